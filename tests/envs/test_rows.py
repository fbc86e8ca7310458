"""`read_rows`: every kind of thing that holds rows gives the same rows; everything else is named in the error."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile

import datasets
import numpy as np
import pandas as pd
import pytest

from jmarl.envs.data import shared_line
from jmarl.envs.rows import read_rows
from jmarl.models.hub.tokenize import ChatPrompt

ROWS = [{"prompt": "é 1", "n": "1"}, {"prompt": "a\nb, c", "n": "2"}]
CHAT = [{"role": "user", "content": "Hi"}]


def in_file(path, rows=ROWS):
    """Write rows as the suffix of a path says, and return it."""
    frame, buffer = pd.DataFrame(rows), io.BytesIO()
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    match plain.suffix:
        case ".json":
            data = json.dumps(rows, indent=1).encode()
        case ".csv" | ".tsv":
            data = frame.to_csv(index=False, sep="\t" if plain.suffix == ".tsv" else ",").encode()
        case ".parquet":
            frame.to_parquet(buffer)
            data = buffer.getvalue()
        case _:
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


HOLDERS = {
    "list": lambda path: ROWS,
    "tuple": lambda path: tuple(ROWS),
    "Dataset": lambda path: datasets.Dataset.from_list(ROWS),
    "Dataset in another format": lambda path: datasets.Dataset.from_list(ROWS).with_format("numpy"),
    "IterableDataset": lambda path: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "DatasetDict of one split": lambda path: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
    "DataFrame": lambda path: pd.DataFrame(ROWS),
    "DataFrame with a named index": lambda path: pd.DataFrame(ROWS).set_index("prompt"),
} | {
    name: lambda path, name=name: in_file(path / f"rows{name}")
    for name in (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".csv.gz", ".json.gz", ".parquet.gz")
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_rows_are_the_same_whatever_holds_them(tmp_path, kind):
    rows = read_rows(HOLDERS[kind](tmp_path))
    assert rows == ROWS and all(type(row) is dict and type(row["n"]) is str for row in rows)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_rows_of_a_file_share_the_texts_of_their_names(tmp_path, suffix):
    """A million rows hold each name once: a text takes more memory than a short value."""
    rows = read_rows(in_file(tmp_path / f"rows{suffix}"))
    assert all(name is first for name, first in zip(rows[0], rows[1], strict=True))


def test_a_generator_is_read_once_and_says_so():
    with pytest.warns(UserWarning, match="2 rows were read from a generator, which can be read once"):
        assert read_rows(row for row in ROWS) == ROWS
    with pytest.raises(ValueError, match="the list_iterator yields no rows: it may have been read before"):
        read_rows(iter([]))


def test_a_saved_directory_is_read_and_a_split_is_chosen(tmp_path):
    one, two = (datasets.Dataset.from_list(rows) for rows in (ROWS, ROWS[:1]))
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(tmp_path / "several"))
    assert read_rows(tmp_path / "one") == ROWS
    assert read_rows(str(tmp_path / "several"), "test") == ROWS[:1]
    with pytest.raises(ValueError, match="has several splits: give one of train, test"):
        read_rows(tmp_path / "several")
    with pytest.raises(ValueError, match="has no split 'dev': give one of train, test"):
        read_rows(tmp_path / "several", "dev")
    in_file(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="did not save .*it has the files b.jsonl: give one of them"):
        read_rows(tmp_path)


def archive():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a", "b")
    return buffer.getvalue()


OTHERS = {
    "zip": (archive(), "a zip archive"),
    "pickle": (pickle.dumps(ROWS), "a pickle, which could run any program"),
    "arrow": (b"ARROW1\0\0", "an Arrow file"),
    "html": (b"\n<!DOCTYPE html><html>", "a web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of git-lfs"),
    "utf-16": ("[{}]".encode("utf-16"), "text in UTF-16"),
    "utf-16 without a mark": ("[{}]".encode("utf-16-le"), "binary data"),
    "latin-1": ('[{"prompt": "é"}]'.encode("latin-1"), "line 1, column 14: the byte 0xe9 .'é' in Latin-1. is not UTF-8"),
    "empty": (b"", "is empty"),
    "blank": (b"\xef\xbb\xbf \n\r\n", "is empty"),
    "half a .gz": (gzip.compress(b"[]" * 99)[:-9], "is a broken .gz file"),
    "half a .parquet": (b"PAR1 and no more", "is a broken .parquet file"),
    "text": (b"one prompt\nanother", "a text without names of columns, 'one prompt"),
    "key twice": (b'[{"prompt": "a", "prompt": "b"}]', "the key 'prompt' is there twice"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_another_kind_is_named(tmp_path, kind):
    """Whatever its suffix; a text without a known suffix may be JSON."""
    data, message = OTHERS[kind]
    for name in ("rows", "rows.jsonl") if kind != "text" else ("rows.txt", "rows"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [
    ("mark.jsonl", "\ufeff" + '{"a": 1}\r\n\r\n{"a": 2}\r\n'),
    ("array.jsonl", '[{"a": 1},\n{"a": 2}]'),
    ("lines.json", '{"a": 1}\n{"a": 2}'),
    ("without_suffix", '\n {"a": 1}\n\n{"a": 2}\n'),
])  # fmt: skip
def test_the_content_of_a_json_file_decides(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(tmp_path / name) == [{"a": 1}, {"a": 2}]


def test_missing_cells_are_none_and_numbers_are_of_python(tmp_path):
    """Not NaN, not the text "nan"; lists inside cells are lists. CSV files have only texts, "NA" and 007 too."""
    frame = pd.DataFrame({"prompt": ["a", None, np.nan], "n": [1.0, np.nan, 3.0], "chat": [np.array(CHAT), None, pd.NA]})
    frame["k"] = np.arange(3)
    rows = read_rows(frame)
    assert rows == [
        {"prompt": "a", "n": 1.0, "chat": CHAT, "k": 0},
        {"prompt": None, "n": None, "chat": None, "k": 1},
        {"prompt": None, "n": 3.0, "chat": None, "k": 2},
    ]
    assert all(type(row["k"]) is int for row in rows)
    (tmp_path / "a.csv").write_text('prompt,n\nNA,007\n"",\n"a ""b"", c",nan\n')
    assert read_rows(tmp_path / "a.csv") == [
        {"prompt": "NA", "n": "007"},
        {"prompt": None, "n": None},
        {"prompt": 'a "b", c', "n": "nan"},
    ]
    long = "x" * 200_000  # longer than the limit of the csv module
    assert read_rows(in_file(tmp_path / "long.csv", [{"a": long, "b": ""}])) == [{"a": long, "b": None}]


@pytest.mark.parametrize(("text", "message"), [
    ("prompt;answer\na;b\n", "separated by ';'"),
    ("a,b\n1,2\n\n1,2,3\n", r"line 4: 3 cells, and 2 columns \(a, b\)"),
    ("a,b\n1\n", "line 2: 1 cells"),
    ("a,a\n1,2\n", "different names"),
    ('a,b\n"1,2\n', "line 2: not valid CSV"),
    ("prompt,n\n\"[{'role': 'user', 'content': 'x'}]\",1\n", "line 2: prompt is a text with a list of messages"),
])  # fmt: skip
def test_a_bad_csv_file_is_an_error_with_its_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "a.csv")


@pytest.mark.parametrize(("source", "message"), [
    ({"prompt": ["a"]}, r"got a dict of \['prompt'\].*Dataset.from_dict"),
    (b"[{}]", "got bytes"),
    (3, "got int"),
    (["a", "b"], "row 0 is a str, not a dict"),
    ([{}, [{}]], "row 1 is a list, not a dict"),
    (pd.Series(["a"]), "row 0 is a str"),
    (datasets.Dataset.from_list(ROWS).data.table, r"got Table.*of this pyarrow Table .to_pylist\(\)"),
])  # fmt: skip
def test_what_holds_no_dicts_is_an_error(source, message):
    with pytest.raises(TypeError, match=message):
        read_rows(source)


def test_a_table_without_clear_columns_is_an_error():
    with pytest.raises(ValueError, match="different texts"):
        read_rows(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(ValueError, match="different texts; they are .0, 1."):
        read_rows(pd.DataFrame([[1, 2]]))
    with pytest.raises(ValueError, match="row 0 of the DataFrame: prompt is a text with a list of messages"):
        read_rows(pd.DataFrame([{"prompt": json.dumps(CHAT)}]))
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")})
    with pytest.raises(ValueError, match=r"several splits: give one of train, test, in Python as data_set\['train'\]"):
        read_rows(splits)


def test_held_out_tasks_that_are_trained_on_are_counted():
    """Also with their keys in another order, at any depth. Numbers are not texts."""
    training = [{"a": 1, "b": {"c": [1, 2], "d": "x"}}, {"a": 2}]
    held_out = [{"b": {"d": "x", "c": (1, 2)}, "a": 1}, {"a": "2"}, {"a": 2}, {"a": 3}]
    assert shared_line(training, held_out, "tasks").startswith("2 of 4 held-out tasks are also trained on")
    assert shared_line(training, held_out[3:], "tasks") == shared_line([], held_out, "tasks") == ""
    message = [{"role": "user", "content": "Hi"}]  # is the same prompt as its text
    tasks = [{"prompt": message}, {"prompt": ChatPrompt(message)}, {"prompt": "Ho"}]
    assert shared_line([{"prompt": "Hi"}], tasks, "tasks").startswith("2 of 3")
