"""Play an environment without models, and note all that it says."""

from __future__ import annotations

import copy

import numpy as np


def play(env, items, group=2, turns=3, between_turns=lambda turn: None, again=False, seed=0):
    """All that an environment says in a tree of episodes, and what it is told: numbers that follow from the seed.

    again: repeat each step from the states before it, as counterfactual replays do."""
    rng, words = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    states, prompts = env.reset(items, rng)
    said = [prompts]
    for turn in range(turns):
        count = len(states) * group
        actions = [[str(words.integers(1, 100)) for _ in range(count)] for _ in range(env.num_agents)]
        for _ in range(1 + again):
            answer = env.step([state for state in states for _ in range(group)], actions, rng)
            result = answer.result
            said.append((result.rewards, result.parts, result.measures, result.faults, result.num_raised, answer.done))
        going = [after for after, done in zip(answer.after, answer.done, strict=True) if not done]
        if not going or turn + 1 == turns:
            break
        between_turns(turn)
        states, prompts = env.observe(going)
        said.append(prompts)
    return said


def plain(said):
    """As text, which tells apart what == does not."""
    return repr(copy.deepcopy(said))
