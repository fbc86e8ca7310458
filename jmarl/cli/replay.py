"""`jmarl replay RUN --step N`: make a step of a run again, bit for bit, and ask what if an agent had said something else.

Nothing in the directory of the run changes. Standard output has the result, standard error how far it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import add_trust_argument, plural, to_stderr

if TYPE_CHECKING:
    from jmarl.replay import OpenStep
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
    text = "number of the joint action of each turn, where episodes branch; in place of --sample"
    which.add_argument("--joint", type=int, nargs="+", default=[], metavar="J", help=text)
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
    if args.task is None and (args.say is not None or args.alternatives):
        raise ValueError("--say and --alternatives need --task, the number of a task of the step, from 0")
    if args.joint and args.sample:
        raise ValueError("give --sample, a completion of the first turn, or --joint, joint actions of all turns, not both")
    if args.samples < 2:
        raise ValueError(f"--samples {args.samples} must be at least 2: an interval needs two continuations")
    from jmarl.envs.base import close

    with contextlib.redirect_stdout(sys.stderr):  # of what rewards and environments print
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
    cfg = read_experiment(str(file), args.trust)
    if cfg.seeds and not cfg.train.population.members:
        raise ValueError("steps of several seeds in one program cannot be made again yet")
    if not learns_from_completions(cfg):
        raise ValueError(f"algorithm={cfg.train.algorithm!r} learns from given data here: its steps have no episodes")
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    replaces = args.say is not None or args.alternatives or args.credit
    step = open_step(args.directory, cfg.train, load_team(cfg), task, args.step, replaces=replaces)
    start = f"the checkpoint after update {step.first}" if step.first else "the beginning"
    count, seconds = args.step - 1 - step.first, step.seconds
    took = f", which took about {seconds:.0f} s in the run" if math.isfinite(seconds) else ""
    again = f": {plural(count, 'update')} before it {'is' if count == 1 else 'are'} made again{took}" if count else ""
    to_stderr(f"step {args.step} from {start}{again}")
    return step


def replayed(args: argparse.Namespace, step: OpenStep) -> tuple[dict[str, Any], list[str]]:
    """Return what the flags ask for as JSON values and as lines."""
    from jmarl.logs.completions_file import finite
    from jmarl.replay import credit, find_message, make_again, return_of, say

    remade = make_again(step, to_stderr)
    result: dict[str, Any] = {"step": step.number, "from": step.first, "compared": remade.checked}
    what = f"{plural(remade.checked, 'step')} equal to completions.jsonl.gz, bit for bit"
    if remade.stored.record is None:
        what = "its completions are not stored (max_completions_mb), only its row of metrics.jsonl is compared"
    lines = [f"step {step.number} is made again: {what}"]
    if args.credit:
        answer = credit(step, remade, args.samples, to_stderr)
        return result | finite(answer._asdict()), [*lines, *credit_lines(answer)]
    if args.task is None:
        return result, lines
    turns = len(remade.rollout.turns)
    if len(args.joint) > turns:
        raise ValueError(f"--joint has {len(args.joint)} numbers, and the step has {plural(turns, 'turn')}")
    before = after = episode_of(remade.rollout, args)
    if args.say is None and not args.alternatives:
        return result | {"episode": before}, [*lines, *side_by_side(before, after)]
    message = find_message(remade.rollout, args.task, args.sample, args.agent, args.turn, args.joint)
    if args.alternatives:
        rows, more = alternatives_of(args, step, remade, message)
        return result | {"alternatives": rows}, [*lines, *more]
    other = say(step, remade, message, args.say)
    after, pairs = episode_of(other, args), zip(return_of(remade.rollout, message), return_of(other, message), strict=True)
    returns = [{"was": float(was), "is": float(now), "difference": float(now - was)} for was, now in pairs]
    lines += [*side_by_side(before, after), "", f"return from turn {args.turn} on:"]
    for agent, row in enumerate(returns):
        lines.append(f"    agent {agent}: " + ", ".join(f"{name} {x:.6g}" for name, x in row.items()))
    return result | finite({"episode": before, "replaced": after, "returns": returns}), lines


def episode_of(rollout: Rollout, args: argparse.Namespace) -> dict[str, str]:
    """Return what was read, written and rewarded in an episode, by a title."""
    from jmarl.replay import path_of

    sections = {}
    for t, (node, joint) in enumerate(path_of(rollout, args.task, args.sample, args.agent, args.joint)):
        turn = rollout.turns[t]
        for agent in turn.acts[:, node].nonzero()[0]:
            sections[f"turn {t}, agent {agent} reads"] = turn.prompts[agent][node]
            sections[f"turn {t}, agent {agent} writes"] = turn.texts[agent][node][turn.joint[joint, agent]]
        sections[f"turn {t}, reward"] = ", ".join(f"{x:.6g}" for x in turn.rewards[node, joint])
    return sections


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
            columns = zip_longest(block(old, width // 2), block(new, width // 2), fillvalue="")
            lines += ["", f"{title}, as it was | now:", *(f"{a:<{width // 2}}|{b}" for a, b in columns)]
    return lines


def alternatives_of(args: argparse.Namespace, step: OpenStep, remade: Any, message: Any) -> tuple[Any, list[str]]:
    """Return what a message and the other completions of its group are worth, as JSON values and as lines, best first."""
    from jmarl.logs.completions_file import finite
    from jmarl.logs.samples import block
    from jmarl.replay import alternatives, value_of

    returns = alternatives(step, remade, message, args.samples, to_stderr)
    texts, agent = remade.rollout.turns[message.turn].texts[message.agent][message.node], message.agent
    rows = list[dict[str, Any]]()
    lines = [f"return of agent {agent} from turn {message.turn} on, and value: the return minus the mean of the group"]
    for g, values in sorted(enumerate(returns), key=lambda pair: -pair[1][:, agent].mean()):
        mean, (value, half), this = values.mean(0), value_of(returns, g), ", the message itself" * (g == message.sample)
        row = {"returns": mean.tolist(), "values": value.tolist(), "ci95": half.tolist()}
        rows.append({"sample": g, "text": texts[g], **row})
        lines.append(f"sample {g}: return {mean[agent]:.4g}, value {value[agent]:+.4g} ± {half[agent]:.2g}{this}")
        lines += block(texts[g], WIDE, 6)
    return finite(rows), [*lines, f"± is the 95 % interval over {args.samples} continuations with the same keys for each"]


def credit_lines(answer: Any) -> list[str]:
    """Return how advantages follow values as lines."""
    return [
        f"rank correlation of advantages and values of messages, without ties: {answer.correlation:.3g}, 95 % interval "
        f"{answer.low:.3g} to {answer.high:.3g} (bootstrap over groups; {answer.compared} of {answer.messages} messages are in "
        "groups where both vary)",
        "mean size of the value of an agent's message, for the return of each agent:",
        *(f"    agent {i}: {', '.join(f'{x:.3g}' for x in row)}" for i, row in enumerate(answer.influence)),
    ]
