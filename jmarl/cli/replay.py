"""`jmarl replay RUN --step N`: make a step of a run again, bit for bit, and ask what if an agent had said something else.

Nothing in the directory of the run changes. Standard output has the result, standard error how far it is.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import add_trust_argument, plural, to_stderr

if TYPE_CHECKING:
    from jmarl.replay import OpenStep, RemadeStep
    from jmarl.rollout.turns import Rollout

WIDE, WIDEST = 100, 160  # columns from which episodes stand side by side, and at most
EPILOG = """examples:
  jmarl replay runs/mine --step 120                       make the step again, and compare it with what is stored
  jmarl replay runs/mine --step 120 --task 3              ... and print an episode
  jmarl replay runs/mine --step 120 --task 3 --agent 1 --turn 0 --say "I take the left one"
  jmarl replay runs/mine --step 120 --task 3 --agent 1 --alternatives --samples 8
  jmarl replay runs/mine --step 120 --credit              do the advantages follow what messages are worth?"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    parser.add_argument("directory", metavar="RUN", help="output directory of a run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="number of the step, as in metrics.jsonl")
    which = parser.add_argument_group("which message")
    which.add_argument("--task", type=int, metavar="P", help="task of the step, from 0; prints its episode")
    which.add_argument("--sample", type=int, default=0, metavar="G", help="which completion of the first turn; default: 0")
    which.add_argument("--agent", type=int, default=0, metavar="A", help="who writes it, from 0; default: 0")
    which.add_argument("--turn", type=int, default=0, metavar="T", help="turn of the episode, from 0; default: 0")
    what_if = parser.add_argument_group("what if").add_mutually_exclusive_group()
    what_if.add_argument("--say", metavar="TEXT", help="the agent writes this; what follows is played on")
    text = "it writes each other completion of the group: what is the message worth?"
    what_if.add_argument("--alternatives", action="store_true", help=text)
    text = "do so for all messages, and compare with the advantages of the step"
    what_if.add_argument("--credit", action="store_true", help=text)
    parser.add_argument("--samples", type=int, default=8, metavar="K", help="continuations of an alternative; default: 8")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.samples < 2:
        raise ValueError(f"--samples {args.samples} must be at least 2: an interval needs two continuations")
    from jmarl.envs.base import close

    step = open_step_of(args)
    try:
        result, lines = replayed(args, step)
    finally:
        close(step.run.task.env)
    print(json.dumps(result, ensure_ascii=False, indent=1) if args.json else "\n".join(lines))
    return 0


def open_step_of(args: argparse.Namespace) -> OpenStep:
    """Return the step of the flags, and say from where it is made again."""
    from jmarl.cli.configuration import read_experiment
    from jmarl.files.run_files import CONFIG_FILE, config_file_of, read_config
    from jmarl.replay import open_step
    from jmarl.runs.experiment import learns_from_completions, load_team, task_of

    file = config_file_of(Path(args.directory))
    if file is None:
        raise FileNotFoundError(f"{args.directory} is not the directory of a run: it has no {CONFIG_FILE}")
    if "task" not in read_config(file).tree:
        raise ValueError(
            f"{file} has no task: the run was begun in Python; make its steps again there, with jmarl.replay.open_step"
        )
    cfg = read_experiment(str(file), args.trust).with_seeds()
    if cfg.seeds:
        raise ValueError("steps of several seeds in one program cannot be made again yet")
    if not learns_from_completions(cfg):
        raise ValueError(f"algorithm={cfg.train.algorithm!r} learns from given data here: its steps have no episodes")
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    step = open_step(args.directory, cfg.train, load_team(cfg), task, args.step)
    start = f"the checkpoint after update {step.first}" if step.first else "the beginning"
    count, seconds = args.step - 1 - step.first, step.seconds
    took = f", which took about {seconds:.0f} s in the run" if math.isfinite(seconds) else ""
    to_stderr(
        f"step {args.step} from {start}" + (f": {plural(count, 'update')} before it are made again{took}" if count else "")
    )
    return step


