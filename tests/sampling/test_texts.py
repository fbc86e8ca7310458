"""`jmarl.generate`: a team's texts for prompts are those that an evaluation samples."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest

import jmarl
from jmarl.evaluation.evaluate import play_held_out
from jmarl.sampling.generate import sample_team
from jmarl.types import TRACES

CONFIG = jmarl.TrainConfig.of(max_new_tokens=6, min_new_tokens=3, chat=True, seed=5, eval_generations=1)
CFG_LONG = jmarl.TrainConfig.of(max_new_tokens=16, seed=5)
PROMPTS = [["The answer", "seven apples", "of fruit"], ["What is it?", "three pears", "The farmer"]]


@pytest.fixture(scope="module")
def team(tiny_config, tiny_tokenizer, random_agent):
    return jmarl.Team.of([random_agent(tiny_config(tie_embeddings=False), tiny_tokenizer, seed) for seed in range(2)])


@pytest.fixture(scope="module")
def texts(team):
    return jmarl.generate(team, PROMPTS, CONFIG)


def test_texts_are_those_of_an_evaluation(team, texts):
    formatters = [lambda item, agent=agent: PROMPTS[agent][item["row"]] for agent in range(2)]
    env = jmarl.RewardEnvironment(lambda first, second: [0.0] * len(first), formatters)
    sample = partial(sample_team, team, jmarl.make_team(team.agents)[1])
    rollout = play_held_out(sample, team, [{"row": row} for row in range(3)], env, CONFIG)
    assert texts == [[text for [text] in rows] for rows in rollout.turns[0].texts]
    assert len(set(sum(texts, []))) == 6


def test_an_agent_without_a_prompt_writes_nothing_and_the_others_write_the_same(team, texts):
    prompts = [[PROMPTS[0][0], None, PROMPTS[0][2]], [None, *PROMPTS[1][1:]]]
    assert jmarl.generate(team, prompts, CONFIG) == [[texts[0][0], "", texts[0][2]], ["", *texts[1][1:]]]


def test_a_stop_text_ends_what_every_agent_writes(team):
    whole = jmarl.generate(team, PROMPTS, CFG_LONG)
    stops = sorted({text[3] for row in whole for text in row})[:2]
    cut = jmarl.generate(
        team, PROMPTS, dataclasses.replace(CFG_LONG, sampling=dataclasses.replace(CFG_LONG.sampling, stop=stops))
    )
    for text, full in zip(sum(cut, []), sum(whole, []), strict=True):
        first = min((full.index(stop) + 1 for stop in stops if stop in full), default=len(full))
        assert full.startswith(text) and first <= len(text) <= first + 8, "the rest of its last token"
    assert cut != whole


def test_chat_messages_and_parameters_on_the_device_give_the_same_texts_by_the_same_program(team, texts):
    messages = [[[{"role": "user", "content": text}] for text in row] for row in PROMPTS]
    traces = TRACES["sample"]
    assert jmarl.generate(team, messages, CONFIG, params=jmarl.make_team(team.agents)[1]) == texts
    assert TRACES["sample"] == traces


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("a", "prompts='a' is not allowed: give one list of prompts per agent"),
        (["a", "b"], "give one list of prompts per agent, [[prompt of agent 0], [prompt of agent 1], ...]"),
        ([["a"]], "1 lists of prompts for a team of 2: give one list per agent"),
        ([["a"], ["b", "c"]], "the agents have [1, 2] prompts: give each equally many, and None where one writes nothing"),
        ([[], []], "the agents have [0, 0] prompts"),
    ],
)
def test_prompts_that_are_not_one_list_per_agent_are_refused(team, prompts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jmarl.generate(team, prompts, CONFIG)
