"""Peak memory of LoRA teams: one base, however many agents.

Command: python -m experiments.bench_lora
Trains a team of one agent and a team of `--agents` with the same rows an agent, each in a process of its own, and prints one
JSON object: the peak of the resident memory of each process (on a GPU also of the device) after `--updates` updates of
sampling, random rewards and AdamW, the seconds of the last update, and the ratios. Expected on a CPU with SmolLM2: four
agents take at most 1.5 times the memory of one. 3 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time

import jax
import numpy as np
import tyro

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.learning.team_update import update_team
from jmarl.models.hub.agents import load_agent
from jmarl.team import make_team
from jmarl.training.rollouts import play_step, rollout_batches, sampler_of
from jmarl.training.start import start


@dataclasses.dataclass(frozen=True)
class Bench:
    """Two teams; prints one JSON object."""

    model: str = "smollm2-135m-instruct"
    agents: int = 4
    """Agents of the larger team."""
    lora_rank: int = 16
    """Rank of the adapters, on all targets; 0: full weights, to compare with."""
    group: int = 4
    """Completions an agent, of one prompt."""
    max_new_tokens: int = 64
    """Length of all completions, forced."""
    updates: int = 2
    micro_batches: int = 1
    per_agent: str = "map"
    mesh: str = "agent=1"
    """Devices by axis; a mesh of several has a base on each."""
    alone: bool = False
    """Only the team of `agents`, in this process."""


def bench(cfg: Bench) -> dict[str, float]:
    """Peak memory and time of the team of `cfg.agents`."""
    learning = TrainConfig.of(
        algorithm="magrpo",
        lora_rank=cfg.lora_rank,
        num_generations=cfg.group,
        max_new_tokens=cfg.max_new_tokens,
        min_new_tokens=cfg.max_new_tokens,
        micro_batches=cfg.micro_batches,
        per_agent=cfg.per_agent,
        mesh=cfg.mesh,
        learning_rate=1e-4,
        progress=False,
    )
    agent = load_agent(cfg.model)
    team, params = make_team([agent] * cfg.agents, lora=cfg.lora_rank > 0)
    del agent
    setup, state = start(team, params, learning, None)
    del params
    rng = np.random.default_rng(0)
    reward = make_reward(lambda *texts: rng.normal(size=len(texts[0])).tolist(), num_agents=cfg.agents)
    env, seconds = RewardEnvironment(reward, [default_formatter] * cfg.agents, None), 0.0
    for step in range(cfg.updates):
        began = time.perf_counter()
        rollout = play_step(sampler_of(team, state), setup, [{"prompt": "Describe a city in the clouds:"}], env, step)
        state, _ = update_team(setup, state, rollout_batches(setup, state, rollout))
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
    out = {"peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "last_update_s": seconds}
    on_device = jax.devices()[0].memory_stats()
    return out | ({"peak_device_gib": on_device["peak_bytes_in_use"] / 2**30} if on_device else {})


def main() -> None:
    cfg = tyro.cli(Bench)
    if cfg.alone:
        print(json.dumps(bench(cfg)))
        return
    found = []
    for agents in (1, cfg.agents):
        fields = dataclasses.asdict(dataclasses.replace(cfg, agents=agents)) | {"alone": None}
        flags = [part for name, x in fields.items() if x is not None for part in ("--" + name.replace("_", "-"), str(x))]
        command = [sys.executable, "-m", "experiments.bench_lora", *flags, "--alone"]
        done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one, team = found
    ratios = {f"{name}_ratio": team[name] / one[name] for name in one}
    figures = {"one": one, "team": team, **ratios}
    print(json.dumps(dataclasses.asdict(cfg) | figures, default=float))


if __name__ == "__main__":
    main()
