"""Self-play alone against a league of past selves, on two small games with exact values.

Claim: an agent that only meets itself forgets how to play others; against its past it forgets less. So far neither shown nor
    refuted. All ways train a team of two on as many tokens: a league plays half of its games against earlier weights, from
    which it learns nothing, so it makes a third more updates.
Command: python -m experiments.league                 (flags: --help; --quick: a few updates of one seed, 2 minutes; --write
    updates the picture and table in this directory, and leaves the numbers of games that were not played)
Games: Kuhn poker (`jmarl.envs.games.kuhn`), measured by NashConv, and tic-tac-toe (`tictactoe`), measured by the games that
    the team loses against perfect play, and by NashConv. Both are computed exactly, from the probability of each answer on
    all boards or cards. A curve has the tokens that its team had learned from at each measure.
Model: two layers of random weights, one token per word.
Expected: see experiments/README.md. Time: 30 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from experiments.report import with_interval
from experiments.tables import markdown_row, pyplot, write_table
from experiments.tiny import random_agents, tokenizer
from jmarl.cli.teams.sources import nested
from jmarl.config import Count, CountOrOff, TrainConfig, check, check_fields
from jmarl.envs.base import TextEnvironment
from jmarl.envs.games import kuhn, tictactoe
from jmarl.envs.games.kuhn import KuhnPoker
from jmarl.envs.games.tictactoe import TicTacToe
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.files.checkpoint import Checkpointer, saved_steps
from jmarl.league.scored import policy_of
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.preferences.pairs import Trajectory
from jmarl.runs.train import fit, train
from jmarl.team import Team, agents_of, make_team, policies, save_team

WAYS: dict[str, dict[str, Any]] = {
    "self-play": {},
    "league": dict(snapshots=8, snapshot_every=10, opponents="uniform", opponent_share=0.5),
    "league, PFSP": dict(snapshots=8, snapshot_every=10, opponents="winrate", opponent_share=0.5),
}


class StudiedGame(NamedTuple):
    """A game of two agents with rewards of their own."""

    env: TextEnvironment
    words: tuple[str, ...]  # of the tokenizer
    legal: list[tuple[str, str]]  # all prompts with each legal answer
    imitation: int  # updates of imitation of legal answers
    measure: Callable[[Sequence[Agent], TrainConfig], dict[str, float]]  # exact numbers of a team
    columns: dict[str, str]  # measure -> what the picture calls it; the first is the one that is compared
    updates: int
    settings: dict[str, Any]  # of training, chosen by pilots on seed 100


def measure_kuhn(agents: Sequence[Agent], cfg: TrainConfig) -> dict[str, float]:
    """Return NashConv, and how probable an illegal answer is where none folds anyway, the mean over cards."""
    sets = kuhn.information_sets(brief=True)
    policy, illegal = {}, []
    for player, agent in enumerate(agents):
        prompts = [prompt for prompt, own in sets.items() if own.player == player]
        odds = policy_of(agent, prompts, ("check", "bet", "fold", "call"), cfg.sampling)
        for prompt in prompts:
            policy[prompt] = {answer: odds[prompt][answer] for answer in sets[prompt].answers}
            illegal += [1 - sum(policy[prompt].values())] * ("fold" not in sets[prompt].answers)
    return {"nash_conv": kuhn.nash_conv(policy), "illegal": float(np.mean(illegal))}


def measure_tictactoe(agents: Sequence[Agent], cfg: TrainConfig) -> dict[str, float]:
    """Return the share of games lost against perfect play, NashConv, and the result against random play, the mean of both."""
    policies = []
    for mark, agent in zip("xo", agents, strict=True):
        boards = [board for board in tictactoe.boards() if tictactoe.to_move(board) == mark]
        prompts = [tictactoe.format_prompt(board, brief=True) for board in boards]
        odds = policy_of(agent, prompts, list("123456789"), cfg.sampling)
        rows = ((board, odds[prompt]) for board, prompt in zip(boards, prompts, strict=True))
        policies.append({board: {move: own[str(move)] for move in tictactoe.legal_moves(board)} for board, own in rows})

    def mean(opponent: str) -> float:
        return float(np.mean([tictactoe.value_against(*pair, opponent) for pair in zip(policies, "xo", strict=True)]))

    return {"lost": -mean("minimax"), "nash_conv": tictactoe.nash_conv(*policies), "random": mean("random")}


def kuhn_game() -> StudiedGame:
    legal = [(prompt, answer) for prompt, own in kuhn.information_sets(brief=True).items() for answer in own.answers]
    settings: dict[str, Any] = dict(num_prompts=6, num_generations=16, learning_rate=3e-4, entropy_coef=0.1)
    words = (*kuhn.CARDS, "check", "bet", "fold", "call")
    return StudiedGame(KuhnPoker(brief=True), words, legal, 100, measure_kuhn, {"nash_conv": "NashConv, chips"}, 400, settings)


def tictactoe_game() -> StudiedGame:
    legal = [
        (tictactoe.format_prompt(board, brief=True), str(move))
        for board in tictactoe.boards()
        for move in tictactoe.legal_moves(board)
    ]
    columns = {"lost": "games lost against perfect play", "nash_conv": "NashConv"}
    settings: dict[str, Any] = dict(num_prompts=8, num_generations=8, learning_rate=1e-3, entropy_coef=0.05)
    words = ("x", "o", ".", "move", *"123456789")
    return StudiedGame(TicTacToe(brief=True), words, legal, 1500, measure_tictactoe, columns, 150, settings)


GAMES = {"kuhn": kuhn_game, "tictactoe": tictactoe_game}


@dataclasses.dataclass(frozen=True)
class LeagueConfig:
    """The games and ways, and how long the agents learn."""

    games: tuple[Literal["kuhn", "tictactoe"], ...] = ("kuhn", "tictactoe")
    """The games."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Self-play alone, and leagues."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of what is sampled; all runs begin with the same agent."""
    num_updates: CountOrOff = 0
    """Updates of self-play; 0: 400 of Kuhn poker, 150 of tic-tac-toe. Leagues make as many more as they need to learn from as
    many tokens."""
    algorithm: str = "rae"
    """Row of the table of algorithms."""
    measure_every: Count = 20
    """Updates between two measures."""
    processes: Count = 2
    """Runs at the same time, each in its own process."""
    output_dir: Path = Path("runs/league")
    """Directory of the runs; finished ones are measured again, not trained again."""
    quick: bool = False
    """20 updates of one seed."""
    write: bool = False
    """Write experiments/league.png, and the table into experiments/README.md."""

    def __post_init__(self) -> None:
        check_fields(self)
        check("ways", self.ways, set(self.ways) <= set(WAYS), f"some of {', '.join(WAYS)}")


def legal_agent(cfg: LeagueConfig, game: str) -> Path:
    """Return the directory of an agent that answers with any legal answer, as a language model that knows the rules."""
    directory, own = cfg.output_dir / f"{game}-legal", GAMES[game]()
    if not directory.exists():
        (agent,) = random_agents(game, tokenizer(own.words, spaced=True), 1, 0)
        updates = min(40, own.imitation) if cfg.quick else own.imitation
        sft = TrainConfig.of(
            algorithm="sft", num_updates=updates, batch_size=256, learning_rate=3e-3, lr_schedule="linear", warmup_updates=20,
            progress=False, mesh="agent=1",
        )  # fmt: skip
        pairs = own.legal * -(-256 // len(own.legal))
        result = fit(Team.of([agent]), [Trajectory((prompt,), (answer,)) for prompt, answer in pairs], sft)
        save_team(directory, result.team, policies(result.state))
    return directory / "agent_0"


def updates_of(cfg: LeagueConfig, game: str, way: str) -> int:
    """Return the updates of a run in which it learns from about as many tokens as self-play."""
    share = WAYS[way].get("opponent_share", 0) / 2  # of the seats: one of two
    return 20 if cfg.quick else round((cfg.num_updates or GAMES[game]().updates) / (1 - share))


def tokens_by_update(directory: Path) -> np.ndarray:
    """Return how many tokens the team of a run had learned from after each update."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return np.cumsum([row["tokens"] for row in map(json.loads, lines) if "tokens" in row])


