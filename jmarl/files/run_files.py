"""Find the settings of a run from its directory, and versions of packages. Imports no jax, so that the report starts at once,
and `jmarl info` can say that jax does not work."""

from __future__ import annotations

import importlib.metadata
import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config.bounded_files import printable, read_json
from jmarl.config.yaml_file import CutShort, YamlFile, read_yaml

CONFIG_FILE = "config.yaml"
BEST_FILE = "best.json"  # in the folder of checkpoints
PACKAGES = ("jmarl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
WRITTEN = {"temperature", "top_p", "top_k", "max_new_tokens"}  # the section `sampling` of a run has them
DICTIONARIES = {"options", "wandb", "chat_template_kwargs", "perturb"}  # settings that are mappings, not sections


def config_file_of(directory: Path) -> Path | None:
    """Return the file with the settings of a run; of one of several seeds it is in the directory above. None: there is none."""
    own, above = directory / CONFIG_FILE, directory.absolute().parent / CONFIG_FILE
    if own.exists():
        return own
    return above if directory.absolute().name.startswith("seed_") and above.is_file() else None


def read_config(file: Path) -> YamlFile:
    """Return the settings in the config.yaml of a run. Raises ValueError if it is cut short, also if it was written before such
    files had a last line: then it begins with the team and ends with wandb, or of a run begun in Python with the section run of
    train. A file that a user wrote needs neither."""
    content = read_yaml(file, inside=file.parent)
    tree, train = content.tree, content.tree.get("train") or {}
    last = "wandb" if "task" in tree else "run"
    of_run = "sampling" in train and ("team" in tree or (train["sampling"] or {}).keys() >= WRITTEN)
    if not tree or ("team" in tree and not train) or (of_run and last not in (*tree, *train)):
        raise CutShort(str(file))
    return content


class Best(NamedTuple):
    """The best evaluation so far, and the column by which it was chosen."""

    updates: int
    value: float
    column: str

    def __str__(self) -> str:
        return f"{self.column} {self.value:.4g} after update {self.updates}"


def read_best(directory: Path) -> Best | None:
    """Return the best evaluation of the run in a directory; None if it keeps none, or has none yet."""
    file = directory / "checkpoints" / BEST_FILE
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        updates, value = content["history"][-1] if content["history"] else (None, 0.0)
        return None if updates is None else Best(int(updates), float(value), str(content["column"]))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{printable(file)} is damaged, it names no best evaluation: move it away") from error


def shown(directory: str) -> str:
    """Return how a line names a directory: inside the working directory by its relative path."""
    path = Path(directory)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else directory


def replace_text(file: Path, text: str, is_shared: bool = False) -> None:
    """Replace the contents of a file at once. is_shared: other processes may do so at the same time; the last one wins."""
    temporary = file.with_name(f"{file.name}{f'.{uuid.uuid4().hex}' * is_shared}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the parts and sections of a config.yaml by their short names."""
    named: dict[str, Any] = {}
    for name, value in tree.items():
        named |= leaves(value) if isinstance(value, Mapping) and name not in DICTIONARIES else {name: value}
    return named


def next_commands(directory: str, seeds: Sequence[int] = ()) -> str:
    """Return a line with the commands that show a run. It can be played by its directory alone if its config.yaml names the
    environment, or data and a reward. seeds: of the runs in the directory, if there are several."""
    commands = [f"jmarl report {shlex.quote(directory)}"]
    file = config_file_of(Path(directory))
    settings = leaves(read_config(file).tree) if file else {}
    scored = settings.get("data") and settings.get("reward")
    if scored or any(settings.get(name) for name in ("environment", "train_envs", "eval_envs")):
        model = f"{directory}/seed_{seeds[0]}" if seeds else directory
        split = " --split train" if scored and not settings.get("held_out") else ""
        commands.append(f"jmarl play --model {shlex.quote(model)}{split}")
    return f"next: {'  |  '.join(commands)}"


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed as one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
