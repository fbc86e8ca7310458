"""Small teams learn small games from scratch: guiding a walker together, and Sudoku with a proposer and a checker.

Claim: a team that is trained together does far better than before training. The table compares it with a single agent that
    writes as many tokens, and with agents that were each trained alone and then put together. experiments/README.md says where
    the team does not win.
Command: python -m experiments.games grid            (or sudoku; flags: --help; --write updates the picture and table in this
    directory)
Games: `jmarl.envs.games.grid` (two agents with 3 moves each, or one with 6; the walker must be at its goal at the end) and
    `jmarl.envs.games.sudoku` (1 or 2 blanks; one agent in both roles, or a proposer and a checker that were trained alone).
Model: two layers of random weights, one token per word.
Expected: held-out return on grid 0.09 -> 0.66 (team), 0.35 (single agent), 0.46 (trained alone), in 30 to 83 s per run; on
    sudoku 0.10 -> 0.91 to 0.96, in 1 to 5 minutes per run; see experiments/README.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from experiments.report import with_interval
from experiments.tables import markdown_row, pyplot, write_table
from experiments.tiny import random_agents, tokenizer
from jmarl.config import Count, CountOrOff, TrainConfig, check, check_fields
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.grid import MOVES, GridPlanning
from jmarl.envs.games.sudoku import NAMES, Sudoku, SudokuState
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.models.hub.agents import Agent
from jmarl.runs.records import TrainResult
from jmarl.runs.train import train
from jmarl.team import make_team

METHODS = {
    "team": "a team, trained together", "single": "one agent, as many tokens", "apart": "each trained alone, then teamed",
}  # fmt: skip
BLANKS = (1, 2)


class CheckerAlone(TextEnvironment):
    """Let Sudoku's checker judge random answers. Reward: 1 minus the share of the blanks that it judges wrongly."""

    roles, reward_range = ("checker",), (0.0, 1.0)

    def __init__(self, game: Sudoku):
        self.game = game

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[SudokuState, list[str | None]]:
        state, _ = self.game.reset(task, rng)
        solution = str(self.game.solve(state)[0]).split()
        digits = [str(digit if rng.random() < 0.5 else rng.integers(1, 5)) for digit in solution]
        step = self.game.step(state, [" ".join(digits), ""], rng)
        return step.state, [step.observations[1]]

    def step(self, state: SudokuState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        after = self.game.step(state, ["", messages[0]], rng).state
        verdicts = [(i in after.open_blanks) != right for i, right in enumerate(after.right)]
        return Step(after, [""], sum(verdicts) / len(verdicts), True)


class Game(NamedTuple):
    """A game for two agents, for a single agent in their place, and for each of the two alone."""

    together: TextEnvironment
    single: TextEnvironment
    alone: tuple[TextEnvironment, TextEnvironment]
    words: tuple[str, ...]  # of the tokenizer
    tokens: tuple[int, int]  # longest message of an agent of the two, and of the single agent
    updates: int
    batch: tuple[int, int]  # prompts per update, completions per prompt
    learning: dict[str, Any]  # settings of this game


def grid() -> Game:
    options: dict[str, Any] = dict(brief=True, stop=False)
    alone = GridPlanning(1, moves=3, **options)
    words = ("walker", "goal", "wall", *MOVES, "1", "2", "3", "4")
    learning: dict[str, Any] = dict(entropy_coef=0.05, joint_mode="cross")
    both, single = GridPlanning(2, moves=3, **options), GridPlanning(1, moves=6, **options)
    return Game(both, single, (alone, alone), words, (3, 6), 500, (32, 8), learning)


def sudoku() -> Game:
    options: dict[str, Any] = dict(blanks=BLANKS, brief=True)
    both, single = Sudoku(**options), Sudoku(**options, single=True)
    alone = Sudoku(**options, single=True, max_turns=1), CheckerAlone(both)
    words = ("1", "2", "3", "4", *NAMES[: BLANKS[1]], "fill", "check", "ok")
    return Game(both, single, alone, words, (BLANKS[1], BLANKS[1]), 450, (64, 4), dict(entropy_coef=0.01))


GAMES = {"grid": grid, "sudoku": sudoku}


@dataclasses.dataclass(frozen=True)
class GamesConfig:
    """A game, and how long the agents learn it."""

    game: Annotated[Literal["grid", "sudoku"], tyro.conf.Positional]
    """The game."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and training."""
    ways: tuple[Literal["team", "single", "apart"], ...] = ("team", "single", "apart")
    """Rows of the table: a team trained together, a single agent, agents trained alone and then put together."""
    num_updates: CountOrOff = 0
    """Updates of each run, also for an agent that is trained alone; 0: 500 for grid, 450 for sudoku."""
    learning_rate: float | tuple[float, ...] = 2e-3
    """Learning rate of all agents (or one per agent) after a short warm-up; it falls linearly to 0."""
    width: int = 64
    """Width of the models."""
    processes: Count = 1
    """Runs to train at the same time, each in its own process."""
    write: bool = False
    """Write experiments/games_GAME.png, and the table into experiments/README.md."""

    def __post_init__(self) -> None:
        check_fields(self)
        check("ways", self.ways, len(set(self.ways)) == len(self.ways) > 0, f"some of {', '.join(METHODS)}, each once")
        check("seeds", self.seeds, len(self.seeds) > 0, "at least one number")


def settings(cfg: GamesConfig, game: Game, env: TextEnvironment, tokens: int, seed: int) -> TrainConfig:
    """Return the settings of a run. tokens: longest message."""
    turns = dict(num_turns=env.max_turns, branching="chain" if env.max_turns > 1 else "tree")
    updates = cfg.num_updates or game.updates
    return TrainConfig.of(
        algorithm="grpo", seed=seed, num_updates=updates, learning_rate=cfg.learning_rate, lr_schedule="linear",
        warmup_updates=updates // 25, num_prompts=game.batch[0], num_generations=game.batch[1], max_new_tokens=tokens,
        eval_generations=1, per_agent="vmap", mesh="agent=1", **turns, **game.learning,
    )  # fmt: skip


class Outcome(NamedTuple):
    """The result of one method and seed."""

    curve: np.ndarray  # mean reward of each update; empty if the agents were not trained together
    before: float  # mean return on held-out tasks
    after: float
    solved: float  # share of held-out tasks
    seconds: float


def run_method(cfg: GamesConfig, method: str, seed: int) -> Outcome:
    """Train one method from one seed, evaluate it on held-out tasks, and print a line."""
    start, game = time.monotonic(), GAMES[cfg.game]()
    tasks, held_out = game.together.tasks("train", 5000), game.together.tasks("eval", 500)
    env = game.single if method == "single" else game.together
    run_cfg = settings(cfg, game, env, game.tokens[method == "single"], seed)
    agents = random_agents(cfg.game, tokenizer(game.words, spaced=True), env.num_agents, seed, cfg.width)
    if method == "apart":
        curve, before = np.zeros(0), evaluate_agents(agents, env, held_out, run_cfg)
        agents = [train_alone(cfg, game, tasks, agent, i, seed) for i, agent in enumerate(agents)]
        after = evaluate_agents(agents, env, held_out, run_cfg)
    else:
        result = train_agents(agents, env, tasks, run_cfg, held_out)
        assert result.before and result.after
        curve, before, after = np.array(result.rewards), numbers(result.before), numbers(result.after)
    seconds = time.monotonic() - start
    outcome = Outcome(curve, before["eval/reward"], after["eval/reward"], after["eval/measures/solved"], seconds)
    print(f"{method}, seed {seed}: {outcome.before:.3f} -> {outcome.after:.3f} in {seconds:.0f} s", flush=True)
    return outcome


def train_agents(
    agents: list[Agent], env: TextEnvironment, tasks: list[dict], cfg: TrainConfig, held_out: list[dict]
) -> TrainResult:
    team, params = make_team(agents)
    result = train(team, env, tasks, cfg, params=params, eval_items=held_out)
    if result.interrupted:  # the table must not contain unfinished runs
        raise KeyboardInterrupt
    return result


def train_alone(cfg: GamesConfig, game: Game, tasks: list[dict], agent: Agent, number: int, seed: int) -> Agent:
    """Return an agent that has learned its part without a partner."""
    env = game.alone[number]
    run_cfg = settings(cfg, game, env, game.tokens[0], seed + 1000 * number)
    return train_agents([agent], env, tasks, run_cfg, []).agents[0]


def evaluate_agents(agents: list[Agent], env: TextEnvironment, items: list[dict], cfg: TrainConfig) -> dict[str, float]:
    return numbers(evaluate(*make_team(agents), items, LockStep(env), cfg))


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Return a table in Markdown: means over seeds with 95 % intervals."""
    lines = ["| way | held-out return before | after | solved | time of a run |", "|---|---|---|---|---|"]
    for method, runs in outcomes.items():
        cells = [METHODS[method]]
        for values in ([x.before for x in runs], [x.after for x in runs], [x.solved for x in runs]):
            mean, interval = mean_and_interval(np.array(values))
            cells.append(with_interval(float(mean), float(interval)))
        lines.append(markdown_row([*cells, f"{np.mean([x.seconds for x in runs]):.0f} s"]))
    return "\n".join(lines)


def draw(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    """Draw the learning curves of all seeds, and the held-out returns at their ends."""
    figure, axes = pyplot().subplots(figsize=(7, 3.8), constrained_layout=True)
    for i, (method, runs) in enumerate(outcomes.items()):
        after = [x.after for x in runs]
        if not runs[0].curve.size:
            axes.axhline(float(np.mean(after)), color=f"C{i}", linestyle="--", label=f"{METHODS[method]} (held-out)")
            continue
        window = max(1, len(runs[0].curve) // 50)
        curves = np.stack([np.convolve(x.curve, np.ones(window) / window, "valid") for x in runs])
        updates = np.arange(window, len(runs[0].curve) + 1)
        axes.plot(updates, curves.T, color=f"C{i}", alpha=0.3, linewidth=0.8)
        axes.plot(updates, curves.mean(0), color=f"C{i}", label=METHODS[method])
        axes.plot([updates[-1]] * len(after), after, "o", color=f"C{i}", markersize=5)
    axes.set(xlabel="updates", ylabel="return", ylim=(0, 1))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def run(cfg: GamesConfig) -> dict[str, list[Outcome]]:
    """Return the outcomes of each method, one per seed."""
    pairs = list(itertools.product(cfg.ways, cfg.seeds))
    if cfg.processes == 1:
        results = [run_method(cfg, *pair) for pair in pairs]
    else:
        with ProcessPoolExecutor(cfg.processes, multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(run_method, [cfg] * len(pairs), *zip(*pairs, strict=True)))
    outcomes: dict[str, list[Outcome]] = {method: [] for method in cfg.ways}
    for (method, _), outcome in zip(pairs, results, strict=True):
        outcomes[method].append(outcome)
    return outcomes


def main() -> None:
    cfg = tyro.cli(GamesConfig)
    outcomes = run(cfg)
    text = table(outcomes)
    print(text)
    if cfg.write:
        draw(outcomes, Path(__file__).parent / f"games_{cfg.game}.png")
        write_table(cfg.game, text)


if __name__ == "__main__":
    main()
