"""`jmarl collect`: play a team without learning, and write what it read and wrote, as `jmarl train` with sft or dpo reads it.

The file is in MRLM's layout: a JSON object with `trajectories`, or with the suffix .jsonl one trajectory per line. A trajectory
is a conversation of one agent: `observations`, `actions` and, for each action, `rewards` with their `components`, which add up
to the value (mean over agents), and the measures in `info`. With history append that is an episode; with history none an agent
reads each prompt alone, so each turn is a trajectory. Observations are lists of messages if prompts are put into a chat
template, else texts, so that training encodes what was sampled from. `metadata` has the rest: number and task of the episode,
agent, role, turns, whether completions ended or were cut off, their returns (reward-to-go of the agent), and the return of the
episode. A turn without a valid reward has none in the file.

`--format messages` and `--format atif` write the same trajectories for other programs, see `teams.formats`: as chat messages,
which sft of jmarl and TRL reads, and as ATIF-v1.7 (github.com/harbor-framework/harbor), in which all agents of an episode have
its session_id. With history none an agent has a trajectory per turn there too.

After each batch the file is complete JSON, and `FILE.progress` says how much of it is done. The same command continues a
collection that was stopped, with the same result; the batch in which it was stopped is played again. `--pairs` writes the best
and the worst of the completions of each prompt as preferences. sft trains one agent: `--agents 0`
writes its trajectories alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import INTERRUPTED, check_output, plural, to_stderr
from jmarl.cli.teams.formats import FORMATS, formatted
from jmarl.cli.teams.match import Match, add_play_arguments, number_of_tasks, open_match, play_tasks, split_batches, tasks_for
from jmarl.cli.teams.rows import episodes_of

if TYPE_CHECKING:
    from jmarl.envs.data import Pair

EPILOG = """examples:
  jmarl collect --model runs/mine -n 200 -o data.jsonl --filter-reward 0.5
  jmarl collect --model runs/mine -n 200 -o first.jsonl --agents 0        of one agent of the team, for sft
  jmarl collect --model M --environment math -n 400 --num-generations 4 -o data.json --pairs pairs.jsonl
  jmarl train --config sft                                learn from data.jsonl; --set data=FILE for another file"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    add_play_arguments(parser, "train")
    what = parser.add_argument_group("what is written")
    what.add_argument("-n", "--num-episodes", type=int, required=True, metavar="N", help="episodes to play")
    what.add_argument("-o", "--output", required=True, metavar="FILE", help=".json or .jsonl")
    text = "trajectories (default), messages, or atif, harbor's"
    what.add_argument("--format", choices=FORMATS, default="trajectories", metavar="F", help=text)
    what.add_argument("--num-generations", type=int, default=1, metavar="K", help="episodes of a task; default: 1")
    what.add_argument("--filter-reward", type=float, metavar="X", help="leave out episodes with a return below X")
    text = "only trajectories of these agents, by number and separated by commas; default: all"
    what.add_argument("--agents", metavar="N,N", help=text)
    what.add_argument("--pairs", metavar="FILE", help="also best and worst completions as pairs, with K > 1")
    what.add_argument("--seed", type=int, default=0, metavar="S", help="of tasks and sampling; default: 0")
    what.add_argument("--batch-size", type=int, default=16, metavar="N", help="tasks sampled at once; default: 16")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    count = number_of_tasks(args.num_episodes, args.num_generations)
    check_arguments(args)
    match = open_match(args, args.seed, args.num_generations)
    if args.pairs and match.cfg.episodes.num_turns > 1:
        raise ValueError("--pairs is for episodes of one turn: later prompts of two episodes differ; set --num-turns 1")
    names = ("format", "num_episodes", "num_generations", "filter_reward", "agents", "seed", "batch_size")
    settings = match.settings | {name: getattr(args, name) for name in names}
    try:
        with interrupted_by_sigterm():
            file = collect(match, args, tasks_for(match, args, count, args.seed), settings)
    except KeyboardInterrupt:
        to_stderr(f"interrupted: the same command continues; the finished batches are in {args.output}")
        return INTERRUPTED
    left_out = "" if args.filter_reward is None else f", those with a return of at least {args.filter_reward:g}"
    to_stderr(f"{file.num_episodes} of {plural(args.num_episodes, 'episode')} in {args.output}{left_out}")
    if args.pairs:
        from jmarl.envs.rows import read_rows
        from jmarl.preferences import save_pairs

        pairs = pairs_of(read_rows(args.output))
        save_pairs(args.pairs, pairs)
        to_stderr(
            f"{plural(len(pairs), 'pair')} in {args.pairs}; the other prompts have no two completions with different rewards"
        )
    file.finish()
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not fit, before a model is read."""
    output = Path(args.output)
    if output.suffix not in (".json", ".jsonl"):
        raise ValueError(f"--output {output} must end in .json or .jsonl")
    if args.format != "trajectories" and (output.suffix != ".jsonl" or args.pairs):
        refused = (
            "--pairs reads trajectories: remove it, or --format" if args.pairs else f"--output {output} must end in .jsonl"
        )
        raise ValueError(f"--format {args.format} writes one trajectory per line: {refused}")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size {args.batch_size} must be at least 1")
    if args.pairs and args.num_generations < 2:
        raise ValueError("--pairs needs several completions of each prompt: set --num-generations to 2 or more")
    if args.pairs and (args.filter_reward is not None or args.agents is not None):
        raise ValueError("--pairs needs all completions of all agents: remove --filter-reward and --agents")
    if not TrajectoryFile(output).progress_path.exists():
        for flag, path in (("--output", output), ("--pairs", Path(args.pairs or ""))):
            if path.is_file():
                raise ValueError(f"{path} exists and is complete: choose another {flag}, or remove it")
    for flag, path in (("--output", args.output), ("--pairs", args.pairs)):
        if path:
            check_output(path, flag, is_file=True)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def collect(match: Match, args: argparse.Namespace, tasks: Sequence[dict], settings: dict[str, Any]) -> TrajectoryFile:
    """Play the tasks in batches, append what was written, and return the file."""

    agents = numbers_of(args.agents, match.env.roles)
    lowest = -math.inf if args.filter_reward is None else args.filter_reward
    file, batches = TrajectoryFile(Path(args.output)), split_batches(tasks, args.batch_size)
    done = file.open(settings)
    if done:
        to_stderr(f"continuing after {done} of {len(batches)} batches")
    else:
        to_stderr(
            f"{plural(len(batches[0]) * args.num_generations, 'episode')} at a time; the first ones wait for the compiler"
        )
    start = time.monotonic()
    for part in range(done, len(batches)):
        rollout = play_tasks(match, batches[part], match.cfg, part)
        first = sum(map(len, batches[:part]))
        episodes = episodes_of(rollout, match, batches[part], first)
        selected = [rows for value, rows in episodes if args.filter_reward is None or value >= lowest]
        rows = [row for rows in selected for row in rows if row["metadata"]["agent"] in agents]
        file.append([formatted(row, args.format) for row in rows], len(selected))
        played = len(episodes) + first * args.num_generations
        to_stderr(f"{played}/{args.num_episodes} episodes, {file.num_episodes} written, {time.monotonic() - start:.0f} s")
    return file


def numbers_of(text: str | None, roles: Sequence[str]) -> list[int]:
    """Return the numbers of agents in a text such as "0,1"; None: all."""
    try:
        agents = list(range(len(roles))) if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        agents = [-1]
    if not set(agents) <= set(range(len(roles))):
        listed = ", ".join(f"{i} ({role})" for i, role in enumerate(roles))
        raise ValueError(f"--agents {text} is not allowed: choose some of {listed}, separated by commas")
    return agents


class TrajectoryFile:
    """A file of trajectories that grows by batches, and the file beside it that says how much of it is done.

    Attributes:
        num_episodes: number of episodes in it.
    """

    def __init__(self, path: Path):
        self.path, self.progress_path = path, path.with_name(f"{path.name}.progress")
        self.lines = path.suffix == ".jsonl"
        self.num_batches = self.num_rows = self.num_episodes = self.size = 0
        self.settings: dict[str, Any] = {}

    def open(self, settings: dict[str, Any]) -> int:
        """Return the number of batches in the file. Raises ValueError if it was begun with other settings."""
        self.settings = json.loads(json.dumps(settings))
        if not self.progress_path.exists() or not self.path.exists():
            self._write_progress()
            return 0
        progress = json.loads(self.progress_path.read_text(encoding="utf-8"))
        before = progress["settings"]
        names = [name for name in {**before, **self.settings} if before.get(name) != self.settings.get(name)]
        if names:
            changes = "; ".join(f"{name}: {before.get(name)!r} -> {self.settings.get(name)!r}" for name in names)
            raise ValueError(
                f"{self.path} was begun with other settings ({changes}): continue with those, choose another --output, or "
                f"remove it and {self.progress_path}"
            )
        self.num_batches, self.num_rows = progress["batches"], progress["rows"]
        self.num_episodes, self.size = progress["episodes"], progress["bytes"]
        return self.num_batches

    def append(self, rows: Sequence[dict], num_episodes: int) -> None:
        """Write the rows of a batch, and then that it is done. The file is complete JSON after each call."""
        texts = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
        separator = "\n" if self.lines else ",\n"
        begin = "" if self.lines or self.size else '{"trajectories": [\n'
        text = begin + (separator if self.num_rows and texts else "") + separator.join(texts)
        self.num_rows += len(rows)
        self.num_episodes += num_episodes
        end = "\n" if self.lines else f'\n], "num_trajectories": {self.num_rows}}}\n'
        with open(self.path, "r+b" if self.size else "wb") as file:
            file.truncate(self.size)
            file.seek(self.size)
            self.size += file.write(encode(text))
            file.write(encode(end if self.num_rows or not self.lines else ""))
            file.flush()
            os.fsync(file.fileno())
        self.num_batches += 1
        self._write_progress()

    def finish(self) -> None:
        """Remove the file beside it: nothing is left to do."""
        self.progress_path.unlink(missing_ok=True)

    def _write_progress(self) -> None:
        counts = {"batches": self.num_batches, "rows": self.num_rows, "episodes": self.num_episodes, "bytes": self.size}
        temporary = self.progress_path.with_name(f"{self.progress_path.name}.tmp")
        temporary.write_text(json.dumps(counts | {"settings": self.settings}), encoding="utf-8")
        temporary.replace(self.progress_path)


def encode(text: str) -> bytes:
    return text.encode("utf-8", errors="backslashreplace")  # a lone surrogate, as JSON writes it: \ud800


def pairs_of(rows: Sequence[Any]) -> list[Pair]:
    """Return the best and the worst joint action of each task as a pair, if their returns differ. rows: of single turns."""
    import numpy as np

    from jmarl.envs.data import Pair
    from jmarl.preferences import select

    tasks: dict[int, dict[int, list[Any]]] = {}  # number of a task -> number of an episode -> its rows, by agent
    for row in rows:
        tasks.setdefault(row["metadata"]["task_number"], {}).setdefault(row["metadata"]["episode"], []).append(row)
    pairs, rng = [], np.random.default_rng(0)
    for episodes in tasks.values():
        joint = list(episodes.values())
        returns = [one[0]["metadata"]["return"] for one in joint]
        rewards = [math.nan if value is None else value for value in returns]
        for i, k in select(rewards, "reward_gap", 1, rng):
            prompts = [row["observations"][0] for row in joint[i]]
            chats = [x if isinstance(x, str) else tuple(x["messages"]) for x in prompts]
            texts = [tuple(row["actions"][0]["content"] for row in one) for one in (joint[i], joint[k])]
            pairs.append(Pair(tuple(chats), *texts, rewards=(rewards[i], rewards[k])))
    return pairs
