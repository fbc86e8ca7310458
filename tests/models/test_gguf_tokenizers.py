"""Tokenizers of GGUF files are those of transformers, and merge as SentencePiece and llama.cpp do."""

import numpy as np
import pytest

from jmarl.models.hub import agents
from tests.gguf_files import write_gguf

BYTES = [f"<0x{n:02X}>" for n in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<start_of_turn>"]
WORDS = ("the", "answer", "to", "question", "is", "not", "one", "that", "others", "gave", "they", "talk", "and")
TEXTS = [
    "the answer", " the  talk", "   three  blanks", "na\u00efve \u65e5\u672c \U0001f642", "they talk\nand talk\n\n\nto others",
    "is\tthat<|user|>the one", "<|end|>gave", "", " ",
]  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def sentencepiece_fields(seed=0):
    """Return a vocabulary of SentencePiece: parts of words, whose scores are not in the order of the tokens."""
    marked = ["\u2581" + word for word in WORDS]
    parts = {part[i:j] for part in marked for i in range(len(part)) for j in range(i + 1, min(i + 5, len(part)) + 1)}
    tokens = [*SPECIAL, *BYTES, *sorted(parts), "\u2581\u2581", "  ", "\n\n"]
    types = [UNKNOWN, *[CONTROL] * 5, *[BYTE] * 256, *[NORMAL] * (len(parts) + 1), USER_DEFINED, USER_DEFINED]
    scores = -np.random.default_rng(seed).permutation(len(tokens)).astype(float)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores.tolist(),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture
def path_of(tiny_dir, tmp_path):
    """`path_of(family, **fields)` writes a tiny model with this tokenizer; None: left out. Fields begin with tokenizer.ggml."""

    def make(family, change):
        def replace(fields, tensors):
            for key in [key for key in fields if key.startswith("tokenizer.ggml")]:
                del fields[key]
            fields |= {key: value for key, value in change.items() if value is not None}

        sizes = {"hidden_size": 64} if family == "phi3" else {}
        vocab = len(change["tokenizer.ggml.tokens"])
        directory = tiny_dir(family, vocab_size=vocab, num_hidden_layers=1, layer_types=None, **sizes)
        return write_gguf(tmp_path / f"{family}.gguf", directory, change=replace)

    return make


def sentencepiece(text, scores):
    """Merge the two neighbors whose token has the highest score, the first ones of them, until none are a token."""
    pieces = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))]
        score, i = max(pairs, default=(-np.inf, 0))
        if score == -np.inf:
            return [part for piece in pieces for part in ([piece] if piece in scores else [BYTES[n] for n in piece.encode()])]
        pieces[-i : 2 - i] = ["".join(pieces[-i : 2 - i])]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_are_merged_as_sentencepiece_merges(family, path_of):
    """By their scores; Gemma by the order of its tokens, and without a blank before a text."""
    fields = sentencepiece_fields()
    gemma, tokens = family == "gemma2", fields["tokenizer.ggml.tokens"]
    fields["tokenizer.ggml.add_space_prefix"] = not gemma
    tokenizer = agents.load_agent(path_of(family, fields)).tokenizer
    order = dict(zip(tokens, range(0, -len(tokens), -1) if gemma else fields["tokenizer.ggml.scores"], strict=True))
    scores = {token: order[token] for token in tokens[len(SPECIAL) + 256 : -3]}  # without the blanks
    rng = np.random.default_rng(1)
    for _ in range(30):
        text = " ".join("".join(rng.choice([*"theansworquiv ", "z", "\u00e9"], 12)).split())
        expected = sentencepiece(text if gemma else " " + text, scores)
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)) == expected
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(("family", "prefix"), [("llama", None), ("gemma2", False), ("gemma3_text", False), ("phi3", None)])
def test_a_sentencepiece_tokenizer_equals_that_of_transformers(family, prefix, path_of):
    from transformers import AutoTokenizer

    fields = sentencepiece_fields() | {"tokenizer.ggml.add_space_prefix": prefix}
    path = path_of(family, fields)
    tokenizer, theirs = agents.load_agent(path).tokenizer, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_of_phi3_take_the_blanks_after_them(path_of):
    """As in its tokenizer.json, and in llama.cpp: a GGUF file does not say it."""
    tokenizer = agents.load_agent(path_of("phi3", sentencepiece_fields())).tokenizer
    assert tokenizer.encode("<|user|>\nthe<|end|>\n") == tokenizer.encode("<|user|>the<|end|>")
    assert tokenizer.encode("<s>\nthe") != tokenizer.encode("<s>the")
    tokenizer = agents.load_agent(path_of("llama", sentencepiece_fields())).tokenizer
    assert tokenizer.encode("<|user|>\nthe") != tokenizer.encode("<|user|>the")


def test_a_sentencepiece_tokenizer_begins_with_bos_unless_the_file_says_no(path_of):
    fields, key = sentencepiece_fields(), "tokenizer.ggml.add_bos_token"
    assert agents.load_agent(path_of("llama", fields)).tokenizer.encode("the")[0] == 1
    assert agents.load_agent(path_of("llama", fields | {key: False})).tokenizer.encode("the")[0] != 1
    assert agents.load_agent(path_of("llama", fields | {"tokenizer.ggml.bos_token_id": None})).tokenizer.encode("the")[0] != 1


def test_tokens_that_end_turns_end_completions(path_of):
    """Those of Phi-3, which files of older converters do not name so."""
    assert agents.load_agent(path_of("phi3", sentencepiece_fields())).stop == (2, SPECIAL.index("<|end|>"))


PRE = {"llama-bpe": True, "smaug-bpe": False, "dbrx": False, "tekken": True, "gpt-4o": False}


@pytest.mark.parametrize("pre", PRE)
def test_text_is_split_as_in_transformers(pre, tiny_tokenizer, tiny_dir, tmp_path):
    """And words that are tokens are not merged from parts, where llama.cpp says so."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    def change(fields, _):
        fields["tokenizer.ggml.pre"] = pre

    tokenizer = agents.load_agent(write_gguf(tmp_path / "m.gguf", tiny_dir("llama"), change=change)).tokenizer
    split, _ = tokenizer.backend_tokenizer.pre_tokenizer
    text = "They'LL say 123456 HTTPServer's  x/y//\n!\n/\n\t caf\u00e9's e\u0301 \u65e5\u672c!?\r\n  end "
    theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    assert split.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
    assert tokenizer.backend_tokenizer.model.ignore_merges == PRE[pre]
    assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) == PRE[pre]
