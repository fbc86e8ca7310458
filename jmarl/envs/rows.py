"""Read rows of data, dicts, from whatever holds them (host code, no jax).

`read_rows` reads everything that items, pairs and texts may be given as. Values stay as they are: CSV files have only texts,
and a missing cell of a CSV file or a DataFrame is None. Left out: rows that are read while a run trains; all are in memory.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.config.paths import expand_home
from jmarl.shadows import explaining

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
GIVE = f"a file ({', '.join(SUFFIXES)}, also .gz), a directory saved by datasets, a list of dicts, a Dataset or a DataFrame"
Rows = Any  # what `read_rows` reads

# The first bytes of files that are not read -> what they are, and what to do.
SIGNATURES = {
    b"PK\x03\x04": "a zip archive (.xlsx, .npz and .pt are too): unpack it, or save the table as .csv",
    b"ARROW1": "an Arrow file: give the directory that datasets saved, or datasets.Dataset.from_file(path)",
    b"\xff\xff\xff\xff": "an Arrow stream: give the directory that datasets saved, or datasets.Dataset.from_file(path)",
    b"version https://git-lfs": "a pointer of git-lfs, not the data itself: run git lfs pull",
    b"SQLite format 3": "an SQLite data base: export the table as .csv",
    b"\x93NUMPY": "a NumPy array: give a list of dicts",
    b"\x89HDF": "an HDF5 file: save the table as .parquet",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, or compress it with gzip",
    b"BZh": "compressed by bzip2: unpack it, or compress it with gzip",
    b"\xfd7zXZ": "compressed by xz: unpack it, or compress it with gzip",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"%PDF": "a PDF document: give the data as .jsonl",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"\xd0\xcf\x11\xe0": "a document of an old Office program: save the table as .csv",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
}


def read_rows(source: Rows, split: str | None = None) -> list[dict]:
    """Return the rows of a data set as a list of dicts.

    Args:
        source: a list of dicts, or anything else with a length and an index; a `datasets.Dataset` or `IterableDataset`; a
            pandas DataFrame; a generator, which is read once, with a warning; a .json, .jsonl, .csv, .tsv or .parquet file,
            also compressed as .gz; or a directory that `datasets` saved. JSON files hold a list of dicts, or one dict per line.
        split: which one, of a data set with several splits; others ignore it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is of another kind or broken, or the split must be chosen.
        TypeError: what is given, or a row of it, holds no dicts.
    """
    path = f"{os.fspath(source)}: " if isinstance(source, str | os.PathLike) else ""
    if isinstance(source, str | os.PathLike):
        source = _read_path(Path(expand_home(source)))
    if _is(source, "datasets", "DatasetDict", "IterableDatasetDict"):
        source = _one_split(source, split)
    if _is(source, "datasets", "IterableDataset"):
        rows = list(source.with_format(None))
    elif _is(source, "datasets", "Dataset"):
        written = source.format["type"] in (None, "python", "custom")
        rows = list(source if written else source.with_format(None, columns=source.format["columns"]))
    elif _is(source, "pandas", "DataFrame"):
        rows = _rows_of_frame(source)
    elif isinstance(source, Sized) and not isinstance(source, Iterable) and not _advice(source):  # as data sets of torch
        rows = [source[i] for i in range(len(source))]  # type: ignore[index]
    elif isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        got = f"a dict of {list(source)}" if isinstance(source, Mapping) else type(source).__name__
        raise TypeError(f"{path}rows are a series of dicts; got {got}. Give {GIVE}{_advice(source)}")
    else:
        rows = _read_once(source) if isinstance(source, Iterator) else list(source)
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"{path}row {i} is a {type(row).__name__}, not a dict. Give {GIVE}{_advice(source)}")
    if path and not rows:
        raise ValueError(f"{path}there are no rows in it: give a file with at least one")
    return [row if isinstance(row, dict) else dict(row) for row in rows]


def _is(value: Any, library: str, *names: str) -> bool:
    """Return whether a value is of one of the classes of a library, without importing it: whoever has a value has it loaded.

    A file of the user may have the name of the library; its classes are others."""
    loaded = vars(sys.modules.get(library, object))
    classes = [loaded[name] for name in names if name in loaded] if "__path__" in loaded else []  # a file is no package
    return isinstance(value, tuple(classes))


def _advice(source: Any) -> str:
    """Return how to turn a table of another library, or a dict of columns, into rows."""
    if isinstance(source, Mapping):
        return "; datasets.Dataset.from_dict turns columns into a data set"
    library = type(source).__module__.partition(".")[0]
    method = {"polars": "to_dicts", "pyarrow": "to_pylist"}.get(library)
    return f"; of this {library} {type(source).__name__} .{method}()" if method else ""


def _read_once(rows: Iterator[Any]) -> list[Any]:
    """Return what an iterator yields, and warn that it is used up. Raises ValueError if it yields nothing."""
    name, listed = type(rows).__name__, list(rows)
    if not listed:
        raise ValueError(f"the {name} yields no rows: it may have been read before, which is possible once; give a list")
    warnings.warn(
        f"{len(listed)} rows were read from a {name}, which can be read once: give a list to use the rows again", stacklevel=4
    )
    return listed


def _one_split(splits: Mapping[str, Any], split: str | None) -> Any:
    """Return one split of a data set. Raises ValueError if it must be chosen."""
    names = list(splits)
    split = names[0] if split is None and len(names) == 1 else split
    if split not in names:
        got = "the data set has several splits" if split is None else f"the data set has no split {split!r}"
        raise ValueError(f"{got}: give one of {', '.join(names)}, in Python as data_set[{names[0]!r}]")
    return splits[str(split)]


def _rows_of_frame(frame: Any) -> list[dict]:
    """Return the rows of a pandas DataFrame: numbers of Python, None for missing cells. A named index is a column."""
    import pandas as pd

    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    names = list(frame.columns)
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the columns of a DataFrame must be different texts; they are {names!r:.200}")

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return [plain(x) for x in value]
        if isinstance(value, dict):
            return {name: plain(x) for name, x in value.items()}
        return None if pd.api.types.is_scalar(value) and pd.isna(value) else value

    columns = [[plain(value) for value in frame[name].tolist()] for name in names]
    rows = [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    for i, row in enumerate(rows):
        _check_cells(row, f"row {i} of the DataFrame")
    return rows


def _check_cells(row: Mapping[str, Any], place: str) -> None:
    """Raise a ValueError for a cell with a list of messages as text, as tables without lists have it."""
    for name, cell in row.items():
        if isinstance(cell, str) and re.match(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]", cell):
            raise ValueError(
                f"{place}: {name} is a text with a list of messages, {cell:.40}...: CSV has no lists; save the data as .jsonl "
                "or .parquet"
            )


# --- files -------------------------------------------------------------------------------------------------------------


def is_saved(path: Path) -> bool:
    """Return whether a path is a directory that `datasets` saved (`save_to_disk`)."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _read_path(path: Path) -> Any:
    """Return what a file or directory holds: a series of rows, or a data set of `datasets`."""
    if is_saved(path):
        with explaining():
            import datasets

            return datasets.load_from_disk(str(path))
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if _suffix(file) in SUFFIXES)
        has = f"it has the files {', '.join(files)}: give one of them" if files else f"give {GIVE}"
        raise ValueError(f"{path} is a directory that datasets did not save (save_to_disk); {has}")
    if not path.is_file():
        raise FileNotFoundError(f"{missing_text(path)}; give {GIVE}")
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a broken .gz file: {error}") from error
    if data.startswith(b"PAR1"):
        return _read_parquet(data, path)
    text = _decode(data, path)
    del data  # rows and text take enough memory
    return _read_text(text, path, _suffix(path))


