"""Search in documents: BM25 over a local corpus, or any other backend.

A backend is a function (query, k) -> documents, best first. If it is a service that cannot be reached, it raises `Unanswered`.
The default searches `corpus.py`; its index is built at the first query, once per process.

    score(document, query) = sum over the words w of the query of
        ln(1 + (D - n_w + 0.5) / (n_w + 0.5)) * f / (f + k1 * (1 - b + b * length / mean length))

Here f is the number of times that w occurs in the document, n_w the number of documents with w, D the number of documents,
k1 = 1.5 and b = 0.75. This is Lucene's variant of BM25, the default of the package bm25s (a test compares the two). The package
itself is not used: importing it starts JAX, and environments run in processes that must not take the accelerator's memory.

Left out: stemming, phrases and synonyms.
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
MAX_QUERY, MAX_DOCUMENT = 300, 300  # characters; longer documents are cut in the result


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """A search backend.

    Args:
        documents: to search; at least one.
        k1: how fast the weight of a word saturates with its count.
        b: how much long documents are penalized, from 0 to 1.
    """

    def __init__(self, documents: Sequence[Document], k1: float = 1.5, b: float = 0.75):
        if not documents:
            raise ValueError("there are no documents to search: give at least one")
        self.documents = list(documents)
        word_counts = [Counter(split_words(f"{document.title} {document.text}")) for document in documents]
        lengths = np.array([max(sum(counts.values()), 1) for counts in word_counts], float)
        norms = k1 * (1 - b + b * lengths / lengths.mean())
        postings: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (document, count)
        for i, counts in enumerate(word_counts):
            for word, count in counts.items():
                postings[word].append((i, count))
        self.weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # word -> documents with it, weight in each
        for word, pairs in postings.items():
            ids, counts = np.array(pairs).T
            rarity = np.log(1 + (len(documents) - len(ids) + 0.5) / (len(ids) + 0.5))
            self.weights[word] = ids, rarity * counts / (counts + norms[ids])

    def scores(self, query: str) -> np.ndarray:
        """Return the score of each document [D]."""
        scores = np.zeros(len(self.documents))
        for word in split_words(query):
            if word in self.weights:
                ids, weights = self.weights[word]
                scores[ids] += weights
        return scores

    def __call__(self, query: str, k: int) -> list[Document]:
        """Return the k best documents that share a word with the query; ties go to the earlier document."""
        scores = self.scores(query)
        return [self.documents[i] for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > 0]


@functools.cache
def _default_backend() -> BM25:
    return BM25(corpus())


def search_corpus(query: str, k: int) -> list[Document]:
    """Search the project's corpus: the default backend."""
    return _default_backend()(query, k)


def search(query: str, *, backend: Backend, k: int) -> str:
    """Return the k best documents as text for the agent; raise ToolError if there is none."""
    documents = list(backend(query, k))[:k]
    if not documents:
        raise ToolError("no document was found: try other words")
    return "\n".join(f"{i}. {title}: {_cut(text)}" for i, (title, text) in enumerate(documents, 1))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_DOCUMENT else f"{text[:MAX_DOCUMENT]} …"


def web_search(backend: Backend = search_corpus, k: int = 3) -> Tool:
    """Return the search tool.

    Args:
        backend: must be picklable, such as a function of a module, if the environment runs in a pool of processes.
        k: number of documents to show.
    """
    if k < 1:
        raise ValueError(f"k={k}: show at least 1 document")
    schema = {
        "type": "object",
        "properties": {"query": {"type": "string", "minLength": 1, "maxLength": MAX_QUERY}},
        "required": ["query"],
        "additionalProperties": False,
    }
    return Tool(
        "web_search",
        f"finds the {k} documents that fit the words of a query best",
        schema,
        functools.partial(search, backend=backend, k=k),
        {"query": "height of Mount Etna"},
        question="How high is Mount Etna?",
    )
