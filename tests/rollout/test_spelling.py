"""Which special tokens prompts without a chat template may write in later turns, and how a dry run shows tokens."""

from __future__ import annotations

import base64
import time

import pytest

from jmarl.cli.dry_run import shown
from jmarl.models.hub.tokenize import ChatPrompt, encode_prompts
from jmarl.rollout.spelling import Spelling

END, START = "<|im_end|>", "<|im_start|>"


def test_later_prompts_write_what_the_first_wrote_and_no_agent(tiny_tokenizer):
    by_hand = Spelling(frozenset({START, END}))
    assert by_hand.after(tiny_tokenizer, ["ok"], f"{START}user").allowed == {START, END}
    after = by_hand.after(tiny_tokenizer, ["ok", f"ok{END}"], "x")
    assert after.allowed == {START} == after.after(tiny_tokenizer, ["ok"], END).allowed
    assert not Spelling(frozenset()).after(tiny_tokenizer, ["<|im_", "end|>"], END).allowed


def test_no_agents_spell_a_token_together(tiny_tokenizer):
    """In one turn or in two; an environment may write their texts side by side."""
    by_hand = Spelling(frozenset({START, END}))
    assert by_hand.after(tiny_tokenizer, ["a<|im_", "start|> b"], "x").allowed == {END}
    assert by_hand.after(tiny_tokenizer, ["start|> b", "a<|im_\n"], "x").allowed == {END}
    assert by_hand.after(tiny_tokenizer, ["a<|im_"], "x").after(tiny_tokenizer, ["end|>"], "x").allowed == {START}
    assert by_hand.after(tiny_tokenizer, ["a <", "b"], "x").allowed == {START, END}
    assert by_hand.after(tiny_tokenizer, ["d|", "a<|i", "> b", "m_", "en"], "x").allowed == {START}, "in five pieces"


def test_many_short_texts_take_no_long_time(tiny_tokenizer):
    texts = [f"{n:03}" for n in range(999)] + ["<|im_", "end|>"]
    start = time.monotonic()
    assert Spelling(frozenset({START, END})).after(tiny_tokenizer, texts, "x").allowed == {START}
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "text",
    [
        "&lt;|im_end|&gt;", "&#60;&#124;im&#95;end&#x7c;&gt;", "&amp;lt;|im_end|>", "%3C%7Cim_end%7C%3e",
        "\\u003c|im_end|\\x3e", "\\U0000003c|im_end\\u{7c}>",
        "<\\|im_end\\|>", "＜|im_end|>", "<|im_\u200bend|>", "<|IM_END|>", base64.b64encode(b"ok<|im_end|> go").decode(),
        base64.b64encode(b"<|im_end|>").decode(),
    ],
)  # fmt: skip
def test_escaped_forms_count_as_well(tiny_tokenizer, text):
    assert Spelling(frozenset({START, END})).after(tiny_tokenizer, ["ok", f"so {text} on"], "x").allowed == {START}


def test_an_agent_that_acts_later_may_write_what_its_first_prompt_writes(tiny_tokenizer):
    waiting = Spelling().after(tiny_tokenizer, [END], None)
    assert waiting.first is None and not waiting.allowed
    assert waiting.after(tiny_tokenizer, ["ok"], START + END).allowed == {START}
    assert not Spelling().after(tiny_tokenizer, [], ChatPrompt([{"role": "user", "content": "a"}])).allowed


def test_a_dry_run_shows_which_parts_are_special_tokens(tiny_tokenizer):
    (row,) = encode_prompts(tiny_tokenizer, [f"a{END}⟨b"], 100, chat=True)
    assert shown(tiny_tokenizer, row) == f"⟨{START}⟩user\na{END}\\⟨b⟨{END}⟩\n⟨{START}⟩assistant\n"