def missing_text(path: Path) -> str:
    """Return that a file does not exist, where, and the nearest name there."""
    files = {file.stem: file.name for file in path.parent.iterdir() if file.is_file()} if path.parent.is_dir() else {}
    near = difflib.get_close_matches(path.stem, files, 1)
    where = "" if path.is_absolute() else f" in the working directory {os.getcwd()}"
    return f"{path} does not exist{where}" + (f"; did you mean {files[near[0]]!r}?" if near else "")


def _suffix(path: Path) -> str:
    """Return the suffix of a file in small letters, without .gz."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def _read_parquet(data: bytes, path: Path) -> list[dict]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is a broken .parquet file: {error!s:.200}") from error
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError(f"the columns of {path} must have different names; they are {table.column_names}")
    return table.to_pylist()


def _decode(data: bytes, path: Path) -> str:
    """Return the text of a file. Raises ValueError that names what other files look like."""
    kind = next((name for start, name in SIGNATURES.items() if data.startswith(start)), None)
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        kind = "a pickle, which could run any program: save the data as .jsonl or .parquet"
    if data[257:262] == b"ustar":
        kind = "a tar archive: unpack it"
    if re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml)", data[:200], re.IGNORECASE):
        kind = "a web page or XML: the download may have failed, or needs a login"
    if kind is None and b"\x00" in data[:1000]:
        kind = "binary data"
    if kind is not None:
        raise ValueError(f"{path} looks like {kind}. Give {GIVE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(data, error, path)) from error


def not_utf8(data: bytes, error: UnicodeDecodeError, path: str | os.PathLike) -> str:
    """Return a message with the line and the column of the byte that is not UTF-8."""
    line_start = data.rfind(b"\n", 0, error.start) + 1
    line, column = data.count(b"\n", 0, error.start) + 1, len(data[line_start : error.start].decode("utf-8", "replace")) + 1
    character = data[error.start : error.start + 1].decode("cp1252", "replace")
    return (
        f"{path}, line {line}, column {column}: the byte {data[error.start]:#x} ({character!r} in Latin-1) is not UTF-8; save "
        f"the file as UTF-8, such as with iconv -f latin1 -t utf8 {path}"
    )


def _read_text(text: str, path: Path, suffix: str) -> Any:
    """Return the rows of a text file. Files with other suffixes hold JSON."""
    if not text.strip():
        raise ValueError(f"{path} is empty")
    if suffix in (".csv", ".tsv"):
        return _read_csv(text, path, "\t" if suffix == ".tsv" else ",")
    if suffix not in SUFFIXES and text.lstrip()[0] not in "[{":
        raise ValueError(f"{path} looks like a text without names of columns, {text.strip()[:30]!r}. Give {GIVE}")
    if text.lstrip()[0] == "[":
        return _parse_json(text, path)
    if suffix not in (".jsonl", ".ndjson"):
        try:
            return _rows_of_object(_loads(text))
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Extra data"):  # not one dict per line
                return _parse_json(text, path)
    return [_parse_json(line, path, i) for i, line in enumerate(_lines(text), 1) if line.strip()]


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, one at a time: all of them would be in memory beside the text and the rows."""
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _rows_of_object(value: Any) -> Any:
    """Return the rows of a JSON object: MRLM writes its trajectories under that name."""
    return value["trajectories"] if isinstance(value, dict) and "trajectories" in value else value


