"""`jmarl plan`: say whether a run fits on a GPU that is not here, and how long it takes at best.

It compiles the run's own programs for that GPU, from the shapes of the models; no weights are read. On the CPU of this machine
`--measure` also makes steps of the run, with its weights and on its devices, until two of them agree.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import add_trust_argument

if TYPE_CHECKING:
    from jmarl.config import ExperimentConfig

EPILOG = """examples:
  jmarl plan --config magrpo --device h100
  jmarl plan --config my.yaml --device rtx4090 --set micro_batches=8 --set remat=full
  jmarl plan --config my.yaml --device a100-40g --fit fits.yaml        settings that fit, the fastest first
  jmarl plan --config my.yaml --device h100 --num-devices 8 --fit fits.yaml     with mesh and strategy, on 8 of one host
  jmarl plan --config my.yaml --device cpu --measure                   predicted beside measured, where the device is here;
                                                                       on a CPU also the time of a step and of the run

Best times are bounds, not measurements. A directory with config.json is enough for a model; without its tokenizer, give
--prompt-tokens. Left out: given pairs and texts, trees of turns, several seeds in one program."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    what = parser.add_argument_group("what to plan")
    what.add_argument("--config", required=True, metavar="FILE[,FILE...]", help="YAML files, or names of shipped ones")
    what.add_argument("--set", nargs="+", action="extend", metavar="NAME=VALUE", help="any setting, overrides the files")
    add_trust_argument(what)
    what.add_argument("--device", required=True, metavar="NAME", help="h100, h200, a100-80g, a100-40g, l40s, rtx4090 or cpu")
    what.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="length of the longest prompt; default: measured on 64 tasks"
    )
    what.add_argument(
        "--num-devices", type=int, metavar="N", help="devices of all hosts; default: as many as the setting mesh names, or 1"
    )
    what.add_argument("--num-nodes", type=int, default=1, metavar="N", help="hosts with equally many devices; default: 1")
    fit = parser.add_argument_group("what to do")
    fit.add_argument(
        "--measure", action="store_true", help="also run the programs on such a device, if it is here; on cpu also steps"
    )
    fit.add_argument("--fit", metavar="FILE", help="find settings that fit, and write them with all others to this YAML file")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not args.measure or args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: a GPU that is here is left alone
    if args.num_devices is not None and args.num_devices < 1:
        raise ValueError(f"--num-devices {args.num_devices} is not allowed: give a number of at least 1")
    if args.num_devices or args.device != "cpu":  # on this CPU a run has the devices that the user has set
        os.environ["JAX_NUM_CPU_DEVICES"] = str(args.num_devices or 1)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of each program that does not fit
    from jmarl.cli.configuration import read_configuration
    from jmarl.models.hub.agents import load_description
    from jmarl.models.sharding import make_mesh
    from jmarl.plan import choose_settings, describe_team, find_gpu, lines_of, make_plan

    gpu = find_gpu(args.device)
    settings: dict[str, Any] = dict(seed=None, device=None, output=None, resume=None, pool=None)
    cfg: ExperimentConfig = read_configuration(argparse.Namespace(**vars(args) | settings)).experiment
    check_can_plan(cfg)
    count = args.num_devices or devices_of(cfg.train.run.mesh)
    if args.num_nodes < 1 or count % args.num_nodes:
        raise ValueError(
            f"--num-nodes {args.num_nodes} does not divide {count} devices: give --num-devices, of all hosts together, and a "
            "divisor of it"
        )
    planned = cfg.train
    if gpu is None and count > 1:
        if not args.measure or args.num_devices:
            raise ValueError(
                f"--device cpu plans one device, and this run is for {count}: virtual devices of a CPU share its memory; plan "
                "it with --set mesh=agent=1, or let --measure make its steps on the mesh"
            )
        make_mesh(cfg.train.run.mesh)  # raises where the devices are missing
        planned, count = planned.replace(mesh="agent=1"), 1
        print(
            f"memory is planned for one device, as virtual devices share it; steps have mesh={cfg.train.run.mesh}", flush=True
        )
    if args.measure and count > 1:
        raise ValueError(f"--measure runs programs on one device, and this plan is for {count}: leave it out")
    if args.fit is not None and args.num_nodes > 1:
        raise ValueError("--fit finds settings for the devices of one host: leave out --num-nodes")
    if args.fit is not None and args.measure:
        raise ValueError("--measure and --fit exclude each other: measure the file that --fit writes")
    if args.fit is not None and not Path(args.fit).absolute().parent.is_dir():
        raise FileNotFoundError(f"--fit {args.fit}: the directory of this file does not exist")
    if args.fit is not None and Path(args.fit).exists():
        raise ValueError(f"--fit {args.fit}: this file exists, and nothing is overwritten: give another name")
    names = cfg.team.models * cfg.team.size if len(cfg.team.models) == 1 else cfg.team.models
    described = {name: load_description(name) for name in dict.fromkeys(names)}
    if args.prompt_tokens is None and any(tokenizer is None for _, tokenizer in described.values()):
        raise ValueError("a model has no tokenizer.json, so prompts cannot be measured: give --prompt-tokens")
    team = describe_team([(name, *described[name]) for name in names], cfg.team.shared_weights)
    prompt_tokens, eval_items = measure_prompts(cfg, team, args.prompt_tokens)
    team = in_chosen_context(team, cfg.train, prompt_tokens)
    where = f"{count} x " * (count > 1) + (gpu.name if gpu else "the CPU of this machine")
    print(
        f"compiling {cfg.train.algorithm} for {where}: prompts of {prompt_tokens} tokens, {eval_items} held-out tasks",
        flush=True,
    )
    if args.fit is not None:
        return find_settings(cfg, args.fit, team, gpu, (prompt_tokens, eval_items, count))
    train, line = choose_settings(team, planned, gpu, prompt_tokens, count)
    if line:
        print(line, flush=True)
    print(
        "\n".join(lines_of(make_plan(team, train, gpu, prompt_tokens, eval_items, args.measure, count, args.num_nodes))),
        flush=True,
    )
    if gpu is None:
        print("\n".join(time_lines(cfg, eval_items, args.measure)))
    return 0


