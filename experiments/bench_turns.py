"""A second turn that goes on from the keys and values of the first, against one that computes the conversation anew.

Claim: the same tokens and log-probabilities, without the time of the history.
Command: python -m experiments.bench_turns            (flags: --help)
Prints one JSON object: seconds of the second turn both ways (medians of `repeats` warm runs by turns), their ratio, the tokens
of history that were not computed again, and the largest difference of a log-probability.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import jax
import numpy as np
import tyro

from jmarl.config import Sampling, check
from jmarl.models.hub.agents import load_agent
from jmarl.models.sharding import mesh_for, place
from jmarl.randomness import Randomness
from jmarl.sampling.generate import Past, SampleRequest, pad, sample_team, tokens_of
from jmarl.team import make_team


@dataclasses.dataclass(frozen=True)
class Turns:
    """Time of a second turn with and without the first one's keys and values."""

    model: str = "smollm2-135m-instruct"
    """Model of both agents: a name, a directory, a .gguf file or a hub id."""
    agents: int = 2
    prompt_tokens: int = 256
    """Tokens of the first turn's prompt."""
    group: int = 4
    """Completions of the first turn; each goes on with one of its own (a chain)."""
    max_new_tokens: int = 128
    new_prompt_tokens: int = 16
    """Tokens of the second turn's prompt behind the history."""
    repeats: int = 3

    def __post_init__(self):
        for field in dataclasses.fields(self)[1:]:
            check(field.name, getattr(self, field.name), getattr(self, field.name) >= 1, ">= 1")


def bench(cfg: Turns) -> dict[str, Any]:
    agent = load_agent(cfg.model)
    team, params = make_team([agent] * cfg.agents)
    mesh = mesh_for("auto", [cfg.agents])
    params = [place(p, mesh) for p in params]
    ids = np.random.default_rng(0).integers(100, agent.config.vocab_size, cfg.prompt_tokens + cfg.new_prompt_tokens).tolist()
    first, new = ids[: cfg.prompt_tokens], ids[cfg.prompt_tokens :]
    settings = Sampling(cfg.max_new_tokens, cfg.max_new_tokens)  # full length, so that every run does the same work
    randomness = Randomness(seed=0, step=0)
    encoded, one = pad(team, [[first]] * cfg.agents), np.arange(1, dtype=np.uint32)
    done = sample_team(team, params, SampleRequest(encoded, settings, randomness, cfg.group, one, keep_cache=True))
    said = [[first + row for row in rows[0]] for rows in tokens_of(team, done, 1)]
    rows = [[row + new for row in of_agent] for of_agent in said]
    fresh = [[row[-1:] + new for row in of_agent] for of_agent in said]
    past = Past((done[0].cache,), (np.tile(np.arange(cfg.group), (cfg.agents, 1, 1)),))
    nodes = np.arange(cfg.group, dtype=np.uint32)

    def second(rows, past):
        began = time.perf_counter()
        request = SampleRequest(pad(team, rows), settings, randomness, 1, nodes, turn=1, past=past)
        out = sample_team(team, params, request)
        return jax.block_until_ready(out)[0], time.perf_counter() - began

    (kept, _), (anew, _) = second(fresh, past), second(rows, None)  # compiles both
    seconds = np.array([[second(fresh, past)[1], second(rows, None)[1]] for _ in range(cfg.repeats)])
    same = np.asarray(kept.tokens == anew.tokens)
    agree = np.cumprod(same, -1).astype(bool)  # up to a first other token
    live, scratch = np.median(seconds, 0)
    return dataclasses.asdict(cfg) | {
        "second_turn_live_s": round(float(live), 3),
        "second_turn_anew_s": round(float(scratch), 3),
        "ratio": round(float(live / scratch), 3),
        "tokens_not_computed_again": sum(len(row) - 1 for of_agent in said for row in of_agent),
        "rows_with_equal_tokens": float(same.all(-1).mean()),
        "largest_logprob_difference": float(np.abs(np.asarray(kept.logprobs - anew.logprobs))[agree].max()),
    }


if __name__ == "__main__":
    print(json.dumps(bench(tyro.cli(Turns))))
