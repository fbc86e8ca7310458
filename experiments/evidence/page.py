"""Write the tables and figures of EVIDENCE.md from the numbers of finished runs. Not an experiment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.evidence.estimates import stratified_interval, tokens_to
from experiments.evidence.record import RESULTS
from experiments.tables import markdown_table, pyplot, write_table
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.report.comparison import half_of, holm, mean_of, text_of, welch

HERE = Path(__file__).parent
PAGE = HERE.parent / "EVIDENCE.md"
MOST_CURVES = 8  # in one figure
LAST = 10  # points at the end of a curve whose mean is the reward of a run

Record = dict[str, Any]
Plan = Mapping[str, Mapping[str, Any]]


def load(claim: str) -> dict[str, list[Record]]:
    """Return the records of each condition of a claim, one for each seed, in the order of its YAML file."""
    records: dict[str, list[Record]] = {}
    for condition in conditions(claim):
        files = (RESULTS / claim).glob(f"{condition}/*.json")
        records[condition.partition("=")[2]] = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(files)]
    return records


def conditions(claim: str) -> list[str]:
    """Return the directories of the conditions of a claim, such as way=team."""
    if not (HERE / f"{claim}.yaml").is_file():  # pairs of agents of other runs
        return sorted(path.name for path in (RESULTS / claim).glob("*"))
    sweep = yaml.safe_load((HERE / f"{claim}.yaml").read_text(encoding="utf-8"))["sweep"]
    varied = [name for name in sweep if name not in ("seeds", "together", "compare")]
    assert len(varied) == 1, f"{claim}.yaml: a claim varies one thing, not {', '.join(varied)}"
    return [f"{varied[0]}={value}" for value in sweep[varied[0]]]


def value(record: Record, column: str, updates: float = math.inf) -> float:
    """Return a number of a run: `reward`, the mean of the last points of its curve, or a column of its last evaluation after at
    most so many updates."""
    if column == "reward" and (curve := record["curve"])["tokens"]:
        (rewards,) = (values for name, values in curve.items() if name != "tokens")
        known = rewards[: math.ceil(len(rewards) * min(1, updates / record["updates"]))]
        return float(np.mean(known[-LAST:])) if known else math.nan
    evaluations = [row for row in record["evaluations"] if row["updates"] <= updates and column in row]
    return evaluations[-1][column] if evaluations else math.nan


def claim_table(claim: str, plan: Mapping[str, Any]) -> str:
    """Return the table of a claim: the means of each condition over seeds, with 95 % intervals and the p of a difference."""
    against = plan["against"]
    records = {name: runs for name, runs in load(claim).items() if runs or name == against}
    budget = plan.get("updates", math.inf)
    rows = [[name, str(len(runs))] for name, runs in records.items()]
    for column in plan["columns"]:
        for limit in dict.fromkeys((budget, math.inf)):
            values = [np.array([value(run, column, limit) for run in runs]) for runs in records.values()]
            reference = values[list(records).index(against)]
            tests = [welch(x, reference) if x is not reference else (math.nan,) * 3 for x in values]
            corrected = holm([p for *_, p in tests])
            for row, x, p in zip(rows, values, corrected, strict=True):
                row.append(text_of(mean_of(x), half_of(x)) + f" (p {p:.2g})" * math.isfinite(p))
    for row, runs in zip(rows, records.values(), strict=True):
        row.append(f"{np.mean([run['tokens'] for run in runs]) / 1e3:,.0f}k" if runs else "")
        row.append(f"{np.mean([run['reward_calls'] for run in runs]) / 1e3:,.0f}k" if runs else "")
        row.append(f"{np.mean([run['cpu_seconds'] for run in runs]) / 60:.1f}" if runs else "")
    ends = [f"after {budget} updates", "at the end"] if math.isfinite(budget) else [""]
    head = [f"`{column}` {end}".strip() for column in plan["columns"] for end in ends]
    return markdown_table(["", "seeds", *head, "tokens", "reward calls", "CPU min"], rows)


def plan_table(plan: Plan) -> str:
    """Return what is done of what is planned, and a line of what is not begun."""
    rows, waiting = [], []
    for claim, own in plan.items():
        if "minutes" not in own:  # it has no runs of its own
            continue
        if not (runs := [run for group in load(claim).values() for run in group]):
            waiting.append(f"`{claim}` ({own['minutes']})")
            continue
        spent = sum(run["cpu_seconds"] for run in runs) / 120  # on two cores
        rows.append(
            [f"`{claim}`", own["question"], f"{own['minutes']}", f"{spent:.0f}", str(len(runs)), own["budget"], own["stop"]]
        )
    table = markdown_table(["claim", "question", "minutes planned", "spent", "runs", "budget", "ends"], rows)
    return f"{table}\n\nPlanned and not run (minutes): {', '.join(waiting)}." if waiting else table


def aggregate_table(plan: Mapping[str, Any]) -> str:
    """Return the table of conditions over several tasks: the interquartile mean of all runs, of those that have runs of all
    tasks, and of each task the mean with its interval, and the tokens after which the mean curve has made 80 % of the way of
    the best condition."""
    tasks = {task: {name: runs for name, runs in load(task).items() if runs} for task in plan["tasks"]}
    rows = []
    for name in dict.fromkeys(name for records in tasks.values() for name in records):
        cells, scores, seconds = [], [], []
        for records, column in zip(tasks.values(), plan["columns"], strict=True):
            scores.append(np.array([value(run, column) for run in records.get(name, [])]))
            seconds += [run["cpu_seconds"] for run in records.get(name, [])]
            cells.append(cell_of(scores[-1], tokens_to_goal(records, name)) if name in records else "–")
        count, interval, mean = min(map(len, scores)), "–", -math.inf
        if count:
            mean, low, high = stratified_interval(np.array([own[:count] for own in scores]).T)
            interval = f"{mean:.3f} ({low:.3f} to {high:.3f})"
        rows.append((mean, [f"`{name}`", f"{max(map(len, scores))}", interval, *cells, f"{np.mean(seconds) / 60:.1f}"]))
    head = ["", "seeds", "interquartile mean", *(f"`{task}` (tokens)" for task in tasks), "CPU min"]
    return markdown_table(head, [row for _, row in sorted(rows, key=lambda row: -row[0])])


def cell_of(scores: np.ndarray, tokens: float) -> str:
    """Return the mean of the runs of a task with its interval, and in brackets the tokens to the goal if it was reached."""
    return f"{text_of(scores.mean(), half_of(scores))} ({f'{tokens / 1e3:,.0f}k' if math.isfinite(tokens) else 'not reached'})"


def tokens_to_goal(records: Mapping[str, list[Record]], name: str) -> float:
    """Return the tokens after which the mean curve of a condition has made 80 % of the way of the best condition."""
    means = {
        own: (tokens, rewards.mean(0)) for own, (tokens, rewards) in ((own, curves(runs)) for own, runs in records.items())
    }
    start, best = (pick(rewards[index] for _, rewards in means.values()) for pick, index in ((min, 0), (max, -1)))
    return tokens_to(start + 0.8 * (best - start), *means[name])


def curves(runs: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, between those after which all runs have begun and the first of them has ended, and the reward of each run
    after so many [run, point]."""
    own = [run["curve"]["tokens"] for run in runs]
    tokens = np.linspace(max(x[0] for x in own), min(x[-1] for x in own), max(map(len, own)))
    rewards = [next(values for name, values in run["curve"].items() if name != "tokens") for run in runs]
    return tokens, np.array([np.interp(tokens, *points) for points in zip(own, rewards, strict=True)])


