"""Which special tokens of a tokenizer rewards and environments read in completions."""

import argparse

import pytest

from jmarl.cli.teams.match import add_play_arguments, environment_of_run, play_config
from jmarl.cli.teams.sources import TeamSource
from jmarl.config import ExperimentConfig
from jmarl.envs.base import special_tokens
from jmarl.envs.centralized import Centralized
from jmarl.envs.math.reasoning import MathReasoning
from jmarl.envs.mixture import Mixture
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.tools.function_calling import FunctionCalling
from jmarl.envs.tools.tool_calls import SPECIAL_TOKENS, parse_message
from jmarl.envs.tools.tool_use import ToolUse
from jmarl.envs.vector import LockStep
from jmarl.logs.rollout_log import token_texts
from jmarl.models.hub.tokenize import decode
from jmarl.mrlm.core.system_prompts import WithSystemPrompts
from jmarl.preferences.reward_model import LearnedReward


@pytest.fixture(scope="module")
def marks():
    """A tokenizer in which the marks of tool calls are special tokens, as in those of Mistral and Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


CALL = '{"name": "calculator", "parameters": {"expression": "2*21"}}'
CALLS = [f"So <tool_call>{CALL}</tool_call>", f"<|python_tag|>{CALL}", f"[TOOL_CALLS] [{CALL}]"]


@pytest.mark.parametrize("text", CALLS)
def test_special_tokens_are_left_out_shown_or_shown_to_environments_that_read_them(marks, text):
    ids = [marks.encode(text + "<|end|>", add_special_tokens=False)]
    plain = text
    for token in marks.all_special_tokens + ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]:
        plain = plain.replace(token, "")
    assert decode(marks, ids) == [plain]
    assert decode(marks, ids, skip=False) == [text + "<|end|>"]
    assert decode(marks, ids, shown=("[INST]",)) == [plain]  # not in this tokenizer
    assert decode(marks, ids, shown=SPECIAL_TOKENS) == [text]
    for skip, shown in ((True, SPECIAL_TOKENS), (False, ())):
        (call,) = parse_message(decode(marks, ids, skip, shown)[0]).calls
        assert tuple(call) == ("calculator", {"expression": "2*21"}, "")


def test_tokens_that_are_parts_of_a_character_have_its_text_together(marks):
    """Each byte is a token; the run of those that make no character alone has its text at the last one."""
    ids = marks.encode("naïve 🙂日!<|end|>", add_special_tokens=False)
    texts = token_texts(marks, ids)
    assert len(texts) == len(ids) and "".join(texts) == "naïve 🙂日!<|end|>"
    assert [text for text in texts if text] == [*"naïve ", "🙂日", "!", "<|end|>"]


def test_environments_of_tools_read_the_marks_of_calls_and_others_none():
    assert special_tokens(LockStep(ToolUse())) == special_tokens(Mixture({"a": ToolUse()})) == SPECIAL_TOKENS
    assert special_tokens(Centralized(LockStep(FunctionCalling()), 2)) == SPECIAL_TOKENS
    assert special_tokens(RewardEnvironment(lambda a: [1.0], [str])) == ()
    assert special_tokens(LockStep(MathReasoning())) == ()


def test_what_wraps_an_environment_reads_its_marks():
    env = LockStep(ToolUse())
    assert special_tokens(WithSystemPrompts(env, [("Be brief.", True)], False)) == SPECIAL_TOKENS
    assert special_tokens(LearnedReward(env)) == SPECIAL_TOKENS


def test_a_run_that_is_played_again_shows_what_it_showed(tiny_config, tiny_tokenizer, random_agent):
    parser = argparse.ArgumentParser()
    add_play_arguments(parser, "eval")
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    cfg = ExperimentConfig.of(models=["m0"], train_envs=["tools", "math"], num_turns=4, skip_special_tokens=False)
    source = TeamSource([agent], "a run", cfg.train, cfg)
    assert play_config(parser.parse_args(["--model", "m0"]), source, 1).episodes.skip_special_tokens is False
    assert special_tokens(environment_of_run(source, {})[0]) == SPECIAL_TOKENS
