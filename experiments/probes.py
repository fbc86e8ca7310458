"""Train every row of the algorithm table that samples on probe environments, and time whole runs compiled as one program.

Claim: each row learns each probe that it is meant for, with 3 seeds; `agree` needs joint credit, `remember` credit over turns.
Command: python -m experiments.probes                 (flags: --help; --speed: updates per second, one program against the loop)
Prints a table of rows and probes. A cell has the mean reward of the last 10 updates, of the seed where it is lowest. --write
puts the table into experiments/README.md. Thresholds: `THRESHOLDS`. Probes: `experiments/probe_tasks.py`.
Model: two layers of width 32, 11 tokens, random weights; two agents (ppo: one), 8 prompts with 8 completions of 2 tokens.
Expected: 0.8 to 1.0 in most cells; experiments/README.md has the table and explains those below. Time: 19 minutes on two cores
    that also ran tests.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import probe_tasks
from experiments.probe_tasks import PROBES
from experiments.tables import markdown_table, write_table
from experiments.tiny import random_agents, tokenizer
from jmarl.algorithms import ALGORITHMS, find_row, resolve
from jmarl.config import TrainConfig, check
from jmarl.envs.base import Answer, Texts
from jmarl.envs.rewards import make_reward
from jmarl.learning.optimizer import init_state
from jmarl.models.config import ModelConfig
from jmarl.randomness import tasks_of
from jmarl.runs.train import train
from jmarl.team import Team, make_team

SYMBOLS = ["|", "x", *"abcdefgh", "y", "<stop>"]  # the token ids of `experiments.probe_tasks` as text
MODEL = ModelConfig("llama", probe_tasks.VOCAB, 32, 64, 2, 4, 2, 8, 64)
ITEMS = [{"id": i} for i in probe_tasks.ITEMS]
THRESHOLDS = {"emit": 0.9, "copy": 0.8, "agree": 0.9, "remember": 0.9}
UPDATES = {"emit": 60, "copy": 300, "agree": 60, "remember": 100}
RATES = {"emit": 5e-3, "copy": 3e-3, "agree": 5e-3, "remember": 5e-3}  # of agents and critics; copy needs the lower one
ROWS = (*(name for name, row in ALGORITHMS.items() if row.data == "rollouts"), "madpo_iter")  # rows that sample

# The default of gspo, for small learning rates, clips sequence ratios to 0.0004. That of dapo leaves out completions that
# do not end, which are all of them here. madpo_iter gets new pairs for every update.
CHANGES: dict[str, dict[str, Any]] = {
    "gspo": dict(clip_eps_low=0.2, clip_eps_high=0.2),
    "dapo": dict(mask_overlong=False),
    "madpo_iter": dict(round_updates=1, batch_size=64, pairs_per_prompt=8),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, probes and seeds."""

    rows: tuple[str, ...] = ROWS
    """Rows of the algorithm table: those that learn from rollouts, and madpo_iter."""
    probes: tuple[str, ...] = tuple(THRESHOLDS)
    """Probes: emit, copy, agree, remember."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and training."""
    speed: bool = False
    """Instead of the table, time runs compiled as one program against the training loop."""
    write: bool = False
    """Put the table into experiments/README.md."""

    def __post_init__(self) -> None:
        check("rows", self.rows, set(self.rows) <= set(ROWS), f"some of {', '.join(ROWS)}")
        check("probes", self.probes, set(self.probes) <= THRESHOLDS.keys(), f"some of {', '.join(THRESHOLDS)}")


class Episode(NamedTuple):
    """The state of an episode."""

    item: int
    tokens: tuple[Any, ...]  # [N, T] of each turn so far


class ProbeEnvironment:
    """A probe as text for the training loop: an `Environment` of `jmarl.envs.base`."""

    def __init__(self, name: str, num_agents: int):
        self.probe, self.num_agents = PROBES[name], num_agents

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Episode], list[list[str]]]:
        del rng
        episodes = [Episode(item["id"], ()) for item in items]
        return episodes, [[f"| {SYMBOLS[item['id']]} |" for item in items]] * self.num_agents

    def step(self, states: Sequence[Episode], actions: Texts, rng: np.random.Generator) -> Answer:
        joint_actions = zip(*actions, strict=True)
        tokens = np.array([[[SYMBOLS.index(symbol) for symbol in text.split()] for text in texts] for texts in joint_actions])
        after = [Episode(state.item, (*state.tokens, new)) for state, new in zip(states, tokens, strict=True)]
        last = len(after[0].tokens) == self.probe.turns
        turns = [jnp.array(turn) for turn in zip(*(state.tokens for state in after), strict=True)]
        items = jnp.array([state.item for state in after])
        rewards = np.asarray(self.probe.reward(turns, items)) if last else np.zeros(len(after))
        judge = make_reward(lambda *texts: np.asarray(rewards).tolist(), num_agents=self.num_agents)
        result = judge(actions, [None] * len(after), [{}] * len(after), rng)
        return Answer(result, np.full(len(after), last), after)

    def observe(self, after: Sequence[Episode]) -> tuple[list[Episode], list[list[str]]]:
        read = [np.asarray(probe_tasks.next_prompt(jnp.asarray(state.tokens[-1]))) for state in after]
        return list(after), [[f"| {SYMBOLS[tokens[n]]} |" for tokens in read] for n in range(self.num_agents)]


