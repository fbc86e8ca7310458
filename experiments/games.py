"""Small teams learn small games from nothing: guiding a walker together, and Sudoku with a proposer and a checker.

Claim: a team that is trained together does far better than before. Beside it stand a single agent that writes as many tokens,
and agents that were each trained alone and then teamed; where the team does not win, experiments/README.md says so.
Command: python -m experiments.games grid            (or sudoku; flags: --help; --write keeps picture and table here)
Games: `jmarl.envs.games.grid` (two agents with 3 moves each, or one with 6; the walker must stand at its goal at the end)
and `jmarl.envs.games.sudoku` (1 or 2 blanks; one agent in both roles, or a proposer and a checker that were trained alone).
Model: two layers of random weights, a word a token.
Expected and time: see experiments/README.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from experiments.report import with_interval
from experiments.tiny import random_agents, tokenizer
from jmarl.config import TrainConfig, check
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.grid import MOVES, GridPlanning
from jmarl.envs.games.sudoku import NAMES, Sudoku
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.models.hub.agents import Agent
from jmarl.team import agents_of, make_team, policies
from jmarl.training.train import train

HERE = Path(__file__).parent
WAYS = {"team": "a team, trained together", "single": "one agent, as many tokens", "apart": "each trained alone, then teamed"}
BLANKS = (1, 2)


class CheckerAlone(TextEnvironment):
    """Sudoku's checker on squares that chance filled: 1 minus the share of the blanks that it judges wrongly."""

    roles, reward_range = ("checker",), (0.0, 1.0)

    def __init__(self, game: Sudoku):
        self.game = game

    def reset(self, task, rng):
        state, _ = self.game.reset(task, rng)
        drawn = [str(digit if rng.random() < 0.5 else rng.integers(1, 5)) for digit in str(self.game.solve(state)[0]).split()]
        step = self.game.step(state, [" ".join(drawn), ""], rng)
        return step.state, [step.observations[1]]

    def step(self, state, messages, rng):
        after = self.game.step(state, ["", messages[0]], rng).state
        fair = [(i in after.open_blanks) != right for i, right in enumerate(after.right)]
        return Step(after, [""], sum(fair) / len(fair), True)


class Game(NamedTuple):
    """A game for two agents, for one in their place, and for each of them alone."""

    together: TextEnvironment
    single: TextEnvironment
    alone: tuple[TextEnvironment, TextEnvironment]
    words: tuple[str, ...]  # of the tokenizer
    tokens: tuple[int, int]  # a message of an agent of the two may have, and one of the single agent
    updates: int
    batch: tuple[int, int]  # prompts of an update, and completions of each
    learning: dict[str, Any]  # settings that are the game's own, for all ways


def grid() -> Game:
    how: dict[str, Any] = dict(brief=True, stop=False)
    alone = GridPlanning(1, moves=3, **how)
    words = ("walker", "goal", "wall", *MOVES, "1", "2", "3", "4")
    learning: dict[str, Any] = dict(entropy_coef=0.05, joint_mode="cross")
    both, single = GridPlanning(2, moves=3, **how), GridPlanning(1, moves=6, **how)
    return Game(both, single, (alone, alone), words, (3, 6), 500, (32, 8), learning)


def sudoku() -> Game:
    how: dict[str, Any] = dict(blanks=BLANKS, brief=True)
    both = Sudoku(**how)
    words = ("1", "2", "3", "4", *NAMES[: BLANKS[1]], "fill", "check", "ok")
    alone = Sudoku(**how, single=True, max_turns=1), CheckerAlone(both)
    single, learning = Sudoku(**how, single=True), dict(entropy_coef=0.01)
    return Game(both, single, alone, words, (BLANKS[1], BLANKS[1]), 450, (64, 4), learning)


GAMES = {"grid": grid, "sudoku": sudoku}


@dataclasses.dataclass(frozen=True)
class GamesConfig:
    """Which game, and how long it is learned."""

    game: Annotated[str, tyro.conf.Positional]
    """grid or sudoku."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and training."""
    ways: tuple[str, ...] = tuple(WAYS)
    """team, single, apart."""
    num_updates: int = 0
    """Updates of every run, as many for an agent that is trained alone; 0: 500 of grid, 450 of sudoku."""
    learning_rate: float | tuple[float, ...] = 2e-3
    """Of all agents, after a short warm-up; it falls linearly to 0."""
    width: int = 64
    """Of the models."""
    processes: int = 1
    """Runs beside each other."""
    write: bool = False
    """Write experiments/games_GAME.png, and the table into experiments/README.md."""

    def __post_init__(self):
        check("game", self.game, self.game in GAMES, " or ".join(GAMES))
        check("ways", self.ways, 0 < len(set(self.ways) & set(WAYS)) == len(self.ways), f"some of {', '.join(WAYS)}")
        check("processes", self.processes, self.processes >= 1, ">= 1")
        check("seeds", self.seeds, len(self.seeds) > 0, "at least one number")


def settings(cfg: GamesConfig, game: Game, env: TextEnvironment, tokens: int, seed: int) -> TrainConfig:
    turns = dict(num_turns=env.max_turns, branching="chain" if env.max_turns > 1 else "tree")
    updates = cfg.num_updates or game.updates
    return TrainConfig.of(
        algorithm="grpo", seed=seed, num_updates=updates, learning_rate=cfg.learning_rate, lr_schedule="linear",
        warmup_updates=updates // 25, num_prompts=game.batch[0], num_generations=game.batch[1], max_new_tokens=tokens,
        eval_generations=1, per_agent="vmap", mesh="agent=1", **turns, **game.learning,  # type: ignore[arg-type]
    )  # fmt: skip


