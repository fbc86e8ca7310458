"""Train every online row of the algorithm table on probe environments, and time whole runs made as one program.

Claim: each row learns each probe it is for, on 3 seeds; `agree` and `remember` need joint credit and credit over turns.
Command: python -m experiments.probes                 (flags: --help; --speed: updates a second, one program against the loop)
Prints a table of rows and probes, the lowest of the seeds' mean rewards of the last 10 updates in each place, and with --write
puts it into experiments/README.md. Thresholds: `THRESHOLDS`. The probes: `jmarl/learning/probes.py`. Time: see there.
The model: two layers, width 32, 11 tokens, random weights; two agents (ppo: one), 8 prompts of 8 completions of 2 tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jmarl.algorithms import ALGORITHMS, find_row, resolve
from jmarl.config import TrainConfig
from jmarl.envs.base import Answer
from jmarl.envs.rewards import make_reward
from jmarl.learning import probes
from jmarl.learning.optimizer import init_state
from jmarl.learning.probes import PROBES
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import Agent
from jmarl.randomness import tasks_of
from jmarl.team import make_team
from jmarl.training.train import train

SYMBOLS = ["|", "x", *"abcdefgh", "y", "<stop>"]  # the token ids of `jmarl.learning.probes` as text
MODEL = ModelConfig("llama", probes.VOCAB, 32, 64, 2, 4, 2, 8, 64)
THRESHOLDS = {"emit": 0.9, "copy": 0.8, "agree": 0.9, "remember": 0.9}
UPDATES = {"emit": 60, "copy": 300, "agree": 60, "remember": 100}
RATES = {"emit": 5e-3, "copy": 3e-3, "agree": 5e-3, "remember": 5e-3}  # of agents and critics; copying needs the slower one


ROWS = (
    *(name for name, row in ALGORITHMS.items() if row.data == "rollouts"),
    "madpo_iter",
)  # those that sample while they learn


@dataclasses.dataclass(frozen=True)
class Config:
    """Which rows, probes and seeds."""

    rows: tuple[str, ...] = ROWS
    """Rows of the algorithm table, of those that learn from rollouts."""
    probes: tuple[str, ...] = tuple(THRESHOLDS)
    """Probes: emit, copy, agree, remember."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and training."""
    speed: bool = False
    """Time a run made as one program against the training loop instead."""
    write: bool = False
    """Put the table into experiments/README.md."""


