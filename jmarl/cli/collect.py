"""`jmarl collect`: play a team without learning, and write what it read and wrote, as `jmarl train` with sft or dpo reads it.

The file is in MRLM's layout: a JSON object with `trajectories`, or with the suffix .jsonl one trajectory per line. A trajectory
is a conversation of one agent: `observations`, `actions` and, for each action, `rewards` with their `components`, which add up
to the value (mean over agents), and the measures in `info`. With history append that is an episode; with history none an agent
reads each prompt alone, so each turn is a trajectory. Observations are lists of messages if prompts are put into a chat
template, else texts, so that training encodes what was sampled from. `metadata` has the rest: number and task of the episode,
agent, role, turns, whether completions ended or were cut off, and the return of the episode. A turn without a valid reward has
none in the file.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import INTERRUPTED, check_output, plural, to_stderr
from jmarl.cli.teams.match import Match, add_play_arguments, number_of_tasks, open_match, play_tasks, split_batches, tasks_for
from jmarl.models.hub.messages import ChatPrompt

if TYPE_CHECKING:
    from jmarl.envs.data import Pair
    from jmarl.rollout.turns import Rollout
    from jmarl.team import Team

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
    what.add_argument("--num-generations", type=int, default=1, metavar="K", help="episodes of a task; default: 1")
    what.add_argument("--filter-reward", type=float, metavar="X", help="leave out episodes with a return below X")
    text = "only trajectories of these agents, by number and separated by commas; default: all"
    what.add_argument("--agents", metavar="N,N", help=text)
    what.add_argument("--pairs", metavar="FILE", help="also write best and worst completions as pairs; needs K > 1")
    what.add_argument("--seed", type=int, default=0, metavar="S", help="of tasks and sampling; default: 0")
    what.add_argument("--batch-size", type=int, default=16, metavar="N", help="tasks sampled at once; default: 16")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    count = number_of_tasks(args.num_episodes, args.num_generations)
    check_arguments(args)
    match = open_match(args, args.seed, args.num_generations)
    if args.pairs and match.cfg.episodes.num_turns > 1:
        raise ValueError("--pairs is for episodes of one turn: later prompts of two episodes differ; set --num-turns 1")
    names = ("num_episodes", "num_generations", "filter_reward", "agents", "seed", "batch_size")
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
        file.append([row for rows in selected for row in rows if row["metadata"]["agent"] in agents], len(selected))
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


# --- rows --------------------------------------------------------------------------------------------------------------


def episodes_of(rollout: Rollout, match: Match, tasks: Sequence[dict], first_task: int) -> list[tuple[float, list[dict]]]:
    """Return the return (mean over agents) and the rows of each episode of a rollout that does not branch.

    tasks: of the rollout. first_task: number of the first of them."""
    ended = ended_of(match.team, rollout)
    num_tasks, num_joint = rollout.turns[0].rewards.shape[:2]
    episodes = []
    for p in range(num_tasks):
        for j in range(num_joint):
            path = path_of(rollout, p, j)
            returns = rollout.joint_returns[0][p, j]
            shared = {
                "episode": (first_task + p) * num_joint + j,
                "task_number": first_task + p,
                "task": tasks[p],
                "return": number(returns.mean()),
                "seed": match.cfg.run.seed,
            }
            rows = []
            for agent, role in enumerate(match.env.roles):
                for row in rows_of(rollout, path, agent, match.cfg.episodes, ended):
                    rows.append(row | {"metadata": shared | {"agent": agent, "role": role} | row["metadata"]})
            episodes.append((float(returns.mean()), rows))
    return episodes


def ended_of(team: Team, rollout: Rollout) -> list[list[Any]]:
    """Return for each turn and agent which completions [P, G] ended; the others were cut off at max_new_tokens."""
    import numpy as np

    from jmarl.team import to_agents

    return [to_agents(team, [np.asarray(stack.ended) for stack in turn.completions]) for turn in rollout.turns]


def path_of(rollout: Rollout, p: int, j: int) -> list[tuple[int, int]]:
    """Return the node and joint action of each turn of an episode, which begins with joint action `j` of node `p`."""
    import numpy as np

    path = [(p, j)]
    for before, turn in zip(rollout.turns, rollout.turns[1:], strict=False):
        node, joint = path[-1]
        following = np.flatnonzero(turn.parents == node * len(before.joint) + joint)
        if not following.size:
            break
        path.append((int(following[0]), 0))
    return path


def rows_of(
    rollout: Rollout, path: Sequence[tuple[int, int]], agent: int, episodes: Any, ended: Sequence[Sequence[Any]]
) -> list[dict]:
    """Return the rows of one agent in one episode: one per turn in which it acts, or one in all with history append."""
    steps = []
    for t, (p, j) in enumerate(path):
        turn = rollout.turns[t]
        if not turn.acts[agent, p]:
            continue
        g = turn.joint[j, agent]
        prompt = turn.prompts[agent][p]
        k = p * len(turn.joint) + j
        components, measures = (finite_at(numbers, k) for numbers in (turn.parts, turn.measures))
        observation: Any = prompt
        if episodes.chat_settings.of(agent) or isinstance(prompt, ChatPrompt):
            messages = prompt.messages if isinstance(prompt, ChatPrompt) else ({"role": "user", "content": prompt},)
            observation = {"messages": [dict(message) for message in messages], "done": False}
        steps.append(
            {
                "observation": observation,
                "action": {"role": "assistant", "content": turn.texts[agent][p][g]},
                "reward": {"value": number(turn.rewards[p, j, agent]), "components": components, "info": measures},
                "turn": t,
                "ended": bool(ended[t][agent][p, g]),
            }
        )
    conversations = [steps] if episodes.history == "append" else [[step] for step in steps]
    return [conversation_row(conversation, len(path)) for conversation in conversations if conversation]


def conversation_row(steps: Sequence[dict], num_turns: int) -> dict:
    """Return a trajectory of some steps of an agent. num_turns: of the whole episode."""
    row = {
        "observations": [step["observation"] for step in steps],
        "actions": [step["action"] for step in steps],
        "rewards": [step["reward"] for step in steps],
        "metadata": {
            "turns": [step["turn"] for step in steps],
            "num_turns": num_turns,
            "ended": [step["ended"] for step in steps],
        },
    }
    if any(step["reward"]["value"] is None for step in steps):
        row["metadata"]["invalid_rewards"] = row.pop("rewards")
    return row


def finite_at(numbers: Mapping[str, Any], k: int) -> dict[str, float]:
    """Return the numbers of joint action k by name, without those that are not finite."""
    return {name: float(values[k]) for name, values in numbers.items() if math.isfinite(values[k])}


def number(value: Any) -> float | None:
    """Return a number as JSON has it; None if it is not finite."""
    return float(value) if math.isfinite(value) else None


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
