"""Search in documents: BM25 over a local corpus, or any other backend.

A backend is a function (query, k) -> documents, best first; one of a service that cannot be reached raises
`base.Unanswered`. The default one searches `tool_corpus`; its index is built when it is first asked, once a process.

    score(document, query) = sum over the query's words w of
        ln(1 + (D - n_w + 0.5) / (n_w + 0.5)) * f / (f + k1 * (1 - b + b * length / mean length))

with f how often w is in the document, n_w in how many of D documents it is, k1 = 1.5, b = 0.75: Lucene's variant, which is also
the default of the package bm25s (a test compares the two). The package itself is not used: when it is imported it starts JAX,
which on an accelerator takes its memory, and environments are played in processes that must not.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from jmarl.envs.tools.corpus import Document, corpus
from jmarl.envs.tools.registry import Tool, ToolError

Backend = Callable[[str, int], Sequence[Document]]
MAX_QUERY, MAX_DOCUMENT = 300, 300  # characters; a longer document is cut where it is shown


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class BM25:
    """A backend on documents of one's own."""

    def __init__(self, documents: Sequence[Document], k1: float = 1.5, b: float = 0.75):
        if not documents:
            raise ValueError("there are no documents to search: give at least one")
        self.documents = list(documents)
        counts = [Counter(words(f"{document.title} {document.text}")) for document in documents]
        lengths = np.array([max(sum(count.values()), 1) for count in counts], float)
        norm = k1 * (1 - b + b * lengths / lengths.mean())
        where: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for i, count in enumerate(counts):
            for word, often in count.items():
                where[word].append((i, often))
        self.weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, found in where.items():
            ids, often = np.array(found).T
            rarity = np.log(1 + (len(counts) - len(ids) + 0.5) / (len(ids) + 0.5))
            self.weights[word] = ids, rarity * often / (often + norm[ids])

    def scores(self, query: str) -> np.ndarray:
        """Of each document."""
        out = np.zeros(len(self.documents))
        for word in words(query):
            if word in self.weights:
                ids, weights = self.weights[word]
                out[ids] += weights
        return out

    def __call__(self, query: str, k: int) -> list[Document]:
        """The best documents that share a word with the query; of equal ones the first."""
        scores = self.scores(query)
        return [self.documents[i] for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > 0]


@functools.cache
def _default() -> BM25:
    return BM25(corpus())


def search_corpus(query: str, k: int) -> list[Document]:
    """The default backend."""
    return _default()(query, k)


def search(query: str, *, backend: Backend, k: int) -> str:
    """What the agent reads."""
    found = list(backend(query, k))[:k]
    if not found:
        raise ToolError("no document was found: try other words")
    return "\n".join(f"{i}. {title}: {_cut(text)}" for i, (title, text) in enumerate(found, 1))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_DOCUMENT else f"{text[:MAX_DOCUMENT]} …"


def web_search(backend: Backend = search_corpus, k: int = 3) -> Tool:
    """The tool. backend: a function of a module or another thing that can be pickled, where a pool of processes is to play."""
    if k < 1:
        raise ValueError(f"k={k}: show at least one document")
    schema = {
        "type": "object",
        "properties": {"query": {"type": "string", "minLength": 1, "maxLength": MAX_QUERY}},
        "required": ["query"],
        "additionalProperties": False,
    }
    what = f"finds the {k} documents that fit the words of a query best"
    run, example = functools.partial(search, backend=backend, k=k), {"query": "height of Mount Etna"}
    return Tool("web_search", what, schema, run, example, question="How high is Mount Etna?")
