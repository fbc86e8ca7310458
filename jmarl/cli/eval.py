"""`jmarl eval`: play without learning, and print the mean return, the success rate, the parts of the reward and the measures.

The 95 % intervals are by Student's t over tasks: episodes of one task, of one or of several seeds, count as one number, their
mean. The success rate is the mean of the measure (or part of the reward) called `solved`, which must be 0 or 1, in the last
turns of the episodes; an environment that has none has no success rate. With several episodes of a task (--num-generations)
there are best@k, the best return of k of them, pass@k, whether one of k succeeds, and majority@k, the success of what most of k
wrote, see `rl.returns`: of those of one seed, and then the mean over seeds.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.cli.main import check_output, plural, to_stderr
from jmarl.cli.teams.match import Match, add_play_arguments, number_of_tasks, open_match, play_tasks, split_batches, tasks_for

EPILOG = """examples:
  jmarl eval --model runs/mine --num-episodes 50
  jmarl eval --config my.yaml                                   its models before training, on its held-out tasks
  jmarl eval --model smollm2-135m-instruct --data rows.jsonl --reward my_module:score
  jmarl eval --model smollm2-135m-instruct --environment math --option difficulty_range=[1,2] --seeds 0,1
  jmarl eval --model runs/mine/models/agent_0 another/model --environment math_verifier --output result.json"""


GROUPS = {  # of numbers in the result -> heading in the table
    "parts": "parts of the reward, summed over turns:",
    "measures": "measures, each in the last turn that has it:",
}


COUNTS = {  # columns of a rollout -> what they count
    "reward/raised": "rewards raised an error or were late", "reward/truncated": "episodes were truncated",
    "long_prompts": "prompts were too long",
}  # fmt: skip


class SeedScores(NamedTuple):
    """The results of the episodes of one seed, [P, K] by task and episode of the task."""

    keys: list[str]  # [P] of the tasks: equal tasks have equal ones
    returns: Any  # return, mean over agents; NaN where invalid
    parts: dict[str, Any]  # parts of the reward, summed over turns
    measures: dict[str, Any]  # other numbers, of the last turn that has them
    solved: dict[str, Any]  # what is called solved, in the last turn
    samples: list[Any]  # of each batch, see `samples_of`
    counts: dict[str, float]  # see COUNTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    add_play_arguments(parser, "eval")
    amount = parser.add_argument_group("what is counted")
    amount.add_argument("-n", "--num-episodes", type=int, default=100, metavar="N", help="of each seed; default: 100")
    amount.add_argument("--num-generations", type=int, default=1, metavar="K", help="episodes of a task; default: 1")
    amount.add_argument("--seeds", default="0", metavar="S,S", help="of tasks and sampling, separated by commas; default: 0")
    amount.add_argument("--batch-size", type=int, default=16, metavar="N", help="tasks sampled at once; default: 16")
    amount.add_argument("-o", "--output", metavar="FILE", help="write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    seeds = seeds_of(args.seeds)
    count = number_of_tasks(args.num_episodes, args.num_generations)
    if args.batch_size < 1:
        raise ValueError(f"--batch-size {args.batch_size} must be at least 1")
    if args.output:
        check_output(args.output, is_file=True)
    start = time.monotonic()
    match = open_match(args, seeds[0], args.num_generations)
    to_stderr("playing; the first episodes wait for the compiler")
    scores = [play_seed(match, args, seed, count) for seed in seeds]
    result = {**match.settings, "num_episodes": args.num_episodes, "num_generations": args.num_generations, "seeds": seeds}
    result |= summary(scores) | {"per_seed": [{"seed": s, **summary([one])} for s, one in zip(seeds, scores, strict=True)]}
    result["seconds"] = round(time.monotonic() - start, 1)
    print(table(result))
    if args.output:
        from jmarl.logs.completions_file import finite

        text = json.dumps(finite(result), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
        Path(args.output).write_text(text, encoding="utf-8", errors="backslashreplace")
        to_stderr(f"written to {args.output}")
    return 0


def seeds_of(text: str) -> list[int]:
    """Return the seeds in a text such as "0,1"."""
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text} is not allowed: give whole numbers separated by commas, such as 0,1") from None
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text} names a seed twice")
    return seeds


def play_seed(match: Match, args: argparse.Namespace, seed: int, count: int) -> SeedScores:
    """Play the tasks of one seed in batches, with a line of progress after each."""
    import numpy as np

    from jmarl.evaluation.evaluate import episode_parts, last_measures, last_solved, samples_of

    cfg, tasks = match.cfg.replace(seed=seed), tasks_for(match, args, count, seed)
    keys = [json.dumps(task, sort_keys=True, default=str) for task in tasks]
    returns, samples = list[Any](), list[Any]()
    parts, measures, solved = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    counts = dict.fromkeys(COUNTS, 0.0)
    start, batches = time.monotonic(), split_batches(tasks, args.batch_size)
    to_stderr(f"seed {seed}: {plural(args.num_episodes, 'episode')}, {len(batches[0]) * args.num_generations} at a time")
    for part, batch in enumerate(batches):
        rollout = play_tasks(match, batch, cfg, part)
        returns.append(rollout.joint_returns[0].mean(-1))
        parts.append(episode_parts(rollout))
        measures.append(last_measures(rollout))
        solved.append(last_solved(rollout))
        samples.append(samples_of(rollout))
        counts = {name: count + rollout.notes.get(name, 0.0) for name, count in counts.items()}
        done = np.concatenate(returns)
        mean, _ = by_task(keys[: len(done)], done)
        to_stderr(f"seed {seed}: {done.size}/{args.num_episodes} episodes, mean {mean:.4g}, {time.monotonic() - start:.0f} s")
    tables = by_name(parts, returns), by_name(measures, returns), by_name(solved, returns)
    return SeedScores(keys, np.concatenate(returns), *tables, samples, counts)


def by_name(tables: Sequence[dict[str, Any]], returns: Sequence[Any]) -> dict[str, Any]:
    """Concatenate the numbers of several batches or seeds by name; NaN where one has none of this name."""
    import numpy as np

    names = dict.fromkeys(name for table in tables for name in table)
    return {
        name: np.concatenate([table.get(name, np.full_like(r, np.nan)) for table, r in zip(tables, returns, strict=True)])
        for name in names
    }


def summary(scores: Sequence[SeedScores]) -> dict[str, Any]:
    """Return the means and 95 % intervals of the episodes of some seeds."""
    import numpy as np

    from jmarl.evaluation.evaluate import figures_at_k, is_success

    keys = [key for one in scores for key in one.keys]
    returns = np.concatenate([one.returns for one in scores])
    mean, interval = by_task(keys, returns)
    invalid = int(np.isnan(returns).sum())
    row: dict[str, Any] = {"mean": mean, "ci95": interval, "episodes": returns.size - invalid, "invalid_episodes": invalid}
    by_seed = [one.returns for one in scores]
    parts, measures = by_name([one.parts for one in scores], by_seed), by_name([one.measures for one in scores], by_seed)
    for name, values in by_name([one.solved for one in scores], by_seed).items():
        if is_success(values):
            rate = "success_rate" if name in ("solved", "reward/solved") else f"success_rate/{name}"
            row |= dict(zip((rate, f"{rate}_ci95"), by_task(keys, values), strict=True))
            row[f"{rate}_episodes"] = int(np.isfinite(values).sum())
    batches, tables, choices = zip(*(batch for one in scores for batch in one.samples), strict=True)
    figures = figures_at_k(np.concatenate(batches), by_name(tables, batches), np.concatenate(choices))
    for name, (values, known) in figures.items():
        if not name.endswith("pass@1"):  # the success rate
            row |= dict(zip((name, f"{name}_ci95"), by_task(keys, values[:, None]), strict=True))
            row[f"{name}_episodes"] = int(known)

    def means(table: dict[str, Any]) -> dict[str, dict[str, float]]:
        return {
            name: dict(zip(("mean", "ci95"), by_task(keys, x), strict=True)) | {"episodes": int(np.isfinite(x).sum())}
            for name, x in table.items()
        }

    counts = {name: sum(one.counts[name] for one in scores) for name in COUNTS}
    return row | {"parts": means(parts), "measures": means(measures), "counts": counts}


def by_task(keys: Sequence[str], values: Any) -> tuple[float, float]:
    """Return the mean of values [P, K] and its 95 % interval over different tasks. keys: of the tasks [P]."""
    import numpy as np

    from jmarl.evaluation.statistics import mean_and_interval, valid_mean

    rows: dict[str, list[Any]] = {}
    for key, row in zip(keys, values, strict=True):
        rows.setdefault(key, []).append(row)
    mean, interval = mean_and_interval(np.array([valid_mean(np.concatenate(group)) for group in rows.values()]))
    return float(mean), float(interval)


def table(result: dict[str, Any]) -> str:
    """Return a result as a table to read."""
    total = result["episodes"] + result["invalid_episodes"]
    rows = [("mean return over tasks", result["mean"], result["ci95"], result["episodes"], total)]
    rows += [
        (name.replace("_", " "), value, result[f"{name}_ci95"], result[f"{name}_episodes"], total)
        for name, value in result.items()
        if (name.startswith("success_rate") or "@" in name) and f"{name}_ci95" in result
    ]
    for group, title in GROUPS.items():
        numbers = [(f"  {name}", x["mean"], x["ci95"], x["episodes"], total) for name, x in result[group].items()]
        rows += [(title, None, math.nan, total, total), *numbers] if numbers else []
    for one in result["per_seed"] if len(result["seeds"]) > 1 else ():
        rows.append(
            (f"seed {one['seed']}", one["mean"], one["ci95"], one["episodes"], one["episodes"] + one["invalid_episodes"])
        )
    width, lines = max(len(name) for name, value, *_ in rows if value is not None), []
    for name, value, ci, counted, episodes in rows:
        interval = f"  ± {ci if ci > 1e-12 else 0:.2g}" if math.isfinite(ci) else ""
        share = f"  ({counted} of {plural(episodes, 'episode')})" if counted < episodes else ""
        lines.append(name if value is None else f"{name:<{width}}  {value:>9.4g}{interval}{share}")
    if not any(name.startswith("success_rate") for name in result):
        lines.append("no success rate: no measure and no part of the reward is called solved")
    if result["invalid_episodes"]:
        lines.append(f"{plural(result['invalid_episodes'], 'episode')} had no valid reward: not counted")
    lines += [f"{count:.0f} {COUNTS[name]}" for name, count in result["counts"].items() if count]
    return "\n".join([*lines, "± is the 95 % interval over tasks"])