def time_lines(cfg: ExperimentConfig, eval_items: int, measures: bool) -> list[str]:
    """Return how long a run takes on this CPU, from steps of it, as lines."""
    from jmarl.plan import has_weights, lines_of_steps, time_steps

    if not measures:
        return ["how long it takes: --measure makes steps of the run"]
    if missing := [model for model in cfg.team.models if not (cfg.team.random_weights or has_weights(model))]:
        return [f"how long it takes is not known: {missing[0]} has no weights, so no step of the run can be made"]
    print("making steps of the run, until two agree ...", flush=True)
    return lines_of_steps(time_steps(cfg), cfg, eval_items)


def check_can_plan(cfg: ExperimentConfig) -> None:
    """Raise a ValueError for runs whose programs jmarl plan does not make."""
    from jmarl.algorithms import find_row
    from jmarl.runs.experiment import learns_from_completions

    train, turns = cfg.train, cfg.train.episodes.num_turns
    given = not learns_from_completions(cfg)
    if given or find_row(train.algorithm).data != "rollouts":
        raise ValueError(
            f"jmarl plan is for runs on rollouts, and algorithm={train.algorithm} learns from pairs or texts. To learn how "
            "long a step takes, train with num_updates=2: time/step_s of the second row of metrics.jsonl is without compiling"
        )
    reasons = {
        f"num_turns={turns} in trees": turns > 1 and train.episodes.branching != "chain",
        f"several seeds in one program, seeds={list(cfg.seeds)}": len(cfg.seeds) > 1,
        f"a population, members={train.population.members}": train.population.members,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"jmarl plan cannot plan {reason} yet: it plans completions, and turns in chains")
    if (league := train.league).on:
        raise ValueError(
            f"jmarl plan counts the present team alone, and a league (snapshots={league.snapshots}, "
            f"strangers={list(league.strangers)}) samples with the weights of opponents too: plan without league, and add to "
            "its sampling opponents_at_once times the bytes of the parameters (with LoRA of the adapters)"
        )
    if turns > 1:
        print(f"{turns} turns: sampling is that of the first turn, {turns} times; the update has the rows of all turns")
    if find_row(train.algorithm).critic == "central":
        print("not counted: the programs of the central critic (its state is)")


def devices_of(mesh: str) -> int:
    """Return how many devices the setting `mesh` names; 1 for auto and data=all."""
    sizes = [part.partition("=")[2].strip() for part in mesh.split(",")]
    return math.prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else 1


def find_settings(cfg: Any, path: str, team: Any, gpu: Any, sizes: tuple[int, int, int]) -> int:
    """Print settings that were tried, and the plan of the first that fit; write all settings of that run to a YAML file.

    Raises ValueError if none fit.

    sizes: tokens of the longest prompt, number of held-out tasks, number of devices."""
    from jmarl.config.yaml_file import dump_yaml
    from jmarl.plan import line_of, lines_of, prove

    if gpu is None:
        raise ValueError("--fit is for GPUs, and --device is cpu")
    for settings, plan, fits in prove(team, cfg.train, gpu, *sizes):
        print(line_of(settings, plan, fits), flush=True)
        if fits:
            Path(path).write_text(dump_yaml(cfg.replace(**settings).as_dict()), encoding="utf-8")
            print("\n".join(["", *lines_of(plan), f"written to {path}: jmarl train --config {path}"]))
            return 0
    raise ValueError(f"nothing that was tried fits on the {gpu.name}: set lora_rank, a smaller model, or shorter completions")


def in_chosen_context(team: Any, cfg: Any, prompt_tokens: int) -> Any:
    """Return a team in the context that a run chooses for prompts of this length, see `Run.long_context`."""
    longest, configs = prompt_tokens + cfg.sampling.max_new_tokens, [spec.config for spec in team.stacks]
    is_long = any(config.has_two_contexts and longest > config.context for config in configs)
    return team.in_context("auto" if cfg.run.long_context == "auto" and not is_long else is_long or cfg.run.long_context)


def measure_prompts(cfg: Any, team: Any, prompt_tokens: int | None) -> tuple[int, int]:
    """Return the length of the longest of the first prompts, unless it is given, and the number of held-out tasks."""
    from jmarl.randomness import TRAIN, Randomness
    from jmarl.runs.experiment import task_of
    from jmarl.sampling.generate import tokenize

    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    if prompt_tokens is None:
        _, prompts = task.env.reset(task.items[:64], Randomness(cfg.train.run.seed, 0, TRAIN).environment_rng())
        rows = tokenize(team, prompts, cfg.train.sampling, cfg.train.episodes.chat_settings, allow_long=True)
        prompt_tokens = max(len(row) for agent in rows for row in agent)
    return prompt_tokens, len(task.held_out)