def _parse_json(text: str, path: Path, line: int | None = None) -> Any:
    """Return the value of a JSON text. Raises ValueError with its place. line: of the file, if the text is one of its lines."""
    try:
        return _loads(text)
    except json.JSONDecodeError as error:
        place, problem = f"{path}, line {line or error.lineno}, column {error.colno}:", error.msg
    except ValueError as error:
        place, problem = f"{path}, line {line}:" if line else f"{path}:", str(error)
    raise ValueError(f"{place} not valid JSON: {problem}. Give a .json file, or a .jsonl file with one dict per line")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict. Raises ValueError for a key that is there twice. Rows share the texts of their keys."""
    value = {sys.intern(name): x for name, x in pairs}
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)  # once: to make one takes longer than to read a row


def _loads(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for a dict that has a key twice."""
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    return _DECODER.decode(text)


def _read_csv(text: str, path: Path, delimiter: str) -> list[dict]:
    """Return the rows of a CSV file, all texts; an empty cell is None."""
    limit = csv.field_size_limit(len(text) + 1)  # it is of the process, and too low for long texts
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(lines)
        if len(names) == 1 and (other := next((mark for mark in ";\t|," if mark in names[0]), None)):
            raise ValueError(
                f"the columns of {path} are separated by {other!r}: use a comma in .csv files, a tab in .tsv files"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"the columns of {path} must have different names; they are {names}")
        rows = []
        for cells in lines:
            place = f"{path}, line {lines.line_num}"
            if cells and len(cells) != len(names):
                raise ValueError(f"{place}: {len(cells)} cells, and {len(names)} columns ({', '.join(names)})")
            if cells:
                rows.append({name: cell or None for name, cell in zip(names, cells, strict=True)})
                _check_cells(rows[-1], place)
        return rows
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: not valid CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
