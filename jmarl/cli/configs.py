"""`jmarl configs`: list the YAML files that come with jmarl, show one, or list all settings."""

from __future__ import annotations

import argparse
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
    settings.add_argument("word", nargs="?", default="", metavar="WORD", help="only those with this word")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.action == "show":
        print(find_config(args.name).read_text(encoding="utf-8"), end="")
    elif args.action == "settings":
        print("\n".join(settings_lines(args.word)) or f"no setting has the word {args.word!r}")
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


def settings_lines(word: str = "") -> list[str]:
    """Return a line for each setting with its section, default and meaning."""
    import ast
    import dataclasses
    import inspect

    from jmarl.config.experiment import TOP_SETTINGS, ExperimentConfig, TaskConfig, TeamConfig
    from jmarl.config.train_config import SECTIONS

    lines = []
    for section, cls in {"team": TeamConfig, "task": TaskConfig, **SECTIONS, "": ExperimentConfig}.items():
        body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        texts = {
            field.target.id: " ".join(ast.literal_eval(text.value).split())  # type: ignore[union-attr]
            for field, text in zip(body, body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        for field in dataclasses.fields(cls):
            if section or field.name in TOP_SETTINGS:
                default = "" if field.default is dataclasses.MISSING else f" ({field.default!r})"
                lines.append(f"{section + '.' if section else ''}{field.name}{default}: {texts.get(field.name, '')}")
    return [line for line in [*lines, *mrlm_lines()] if word.lower() in line.lower()]


def mrlm_lines() -> list[str]:
    """Return a line for each key of MRLM with what it sets, or why it is refused."""
    from jmarl.config.mrlm_keys import KEYS
    from jmarl.config.mrlm_rules import Refused

    lines = []
    for section, keys in KEYS.items():
        for key, entry in keys.items():
            if isinstance(entry, Refused):
                text = f"refused: {entry.reason}"
            elif isinstance(entry, str):
                text = f"as {entry}"
            else:
                text = " ".join((entry.__doc__ or "").split("\n\n")[0].split())
            lines.append(f"{section}.{key} (MRLM): {text}")
    return lines
