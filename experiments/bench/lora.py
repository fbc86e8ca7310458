"""Measure the peak memory of LoRA teams, which hold one base model for any number of agents.

Claim: on a CPU with SmolLM2, four agents take at most 1.5 times the memory of one.
Command: python -m experiments.bench.lora
Trains a team of one agent and a team of `--agents`, with equally many completions per agent, each in its own process. Prints
one JSON object: the peak of the resident memory of each process (on a GPU also of the device) after `--updates` updates
(sampling, random rewards and AdamW), the seconds of the last update, and the ratios.
Expected: 1.72 GiB for one agent and 2.12 GiB for four, a ratio of 1.23. Time: 3 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import jax
import numpy as np
import tyro

from experiments.report import peak_memory
from experiments.start import TrainingBenchOptions, load_team, train_config
from jmarl.config import Count, CountOrOff
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.learning.team_update import update_team
from jmarl.runs.kinds.rollouts import play_step, rollout_batches, sampler_of
from jmarl.runs.start import start


@dataclasses.dataclass(frozen=True)
class Bench(TrainingBenchOptions):
    """Two teams; prints one JSON object."""

    agents: Count = 4
    """Agents of the larger team."""
    lora_rank: CountOrOff = 16
    """Rank of the adapters, on all targets; 0: train full weights, to compare with."""
    updates: Count = 2
    """Updates to make."""
    mesh: str = "agent=1"
    """Devices by axis, such as agent=2; each holds a copy of the base."""
    alone: bool = False
    """Measure only the team of `agents`, in this process."""


def bench(options: Bench) -> dict[str, float]:
    """Return the peak memory and the time of the team of `options.agents`."""
    length = options.max_new_tokens
    cfg = train_config(options, num_generations=options.group, min_new_tokens=length, learning_rate=1e-4, progress=False)
    team, params = load_team(options.model, options.agents, cfg)
    setup, state = start(team, params, cfg)
    del params  # else the peak would count them twice
    rng, seconds = np.random.default_rng(0), 0.0
    reward = make_reward(lambda *texts: rng.normal(size=len(texts[0])).tolist(), num_agents=options.agents)
    env = RewardEnvironment(reward, [default_formatter] * options.agents, None)
    for step in range(options.updates):
        began = time.perf_counter()
        rollout = play_step(sampler_of(setup, state), setup, [{"prompt": "Describe a city in the clouds:"}], env, step)
        state, _ = update_team(setup, state, rollout_batches(setup, state, rollout))
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
    return peak_memory() | {"last_update_s": seconds}


def bench_in_process(options: Bench) -> dict[str, float]:
    """Return the result of `bench` in a new process, whose peak memory is that of this team alone."""
    values = {name: x for name, x in dataclasses.asdict(options).items() if name != "alone"}
    flags = [part for name, x in values.items() for part in ("--" + name.replace("_", "-"), str(x))]
    command = [sys.executable, "-m", "experiments.bench.lora", *flags, "--alone"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = tyro.cli(Bench)
    if options.alone:
        print(json.dumps(bench(options)))
        return
    one, team = (bench_in_process(dataclasses.replace(options, agents=agents)) for agents in (1, options.agents))
    ratios = {f"{name}_ratio": team[name] / one[name] for name in one}
    print(json.dumps(dataclasses.asdict(options) | {"one": one, "team": team} | ratios))


if __name__ == "__main__":
    main()
