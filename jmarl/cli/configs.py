"""`jmarl configs`: list the YAML files that come with jmarl, show one, or explain the settings."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from pathlib import Path

from jmarl.config.validation import did_you_mean

PLACES = (Path(__file__).parent / "configs", Path(__file__).parents[2] / "experiments" / "configs")  # of a wheel; of a checkout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    actions.add_parser("list", help="names of the files, and what each is for")
    show = actions.add_parser("show", help="print a file; `jmarl configs show NAME > my.yaml` makes it yours")
    show.add_argument("name", metavar="NAME", help="a name of `jmarl configs list`")
    settings = actions.add_parser("settings", help="all settings, with their defaults and what they do")
    settings.add_argument(
        "word", nargs="?", default="", metavar="WORD", help="only those with a word that begins so, in name, alias or text"
    )
    settings.add_argument("--aliases", action="store_true", help="also other names of settings, and the keys of MRLM's files")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.action == "show":
        print(find_config(args.name).read_text(encoding="utf-8"), end="")
    elif args.action == "settings":
        lines = settings_lines(args.word, args.aliases)
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
            wrap = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            lines = [wrap.fill(line) for line in lines]
        print("\n".join(lines) or no_setting(args.word))
    else:
        for name, path in shipped_configs().items():
            print(f"{name:<16} {first_line(path)}")
    return 0


def shipped_configs() -> dict[str, Path]:
    """Return the shipped files by name."""
    directory = next((place for place in PLACES if place.is_dir()), None)
    if directory is None:
        raise FileNotFoundError(f"the shipped configurations are not in {PLACES[0]}: install jmarl again")
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """Return the path of a shipped file. Raises FileNotFoundError with the nearest name."""
    configs = shipped_configs()
    if name not in configs:
        raise FileNotFoundError(
            f"{name} is neither a file nor a shipped configuration{did_you_mean(name, configs)}; `jmarl configs list` shows all"
        )
    return configs[name]


def first_line(path: Path) -> str:
    """Return what the comment at the top of a file says."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def settings_lines(word: str = "", aliases: bool = False) -> list[str]:
    """Return a line for each setting: name = default | what is allowed | meaning.

    Args:
        word: only settings with a word that begins so in their line or their other names (turn is in num_turns, and not in
            return); a setting shows the names that have it.
        aliases: show all other names, and the keys of MRLM.
    """
    from jmarl.config.experiment import TOP_SETTINGS, ExperimentConfig, TaskConfig, TeamConfig
    from jmarl.config.train_config import SECTIONS, TrainConfig
    from jmarl.config.validation import explain

    lines, others = [], other_names()
    has_word = re.compile(rf"(?<![^\W_]){re.escape(word)}", re.IGNORECASE).search
    classes = {"team": TeamConfig, "task": TaskConfig, "": TrainConfig, **SECTIONS, "experiment": ExperimentConfig}
    for section, cls in classes.items():
        for name, text in explain(cls).items():
            if (cls is TrainConfig and name != "algorithm") or (cls is ExperimentConfig and name not in TOP_SETTINGS):
                continue  # parts and sections
            path = name if section in ("", "experiment") else f"{section}.{name}"
            line, also = f"{path} = {text}", others.get(name, [])
            if not aliases and has_word(line):
                also = []
            elif not aliases:
                also = [other for other in also if has_word(other)]
            lines.append(line + (f" | also {', '.join(also)}" if also else ""))
    return [line for line in [*lines, *(mrlm_lines() if aliases else [])] if has_word(line)]


def other_names() -> dict[str, list[str]]:
    """Return the other names of each setting that has some: those of CoMLRL, MRLM and TRL."""
    from jmarl.config.aliases import BY_VALUE, OTHER_NAMES

    names: dict[str, list[str]] = {}
    for other, name in OTHER_NAMES.items():
        names.setdefault(name, []).append(other)
    for other, values in BY_VALUE.items():
        for value, (name, _) in values.items():
            names.setdefault(name, []).append(f"{other}={value}")
    return names


def no_setting(word: str) -> str:
    """Return the line for a word that no setting has."""
    from jmarl.config.experiment import PART_OF

    hint = did_you_mean(word, PART_OF)
    return f"no setting has the word {word!r}{hint} (with --aliases this command looks in the keys of MRLM too)"


def mrlm_lines() -> list[str]:
    """Return a line for each key of MRLM with what it sets, or why it is refused."""
    from jmarl.mrlm.keys import KEYS, meaning

    return [f"{section}.{key} (MRLM): {meaning(entry)}" for section, keys in KEYS.items() for key, entry in keys.items()]
