"""The corpus and the search tool: BM25 scores, other backends, and what is not started."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from jmarl.envs.tools.corpus import KINDS, Document, corpus, things
from jmarl.envs.tools.registry import ToolRegistry
from jmarl.envs.tools.search import BM25, search_corpus, web_search
from jmarl.envs.tools.tool_use import create_default_tool_registry
from jmarl.envs.vector import Unanswered


def test_the_corpus_has_560_documents_with_distractors():
    assert len(corpus()) == len({document.title for document in corpus()}) == 560 and len(KINDS) == 10
    assert len({document.text for document in corpus()}) == 560
    for thing in things():
        similar = [e for e in things() if e.kind == thing.kind and set(e.name.split()) & set(thing.name.split())]
        assert len(similar) >= 2


def test_one_document_answers_each_question():
    """Its title is in the question, and no other title of its kind is."""
    for thing in things():
        for fact in KINDS[thing.kind].questions:
            question = thing.question(fact)
            named = [e for e in things() if e.kind == thing.kind and e.name in question]
            assert named == [thing] and thing.facts[fact] in thing.document().text
            assert thing.facts[fact] not in question.replace(thing.name, "")


def test_search_finds_the_document_of_every_question():
    """Measured: all of 2,240 among the first three, 99.8 % first. The other results share a part of the name."""
    questions = [(thing.name, thing.question(fact)) for thing in things() for fact in KINDS[thing.kind].questions]
    results = [[document.title for document in search_corpus(question, 3)] for _, question in questions]
    names = [name for name, _ in questions]
    among_three = np.mean([name in titles for name, titles in zip(names, results, strict=True)])
    first = np.mean([name == titles[0] for name, titles in zip(names, results, strict=True)])
    assert len(questions) == 2240 and among_three == 1.0 and first >= 0.99
    assert all(len(titles) == 3 for titles in results)


def test_scores_equal_those_of_the_package_bm25s():
    bm25s = pytest.importorskip("bm25s")
    documents = corpus()[::4]
    texts = [f"{d.title} {d.text}".lower() for d in documents]
    options = dict(token_pattern=r"(?u)\b\w+\b", stopwords=None, show_progress=False)
    reference = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    reference.index(bm25s.tokenize(texts, **options), show_progress=False)
    index = BM25(documents)
    for query in ("height of mount ilvar", "Which river does the bridge cross", "crew crew ship", "9 crowns"):
        tokens = bm25s.tokenize([query.lower()], return_ids=False, **options)[0]
        np.testing.assert_allclose(index.scores(query), reference.get_scores(tokens), rtol=1e-4, atol=1e-5)


def test_a_score_equals_that_computed_by_hand():
    scores = BM25([Document("a", "fox fox"), Document("b", "dog")], k1=1.5, b=0.75).scores("fox cat")
    norm = 1.5 * (0.25 + 0.75 * 3 / 2.5)
    assert scores == pytest.approx([math.log(1 + 1.5 / 1.5) * 2 / (2 + norm), 0])


def test_search_is_a_tool_with_any_backend():
    queries = []

    def backend(query, k):
        queries.append((query, k))
        return [Document("t", "x" * 1000)] * 5 if query != "nothing" else []

    registry = ToolRegistry([web_search(backend, k=2)])
    text = registry.call("web_search", {"query": "q"}).text
    assert queries == [("q", 2)] and text.splitlines() == [f"{i}. t: {'x' * 300} …" for i in (1, 2)]
    assert registry.call("web_search", {"query": "nothing"}) == (False, "error: no document was found: try other words")
    assert not create_default_tool_registry().call("web_search", {"query": "qwertz ??"}).ok

    def unreachable(query, k):
        raise Unanswered("the service does not answer")

    with pytest.raises(Unanswered):
        ToolRegistry([web_search(unreachable)]).call("web_search", {"query": "q"})
    with pytest.raises(ValueError, match="k=0"):
        web_search(k=0)
    with pytest.raises(ValueError, match="no documents"):
        BM25([])


def test_search_starts_neither_jax_nor_the_sandbox():
    code = """
import sys
import numpy as np
from jmarl.envs import make
from jmarl.sandbox import client
for name in ("tools", "tools_sandbox"):
    env = make(name)
    state, _ = env.reset(env.tasks(count=1)[0], np.random.default_rng(0))
    call = '<tool_call>{"name": "web_search", "parameters": {"query": "Tarn"}}</tool_call>'
    assert "Tarn" in env.step(state, [call], None).observations[0]
assert client._default is None and not {"jax", "numba", "torch"} & set(sys.modules), "started"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout + done.stderr == "", done.stderr
