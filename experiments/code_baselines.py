"""Compare how a team of language models solves programming problems by prompting alone, and after training.

    single agent          one model writes the whole program, with as many tokens as the team has together
    naive concatenation   all agents write at once, and their texts are joined
    sequential pipeline   agents write in turn and read what was written before
    one-round discussion  all agents write, read what the others wrote, and write again
    trained team          naive concatenation with the models of a finished training run (--team)

Claim: the table shows how much training gains over prompting on the same held-out problems. Nothing is trained here.
Command: python -m experiments.code_baselines            (flags: --help)
Prints a table: mean reward (a single agent has no reward for a helper), share of the hidden tests that pass, pass@1 and pass@k
with 95 % intervals over held-out problems, and tokens written per program.
Expected: on 32 held-out problems, rewards of 1.0 to 1.1 by prompting alone and 1.62 ± 0.12 after training; see
    experiments/README.md. Time: not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.code_pipeline import CodePipeline
from experiments.code_team import CodeConfig, load_problems
from experiments.tables import markdown_table
from jmarl.config import SECTIONS, Run, TrainConfig, check
from jmarl.config.flags import parse_flags
from jmarl.envs.code.generation import CodeGeneration
from jmarl.evaluation.evaluate import evaluate, in_last_turn, numbers
from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.logs.rollout_log import token_counts
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.sandbox import Limits, Sandbox
from jmarl.team import make_team


@dataclasses.dataclass(frozen=True)
class Baselines(CodeConfig):
    """Methods that use a team without training it, on the same held-out problems."""

    team: str = ""
    """Directory with the models of a trained team (agent_0, agent_1, …), such as runs/code_team/models; empty: none."""
    run: Run = dataclasses.replace(CodeConfig.run, output_dir="")

    def check_together(self) -> None:
        super().check_together()
        check("agents", self.agents, self.agents >= 2, "2 or more: the table has a row for a single agent")
        check("held_out", self.held_out, self.held_out >= 1, "1 or more")
        check("reward", self.reward, self.reward == "levels", "levels, because the table has a column for one of them")
        check("num_turns", self.episodes.num_turns, self.episodes.num_turns == 1, "left out: each method sets it")
        check("dataset", self.dataset, self.dataset != "classeval", "a data set of single functions")


class Method(NamedTuple):
    """A row of the table."""

    name: str
    agents: list[Agent]
    env: CodeGeneration
    settings: dict[str, Any] = {}  # that differ from those of the command line


def methods(cfg: Baselines, agent: Agent, sandbox: Sandbox) -> Iterator[Method]:
    options: dict[str, Any] = dict(limits=Limits(wall_s=cfg.wall_s), sandbox=sandbox)
    team, n = [agent] * cfg.agents, cfg.agents
    all_tokens = dict(max_new_tokens=n * cfg.sampling.max_new_tokens)
    yield Method("single agent", [agent], CodeGeneration(1, **options), all_tokens)
    yield Method("naive concatenation", team, CodeGeneration(n, **options))
    yield Method("sequential pipeline", team, CodePipeline(n, **options), dict(num_turns=n))
    yield Method("one-round discussion", team, CodeGeneration(n, feedback="plain", **options), dict(num_turns=2))
    if cfg.team:
        trained = [load_agent(str(Path(cfg.team) / f"agent_{i}")) for i in range(n)]
        yield Method("trained team", trained, CodeGeneration(n, **options))


def table_row(method: Method, items: Sequence[dict], cfg: TrainConfig) -> list[str]:
    """Evaluate a method and return its row of the table."""
    team, params = make_team(method.agents)
    evaluation = evaluate(team, params, items, method.env, cfg)
    turns, metrics = evaluation.rollout.turns, numbers(evaluation)
    rewards = in_last_turn(evaluation.rollout, [turn.rewards.mean(-1).reshape(-1) for turn in turns])
    mean, interval = mean_and_interval(valid_mean(rewards))
    tokens = sum(count_tokens(method.env, t, token_counts(team, turn)) for t, turn in enumerate(turns)) / rewards.size
    passes = [f"{metrics[f'eval/pass@{k}']:.3f} ± {metrics[f'eval/pass@{k}_ci95']:.3f}" for k in (1, cfg.run.eval_generations)]
    tests = metrics["eval/reward/level_3"]
    return [method.name, f"{mean:.2f} ± {interval:.2f}", f"{tests:.3f}", *passes, f"{tokens:.0f}"]


def count_tokens(env: CodeGeneration, turn: int, counts: Sequence[np.ndarray]) -> int:
    """Return the tokens written in a turn, without those of agents that are not on turn. counts: of each agent."""
    return sum(tokens.sum() for i, tokens in enumerate(counts) if i == turn or not isinstance(env, CodePipeline))


def main() -> None:
    cfg = parse_flags(Baselines)
    items, rows = load_problems(cfg)[1], []
    k = cfg.run.eval_generations
    with Sandbox(cfg.sandbox) as sandbox:
        for method in methods(cfg, load_agent(cfg.model), sandbox):
            settings = TrainConfig(cfg.algorithm, **{section: getattr(cfg, section) for section in SECTIONS})
            settings = settings.replace(branching="chain", **method.settings)
            rows.append(table_row(method, items, settings))
            print(f"{method.name}: {', '.join(rows[-1][1:])}", flush=True)
    print(f"\n{len(items)} held-out items of {cfg.dataset}, {k} samples each\n")
    print(markdown_table(("way", "reward", "tests passed", "pass@1", f"pass@{k}", "tokens"), rows))


if __name__ == "__main__":
    main()
