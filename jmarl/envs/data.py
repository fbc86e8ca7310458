"""Rows of data sets, from the hub or from a local file of the same fields."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jmarl.envs.messages import check_split

EVAL_SHARE = 0.2


def load_rows(
    hub: str,
    fields: Sequence[str],
    *,
    config: str | None = None,
    split: str = "train",
    path: str | Path | None = None,
    limit: int | None = None,
) -> list[dict]:
    """The rows of a data set of the hub, or of a JSON Lines file (also .gz) in its place; each has all of `fields`.

    A features.json beside the file, or two folders above it, says the types of columns that are empty in whole files.
    """
    rows = _read(hub, config, split, path, fields)
    source = str(path or hub)
    columns = list(rows.column_names)
    missing = [field for field in fields if field not in columns]
    if missing:
        raise ValueError(
            f"{source} has no column {', '.join(missing)}: it has {', '.join(columns)}, needed are {', '.join(fields)}"
        )
    out = []
    for number, row in enumerate(rows if limit is None else rows.select(range(min(limit, len(rows))))):
        empty = [field for field in fields if row[field] in (None, "")]
        if empty:
            raise ValueError(f"row {number} of {source} has no {', '.join(empty)}: needed are {', '.join(fields)}")
        out.append(row)
    return out


def _read(hub: str, config: str | None, split: str, path: str | Path | None, fields: Sequence[str]) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    if path is None:
        return datasets.load_dataset(hub, config, split=split)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: give a JSON Lines file with the fields {', '.join(fields)}")
    beside = path.with_name("features.json")
    above = path.parent.parent / "features.json"
    described = next((file for file in (beside, above) if file.is_file()), None)
    features = datasets.Features.from_dict(json.loads(described.read_text())) if described else None
    try:
        return datasets.load_dataset("json", data_files=str(path), features=features, split="train")
    except (StopIteration, json.JSONDecodeError, DatasetGenerationError) as error:
        why = "it is empty" if isinstance(error, StopIteration) else str(error.__cause__ or error)
        raise ValueError(f"{path} cannot be read as JSON Lines with the fields {', '.join(fields)}: {why:.300}") from error


def split_of(key: str) -> str:
    """The split that a task is in, from what the task is."""
    return "eval" if _hash(key) / (1 << 32) < EVAL_SHARE else "train"


def _hash(key: str) -> int:
    return zlib.crc32(key.encode(errors="surrogatepass"))


def split_rows(rows: Sequence[Any], split: str, key: Callable[[Any], str] = str) -> list[Any]:
    """Those of a file's rows that are of a split: about a fifth are eval, one at least, drawn by what they are (`key`)."""
    check_split(split)
    ranked = sorted({key(row): row for row in rows}.items(), key=lambda pair: (_hash(pair[0]), pair[0]))
    held_out = max(1, round(EVAL_SHARE * len(ranked)))
    return [row for _, row in (ranked[:held_out] if split == "eval" else ranked[held_out:])]
