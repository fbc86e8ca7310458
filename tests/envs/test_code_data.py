"""Code from completions, and data sets of programming problems as items."""

from __future__ import annotations

import time

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


def test_long_texts_without_code_are_read_fast():
    start = time.process_time()
    assert extract_code("a" * 20_000) == "" and extract_code(" " * 20_000 + "a" * 20_000) == ""
    assert extract_code("def f():\n" + "\n" * 20_000 + "# a\n" * 5_000).startswith("def f():")
    assert time.process_time() - start < 0.3


def test_remove_names_removes_definitions_and_decorators():
    assert remove_names("import re\n@c\ndef f(): pass\ndef g(): pass  # g", ["f"]) == "import re\n\n\ndef g(): pass  # g"


@pytest.mark.parametrize("name, path, count", [
    ("humaneval", "humaneval/test.jsonl.gz", 122),
    ("coophumaneval", "coophumaneval/test.jsonl", 56),
    ("mbpp", "mbpp/full/train.jsonl.gz", 261),
    ("mbpp", "mbpp/full/test.jsonl.gz", 349),
    ("mbpp_sanitized", "mbpp/sanitized/test.jsonl.gz", 180),
    ("mbpp_openmlrl", "mbpp/openmlrl/sanitized.jsonl.gz", 179),
])  # fmt: skip
def test_data_sets_become_items(data_dir, own_cache, name, path, count):
    items = load_items(name, path=data_dir / path)
    assert len(items) == count
    env = CodeGeneration(2)
    _, prompts = env.reset(items, np.random.default_rng(0))
    for item, *texts in zip(items, *prompts, strict=True):
        assert item_tests(item).entry_point and all(item["entry_point"] in text for text in texts)
        asserted = [line.strip() for line in item["test"].splitlines() if line.strip().startswith("assert")]
        assert not any(line in text for line in asserted for text in texts)


def test_reference_solutions_earn_the_maximum_of_one_agent(data_dir, own_cache):
    """From the completion to the reward: solutions of HumanEval and MBPP in markdown."""
    import gzip
    import json

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


CODE = "def f(x):\n    return 1"
HEADS = (
    "python", " Python ", "py3", "python3.11", 'py title="a.py"', "python {.numbers}", "python:main.py", "{.python .numbers}",
    "{#id .python}", "{python echo=FALSE}", "python,linenos", "py{1,3-4}", "main.py", 'title="a.py"', "",
)  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("fence", ["```", "~~~", "`````"])
def test_the_info_string_of_a_fence_is_no_code(head, fence):
    assert extract_code(f"So:\n{fence}{head}\n{CODE}\n{fence}\nDone.") == CODE


INDENTED, QUOTED = "   def f(x):\n       return 1", "> def f(x):\n>     return 1"
MARKDOWN = {
    "in a quote": f"> ```python\n{QUOTED}\n> ```",
    "in a list": f"1. So:\n\n   ```python\n{INDENTED}\n   ```",
    "behind a list mark": f"-  ```python\n{INDENTED}\n   ```",
    "indented": f"   ```python\n{INDENTED}\n  ```",
    "closed by a longer fence": f"~~~python\n{CODE}\n~~~~~",
    "not closed": f"So:\n````py\n{CODE}",
    "other line ends": f"```py\n{CODE}\n```\n".replace("\n", "\r\n"),
    "in Markdown": f"````markdown\nSo:\n```python\n{CODE}\n```\n````",
    "in Markdown of the same fence": f"```markdown\nSo:\n```python\n{CODE}\n```\n```",
    "behind text": f"Sure! ```python\n{CODE}\n```",
    "closed behind code": f"```python\n{CODE}```\n\nand\n```text\nx\n```",
    "closed by the next one": f"```python\n{CODE}\n```text\nx\n```",
    "before a special token": f"```python\n{CODE}\n```<|im_end|>",
    "before a token of Gemma": f"```python\n{CODE}\n```<end_of_turn>",
    "without a fence, before a special token": f"{CODE}<|im_end|>",
    "code behind the fence": f"```{CODE}\n```",
    "beside text in three ticks": f"Use ```x``` here:\n```python\n{CODE}\n```",
    "beside another language": f'```json title="a"\n{{}}\n```\n```py\n{CODE}\n```\n~~~bash\nls\n~~~',
}


@pytest.mark.parametrize("name", MARKDOWN)
def test_code_is_found_in_fences_of_any_form(name):
    assert extract_code(MARKDOWN[name]) == CODE


def test_a_block_may_contain_shorter_and_indented_fences():
    inner = 'def f(x):\n    """Do.\n\n    ```\n    f(1)\n    ```\n    """\n    return 1'
    for text in (f"```python\n{inner}\n```", f"````python\n{inner}\n````", f"~~~python\n{inner}\n~~~"):
        assert extract_code(text) == inner


@pytest.mark.parametrize(
    "text", ["```json\n{}", "~~~text\nx = 1\n~~~", "````\n```bash\nls\n```\n````", "```python\n```", "It is ``` so"]
)
def test_other_languages_and_empty_blocks_have_no_code(text):
    assert extract_code(text) == ""