class TimedEnvironment(ProbeEnvironment):
    """A probe that records the time at which each update has its first joint actions."""

    def __init__(self, name: str, num_agents: int):
        super().__init__(name, num_agents)
        self.times: list[float] = []

    def step(self, states: Sequence[Episode], actions: Texts, rng: np.random.Generator) -> Answer:
        if not states[0].tokens:
            self.times.append(time.perf_counter())
        return super().step(states, actions, rng)


def settings(row: str, probe: str, seed: int) -> TrainConfig:
    """Return the settings of a run."""
    turns = PROBES[probe].turns
    return TrainConfig.of(
        algorithm=row, seed=seed, num_updates=UPDATES[probe], num_prompts=8, num_generations=8, max_new_tokens=2,
        learning_rate=RATES[probe], per_agent="vmap", mesh="agent=1", progress=False, num_turns=turns,
        branching="chain" if turns > 1 else "tree", **CHANGES.get(row, {}),
    )  # fmt: skip


def probe_tokenizer() -> Any:
    """Return the tokenizer with one token per symbol, with the ids of `experiments.probe_tasks`."""
    return tokenizer(tuple(SYMBOLS[:-1]), spaced=True)


def team_of(num_agents: int, seed: int) -> tuple[Team, list[Any]]:
    """Return a team of random weights, and its parameters."""
    return make_team(random_agents("agent", probe_tokenizer(), num_agents, seed, model=MODEL))


def learn(row: str, probe: str, seed: int) -> float:
    """Train a team, and return the mean reward of the last 10 updates."""
    agents = 1 if row == "ppo" else 2
    team, params = team_of(agents, seed)
    result = train(team, ProbeEnvironment(probe, agents), ITEMS, settings(row, probe, seed), params=params)
    if result.interrupted:  # the table must not contain unfinished runs
        raise KeyboardInterrupt
    return float(np.mean(result.rewards[-10:]))


def table(results: dict[str, dict[str, list[float]]], cfg: Config) -> str:
    """Return a table in Markdown; it marks cells below their threshold. results: row -> probe -> value of each seed."""
    lines = []
    for row, values in results.items():
        worst = {probe: min(seeds) if seeds else None for probe, seeds in values.items()}
        cells = ["–" if v is None else f"{v:.2f}" + ("" if v >= THRESHOLDS[p] else " (below)") for p, v in worst.items()]
        lines.append([f"`{row}`", *cells])
    return markdown_table(["row", *(f"{p} (≥ {THRESHOLDS[p]}, {UPDATES[p]} updates)" for p in cfg.probes)], lines)


def items_of(cfg: TrainConfig, num_updates: int) -> jax.Array:
    """Return the items [updates, P] that the training loop uses."""
    count, seed = cfg.episodes.num_prompts, cfg.run.seed
    return jnp.array([[ITEMS[i]["id"] for i in tasks_of(step, len(ITEMS), count, seed)] for step in range(num_updates)])


def speed(row: str, probe: str, updates: int = 200) -> dict[str, Any]:
    """Return updates per second, without compiling, of the training loop and of the same run compiled as one program.

    Loop: the median time between the joint actions of two updates. Program: the second of two runs."""
    cfg, env = settings(row, probe, 0).replace(num_updates=updates), TimedEnvironment(probe, 2)
    team, params = team_of(2, 0)
    train(team, env, ITEMS, cfg, params=params)
    loop, seconds = float(np.median(np.diff(env.times))), 0.0
    for _ in range(2):
        state = init_state(team_of(2, 0)[1], resolve(cfg)).stacks[0]
        start = time.perf_counter()
        _, metrics = probe_tasks.run(state, items_of(cfg, updates), probe=probe, model=MODEL, cfg=cfg)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start
    rates = {"loop": 1 / loop, "one_program": updates / seconds, "ratio": updates / seconds * loop}
    return {"row": row, "probe": probe} | {name: round(value, 1) for name, value in rates.items()}


def main(cfg: Config) -> None:
    if cfg.speed:
        for probe in cfg.probes:
            print(json.dumps(speed("magrpo", probe)))
        return
    results: dict[str, dict[str, list[float]]] = {row: {} for row in cfg.rows}
    start = time.monotonic()
    for row in cfg.rows:
        for probe in cfg.probes:
            agents, pairs = 1 if row == "ppo" else 2, find_row(row).data == "pairs"
            fits = agents >= PROBES[probe].min_agents and not (pairs and PROBES[probe].turns > 1)
            values = [learn(row, probe, seed) for seed in cfg.seeds] if fits else []
            results[row][probe] = values
            print(f"{time.monotonic() - start:6.0f} s  {row:12} {probe:9}", " ".join(f"{v:.3f}" for v in values), flush=True)
    text = table(results, cfg)
    print(text)
    if cfg.write:
        write_table("probes", text)


if __name__ == "__main__":
    main(tyro.cli(Config))
