"""`jmarl train`: run the experiment of a YAML file, with any algorithm.

Settings come from the files, later ones override; then from --set, which takes any setting in any spelling; then from the other
flags. `config.yaml` in the run's directory has them all, and `jmarl train --config RUN/config.yaml` repeats the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging

from jmarl.cli.main import add_trust_argument, show
from jmarl.lazy import collector_paused

EPILOG = """examples:
  jmarl configs list                                          the shipped files
  jmarl train --config magrpo                                 one of them by name
  jmarl train --config my.yaml --set learning_rate=2e-5 --set num_prompts=4
  jmarl train --config base.yaml,big.yaml --output runs/big   big.yaml overrides base.yaml
  jmarl train --config my.yaml --resume                       continue from the newest checkpoint
  jmarl train --config my.yaml --resume auto                  begin or continue, for a queue that starts jobs again
  jmarl train --config runs/big/config.yaml --output runs/again

exit codes: 0 done; 1 failed, or a checkpoint or model could not be written; 2 wrong settings; 75 interrupted and saved;
130 interrupted and nothing is saved. `jmarl configs settings` lists all settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    what = parser.add_argument_group("what to run")
    what.add_argument("--config", required=True, metavar="FILE[,FILE...]", help="YAML files, or names of shipped ones")
    what.add_argument("--set", nargs="+", action="extend", metavar="NAME=VALUE", help="any setting, overrides the files")
    what.add_argument("--seed", type=int, metavar="N", help="as --set seed=N")
    text = "of a sweep only these runs, by their directories"
    what.add_argument("--only", nargs="+", action="extend", default=[], metavar="NAME", help=text)
    add_trust_argument(what)
    where = parser.add_argument_group("where")
    where.add_argument("--output", metavar="DIR", help="directory of the run; default: runs/<experiment_name>")
    where.add_argument("--device", choices=("auto", "cpu", "gpu", "tpu"), help="platform; default: what JAX finds")
    where.add_argument(
        "--distributed",
        default="",
        metavar="auto|HOST:PORT",
        help="join processes into one run, found by Slurm, Open MPI, Kubernetes, torchrun (auto), or at process 0",
    )
    where.add_argument("--pool", choices=("processes", "ray"), help="where environments and rewards run")
    how_to = parser.add_argument_group("how")
    how_to.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="latest|auto|STEP|PATH",
        help="continue from the newest checkpoint (auto: or begin), that of a step, or of a run's directory",
    )
    how_to.add_argument("--dry-run", action="store_true", help="check everything, play and show an episode, end")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with collector_paused():
        from jmarl.cli.configuration import naming_places, read_configuration
        from jmarl.cli.settings.running import train
        from jmarl.logs.samples import SAMPLES
        from jmarl.processes.join import joined_place
        from jmarl.processes.place import check_processes

        SAMPLES.setLevel(logging.INFO if args.verbose else logging.WARNING)
        configuration = read_configuration(args)  # imports jax
    with naming_places(configuration.given):
        choose_device(configuration.device, args.distributed)
        if "processes" in configuration.given and not args.dry_run:
            asked = configuration.given["processes"]
            try:
                check_processes(asked.value, joined_place())
            except ValueError as error:
                raise ValueError(f"{asked.place}: {error}") from None
        lines = list(configuration.notes)
        if configuration.experiment.train.run.mesh == "data=all":
            lines.append(devices_line())
        sweep = None
        if configuration.sweep is not None:
            from jmarl.cli.sweep import read_sweep

            sweep = read_sweep(args, configuration)
        elif args.only:
            raise ValueError(f"--only {' '.join(args.only)} chooses runs of a sweep, and no file has a section sweep")
        if args.dry_run:
            from jmarl.cli.dry_run import checked_run, checked_sweep

            lines += checked_run(configuration.experiment) if sweep is None else checked_sweep(sweep.chosen)
            print("\n".join(lines))
            return 0
        if lines:
            show("\n".join(lines))
        if sweep is not None:
            from jmarl.cli.sweep import run_sweep
            from jmarl.processes import exchange

            exchange.require_one("sweeps")
            return run_sweep(sweep, args.line)
        return train(configuration.experiment)[0]


def choose_device(name: str, distributed: str = "") -> None:
    """Choose the platform of JAX, and join the processes of the run if there are several. Raises ValueError if this machine
    does not have the platform.

    distributed: as for `join_processes`."""
    import jax

    from jmarl.processes.join import join_processes

    if name not in ("auto", "cpu", "gpu", "tpu"):
        raise ValueError(f"device={name!r} is not allowed: choose auto, cpu, gpu or tpu")
    if name != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(name, name))
    join_processes(distributed)
    if name == "auto":
        return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that the platform has a plugin
        hint = "; pip install 'jmarl[cuda12]'" if name == "gpu" and not importlib.util.find_spec("jax_cuda12_plugin") else ""
        raise ValueError(f"device={name!r} is not on this machine{f': {error}' if str(error) else ''}{hint}") from error


def devices_line() -> str:
    """Return what `distributed` does with the devices."""
    import jax

    count = jax.device_count()
    if count == 1:
        return "distributed: there is one device, so nothing is spread over others"
    where = "this process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
    return f"distributed: weights and batches are spread over {count} devices of {where}"
