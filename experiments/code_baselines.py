"""How a team of language models solves programming problems by prompting alone, and after training.

    single agent          one model writes all of it, with the tokens of the whole team
    naive concatenation   all write at once, and their answers are put together
    sequential pipeline   one after the other, each reads what was written before
    one-round discussion  all write, read each other's answers, and write again
    trained team          naive concatenation by the models that a training wrote (--team), and so with any of the others

Command: python -m experiments.code_baselines            (flags: --help)
Prints a table: mean reward (the single agent's is without the helper's share), share of the hidden tests that pass, pass@1 and
pass@k with 95 % intervals over held-out problems, and tokens written for one program. Nothing is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.code_team import CodeConfig, items_of
from jmarl.config import SECTIONS, Run, TrainConfig, check
from jmarl.config.flags import parse_flags
from jmarl.envs.code.generation import CodeGeneration
from jmarl.envs.code.pipeline import CodePipeline
from jmarl.evaluation.evaluate import evaluate, in_last_turn, numbers
from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.models.sharding import mesh_for, place
from jmarl.sandbox import Limits, Sandbox
from jmarl.team import make_team
from jmarl.training.logs.rollout_log import token_counts

COLUMNS = ("way", "reward", "tests passed", "pass@1", "pass@k", "tokens")


@dataclasses.dataclass(frozen=True)
class Baselines(CodeConfig):
    """Ways to use a team without training it, on the same held-out problems."""

    team: str = ""
    """Directory of a trained team's models (agent_0, agent_1, …), such as runs/code_team/models; empty: only baselines."""
    run: Run = dataclasses.replace(CodeConfig.run, output_dir="")

    def __post_init__(self):
        super().__post_init__()
        check("agents", self.agents, self.agents >= 2, "2 or more: a single agent is one of the rows")
        check("held_out", self.held_out, self.held_out >= 1, "1 or more")
        check("reward", self.reward, self.reward == "levels", "levels: the table shows them")
        check("num_turns", self.episodes.num_turns, self.episodes.num_turns == 1, "1: each way has its own")
        check("dataset", self.dataset, self.dataset != "classeval", "one of single functions")


def ways(cfg: Baselines, agent: Agent, sandbox: Sandbox) -> Iterator[tuple[str, list[Agent], CodeGeneration, dict[str, Any]]]:
    """Names, models, environments, and settings that differ."""
    how: dict[str, Any] = dict(limits=Limits(wall_s=cfg.wall_s), sandbox=sandbox)
    team, n = [agent] * cfg.agents, cfg.agents
    yield "single agent", [agent], CodeGeneration(1, **how), dict(max_new_tokens=n * cfg.sampling.max_new_tokens)
    yield "naive concatenation", team, CodeGeneration(n, **how), {}
    yield "sequential pipeline", team, CodePipeline(n, **how), dict(num_turns=n)
    yield "one-round discussion", team, CodeGeneration(n, feedback="plain", **how), dict(num_turns=2)
    if cfg.team:
        trained = [load_agent(str(Path(cfg.team) / f"agent_{i}")) for i in range(n)]
        yield "trained team", trained, CodeGeneration(n, **how), {}


def row_of(name: str, agents: list[Agent], env: CodeGeneration, items: Sequence[dict], cfg: TrainConfig) -> list[str]:
    """A row of the table."""
    team, params = make_team(agents)
    mesh = mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks])
    found = evaluate(team, [place(of_stack, mesh) for of_stack in params], items, env, cfg)
    played, told = found.rollout, numbers(found)
    rewards = in_last_turn(played, [turn.rewards.mean(-1).reshape(-1) for turn in played.turns])
    mean, interval = mean_and_interval(valid_mean(rewards))
    tokens = sum(used(env, t, token_counts(team, turn)) for t, turn in enumerate(played.turns)) / rewards.size
    passes = [f"{told[f'eval/pass@{k}']:.3f} ± {told[f'eval/pass@{k}_ci95']:.3f}" for k in (1, cfg.run.eval_generations)]
    tests = told["eval/reward/level_3"]
    return [name, f"{mean:.2f} ± {interval:.2f}", f"{tests:.3f}", *passes, f"{tokens:.0f}"]


def used(env: CodeGeneration, turn: int, counts: Sequence[np.ndarray]) -> int:
    """Tokens of a turn; those of agents that only wait are not counted."""
    return sum(of_agent.sum() for i, of_agent in enumerate(counts) if i == turn or not isinstance(env, CodePipeline))


def table(rows: Sequence[Sequence[str]], k: int) -> str:
    head = [name.replace("pass@k", f"pass@{k}") for name in COLUMNS]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    cfg = parse_flags(Baselines)
    items, rows = items_of(cfg)[1], []
    with Sandbox(cfg.sandbox) as sandbox:
        for name, agents, env, changes in ways(cfg, load_agent(cfg.model), sandbox):
            settings = TrainConfig(cfg.algorithm, **{section: getattr(cfg, section) for section in SECTIONS})
            settings = settings.replace(branching="chain", **changes)
            rows.append(row_of(name, agents, env, items, settings))
            print(f"{name}: {', '.join(rows[-1][1:])}", flush=True)
    print(f"\n{len(items)} held-out items of {cfg.dataset}, {cfg.run.eval_generations} samples each\n")
    print(table(rows, cfg.run.eval_generations))


if __name__ == "__main__":
    main()