def replayed(args: argparse.Namespace, step: OpenStep) -> tuple[dict[str, Any], list[str]]:
    """Return what the flags ask for as JSON values and as lines."""
    from jmarl.replay import find_message, make_again, say

    remade = make_again(step, to_stderr)
    rollout = remade.rollout
    result: dict[str, Any] = {"step": step.number, "from": step.first, "compared": remade.checked}
    lines = [compared_line(step, remade)]
    if args.task is None and (args.say is not None or args.alternatives):
        raise ValueError("--say and --alternatives need --task, the task of the step from 0")
    if args.task is None:
        return result, lines
    before = episode_of(rollout, args)
    if args.say is None:
        return result | {"episode": before}, [*lines, *side_by_side(before, before)]
    message = find_message(rollout, args.task, args.sample, args.agent, args.turn)
    other = say(step, remade, message, args.say)
    after = episode_of(other, args)
    returns = returns_of(rollout, other, message)
    lines += [*side_by_side(before, after), "", f"return from turn {args.turn} on:", *return_lines(returns)]
    return result | {"episode": before, "replaced": after, "returns": returns}, lines


def compared_line(step: OpenStep, remade: RemadeStep) -> str:
    """Return what was compared with what is stored."""
    if remade.stored.record:
        return f"step {step.number} is made again: {plural(remade.checked, 'step')} equal to completions.jsonl.gz, bit for bit"
    what = "its row of metrics.jsonl" if remade.stored.row else "nothing: the run has stored neither its texts nor its row"
    return f"step {step.number} is made again; its completions are not stored (max_completions_mb); compared with {what}"


def episode_of(rollout: Rollout, args: argparse.Namespace) -> dict[str, str]:
    """Return what was read, written and rewarded in an episode, by a title."""
    from jmarl.replay import path_of

    sections = {}
    for t, (node, joint) in enumerate(path_of(rollout, args.task, args.sample, args.agent)):
        turn = rollout.turns[t]
        for agent, acts in enumerate(turn.acts[:, node]):
            if acts:
                sections[f"turn {t}, agent {agent} reads"] = turn.prompts[agent][node]
                sections[f"turn {t}, agent {agent} writes"] = turn.texts[agent][node][turn.joint[joint, agent]]
        sections[f"turn {t}, reward"] = ", ".join(f"{x:.6g}" for x in turn.rewards[node, joint])
    return sections


def returns_of(rollout: Rollout, other: Rollout, message: Any) -> list[dict[str, float | None]]:
    """Return the return of each agent from a message on, before and after it was replaced, and the difference."""
    from jmarl.logs.completions_file import finite
    from jmarl.replay import return_of

    pairs = zip(return_of(rollout, message).tolist(), return_of(other, message).tolist(), strict=True)
    return finite([{"was": was, "is": now, "difference": now - was} for was, now in pairs])


def return_lines(returns: list[dict[str, float | None]]) -> list[str]:
    """Return a line for each agent."""
    rows = [[f"{name} {'none' if x is None else f'{x:.6g}'}" for name, x in row.items()] for row in returns]
    return [f"    agent {agent}: {', '.join(row)}" for agent, row in enumerate(rows)]


def side_by_side(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return two episodes as lines. What is equal stands there once; what differs in two columns, or below each other where
    the terminal is narrow."""
    from jmarl.logs.samples import block

    width = min(WIDEST, shutil.get_terminal_size((WIDE, 24)).columns)
    lines = []
    for title in {**before, **after}:
        old, new = (texts.get(title, "(nothing: the episode has ended)") for texts in (before, after))
        if old == new:
            lines += ["", f"{title}:", *block(old, width)]
        elif width < WIDE:
            lines += ["", f"{title}, as it was:", *block(old, width), f"{title}, now:", *block(new, width)]
        else:
            half = width // 2
            columns = zip_longest(block(old, half), block(new, half), fillvalue="")
            lines += ["", f"{title}, as it was | now:", *(f"{a:<{half}}|{b}" for a, b in columns)]
    return lines
