"""Given data: rows of data sets, from the Hugging Face Hub or a local file, pairs and trajectories, and the splits of tasks."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config.validation import did_you_mean
from jmarl.envs.rows import SUFFIXES, read_rows
from jmarl.models.hub.tokenize import ChatPrompt
from jmarl.shadows import explaining

SPLITS = ("train", "eval")
EVAL_SHARE = 0.2

Messages = tuple[Mapping[str, str], ...]
Prompt = str | Messages  # a text, or chat messages
Ids = Sequence[int]


class SampledTokens(NamedTuple):
    """One agent's part of a sampled pair, as token ids."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


class Pair(NamedTuple):
    """Two joint actions of N agents on one item."""

    prompts: tuple[Prompt, ...]  # [N]
    chosen: tuple[str, ...]  # [N]
    rejected: tuple[str, ...]  # [N]
    rewards: tuple[float, float] | None = None  # of chosen and rejected; None: unknown
    tokens: tuple[SampledTokens, ...] | None = None  # [N] for sampled pairs; None: the texts are encoded


class Trajectory(NamedTuple):
    """The observations and actions of one agent in one episode."""

    observations: tuple[Prompt, ...]  # before each action, perhaps after the last; "": none, a text that is trained whole
    actions: tuple[str, ...]
    reward: float = math.nan  # sum over the episode; NaN: unknown
    agent: str = ""  # who wrote the actions, in data of a team; empty: unknown


def check_split(split: str) -> None:
    """Raise a ValueError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose {' or '.join(SPLITS)}")


def load_rows(
    hub: str,
    fields: Sequence[str],
    *,
    config: str | None = None,
    split: str = "train",
    path: str | Path | None = None,
    limit: int | None = None,
) -> list[dict]:
    """Return the rows of a data set; each has a value in all of `fields`.

    Args:
        hub: id on the Hub; not used if there is a `path`.
        fields: columns that must be there.
        config: configuration of the data set on the Hub.
        split: split of the data set on the Hub.
        path: a file in place of the Hub, as `read_rows` reads it.
        limit: return only so many rows.

    Raises:
        FileNotFoundError: there is no file at `path`.
        ValueError: the file cannot be read, a column is missing, or a row is empty there.
    """
    source = str(path or hub)
    try:
        rows = _read_hub(hub, config, split) if path is None else read_rows(Path(path))
    except (FileNotFoundError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{error}; needed are the fields {', '.join(fields)}") from error
    columns = list(dict.fromkeys(name for row in rows for name in row))
    missing = [field for field in fields if field not in columns]
    if missing:
        raise ValueError(
            f"{source} has no column {', '.join(missing)}: it has {', '.join(columns)}, needed are {', '.join(fields)}"
            + "".join(did_you_mean(name, columns) for name in missing)
        )
    rows = [{name: row.get(name) for name in columns} for row in rows[:limit]]
    for number, row in enumerate(rows):
        empty = [field for field in fields if row[field] in (None, "")]
        if empty:
            raise ValueError(f"row {number} of {source} has no {', '.join(empty)}: needed are {', '.join(fields)}")
    return rows


def _read_hub(hub: str, config: str | None, split: str) -> list[dict]:
    """Return the rows of a data set of the Hub."""
    try:
        with explaining():
            import datasets

            return list(datasets.load_dataset(hub, config, split=split))  # type: ignore[arg-type]
    except (ConnectionError, FileNotFoundError) as error:  # no network, or no such data set
        raise FileNotFoundError(
            f"data set {hub!r} cannot be loaded from the Hugging Face Hub ({' '.join(str(error).split()):.200}): check the "
            f"spelling and the network, or give a file ({', '.join(SUFFIXES)}); HF_HUB_OFFLINE=1 reads only the cache"
        ) from error


def shared_line(training: Iterable[Any], held_out: Sequence[Any], name: str) -> str:
    """Return a line that counts the held-out tasks that are trained on too; empty if there are none.

    name: what the line calls the tasks.
    """
    if not held_out:
        return ""
    known = {task_key(task) for task in training}
    count = sum(task_key(task) in known for task in held_out)
    if not count:
        return ""
    return f"{count} of {len(held_out)} held-out {name} are also trained on: a team may remember their answers"


def task_key(value: Any) -> str:
    """Return a text that is the same for tasks of the same content, whatever the order of their keys. A single message of the
    user is its text."""
    value = value.messages if isinstance(value, ChatPrompt) else value
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        value = value[0].get("content", value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {task_key(x)}' for key, x in value.items()))}}}"
    return f"[{', '.join(map(task_key, value))}]" if isinstance(value, list | tuple) else repr(value)


def split_of(key: str) -> str:
    """Return the split of a task, which depends only on the text that identifies it. About EVAL_SHARE of them are `eval`."""
    return "eval" if _hash(key) / (1 << 32) < EVAL_SHARE else "train"


def split_rows(rows: Sequence[Any], split: str, key: Callable[[Any], str] = str) -> list[Any]:
    """Return the rows of a split, without duplicates. EVAL_SHARE of them, and at least one, are `eval`, chosen by a hash of
    `key(row)`."""
    check_split(split)
    ranked = sorted({key(row): row for row in rows}.items(), key=lambda pair: (_hash(pair[0]), pair[0]))
    num_eval = max(1, round(EVAL_SHARE * len(ranked)))
    return [row for _, row in (ranked[:num_eval] if split == "eval" else ranked[num_eval:])]


def _hash(key: str) -> int:
    return zlib.crc32(key.encode(errors="surrogatepass"))
