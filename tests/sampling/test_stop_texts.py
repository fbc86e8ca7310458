"""The automaton of stop texts ends a row with the token that completes one, wherever texts and tokens begin and end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jmarl.models.hub.tokenize import decode
from jmarl.sampling.stop_texts import automaton, over_tokens, stop_table, token_bytes
from tests.models.test_special_tokens import FAMILIES, tokenizer_of

LETTERS = st.text("ab\u00e9\u4f60", min_size=1, max_size=4)


def follow(table, ids):
    """Return the place of the first token after which a text is complete; None if there is none."""
    state = 0
    for place, i in enumerate(ids):
        state = int(table[state, i])
        if state == len(table) - 1:
            return place
    return None


@given(st.lists(LETTERS, min_size=1, max_size=3), st.text("ab\u00e9\u4f60", max_size=30), st.data())
def test_a_text_is_found_at_the_token_that_completes_it(texts, written, data):
    """Tokens are any pieces of the bytes of a text, some of them empty."""
    spelled = written.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(spelled)), max_size=20)))
    tokens = [spelled[a:b] for a, b in zip([0, *cuts], [*cuts, len(spelled)], strict=True)]
    table = over_tokens(automaton([text.encode() for text in texts]), tokens)
    so_far = [b"".join(tokens[: i + 1]) for i in range(len(tokens))]
    complete = [i for i, x in enumerate(so_far) if any(text.encode() in x for text in texts)]
    assert follow(table, range(len(tokens))) == next(iter(complete), None)


def byte_fallback():
    """A tokenizer as that of Llama 2, which writes characters without a token as bytes."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abcdefgh", "\u2581a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {name: lambda name=name: tokenizer_of(**FAMILIES[name]) for name in ("chatml", "llama3", "gemma")}
TOKENIZERS["byte fallback"] = byte_fallback


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_those_of_the_decoded_text(name):
    tokenizer = TOKENIZERS[name]()
    tokens, rng = token_bytes(tokenizer, len(tokenizer) + 5), np.random.default_rng(0)
    assert tokens[-5:] == [b""] * 5, "ids without a token add nothing"
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.added_tokens_decoder]
    if name == "byte fallback":  # it writes all bytes of a run as replacements where some are no character
        rows = [tokenizer.encode("a" + "".join(rng.choice([*"ab \u00e9\u4f60\U0001f600\n"], 9)))[:-1] for _ in range(50)]
        rows = [
            row
            for row in rows
            if b"".join(tokens[i] for i in row).decode(errors="ignore").encode() == b"".join(tokens[i] for i in row)
        ]
    else:
        rows = rng.choice(ordinary, (50, 12)).tolist()
    assert len(rows) > 10
    for ids in rows:
        spelled, text = b"".join(tokens[i] for i in ids).decode(errors="replace"), decode(tokenizer, [ids])[0]
        assert spelled.replace("\ufffd", "") == text.replace("\ufffd", "")


def test_a_special_token_counts_where_a_stop_text_spells_it():
    tokenizer = tokenizer_of(**FAMILIES["chatml"])
    a, b, start, end = (tokenizer.convert_tokens_to_ids(x) for x in ("a", "b", "<|im_start|>", "<|im_end|>"))
    table = stop_table(tokenizer, len(tokenizer), ("ab", "b<|im_start|>"))
    assert follow(table, [a, end, b]) == 2, "a text has no special tokens"
    assert follow(table, [a, start, b]) is None and follow(table, [b, start, a]) == 1
    assert stop_table(tokenizer, len(tokenizer), ()) is None


def test_a_tokenizer_whose_tokens_are_no_parts_of_the_text_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2, "</s>": 3}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", "b"), decoders.Fuse(), decoders.Replace("bb", "c")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    with pytest.raises(ValueError, match="stop='a' cannot be found in the tokens of this tokenizer"):
        stop_table(tokenizer, 4, ("a",))
