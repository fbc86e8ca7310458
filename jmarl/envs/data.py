"""Rows of data sets, from the Hugging Face Hub or from a local file with the same fields, and the splits of tasks."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SPLITS = ("train", "eval")
EVAL_SHARE = 0.2


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
        path: a JSON Lines file (or .gz) in place of the Hub. A features.json beside it, or in the folder above its folder,
            gives the types of columns that are empty in whole files.
        limit: return only so many rows.

    Raises:
        FileNotFoundError: there is no file at `path`.
        ValueError: the file cannot be read, a column is missing, or a row is empty there.
    """
    rows = _read(hub, config, split, path, fields)
    source = str(path or hub)
    columns = list(rows.column_names)
    missing = [field for field in fields if field not in columns]
    if missing:
        raise ValueError(
            f"{source} has no column {', '.join(missing)}: it has {', '.join(columns)}, needed are {', '.join(fields)}"
        )
    checked = []
    for number, row in enumerate(rows if limit is None else rows.select(range(min(limit, len(rows))))):
        empty = [field for field in fields if row[field] in (None, "")]
        if empty:
            raise ValueError(f"row {number} of {source} has no {', '.join(empty)}: needed are {', '.join(fields)}")
        checked.append(row)
    return checked


def _read(hub: str, config: str | None, split: str, path: str | Path | None, fields: Sequence[str]) -> Any:
    """Return the data set of the Hub or of a file."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    if path is None:
        try:
            return datasets.load_dataset(hub, config, split=split)
        except (ConnectionError, FileNotFoundError) as error:  # no network, or no such data set
            raise FileNotFoundError(
                f"data set {hub!r} cannot be loaded from the Hugging Face Hub ({' '.join(str(error).split()):.200}): check the "
                "spelling and the network, or give a .json or .jsonl file; HF_HUB_OFFLINE=1 reads only the cache"
            ) from error
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: give a JSON Lines file with the fields {', '.join(fields)}")
    candidates = (path.with_name("features.json"), path.parent.parent / "features.json")
    schema = next((file for file in candidates if file.is_file()), None)
    features = datasets.Features.from_dict(json.loads(schema.read_text(encoding="utf-8"))) if schema else None
    try:
        return datasets.load_dataset("json", data_files=str(path), features=features, split="train")
    except (StopIteration, json.JSONDecodeError, DatasetGenerationError) as error:
        reason = "it is empty" if isinstance(error, StopIteration) else str(error.__cause__ or error)
        raise ValueError(f"{path} cannot be read as JSON Lines with the fields {', '.join(fields)}: {reason:.300}") from error


def read_rows(source: Any) -> list[Mapping]:
    """Return the dicts of a .json file (a list), of a .jsonl file (one per line), or of any iterable of dicts.

    Raises FileNotFoundError if there is no such file, ValueError if it is not JSON, TypeError for other values than dicts.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give a .json or .jsonl file")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            lines = enumerate(text.split("\n"), 1)
            source = [_parse_json(line, f"{path}, line {i},") for i, line in lines if line.strip()]
        else:
            source = _parse_json(text, str(path))
    if isinstance(source, Mapping) and "trajectories" in source:
        source = source["trajectories"]
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        got = f"a dict of {list(source)}" if isinstance(source, Mapping) else type(source).__name__
        raise TypeError(f"rows are a series of dicts; got {got}")
    rows = list(source)
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"row {i} is a {type(row).__name__}, not a dict")
    return rows


def _parse_json(text: str, place: str) -> Any:
    """Return the value of a JSON text. Raises ValueError with its place."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place} is not valid JSON: {error}. Give a .json file, or a .jsonl file with one dict per line"
        ) from error


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
