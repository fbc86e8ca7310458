"""The exact policy of an agent is what its samples have as log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.tiny import random_agents, tokenizer
from jmarl.config import Sampling
from jmarl.league.scored import policy_of
from jmarl.randomness import Randomness
from jmarl.sampling.generate import SampleRequest, pad, sample_team, texts_of, tokenize, tokens_of
from jmarl.team import make_team

WORDS = ("queen", "king", "bet", "call")
PROMPTS = ["queen", "king bet"]


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_probabilities_are_those_of_samples_and_sum_to_one(max_new_tokens):
    """With two tokens at most, `bet` has to end, and `bet call` is cut; with one, `bet` is cut and `bet call` is too long."""
    (agent,) = random_agents("a", tokenizer(WORDS, spaced=True), 1, 0, width=32)
    settings = Sampling(max_new_tokens=max_new_tokens, temperature=0.7)
    pairs = [f"{a} {b}" for a in WORDS for b in WORDS]
    policy = policy_of(agent, PROMPTS, [*WORDS, *pairs, ""], settings)
    for prompt in PROMPTS:
        assert math.isclose(sum(policy[prompt].values()), 1, abs_tol=1e-5)
        assert max_new_tokens == 2 or policy[prompt]["bet call"] == 0
    team, params = make_team([agent])
    request = SampleRequest(pad(team, tokenize(team, [PROMPTS], settings, False)), settings, Randomness(0, 0), 32, np.arange(2))
    (done,) = sample_team(team, params, request)
    texts = texts_of(team, tokens_of(team, (done,), 2))[0]
    logprobs = np.sum(done.logprobs[0], -1, where=np.asarray(done.action_mask[0]))
    for prompt, group, own in zip(PROMPTS, texts, logprobs, strict=True):
        assert len(set(group)) > 3
        for text, logprob in zip(group, own, strict=True):
            assert math.isclose(policy[prompt][text], math.exp(logprob), rel_tol=1e-4)


def test_samplers_that_cut_the_vocabulary_are_refused():
    (agent,) = random_agents("a", tokenizer(WORDS), 1, 0, width=32)
    with pytest.raises(ValueError, match="top_p=0.9"):
        policy_of(agent, PROMPTS, WORDS, Sampling(top_p=0.9))
