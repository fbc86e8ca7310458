"""Code from completions, and data sets of programming problems as items."""

from __future__ import annotations

import numpy as np
import pytest

from jmarl.envs.code.data import load_items
from jmarl.envs.code.extraction import extract_code
from jmarl.envs.code.generation import CodeGeneration
from jmarl.envs.code.scoring import item_tests
from jmarl.envs.code.syntax import remove_names


def test_extract_code_returns_the_code_of_a_text():
    assert extract_code("```\nx = 1\n```") == "x = 1"
    assert extract_code("@cache\ndef f():\n    return 1\n\nf = g(f)\nSo it is.") == "@cache\ndef f():\n    return 1\n\nf = g(f)"
    assert extract_code("no code at all") == ""
    assert extract_code("```json\n{}\n```") == ""


def test_remove_names_removes_definitions_and_decorators():
    assert remove_names("import re\n@c\ndef f(): pass\ndef g(): pass  # g", ["f"]) == "import re\n\n\ndef g(): pass  # g"


@pytest.mark.parametrize(
    "name, path, count",
    [
        ("humaneval", "humaneval/test.jsonl.gz", 122),
        ("coophumaneval", "coophumaneval/test.jsonl", 56),
        ("mbpp", "mbpp/full/train.jsonl.gz", 261),
        ("mbpp", "mbpp/full/test.jsonl.gz", 349),
        ("mbpp_sanitized", "mbpp/sanitized/test.jsonl.gz", 180),
        ("mbpp_openmlrl", "mbpp/openmlrl/sanitized.jsonl.gz", 179),
    ],
)
def test_data_sets_become_items(data_dir, tmp_path, monkeypatch, name, path, count):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    items = load_items(name, path=data_dir / path)
    assert len(items) == count
    env = CodeGeneration(2)
    _, prompts = env.reset(items, np.random.default_rng(0))
    for item, *texts in zip(items, *prompts, strict=True):
        assert item_tests(item).entry_point and all(item["entry_point"] in text for text in texts)
        asserted = [line.strip() for line in item["test"].splitlines() if line.strip().startswith("assert")]
        assert not any(line in text for line in asserted for text in texts)


def test_reference_solutions_earn_the_maximum_of_one_agent(data_dir, tmp_path, monkeypatch):
    """From the completion to the reward: solutions of HumanEval and MBPP in markdown."""
    import gzip
    import json

    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    env = CodeGeneration(1)
    for name, path, code in (
        ("humaneval", "humaneval/test.jsonl.gz", lambda row: row["prompt"] + row["canonical_solution"]),
        ("mbpp_sanitized", "mbpp/sanitized/validation.jsonl.gz", lambda row: row["code"]),
    ):
        rows = [json.loads(line) for line in gzip.decompress((data_dir / path).read_bytes()).splitlines()][:30]
        items = load_items(name, path=data_dir / path, limit=30)
        states, _ = env.reset(items, np.random.default_rng(0))
        texts = [f"Here:\n```python\n{code(row)}\n```" for row in rows]
        assert env.step(states, [texts], np.random.default_rng(0)).result.total == pytest.approx(2.1)


def test_bad_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="humaneval, coophumaneval"):
        load_items("apps")
    with pytest.raises(FileNotFoundError, match="entry_point"):
        load_items("humaneval", path=tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"task_id": "a", "prompt": "p", "test": "t", "entry_point": ""}\n')
    with pytest.raises(ValueError, match="row 0.*entry_point"):
        load_items("humaneval", path=tmp_path / "bad.jsonl")
