"""Files of a directory from a stranger: what is no file of it, too large or too deep is refused in a sentence."""

from __future__ import annotations

import os
import re
import socket

import pytest

from jmarl.config.bounded_files import DEPTH, LIMIT, TAIL, bounded_text, parse_json, read_json, read_tail
from jmarl.config.yaml_file import parse_yaml


def bind(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def write_sparse(path):
    path.touch()
    os.truncate(path, 100 << 30)


MAKE = {
    "is a pipe, not a file": os.mkfifo,
    "is a directory, not a file": os.mkdir,
    "is a socket, not a file": bind,
    "link to /dev/zero, out of": lambda path: path.symlink_to("/dev/zero"),
    "secret, out of": lambda path: path.symlink_to(path.parent.parent / "secret"),
    f"has {100 << 30} bytes, and at most {LIMIT} are read": write_sparse,
    "is not UTF-8 text": lambda path: path.write_bytes(b"\xff"),
    "symbolic link": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("sentence", MAKE)
def test_what_a_run_has_not_written_is_refused_in_a_sentence(sentence, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run").mkdir()
    MAKE[sentence](tmp_path / "run" / "x\x1b[31m")
    with pytest.raises((ValueError, OSError), match=re.escape(sentence)) as refused:
        bounded_text(tmp_path / "run" / "x\x1b[31m")
    assert "\x1b" not in str(refused.value)


def test_links_to_folders_and_inside_a_directory_are_followed(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "best.json").write_text("[1]")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "newest.json").symlink_to("best.json")
    assert read_json(tmp_path / "run" / "checkpoints" / "newest.json") == [1]
    with pytest.raises(ValueError, match=r"best.json is a link to .*, out of .*run, and is not read"):
        read_json(tmp_path / "run" / "checkpoints" / "best.json", tmp_path / "run")


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"first" + b"\xff" * TAIL)
    assert read_tail(tmp_path / "log.txt", tmp_path) == "... 5 bytes ...\n" + "\ufffd" * TAIL


def test_json_is_at_most_so_deep():
    assert parse_json("[" * (DEPTH - 1) + "]" * (DEPTH - 1))
    for text in ("[" * 10**6, "[" * DEPTH + "1" + "]" * DEPTH, '{"a":' * DEPTH + "1" + "}" * DEPTH):
        with pytest.raises(ValueError, match="nested deeper than 100"):
            parse_json(text)


def aliases(first, join):
    return f"a0: &a0 {first}\n" + "".join(f"a{i}: &a{i} {join(9 * [f'*a{i - 1}'])}\n" for i in range(1, 11))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (aliases("[x]", lambda names: f"[{', '.join(names)}]"), "has more than 1000000 values"),
        (aliases("{x: 1}", lambda names: f"{{{', '.join(f'k{j}: {x}' for j, x in enumerate(names))}}}"), "more than 1000000"),
        (aliases("{x: 1}", lambda names: f"{{<<: [{', '.join(names)}]}}"), "has more than 1000000 values"),
        ("a: &a [*a]", "is nested deeper than 100"),
        ("a: " + "[" * 900, "is nested deeper than 100"),
        ("a: 1\nb: " + ":".join(["1"] * 1000), "line 2 has a number of 1999 digits"),
    ],
)
def test_yaml_that_unpacks_to_much_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_yaml(text, "x.yaml")
