"""Ask before the config.yaml of a run from elsewhere names code that is then run.

As with direnv, trusted is what the command line, its --config file or Python names, and the directory of a run that was trained
on this account. Of that there is a record outside the directory, in `~/.local/state/jmarl/trusted` (XDG_STATE_HOME): its path,
and the SHA-256 of each setting that names code. For anything else `require_trust` says what would be run, and asks for --trust.
The names in jmarl's own tables are no code from elsewhere. Other objects of jmarl are: what they do depends on their arguments.
Left out: modules in a directory that change after its run was trained, and moved runs, which are runs from elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmarl.config.experiment import MODULES
from jmarl.config.paths import expand_home
from jmarl.envs import ENVIRONMENTS, OTHER_NAMES
from jmarl.envs.calls.user_code import excerpt
from jmarl.files.run_files import config_file_of

logger = logging.getLogger(__name__)

FUNCTIONS = (  # of jmarl, for rewards and formatters
    "jmarl.envs.rewards:story_length_ratio", "jmarl.envs.writing.story:setup_prompt", "jmarl.envs.writing.story:story_prompt",
)  # fmt: skip
OWN = {*ENVIRONMENTS.values(), *OTHER_NAMES.values(), *FUNCTIONS}
OTHERS = ("wandb", "replay_rollout")  # `wandb.init` takes a program and a server; a failed update is a pickle
WORD = re.compile(r"[\w-]*")  # a name in a table
SHOWN = 200  # characters of a setting

FORGET_S = 180 * 24 * 3600.0  # after which the record of a directory that is gone is removed
_records: dict[str, dict[str, str]] = {}  # those of this process, which hold where none can be written


def named_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that name code from outside jmarl, or servers. settings: by their short names, as plain values."""
    named = {name for name in MODULES if any(map(is_code, _listed(settings.get(name))))}
    named |= {name for name in OTHERS if settings.get(name)}
    options = settings.get("options")  # those of jmarl's own environments name no code, but servers in their place
    if options and ("environment" in named or "servers" in options):
        named.add("options")
    return {name: settings[name] for name in sorted(named)}


def is_code(entry: Any) -> bool:
    """Return whether the name of an environment, function or algorithm is none of jmarl's tables. An environment may be a
    mapping of its name and its options, which may name servers."""
    if isinstance(entry, Mapping):
        options = entry.get("options") or {}
        return is_code(entry.get("name", "")) or not isinstance(options, Mapping) or "servers" in options
    return str(entry) not in OWN and not WORD.fullmatch(str(entry))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def require_trust(file: Path, settings: Mapping[str, Any], trust: bool = False) -> None:
    """Raise PermissionError if settings of a run's config.yaml name code, nobody trusts it, and it was not trained here.

    Args:
        file: the config.yaml. What it names is trusted from now on, once the user says so.
        settings: those of the file that are used, by their short names.
        trust: whether --trust is given.
    """
    known = _record(file.parent) or {}
    asked = {name: value for name, value in named_code(settings).items() if known.get(name) != _digest(value)}
    if not asked:
        return
    what = ", ".join(f"{name}={excerpt(value, SHOWN)}" for name, value in asked.items())
    sentence = f"no record here says that this account trained or trusts {str(file)!r}, and it names code to run: {what}"
    if not trust and not _agreed(f"jmarl: {sentence}. Do you trust it? [y/N] "):
        raise PermissionError(f"{sentence}; if you trust whoever wrote it, give --trust, and it is not asked for again")
    record_trust(file.parent, asked)


def _agreed(question: str) -> bool:
    """Ask at the terminal; without one, nobody agrees."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def is_trusted(directory: str | Path) -> bool:
    """Return whether a run was trained in a directory on this account, or its user has trusted it."""
    file = config_file_of(Path(directory))
    return _record(file.parent if file else directory) is not None


def record_trust(directory: str | Path, named: Mapping[str, Any]) -> None:
    """Record that a directory is trusted, with the settings of its config.yaml that name code, and forget directories that
    are long gone. Where no record can be written, a warning says that later commands ask."""
    key = os.path.realpath(directory)
    digests = (_record(directory) or {}) | {name: _digest(value) for name, value in named.items()}
    try:
        path = _path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # of this process alone
        try:
            temporary.write_text(json.dumps({"directory": key, "sha256": digests}), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for file in path.parent.glob("*.json"):
            forget_gone(file)
    except OSError as error:
        _records[key] = digests
        if named:
            logger.warning("%s names code, and no record of it can be written (%s): later commands ask for --trust", key, error)


def forget_gone(file: Path) -> None:
    """Remove an old record if its directory is gone: a younger one may be of a disk that is not mounted now. One that is
    damaged stays."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if time.time() - file.stat().st_mtime < FORGET_S:
            return
        directory = json.loads(file.read_bytes())["directory"]
        try:
            os.stat(directory)
        except (FileNotFoundError, NotADirectoryError):  # not one that cannot be read now
            file.unlink()


def _record(directory: str | Path) -> dict[str, str] | None:
    """Return the SHA-256 of each setting of a trusted directory; None if it is not trusted, or its record is damaged or was
    written by another user."""
    key = os.path.realpath(directory)
    if key in _records:
        return _records[key]
    try:
        with _path_of(key).open(encoding="utf-8") as file:
            content = json.load(file)
            is_own = os.fstat(file.fileno()).st_uid == os.geteuid()
        return dict(content["sha256"]) if is_own and content["directory"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path_of(key: str) -> Path:
    root = Path(expand_home(os.environ.get("XDG_STATE_HOME") or "~/.local/state"))
    if not root.is_absolute():
        raise FileNotFoundError("this account has no home directory")
    return root / "jmarl" / "trusted" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