def run_one(cfg: LeagueConfig, game: str, seed: int, way: str) -> dict[str, Any]:
    """Train a team, measure all of its checkpoints, and return a curve of each measure."""
    start, own = time.monotonic(), GAMES[game]()
    directory = cfg.output_dir / f"{game}-{way.replace(', ', '-')}-{seed}"
    run_cfg = TrainConfig.of(
        algorithm=cfg.algorithm, seed=seed, num_updates=updates_of(cfg, game, way), warmup_updates=20,
        max_new_tokens=1, num_turns=own.env.max_turns, branching="chain", per_agent="vmap", mesh="agent=1",
        save_every=cfg.measure_every, save_total_limit=1000, output_dir=str(directory), resume="auto", progress=False,
        league=WAYS[way], **own.settings,
    )  # fmt: skip
    agents = [load_agent(legal_agent(cfg, game))] * 2
    team, params = make_team(agents)
    count = run_cfg.episodes.num_prompts
    tasks = own.env.tasks(count=count)
    result = train(team, own.env, tasks * (count // len(tasks)), run_cfg, params=params)
    if result.interrupted:  # the table must not contain unfinished runs
        raise KeyboardInterrupt
    curve, tokens = [{"update": 0, "tokens": 0, **own.measure(agents, run_cfg)}], tokens_by_update(directory)
    for step in saved_steps(directory / "checkpoints"):
        with Checkpointer(directory / "checkpoints", read_only=True) as saved:
            arrays = saved.read_arrays(step)[0]
        measures = own.measure(agents_of(team, [nested(arrays, "stacks/0/params/")]), run_cfg)
        curve.append({"update": step, "tokens": int(tokens[step - 1]), **measures})
    last = {name: x for name, x in curve[-1].items() if name != "update"}
    print(f"{game}, {way}, seed {seed}: " + ", ".join(f"{name} {x:.3f}" for name, x in last.items()), end="", flush=True)
    print(f" in {time.monotonic() - start:.0f} s", flush=True)
    return {"game": game, "way": way, "seed": seed, "curve": curve}


def with_stored(runs: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Return runs, and those in a file whose games are not among them, in the order of `GAMES`."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    games = {run["game"] for run in runs}
    return sorted([run for run in stored if run["game"] not in games] + [*runs], key=lambda run: [*GAMES].index(run["game"]))


def curves(runs: Sequence[dict[str, Any]], game: str, way: str, column: str) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Return what is counted along the curves, tokens if they have them, the mean of it over seeds [T], and the mean [T] and
    half of the 95 % interval [T] of a measure over seeds."""
    own = [run["curve"] for run in runs if run["game"] == game and run["way"] == way]
    counted = "tokens" if "tokens" in own[0][0] else "updates"
    values = np.array([[point[column] for point in curve] for curve in own])  # [seed, T]
    points = [mean_and_interval(column) for column in values.T]
    along = np.mean([[point["tokens" if counted == "tokens" else "update"] for point in curve] for curve in own], 0)
    return counted, along, *np.array(points).T


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table in Markdown: the mean over the second half of the updates, and the last one."""
    lines = ["| game | measure | way | second half | end | worst of the second half |", "|---|---|---|---|---|---|"]
    for game, way in dict.fromkeys((run["game"], run["way"]) for run in runs):
        for column, name in GAMES[game]().columns.items():
            own = [[point[column] for point in run["curve"]] for run in runs if (run["game"], run["way"]) == (game, way)]
            half = [curve[len(curve) // 2 :] for curve in own]
            numbers = [np.mean(half, 1), np.array(own)[:, -1], np.max(half, 1)]
            cells = [with_interval(*map(float, mean_and_interval(x))) for x in numbers]
            lines.append(markdown_row([game, name, way, *cells]))
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each measure over tokens, or over updates where they were not counted: means over seeds with 95 % intervals."""
    panels = [
        (game, *column) for game in dict.fromkeys(run["game"] for run in runs) for column in GAMES[game]().columns.items()
    ]
    figure, all_axes = pyplot().subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.4), constrained_layout=True, squeeze=False
    )
    for axes, (game, column, name) in zip(all_axes[0], panels, strict=True):
        for i, way in enumerate(dict.fromkeys(run["way"] for run in runs)):
            if not any(run["game"] == game and run["way"] == way for run in runs):
                continue
            counted, along, mean, interval = curves(runs, game, way, column)
            axes.plot(along, mean, color=f"C{i}", label=way)
            axes.fill_between(along, mean - interval, mean + interval, color=f"C{i}", alpha=0.2, linewidth=0)
            axes.set(xlabel=counted, title=f"{game}: {name}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    max(all_axes[0], key=lambda axes: len(axes.lines)).legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    cfg = tyro.cli(LeagueConfig)
    cfg = dataclasses.replace(cfg, output_dir=cfg.output_dir / "quick") if cfg.quick else cfg
    jobs = list(itertools.product(cfg.games, cfg.seeds[:1] if cfg.quick else cfg.seeds, cfg.ways))
    with ProcessPoolExecutor(cfg.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(legal_agent, [cfg] * len(cfg.games), cfg.games))
        runs = list(pool.map(run_one, [cfg] * len(jobs), *zip(*jobs, strict=True)))
    print(table(runs))
    if cfg.write:
        here = Path(__file__).parent
        runs = with_stored(runs, here / "league.json")
        draw(runs, here / "league.png")
        write_table("league", table(runs))
        (here / "league.json").write_text(json.dumps(runs) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
