"""Time a second turn that reuses the keys and values of the first, against one that computes the conversation again.

Claim: tokens and log-probabilities are the same, and the time for the conversation so far is saved.
Command: python -m experiments.bench.turns            (flags: --help)
Prints one JSON object: the seconds of the second turn both ways (medians of `--repeats` warm runs, in turn), their ratio, the
number of tokens that were not computed again, and the largest difference of a log-probability.
Expected: 4.6 s against 9.2 s on two cores, 3064 tokens not computed again, differences of at most 3e-5. Time: about 90 s
    (estimated).
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import jax
import numpy as np
import tyro

from experiments.start import BenchOptions
from jmarl.config import Count, Run, Sampling
from jmarl.models.hub.agents import load_agent
from jmarl.models.sharding import place
from jmarl.randomness import Randomness
from jmarl.sampling.generate import Past, Rows, SampleRequest, pad, sample_team, tokens_of
from jmarl.team import make_team, on_mesh
from jmarl.types import Completions


@dataclasses.dataclass(frozen=True)
class Turns(BenchOptions):
    """Time of a second turn with and without the keys and values of the first."""

    agents: Count = 2
    """Agents of the team."""
    prompt_tokens: Count = 256
    """Tokens of the prompt of the first turn."""
    group: Count = 4
    """Completions of the first turn; the second turn has one completion for each of them (a chain)."""
    max_new_tokens: Count = 128
    new_prompt_tokens: Count = 16
    """Tokens that the prompt of the second turn adds to the conversation."""
    repeats: Count = 3
    """Warm runs."""


def bench(options: Turns) -> dict[str, Any]:
    agent = load_agent(options.model)
    team, params = make_team([agent] * options.agents)
    team = on_mesh(team, Run())
    params = [place(stack, spec.mesh) for stack, spec in zip(params, team.stacks, strict=True)]
    count = options.prompt_tokens + options.new_prompt_tokens
    ids = np.random.default_rng(0).integers(100, agent.config.vocab_size, count).tolist()
    first, new = ids[: options.prompt_tokens], ids[options.prompt_tokens :]
    settings = Sampling(options.max_new_tokens, options.max_new_tokens)  # full length, so that all runs do the same work
    randomness = Randomness(seed=0, step=0)
    encoded, prompt_ids = pad(team, [[first]] * options.agents), np.arange(1, dtype=np.uint32)
    turn = sample_team(team, params, SampleRequest(encoded, settings, randomness, options.group, prompt_ids, keep_cache=True))
    conversations = [[first + completion for completion in prompts[0]] for prompts in tokens_of(team, turn, 1)]  # [N][G]
    all_tokens = [[row + new for row in rows] for rows in conversations]
    new_tokens = [[row[-1:] + new for row in rows] for rows in conversations]  # the last token has no keys and values yet
    past = Past((turn[0].cache,), (np.tile(np.arange(options.group), (options.agents, 1, 1)),))
    nodes = np.arange(options.group, dtype=np.uint32)

    def second_turn(rows: Rows, past: Past | None) -> tuple[Completions, float]:
        start = time.perf_counter()
        request = SampleRequest(pad(team, rows), settings, randomness, 1, nodes, turn=1, past=past)
        completions = sample_team(team, params, request)
        return jax.block_until_ready(completions)[0], time.perf_counter() - start

    (reused, _), (recomputed, _) = second_turn(new_tokens, past), second_turn(all_tokens, None)  # compiles both
    seconds = [[second_turn(new_tokens, past)[1], second_turn(all_tokens, None)[1]] for _ in range(options.repeats)]
    live, anew = np.median(seconds, 0).tolist()
    equal = np.asarray(reused.tokens == recomputed.tokens)
    comparable = np.cumprod(equal, -1).astype(bool)  # up to the first token that differs
    return dataclasses.asdict(options) | {
        "second_turn_live_s": round(live, 3),
        "second_turn_anew_s": round(anew, 3),
        "ratio": round(live / anew, 3),
        "tokens_not_computed_again": sum(len(row) - 1 for rows in conversations for row in rows),
        "rows_with_equal_tokens": float(equal.all(-1).mean()),
        "largest_logprob_difference": float(np.abs(np.asarray(reused.logprobs - recomputed.logprobs))[comparable].max()),
    }


if __name__ == "__main__":
    print(json.dumps(bench(tyro.cli(Turns))))
