"""`jmarl play`: print one episode turn by turn: what each agent reads and writes, the reward, its parts and measures."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import plural, to_stderr
from jmarl.cli.teams.match import Match, add_play_arguments, open_match, play_tasks, tasks_for

if TYPE_CHECKING:
    from jmarl.rollout.turns import Rollout

WIDTH = 100  # widest line

EPILOG = """examples:
  jmarl play --model runs/mine
  jmarl play --model smollm2-135m-instruct --environment sudoku --task 3 --temperature 0 | less"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    add_play_arguments(parser, "eval")
    which = parser.add_argument_group("which episode")
    which.add_argument("--task", type=int, default=0, metavar="N", help="number of the task, from 0; default: 0")
    which.add_argument("--seed", type=int, default=0, metavar="S", help="of tasks and sampling; default: 0")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.task < 0:
        raise ValueError(f"--task {args.task} is not allowed: the first task is 0")
    match = open_match(args, args.seed)
    task = tasks_for(match, args, args.task + 1, args.seed)[args.task]
    to_stderr("playing; the first turn waits for the compiler")
    rollout = play_tasks(match, [task], match.cfg)
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    print("\n".join(episode_lines(rollout, match, task, width)))
    return 0


def episode_lines(rollout: Rollout, match: Match, task: dict, width: int) -> list[str]:
    """Return an episode as lines. rollout: of one task with one completion."""
    from jmarl.cli.teams.rows import ended_of, number
    from jmarl.logs.samples import block

    ended, roles = ended_of(match.team, rollout), match.env.roles
    lines = [rule(f"{match.settings['environment']}, task", width)]
    lines += [line for name, value in task.items() for line in block(f"{name}: {value}", width)]
    for t, turn in enumerate(rollout.turns):
        lines += ["", rule(f"turn {t}", width, "=")]
        for agent, role in enumerate(roles):
            if not turn.acts[agent, 0]:
                lines += ["", f"agent {agent} ({role}) does not act"]
                continue
            lines += ["", f"agent {agent} ({role}) reads:", *block(turn.prompts[agent][0], width)]
            cut_off = "" if ended[t][agent][0, 0] else f", cut off at {match.cfg.sampling.max_new_tokens} tokens"
            lines += ["", f"agent {agent} ({role}) writes{cut_off}:", *block(turn.texts[agent][0][0], width)]
        lines += ["", *reward_lines(turn, roles, width)]
    returns = [number(x) for x in rollout.joint_returns[0][0, 0]]
    return [*lines, "", rule(f"return {numbers_text(returns, roles)} after {plural(len(rollout.turns), 'turn')}", width)]


def reward_lines(turn: Any, roles: tuple[str, ...], width: int) -> list[str]:
    """Return the reward of a turn, its parts and the measures as lines."""
    from jmarl.cli.teams.rows import number
    from jmarl.logs.samples import block

    rewards = [number(x) for x in turn.rewards[0, 0]]
    lines = [f"reward {numbers_text(rewards, roles)}"]
    if turn.fault:
        lines += block(f"invalid: {turn.fault}", width)
    for title, numbers in (("parts of the reward, which add up to it:", turn.parts), ("measures:", turn.measures)):
        shown = [f"    {name} {values[0]:.4g}" for name, values in numbers.items() if math.isfinite(values[0])]
        lines += [title, *shown] if shown else []
    return lines


def numbers_text(values: list[float | None], roles: tuple[str, ...]) -> str:
    """Return numbers of the agents as a text: one for the team if all are equal."""
    texts = ["none" if value is None else f"{value:.4g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(f"{x} ({role})" for x, role in zip(texts, roles, strict=True))


def rule(title: str, width: int, line: str = "-") -> str:
    """Return a title in a horizontal line."""
    return f"{line * 2} {title} ".ljust(width, line)
