"""One model for all roles: parsing of its sections, their rewards, and that it learns to write them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs import make
from jmarl.envs.base import describe
from jmarl.envs.centralized import Centralized, joint_prompt, parse
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward, story_length_ratio
from jmarl.envs.vector import LockStep
from jmarl.models import decoder
from jmarl.models.hub.agents import Agent
from jmarl.runs.checks import environment_of
from jmarl.runs.train import train
from jmarl.team import Team

ITEMS = [{"prompt": "a fox"}, {"prompt": "the moon"}]
FORMATTERS = [lambda item: f"Set up {item['prompt']}.", lambda item: f"Tell of {item['prompt']}."]


def tagged(*texts):
    return "".join(f"<agent_{i}>{text}</agent_{i}>" for i, text in enumerate(texts))


# --- parsing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, texts, missing", [
    ("<agent_0>one</agent_0><agent_1>two</agent_1>", ["one", "two"], 0),
    ("well:\n<AGENT_1> two </Agent_1> and <agent_0>\none\nmore\n</AGENT_0> bye", ["one\nmore", "two"], 0),
    ("<agent_1>two</agent_1>", ["", "two"], 1),
    ("<agent_0></agent_0><agent_1>two</agent_1>", ["", "two"], 0),
    ("<agent_0>one</agent_0><agent_1>cut o", ["one", ""], 1),
    ("<agent_0>one</agent_1><agent_1>two</agent_0>", ["one</agent_1><agent_1>two", ""], 1),
    ("<agent_0>first</agent_0><agent_0>second</agent_0>", ["first", ""], 1),
    ("<agent_0>one</agent_0><agent_10>ten</agent_10><agent_2>three</agent_2>", ["one", ""], 1),
    ("<agent_0>a <agent_1>b</agent_1> c</agent_0>", ["a <agent_1>b</agent_1> c", "b"], 0),
    ("no tags at all", ["", ""], 2),
    ("", ["", ""], 2),
])  # fmt: skip
def test_a_completion_is_cut_into_sections(text, texts, missing):
    sections = parse(text, 2)
    assert (sections.texts, sections.missing, sections.parse_error) == (texts, missing, missing == 2)


def test_more_than_ten_roles_can_have_sections():
    texts = [f"text {i}" for i in range(12)]
    assert parse(tagged(*texts), 12).texts == texts


def test_the_joint_prompt_contains_the_prompts_of_all_roles_and_the_form():
    text = joint_prompt(["Set up a fox.", "Tell of a fox.", "Judge it."])
    assert text.index("Set up a fox.") < text.index("Tell of a fox.") < text.index("Judge it.")
    assert not parse(text, 3).missing, "the form in the prompt is the form that is parsed"


# --- rewards and turns -------------------------------------------------------------------------------------------------------


def test_a_joint_action_has_the_reward_that_it_has_for_a_team():
    """Rewards and parts are those of separate agents with the same texts, NaN included; the form has its own parts."""
    texts = [["a fox", "", "moon"], ["the fox ran far", "told", "x"]]

    def reward(a, b, batch_items):
        return [float("nan") if y == "x" else v for v, y in zip(story_length_ratio(a, b), b, strict=True)]

    inner = RewardEnvironment(make_reward(reward, num_agents=2), FORMATTERS)
    rng, items = np.random.default_rng(0), [*ITEMS, ITEMS[0]]
    states, prompts = inner.reset(items, rng)
    expected = inner.step(states, texts, rng).result
    central = Centralized(inner, 2)
    states, read = central.reset(items, rng)
    assert read == [[joint_prompt(texts) for texts in zip(*prompts, strict=True)]]
    answer = central.step(states, [[tagged(*pair) for pair in zip(*texts, strict=True)]], rng)
    np.testing.assert_array_equal(answer.result.total, expected.total)
    np.testing.assert_array_equal(answer.result.rewards, expected.rewards.mean(1, keepdims=True))
    np.testing.assert_array_equal(answer.result.parts["reward"], expected.parts["reward"])
    assert answer.result.invalid.tolist() == [False, False, True] and answer.result.faults == expected.faults
    form = central.step(
        states, [[tagged(*pair) for pair in ("ab",)] + ["nothing", "<agent_1>b</agent_1>"]], rng
    ).result.measures
    assert form["parse_error"].tolist() == [0, 1, 0] and form["missing_sections"].tolist() == [0, 1, 0.5]


def test_rewards_of_roles_are_averaged():
    inner = RewardEnvironment(make_reward(lambda a, b: [(1.0, 0.0)] * len(a), num_agents=2), FORMATTERS)
    states, _ = inner.reset(ITEMS, np.random.default_rng(0))
    result = Centralized(inner, 2).step(states, [["x", "y"]], np.random.default_rng(0)).result
    assert result.rewards.tolist() == [[0.5], [0.5]]


def test_later_turns_depend_on_the_texts_of_the_roles():
    """A transition gets the texts, prompts and histories of the roles. An environment with its own state works too."""
    calls = []

    def transition(**arguments):
        calls.append(arguments)
        return [f"again, {text}" for text in arguments["agent_completions"]]

    rng = np.random.default_rng(0)
    central = Centralized(RewardEnvironment(make_reward(story_length_ratio, num_agents=2), FORMATTERS, transition), 2)
    states, _ = central.reset(ITEMS[:1], rng)
    answer = central.step(states, [[tagged("one", "two")]], rng)
    states, read = central.observe(answer.after)
    assert read == [[joint_prompt(["again, one", "again, two"])]]
    assert calls[0]["agent_completions"] == ["one", "two"] and calls[0]["num_agents"] == 2
    assert calls[0]["prompt_history_per_agent"] == [["Set up a fox."], ["Tell of a fox."]]
    central.observe(central.step(states, [["no form"]], rng).after)
    assert calls[1]["response_history_per_agent"] == [["one", ""], ["two", ""]]

    class Counter:
        def reset(self, item, rng):
            return 0, ["0", "0"]

        def step(self, state, texts, rng):
            return state + 1, [str(state + 1)] * 2, float(len(texts[1])), state == 1

    central = Centralized(LockStep(Counter(), 2), 2)
    states, _ = central.reset(ITEMS[:1], rng)
    for turn in (1, 2):
        answer = central.step(states, [[tagged("one", "three")]], rng)
        assert answer.result.total.tolist() == [5.0] and answer.done.tolist() == [turn == 2]
        states, read = central.observe(answer.after)
        assert read == [[joint_prompt([str(turn)] * 2)]]


def test_max_turns_and_describe_come_from_the_environment():
    """Episodes of three turns are not truncated to one, and the metadata of a run describes the inner environment."""
    central = Centralized(LockStep(make("math_verifier", rounds=1)), 2)
    assert central.max_turns == 3 and describe(central) == {"centralized": 2} | describe(central.env) != {"centralized": 2}
    with pytest.raises(ValueError, match="num_turns=1, and an episode of this environment has up to 3"):
        environment_of(Team(()), central, TrainConfig())
    assert Centralized(RewardEnvironment(make_reward(story_length_ratio, num_agents=2), FORMATTERS), 2).max_turns == 1


def test_a_team_of_two_is_refused():
    central = Centralized(RewardEnvironment(make_reward(story_length_ratio, num_agents=2), FORMATTERS), 2)
    states, _ = central.reset(ITEMS[:1], np.random.default_rng(0))
    with pytest.raises(ValueError, match="one model writes for all roles, but the team has 2 agents: make a team of one"):
        central.step(states, [["a"], ["b"]], np.random.default_rng(0))


# --- training ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaker(tiny_config):
    """A tiny model whose tokens are whole tags and two words, so that random text has a section now and then."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<end>", "<agent_0>", "</agent_0>", "<agent_1>", "</agent_1>", "yes", "no"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    cfg = tiny_config(vocab_size=len(words))
    init_params = jax.jit(decoder.init_params, static_argnums=0)  # one program, not one per operation
    return Agent("speaker", cfg, jax.device_get(init_params(cfg, jax.random.key(0))), fast)


