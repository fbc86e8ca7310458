"""`jmarl cross-play RUN RUN ...`: play all pairings of the agents of several runs, and print the mean return of each.

Agent 0 of one run with agent 1 of another: teams that never met in training, on the diagonal those that did. The runs must have
learned the same task, which is played; `--config` names another one. Strangers (`jmarl.league.strangers`) stand behind the runs
as module:function or an address, and hold any seat. See `jmarl.evaluation.cross_play` and, for episodes of several turns or
with strangers, `jmarl.league.pairings` for what is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import add_trust_argument, check_output, find_own_modules, plural, to_stderr
from jmarl.cli.teams.match import add_sampling_arguments, environment_of_run, play_config, sampling_settings
from jmarl.cli.teams.sources import experiment_of, is_run, load_source, require_trusted_task

if TYPE_CHECKING:  # imported in the functions, so that `--help` answers at once
    from jmarl.config import ExperimentConfig, TrainConfig
    from jmarl.evaluation.zero_shot import CrossPlay
    from jmarl.league.seats import Stranger
    from jmarl.models.hub.agents import Agent

EPILOG = """examples:
  jmarl cross-play runs/seed_0 runs/seed_1 runs/seed_2 --json pairings.json
  jmarl cross-play runs/a runs/b --config my.yaml -n 50
  jmarl cross-play runs/a jmarl.envs.games.tictactoe:minimax http://localhost:8000/v1#model"""
