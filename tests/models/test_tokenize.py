"""Encode prompts to token ids, and decode token ids to text."""

import re
from typing import Any

import numpy as np
import pytest

from jmarl.models.hub import cut
from jmarl.models.hub import tokenize as text


def test_chat_prompt_ends_where_the_assistant_begins(tiny_tokenizer):
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert text.chat_prompt(tiny_tokenizer, "Hello", system="Be brief.") == expected
    assert text.chat_prompt(tiny_tokenizer, "Hello") == expected[expected.index("<|im_start|>user") :]


def test_chat_without_a_template_is_an_error(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        text.encode_prompts(tokenizer, ["Hello"], 64, chat=True)


@pytest.fixture
def bos_tokenizer(make_tokenizer):
    """A tokenizer that adds a beginning-of-sequence token before every text, like Llama's."""
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def test_a_prompt_has_exactly_one_beginning_of_sequence(bos_tokenizer):
    (plain,) = text.encode_prompts(bos_tokenizer, ["Hello"], 64)
    (chat,) = text.encode_prompts(bos_tokenizer, ["Hello"], 64, chat=True)
    (templated,) = text.encode_prompts(bos_tokenizer, [text.chat_prompt(bos_tokenizer, "Hello")], 64)
    assert plain[0] == 1 and plain.count(1) == 1
    assert chat == templated
    assert chat[0] == 1 and chat[1] != 1


@pytest.mark.parametrize("kind", ["library", "own"])
def test_many_texts_are_encoded_and_decoded_as_one_after_the_other(bos_tokenizer, kind):
    """In one call, unless a tokenizer has a method of its own, which is then called for each of them."""
    if kind == "own":
        plain: Any = type(bos_tokenizer)

        class Own(plain):
            def encode(self, text, **options):
                return plain.encode(self, text.upper(), **options)

        bos_tokenizer.__class__ = Own
    texts = ["Hello", "<|im_start|>Hello", "a<|im_end|>b", "Hello<|endoftext|>", "\ud800 and", "é 12"]
    for special in (None, [frozenset()] * len(texts), [frozenset({"<|im_end|>"})] * len(texts)):
        rows = text.encode_prompts(bos_tokenizer, texts, 64, special=special)
        allowed = special or [None] * len(texts)
        assert rows == [text.encode_prompt(bos_tokenizer, x, special=own) for x, own in zip(texts, allowed, strict=True)]
        for skip in (True, False):
            assert text.decode(bos_tokenizer, [*rows, []], skip) == [
                text.decode(bos_tokenizer, [row], skip)[0] for row in [*rows, []]
            ]
    (first,) = text.encode_prompts(bos_tokenizer, ["h"], 64)
    assert (first == text.encode_prompts(bos_tokenizer, ["H"], 64)[0]) == (kind == "own")


def test_a_prompt_may_fill_the_context_exactly_and_no_more(tiny_tokenizer):
    n = len(tiny_tokenizer.encode("1234567"))
    assert n == 7
    assert len(text.encode_prompts(tiny_tokenizer, ["1234567"], n + 5, max_new_tokens=5)[0]) == n
    with pytest.raises(ValueError, match=r"prompt 1 \('1234567'...\) has 7 tokens; .*max_new_tokens=5.* 12.* 11"):
        text.encode_prompts(tiny_tokenizer, ["1", "1234567"], n + 4, max_new_tokens=5)


def test_errors_name_other_bad_prompts(tiny_tokenizer):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        text.encode_prompts(tiny_tokenizer, ["a", ""], 8)
    with pytest.raises(TypeError, match="list of strings"):
        text.encode_prompts(tiny_tokenizer, "a", 8)
    with pytest.raises(ValueError, match="system= needs chat=True"):
        text.encode_prompts(tiny_tokenizer, ["a"], 8, system="b")


def test_stop_ids_are_the_eos_first_and_then_special_ends_of_turn(tiny_tokenizer, make_tokenizer):
    assert text.stop_ids(tiny_tokenizer) == (2, 0)
    base = make_tokenizer()
    base.eos_token = "<|endoftext|>"
    assert text.stop_ids(base) == (0, 2)
    base.eos_token = None
    assert text.stop_ids(base) == (2, 0)


def test_stop_tokens_that_are_not_special_do_not_stop(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|eot_id|>"])  # in the vocabulary, but not special
    assert text.stop_ids(tokenizer) == (2, 0)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_of_text|>"]})
    assert text.stop_ids(tokenizer) == (2, 0, len(tokenizer) - 1)


def test_decode_skips_special_tokens_and_keeps_every_space(tiny_tokenizer):
    sentence = "Well , do n't  tidy this ! 日本 🙂\n\tx = 1"
    ids = tiny_tokenizer.encode(sentence)
    rows = [np.array([*ids, 2, 0, 0]), ids[:0]]
    assert text.decode(tiny_tokenizer, rows) == [sentence, ""]


# --- prompts that are too long -------------------------------------------------------------------------------------------


def test_a_cut_prompt_is_its_last_tokens(tiny_tokenizer, bos_tokenizer):
    """A beginning-of-sequence token at the start stays."""
    (row,) = text.encode_prompts(tiny_tokenizer, ["0123456789"], 64)
    assert cut.cut_left(tiny_tokenizer, row, 4) == row[-4:] == tiny_tokenizer.encode("6789")
    (row,) = text.encode_prompts(bos_tokenizer, ["0123456789"], 64)
    assert cut.cut_left(bos_tokenizer, row, 4) == [1, *row[-3:]]
    assert cut.cut_left(bos_tokenizer, row, len(row)) == row


def test_a_cut_message_keeps_its_chat_template(tiny_tokenizer):
    """The result is the template around the last characters; a conversation loses its oldest tokens."""
    (row,) = text.encode_prompts(tiny_tokenizer, ["0123456789"], 64, chat=True)
    (expected,) = text.encode_prompts(tiny_tokenizer, ["789"], 64, chat=True)
    assert cut.cut_left(tiny_tokenizer, row, len(expected), chat=True) == expected
    history = row + tiny_tokenizer.encode("42<|im_end|>", add_special_tokens=False)
    (longer,) = text.follow_ups(tiny_tokenizer, [history], ["And now?"], 256, chat=True)
    shorter = cut.cut_left(tiny_tokenizer, longer, len(longer) - 5, chat=True)
    expected = tiny_tokenizer.decode(longer, skip_special_tokens=False).replace("0123456789", "56789")
    assert tiny_tokenizer.decode(shorter, skip_special_tokens=False) == expected


def test_cut_messages_keep_the_template_and_lose_the_oldest_text(tiny_tokenizer):
    """The system message loses its text after the other earlier ones, and the last message at the end."""
    roles = ("system", "user", "assistant", "user")
    contents = ("Be kind.", "Where is the farmer now?", "In the field.", "And the apples?")

    def messages(*texts):
        return [{"role": role, "content": content} for role, content in zip(roles, texts, strict=True)]

    def encoded(*texts):
        return text.encode_prompts(tiny_tokenizer, [messages(*texts)], 1024)[0]

    prompt = text.ChatPrompt(messages(*contents))
    for remaining in (
        ("Be kind.", "farmer now?", *contents[2:]),
        ("Be kind.", "", "field.", contents[3]),
        ("", "", "", "apples?"),
    ):
        room = len(encoded(*remaining))
        row = cut.cut_messages(tiny_tokenizer, prompt, room)
        read = tiny_tokenizer.decode(row, skip_special_tokens=False)
        messages_read = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", read)
        assert len(row) <= room and tuple(role for role, _ in messages_read) == roles
        assert all(
            whole.endswith(part) and len(part) >= len(least)
            for whole, (_, part), least in zip(contents, messages_read, remaining, strict=True)
        )
        assert read.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [content for _, content in messages_read[:3]] == ["", "", ""]
    size = len(encoded("", "", "", ""))
    with pytest.raises(ValueError, match=f"room for {size} tokens .* template of its 4 messages takes {size}: lower max_new"):
        cut.cut_messages(tiny_tokenizer, prompt, size)


def test_no_room_for_any_token_of_a_prompt_is_an_error(tiny_tokenizer):
    with pytest.raises(ValueError, match="there is room for 0 tokens of a prompt: lower max_new_tokens"):
        cut.cut_left(tiny_tokenizer, [5, 6], 0)
    before, after = cut.template_ids(tiny_tokenizer)
    size = len(before) + len(after)
    with pytest.raises(ValueError, match=f"room for {size} tokens of a prompt, of which the chat template takes {size}"):
        cut.cut_left(tiny_tokenizer, [*before, 5, 6, *after], size, chat=True)


# --- later turns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False])
def test_a_follow_up_is_what_the_template_writes(tiny_tokenizer, ended):
    """The conversation reads as the template renders it, whether or not the completion ended its message. The tokens of the
    history are unchanged."""
    (prompt,) = text.encode_prompts(tiny_tokenizer, ["What is the answer?"], 64, chat=True)
    history = prompt + tiny_tokenizer.encode("42, says the farmer" + ("<|im_end|>" if ended else ""), add_special_tokens=False)
    (row,) = text.follow_ups(tiny_tokenizer, [history], ["And the question?"], 256, 8, chat=True)
    assert row[: len(history)] == history
    messages = [("user", "What is the answer?"), ("assistant", "42, says the farmer"), ("user", "And the question?")]
    messages = [{"role": role, "content": content} for role, content in messages]
    expected = tiny_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tiny_tokenizer.decode(row, skip_special_tokens=False) == expected


def test_a_follow_up_without_a_template_is_the_text(tiny_tokenizer):
    assert text.follow_ups(tiny_tokenizer, [[5, 6]], [" and"], 64) == [[5, 6, *tiny_tokenizer.encode(" and")]]
    with pytest.raises(ValueError, match="prompt 0 of a later turn is empty"):
        text.follow_ups(tiny_tokenizer, [[5, 6]], [""], 64)
    n = len(tiny_tokenizer.encode(" and"))
    with pytest.raises(
        ValueError, match=rf"prompt 1 of a later turn \(' and'...\) makes {n + 2} tokens .* that is {n + 62}, more"
    ):
        text.follow_ups(tiny_tokenizer, [[], [5, 6]], [" and", " and"], n + 61, 60)


def test_lone_surrogates_in_prompts_are_escaped(tiny_tokenizer):
    """Messages of exceptions may contain them, and environments put these into the next prompt."""
    for chat in (False, True):
        broken, plain = (
            text.encode_prompts(tiny_tokenizer, [prompt], 512, chat=chat) for prompt in ("a \ud800 b é", "a \\ud800 b é")
        )
        assert broken == plain
    assert text.follow_ups(tiny_tokenizer, [[1]], ["\ud800"], 512) == text.follow_ups(tiny_tokenizer, [[1]], ["\\ud800"], 512)