@pytest.mark.long
def test_a_model_learns_to_write_sections_for_both_roles(speaker, tmp_path):
    """The reward counts roles with a text, which needs sections: the held-out reward rises, and fewer sections are missing.
    Evaluation uses the same environment."""

    def agree(a, b):
        return [0.5 * (bool(x) + bool(y)) for x, y in zip(a, b, strict=True)]

    cfg = TrainConfig.of(
        num_updates=60, num_prompts=4, num_generations=16, max_new_tokens=8, min_new_tokens=8, learning_rate=1e-2,
        eval_generations=16, progress=False, output_dir=str(tmp_path),
    )  # fmt: skip
    env = Centralized(RewardEnvironment(make_reward(agree, num_agents=2), FORMATTERS), 2)
    result = train(Team.of([speaker]), env, ITEMS * 2, cfg, eval_items=ITEMS * 2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert result.before.mean < 0.4 and result.after.mean > result.before.mean + 0.25
    missing = [row["measures/missing_sections"] for row in rows if "measures/missing_sections" in row]
    rewards = [row["reward/agree"] for row in rows if "reward/agree" in row]
    assert missing[-1] < missing[0] - 0.3 and rewards[-1] > rewards[0] + 0.2
    assert all(
        0 <= row["measures/parse_error"] <= row["measures/missing_sections"] for row in rows if "measures/parse_error" in row
    )