def tokenizer() -> Any:
    """Words of one symbol each, with ids as in `jmarl.learning.probes`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<stop>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<stop>")


class Episode(NamedTuple):
    item: int
    said: tuple[np.ndarray, ...]  # of each turn so far, tokens [N, T]


class ProbeEnvironment:
    """A probe for the training loop, which speaks text: `jmarl.envs.base.Environment`."""

    def __init__(self, name: str, num_agents: int):
        self.probe, self.num_agents = PROBES[name], num_agents

    def reset(self, items, rng):
        del rng
        episodes = [Episode(item["id"], ()) for item in items]
        return episodes, [[f"| {SYMBOLS[item['id']]} |" for item in items]] * self.num_agents

    def step(self, states, actions, rng):
        said = np.array([[[SYMBOLS.index(s) for s in text.split()] for text in texts] for texts in zip(*actions, strict=True)])
        after = [Episode(state.item, (*state.said, tokens)) for state, tokens in zip(states, said, strict=True)]
        last = len(after[0].said) == self.probe.turns
        turns = [jnp.array(turn) for turn in zip(*(state.said for state in after), strict=True)]
        rewards = (
            np.asarray(self.probe.reward(turns, jnp.array([state.item for state in after]))) if last else np.zeros(len(after))
        )
        judge = make_reward(lambda *texts: np.asarray(rewards).tolist(), num_agents=self.num_agents)
        result = judge(actions, [None] * len(after), [{}] * len(after), rng)
        return Answer(result, np.full(len(after), last), after)

    def observe(self, after):
        read = [np.asarray(probes.next_prompt(jnp.asarray(state.said[-1]))) for state in after]
        return after, [[f"| {SYMBOLS[tokens[n]]} |" for tokens in read] for n in range(self.num_agents)]


def settings(row: str, probe: str, seed: int) -> TrainConfig:
    turns = PROBES[probe].turns
    return TrainConfig.of(
        algorithm=row, seed=seed, num_updates=UPDATES[probe], num_prompts=8, num_generations=8, max_new_tokens=2,
        learning_rate=RATES[probe], per_agent="vmap", mesh="agent=1", progress=False, num_turns=turns,
        branching="chain" if turns > 1 else "tree", **CHANGES.get(row, {}),
    )  # fmt: skip


# gspo clips sequence ratios within 0.0004, made for small learning rates; dapo leaves out what did not end, here everything.
# madpo_iter makes new pairs for every update.
CHANGES: dict[str, dict[str, Any]] = {
    "gspo": dict(clip_eps_low=0.2, clip_eps_high=0.2),
    "dapo": dict(mask_overlong=False),
    "madpo_iter": dict(round_updates=1, batch_size=64, pairs_per_prompt=8),
}


def team_of(num_agents: int, seed: int) -> tuple:
    keys = jax.random.split(jax.random.key(seed), num_agents)
    words = tokenizer()
    return make_team([Agent(f"agent-{i}", MODEL, jax.device_get(init_params(MODEL, k)), words) for i, k in enumerate(keys)])


ITEMS = [{"id": i} for i in probes.ITEMS]


def learned(row: str, probe: str, seed: int) -> float:
    """Mean reward of the last 10 updates of a run of the training loop."""
    agents = 1 if row == "ppo" else 2
    team, params = team_of(agents, seed)
    result = train(team, ProbeEnvironment(probe, agents), ITEMS, settings(row, probe, seed), params=params)
    if result.interrupted:  # the table is of whole runs
        raise KeyboardInterrupt
    return float(np.mean(result.rewards[-10:]))


def table(results: dict[str, dict[str, list[float]]], cfg: Config) -> str:
    """Markdown; a place below its threshold is marked."""
    head = ["row", *(f"{p} (≥ {THRESHOLDS[p]}, {UPDATES[p]} updates)" for p in cfg.probes)]
    lines = [head, ["---"] * len(head)]
    for row, of_row in results.items():
        worst = {probe: min(values) if values else None for probe, values in of_row.items()}
        places = ["–" if v is None else f"{v:.2f}" + ("" if v >= THRESHOLDS[p] else " (below)") for p, v in worst.items()]
        lines.append([f"`{row}`", *places])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(text: str) -> None:
    path = Path(__file__).parent / "README.md"
    marks = r"(<!-- probes -->\n).*(<!-- end of probes -->)"
    old = path.read_text()
    if not re.search(marks, old, re.DOTALL):
        raise ValueError(f"{path} has no lines '<!-- probes -->' and '<!-- end of probes -->' to put the table between")
    path.write_text(re.sub(marks, lambda m: m[1] + text + "\n" + m[2], old, flags=re.DOTALL))


def items_of(cfg: TrainConfig, num_updates: int) -> jax.Array:
    """The items [updates, P] that the training loop takes."""
    count, seed = cfg.episodes.num_prompts, cfg.run.seed
    return jnp.array([[ITEMS[i]["id"] for i in tasks_of(step, len(ITEMS), count, seed)] for step in range(num_updates)])


class Timed(ProbeEnvironment):
    """Notes when each update has its first joint actions."""

    def __init__(self, name: str, num_agents: int):
        super().__init__(name, num_agents)
        self.times: list[float] = []

    def step(self, states, actions, rng):
        if not states[0].said:
            self.times.append(time.perf_counter())
        return super().step(states, actions, rng)


def speed(row: str, probe: str, updates: int = 200) -> dict[str, Any]:
    """Updates a second, without compiling: of the training loop (the median from one update's joint actions to the next's), and
    of the same run as one program, the second of two."""
    run, env = settings(row, probe, 0).replace(num_updates=updates), Timed(probe, 2)
    team, params = team_of(2, 0)
    train(team, env, ITEMS, run, params=params)
    loop, seconds = float(np.median(np.diff(env.times))), 0.0
    for _ in range(2):
        state = init_state(team_of(2, 0)[1], resolve(run)).stacks[0]
        start = time.perf_counter()
        _, metrics = probes.run(state, items_of(run, updates), probe=probe, model=MODEL, cfg=run)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start
    whole = updates / seconds
    return {
        "row": row,
        "probe": probe,
        "loop": round(1 / loop, 1),
        "one_program": round(whole, 1),
        "ratio": round(whole * loop, 1),
    }


def main(cfg: Config) -> None:
    if cfg.speed:
        for probe in cfg.probes:
            print(json.dumps(speed("magrpo", probe)))
        return
    results: dict[str, dict[str, list[float]]] = {}
    start = time.monotonic()
    for row in cfg.rows:
        data = find_row(row).data
        for probe in cfg.probes:
            agents = 1 if row == "ppo" else 2
            fits = agents >= PROBES[probe].min_agents and not (data == "pairs" and PROBES[probe].turns > 1)
            seeds = cfg.seeds if fits else ()
            values = [learned(row, probe, seed) for seed in seeds]
            results.setdefault(row, {})[probe] = values
            print(f"{time.monotonic() - start:6.0f} s  {row:12} {probe:9}", " ".join(f"{v:.3f}" for v in values), flush=True)
    text = table(results, cfg)
    print(text)
    if cfg.write:
        write(text)


if __name__ == "__main__":
    main(tyro.cli(Config))