class Outcome(NamedTuple):
    """Of one way and seed."""

    curve: np.ndarray  # mean reward of each update; empty where nothing was trained together
    before: float  # held-out return
    after: float
    solved: float  # share of held-out tasks
    seconds: float


def learned(cfg: GamesConfig, game: Game, way: str, seed: int) -> Outcome:
    """Train one way from one seed, and play held-out tasks."""
    began = time.monotonic()
    tasks, held_out = game.together.tasks("train", 5000), game.together.tasks("eval", 500)
    env = game.single if way == "single" else game.together
    how = settings(cfg, game, env, game.tokens[way == "single"], seed)
    agents = random_agents(cfg.game, tokenizer(game.words, spaced=True), env.num_agents, seed, cfg.width)
    if way == "apart":
        before = played(agents, env, held_out, how)
        agents = [trained_alone(cfg, game, tasks, agent, i, seed) for i, agent in enumerate(agents)]
        after = played(agents, env, held_out, how)
        return Outcome(
            np.zeros(0), before["eval/reward"], after["eval/reward"], after["eval/reward/solved"], time.monotonic() - began
        )
    team, params = make_team(agents)
    result = train(team, env, tasks, how, params=params, eval_items=held_out)
    if result.interrupted:  # the table is of whole runs
        raise KeyboardInterrupt
    assert result.before and result.after
    solved = numbers(result.after)["eval/reward/solved"]
    return Outcome(np.array(result.rewards), result.before.mean, result.after.mean, solved, time.monotonic() - began)


def trained_alone(cfg: GamesConfig, game: Game, tasks: list[dict], agent: Agent, number: int, seed: int) -> Agent:
    """An agent after it learned its part without a partner."""
    team, params = make_team([agent])
    how = settings(cfg, game, game.alone[number], game.tokens[0], seed + 1000 * number)
    result = train(team, game.alone[number], tasks, how, params=params)
    if result.interrupted:
        raise KeyboardInterrupt
    return agents_of(team, policies(result.state))[0]


def played(agents: list[Agent], env: TextEnvironment, items: list[dict], how: TrainConfig) -> dict[str, float]:
    team, params = make_team(agents)
    return numbers(evaluate(team, params, items, LockStep(env), how))


def table(found: dict[str, list[Outcome]]) -> str:
    """Markdown: means over seeds with 95 % intervals."""

    def told(values: list[float]) -> str:
        mean, interval = mean_and_interval(np.array(values))
        return with_interval(float(mean), float(interval))

    lines = ["| way | held-out return before | after | solved | time of a run |", "|---|---|---|---|---|"]
    for way, of in found.items():
        columns = ([o.before for o in of], [o.after for o in of], [o.solved for o in of])
        lines.append(f"| {WAYS[way]} | {' | '.join(map(told, columns))} | {np.mean([o.seconds for o in of]):.0f} s |")
    return "\n".join(lines)


def draw(found: dict[str, list[Outcome]], path: Path) -> None:
    """Curves of all seeds, and held-out returns at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.8), constrained_layout=True)
    for i, (way, of) in enumerate(found.items()):
        after = [o.after for o in of]
        if not of[0].curve.size:
            axes.axhline(float(np.mean(after)), color=f"C{i}", linestyle="--", label=f"{WAYS[way]} (held-out)")
            continue
        window = max(1, len(of[0].curve) // 50)
        curves = np.stack([np.convolve(o.curve, np.ones(window) / window, "valid") for o in of])
        updates = np.arange(window, len(of[0].curve) + 1)
        axes.plot(updates, curves.T, color=f"C{i}", alpha=0.3, linewidth=0.8)
        axes.plot(updates, curves.mean(0), color=f"C{i}", label=WAYS[way])
        axes.plot([updates[-1]] * len(after), after, "o", color=f"C{i}", markersize=5)
    axes.set(xlabel="updates", ylabel="return", ylim=(0, 1))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def write(cfg: GamesConfig, text: str) -> None:
    """Put a table between its marks in experiments/README.md."""
    path = HERE / "README.md"
    marks = rf"(<!-- {cfg.game} -->\n).*(<!-- end of {cfg.game} -->)"
    old = path.read_text()
    if not re.search(marks, old, re.DOTALL):
        raise ValueError(f"{path} has no lines '<!-- {cfg.game} -->' and '<!-- end of {cfg.game} -->' to put the table between")
    path.write_text(re.sub(marks, lambda m: m[1] + text + "\n" + m[2], old, flags=re.DOTALL))


def run(cfg: GamesConfig) -> dict[str, list[Outcome]]:
    pairs = list(itertools.product(cfg.ways, cfg.seeds))
    if cfg.processes == 1:
        made = [told_of(cfg, *pair) for pair in pairs]
    else:
        with ProcessPoolExecutor(cfg.processes, multiprocessing.get_context("spawn")) as pool:
            made = list(pool.map(told_of, [cfg] * len(pairs), *zip(*pairs, strict=True)))
    found: dict[str, list[Outcome]] = {way: [] for way in cfg.ways}
    for (way, _), outcome in zip(pairs, made, strict=True):
        found[way].append(outcome)
    return found


def told_of(cfg: GamesConfig, way: str, seed: int) -> Outcome:
    """`learned`, and a line of it."""
    found = learned(cfg, GAMES[cfg.game](), way, seed)
    print(f"{way}, seed {seed}: {found.before:.3f} -> {found.after:.3f} in {found.seconds:.0f} s", flush=True)
    return found


def main() -> None:
    cfg = tyro.cli(GamesConfig)
    found = run(cfg)
    text = table(found)
    print(text)
    if cfg.write:
        draw(found, HERE / f"games_{cfg.game}.png")
        write(cfg, text)


if __name__ == "__main__":
    main()