SAME = (
    "environment", "options", "train_envs", "eval_envs", "data", "subset", "reward", "formatters", "external_transition",
    "in_turns", "split", "held_out", "held_out_split",
)  # fmt: skip
MODULES = ("reward", "formatters", "external_transition", "environment")  # with the directory that they were found in, perhaps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    text = "directory of a run, or of agents (agent_0/, ...); behind them strangers: module:function prompt -> text, or the "
    text += "address of an OpenAI-compatible API"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    parser.add_argument("--config", metavar="FILE", help="play the task of this YAML file instead of that of the runs")
    parser.add_argument("--split", choices=("train", "eval"), default="eval", help="its tasks to play; default: eval")
    parser.add_argument("-n", "--num-tasks", type=int, default=100, metavar="N", help="at most so many tasks; default: 100")
    text = "completions of each task and agent; default: 4"
    parser.add_argument("--num-generations", type=int, default=4, metavar="K", help=text)
    text = "pair completion k with k of the others (aligned), or with all of them; default: aligned"
    parser.add_argument("--joint-mode", choices=("aligned", "cross"), default="aligned", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of tasks and sampling; default: 0")
    parser.add_argument("--json", metavar="FILE", help="write all numbers to this file")
    add_trust_argument(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(environment=None, option=[], data=None)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import numpy as np

    from jmarl.evaluation.cross_play import check_runs, run_names
    from jmarl.league.strangers import is_stranger, open_stranger, short_names
    from jmarl.runs.precompile import keep_programs

    find_own_modules()
    for flag, value in (("--num-tasks", args.num_tasks), ("--num-generations", args.num_generations)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    others = [name for name in args.runs if is_stranger(name)]
    args.runs = [name for name in args.runs if name not in others]
    if not args.runs:
        raise ValueError(f"{', '.join(others)}: strangers play with the agents of runs: give the directory of a run in front")
    names = [*run_names(args.runs), *short_names(others)]
    cfg = task_of_runs(args)
    check_runs(names, [cfg.team.size] * len(names))
    if args.json:
        check_output(args.json, "--json", is_file=True)
    to_stderr(f"reading {', '.join(names)} ...")
    sources = [load_source([directory]) for directory in args.runs]
    check_runs(names, [len(source.agents) for source in sources] + [cfg.team.size] * len(others))
    source = dataclasses.replace(sources[0], cfg=cfg.train, experiment=cfg)
    env, name, options = environment_of_run(source, {})
    keep_programs(to_stderr)
    settings = play_config(args, source, env.max_turns)
    settings = settings.replace(seed=args.seed, eval_generations=args.num_generations, joint_mode=args.joint_mode)
    tasks = env.tasks(args.split, args.num_tasks, args.seed)
    if not tasks:
        raise ValueError(f"there are no tasks in the split {args.split} of {name}: choose another --split")
    to_stderr(f"playing {plural(len(tasks), 'task')} of {name}; the first ones wait for the compiler")
    asked = settings.eval_sampling(), bool(np.any(settings.episodes.chat)), args.seed
    strangers = [open_stranger(name, *asked) for name in others]
    played = play_all([source.agents for source in sources], strangers, tasks, env, settings, names)
    print(f"{played.table()}\n± is the 95 % interval over tasks; self-play: agents of one run, zero-shot: of different runs")
    if args.json:
        what = {"environment": name, "options": options, "split": args.split, "seed": args.seed, **sampling_settings(settings)}
        text = json.dumps(
            played.summary() | {"directories": args.runs, "strangers": others, "settings": what}, ensure_ascii=False, indent=1
        )
        Path(args.json).write_text(text + "\n", encoding="utf-8")
        to_stderr(f"written to {args.json}")
    return 0


def play_all(
    teams: Sequence[Sequence[Agent]],
    strangers: Sequence[Stranger],
    tasks: Sequence[dict],
    env: Any,
    settings: TrainConfig,
    names: Sequence[str],
) -> CrossPlay:
    """Play all pairings: each agent is sampled once if nothing that it reads depends on its partners."""
    import numpy as np

    from jmarl.envs.calls.copies import copies
    from jmarl.evaluation.cross_play import cross_play
    from jmarl.league.pairings import PairedRuns, play_pairings

    _, prompts = env.reset(copies(tasks), np.random.default_rng(0))
    if settings.episodes.num_turns == 1 and not strangers and all(text is not None for row in prompts for text in row):
        return cross_play(teams, tasks, env, settings, names=names)
    return play_pairings(PairedRuns.of(teams, settings), tasks, env, settings, names, strangers)


def task_of_runs(args: argparse.Namespace) -> ExperimentConfig:
    """Return the experiment whose task is played: of --config, or of the first run, if the others have the same task."""
    from jmarl.cli.configuration import read_experiment

    for directory in map(Path, args.runs):
        if not is_run(directory) and not (directory / "agent_0").is_dir():
            raise FileNotFoundError(
                f"{directory} is no run: give directories that `jmarl train` wrote, or of agents (agent_0/)"
            )
    cfg = read_experiment(args.config, args.trust) if args.config else same_task(args.runs)
    if not args.config:
        require_trusted_task(Path(args.runs[0]), cfg, args.trust)
    return cfg


def same_task(runs: Sequence[str]) -> ExperimentConfig:
    """Return the experiment of the first run. Raises ValueError if a run is of another task or does not say of which."""
    experiments = [experiment_of(Path(directory)) for directory in runs]
    known = [experiment for experiment in experiments if experiment is not None]
    if len(known) < len(runs):
        unknown = runs[experiments.index(None)]
        raise ValueError(f"{unknown} has no config.yaml, which says what it played: give --config FILE")
    for directory, experiment in zip(runs, known, strict=True):
        first, own = task_settings(known[0]), task_settings(experiment)
        if changed := [name for name in first if first[name] != own[name]]:
            name = changed[0]
            raise ValueError(
                f"{runs[0]} and {directory} learned different tasks ({name}: {first[name]!r:.80} and {own[name]!r:.80}): give "
                "runs of one task, or --config FILE with the task to play"
            )
    return known[0]


def task_settings(cfg: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that two runs of one task have in common."""
    settings = {name: getattr(cfg.task, name) for name in SAME} | {"roles": cfg.team.roles, "num_agents": cfg.team.size}
    for name in ("data", "held_out"):
        if isinstance(settings[name], str) and Path(settings[name]).exists():
            settings[name] = str(Path(settings[name]).resolve())
    for name in MODULES:
        value = settings[name]
        settings[name] = value.rpartition("/")[2] if isinstance(value, str) else value and [x.rpartition("/")[2] for x in value]
    return settings | {name: getattr(cfg.train.episodes, name) for name in ("chat", "chat_template_kwargs")}