def draw(claim: str, plan: Mapping[str, Any]) -> None:
    """Draw the learning curves of a claim over tokens: means over seeds, with 95 % intervals. Many conditions are dots."""
    records = {name: runs for name, runs in load(claim).items() if runs}
    if len(records) > MOST_CURVES:
        return draw_dots(claim, plan, records)
    figure, axes = pyplot().subplots(figsize=(6.4, 3.6), constrained_layout=True)
    for i, (name, runs) in enumerate(records.items()):
        tokens, rewards = curves(runs)
        mean, interval = mean_and_interval(rewards.T)
        axes.plot(tokens, mean, color=f"C{i}", label=f"{name} ({len(runs)} seeds)")
        axes.fill_between(tokens, mean - interval, mean + interval, color=f"C{i}", alpha=0.2, linewidth=0)
    axes.set(xlabel="tokens that all agents wrote", ylabel="reward in training")
    axes.legend(fontsize=8)
    save(figure, axes, claim, plan)


def draw_dots(claim: str, plan: Mapping[str, Any], records: Mapping[str, Sequence[Record]]) -> None:
    """Draw the first column of each condition, sorted: every seed, the mean, and its 95 % interval."""
    column = plan["columns"][0]
    values = {name: np.array([value(run, column) for run in runs]) for name, runs in records.items()}
    names = sorted(values, key=lambda name: values[name].mean())
    figure, axes = pyplot().subplots(figsize=(6.4, 0.8 + 0.22 * len(names)), constrained_layout=True)
    for i, name in enumerate(names):
        axes.plot(values[name], [i] * len(values[name]), ".", color="C0", alpha=0.4)
        axes.errorbar(values[name].mean(), i, xerr=half_of(values[name]), fmt="o", color="C0", markersize=4, capsize=3)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel=f"{column} at the end, over seeds")
    save(figure, axes, claim, plan)


def save(figure: Any, axes: Any, claim: str, plan: Mapping[str, Any]) -> None:
    """Write the figure of a claim."""
    axes.set_title(plan["question"], fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(HERE / "figures" / f"{claim}.png", dpi=110)
    pyplot().close(figure)


def write(plan: Plan, claims: Sequence[str] = ()) -> None:
    """Write the tables of EVIDENCE.md and the figures that it shows."""
    shown = PAGE.read_text(encoding="utf-8")
    (HERE / "figures").mkdir(exist_ok=True)
    parts = {task for own in plan.values() for task in own.get("tasks", [])}  # whose tables are one
    write_table("plan", plan_table(plan), PAGE)
    for claim in claims or plan:
        if f"{claim}_pairs" in plan:  # which has the numbers of its agents
            continue
        if "tasks" in plan[claim]:
            if all(any(load(task).values()) for task in plan[claim]["tasks"]):
                write_table(claim, aggregate_table(plan[claim]), PAGE)
        elif any(load(claim).values()):
            if claim not in parts and plan[claim].get("table", True):
                write_table(claim, claim_table(claim, plan[claim]), PAGE)
            if f"figures/{claim}.png" in shown:
                draw(claim, plan[claim])
            print(f"wrote what the page shows of {claim}", flush=True)
