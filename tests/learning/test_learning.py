"""Tiny teams learn: a probe reward rises above the untrained interval, whatever the team is made of."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jmarl.config import Episodes, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.models import decoder
from jmarl.models.hub.agents import Agent
from jmarl.models.stack import unstack
from jmarl.randomness import Randomness
from jmarl.rollout.play import play
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team
from tests.matrix import product

# Training and evaluation have the same shapes, and no completion ends early: one program to sample and one to update.
CONFIG = TrainConfig.of(
    num_updates=20, num_prompts=8, num_generations=8, max_new_tokens=6, min_new_tokens=6, learning_rate=1e-2,
    per_agent="vmap", eval_generations=8, progress=False,
)  # fmt: skip
ITEMS = [{"prompt": text} for text in ("the answer", "is in a", "basket", "of fruit", "def add", "seven", "42", "walked")]
HELD_OUT = [{"prompt": text} for text in ("apples", "or pears", "so they", "the market", "with", "two", "agents", "return")]


def vowels(text):
    """Share of vowels."""
    return sum(text.count(v) for v in "aeiou") / max(len(text), 1)


def both(a, b):
    return [(vowels(x) + vowels(y)) / 2 for x, y in zip(a, b, strict=True)]


init_params = jax.jit(decoder.init_params, static_argnums=0)


def random_agent(cfg, tokenizer, seed):
    return Agent("random", cfg, jax.device_get(init_params(cfg, jax.random.key(seed))), tokenizer)


def two_architectures(tiny_config, tiny_tokenizer, make_tokenizer, seed):
    """Llama and Qwen3 of other widths, the second with a tokenizer of its own: two stacks."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    small = tiny_config("llama")
    large = tiny_config("qwen3", vocab_size=321, hidden_size=48)
    return make_team([random_agent(small, tiny_tokenizer, seed), random_agent(large, tokenizer, 10 + seed)])


def shared_weights(tiny_config, tiny_tokenizer, make_tokenizer, seed):
    """One parameter set in two roles."""
    return make_team([random_agent(tiny_config("llama"), tiny_tokenizer, seed)] * 2, shared_weights=True)


def two_copies(tiny_config, tiny_tokenizer, make_tokenizer, seed):
    """One stack of two agents."""
    return make_team([random_agent(tiny_config("llama"), tiny_tokenizer, seed + i) for i in (0, 10)])


FORMATTERS = [lambda item: item["prompt"], lambda item: "apples " + item["prompt"]]


def shares_of_agents(result, evaluation):
    """Mean share of vowels in each agent's held-out completions."""
    return [np.mean([[vowels(t) for t in row] for row in agent]) for agent in evaluation.rollout.turns[0].texts]


@pytest.mark.long
@pytest.mark.parametrize("make, seed", product([two_architectures, shared_weights, two_copies], [0, 1, 2]))
def test_a_team_learns_the_probe(tiny_config, tiny_tokenizer, make_tokenizer, make, seed):
    """The mean on held-out prompts ends above the untrained team's 95 % interval, each agent for itself writes more
    vowels, and every parameter set changes in every one of its arrays."""
    team, params = make(tiny_config, tiny_tokenizer, make_tokenizer, seed)
    untrained = jax.device_get(params)
    cfg = CONFIG.replace(seed=seed)
    reward = make_reward(both, num_agents=2)
    result = train(team, RewardEnvironment(reward, FORMATTERS), ITEMS, cfg, params=params, eval_items=HELD_OUT)
    before, after = result.before, result.after
    assert after.mean - after.interval > before.mean + before.interval
    assert np.mean(result.rewards[-5:]) > np.mean(result.rewards[:5])
    for was, now in zip(shares_of_agents(result, before), shares_of_agents(result, after), strict=True):
        assert now > was
    for spec, old, state in zip(team.stacks, untrained, result.state.stacks, strict=True):
        for a in range(len(spec.members)):
            pairs = zip(jax.tree.leaves(unstack(old, a)), jax.tree.leaves(unstack(state.params, a)), strict=True)
            assert all(np.abs(x - y).max() > 1e-3 for x, y in pairs)


@pytest.mark.long
def test_without_a_signal_a_team_learns_nothing(tiny_config, tiny_tokenizer, make_tokenizer):
    """The control: a constant reward leaves the completions on held-out prompts exactly as they were."""
    team, params = two_copies(tiny_config, tiny_tokenizer, make_tokenizer, 0)
    reward = make_reward(lambda a, b: [1.0] * len(a), num_agents=2)
    result = train(team, RewardEnvironment(reward, FORMATTERS), ITEMS, CONFIG, params=params, eval_items=HELD_OUT)
    before, after = (evaluation.rollout.turns[0].texts for evaluation in (result.before, result.after))
    assert before == after
    keys = 8, Randomness(seed=0, step=0)
    params = [s.params for s in result.state.stacks]
    sample = partial(sample_team, team, params)
    again = play(sample, team, HELD_OUT, RewardEnvironment(reward, FORMATTERS), CONFIG.sampling, Episodes(), *keys)
    assert again.turns[0].texts != after, "training draws other random numbers than evaluation"
