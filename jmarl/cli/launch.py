"""`jmarl launch`: start a command, a script or a module as several processes that are one run."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from jmarl.cli.main import COMMANDS, parser_for, to_stderr
from jmarl.config.paths import expand_home
from jmarl.processes.launch import Launch, launch, process_command

PORT = 29500  # of the coordinator where several hosts must agree on one
EPILOG = """examples:
  jmarl launch --nproc-per-node 4 -- train --config my.yaml
  jmarl launch --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr node1 -- train --config my.yaml   on node1
  jmarl launch --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr node1 -- train --config my.yaml   on the other
  jmarl launch --nproc-per-node 2 --strategy fsdp -- experiments/examples/train_distributed_ppo.py --quick
  jmarl launch --nproc-per-node 2 --restarts 3 --elastic -- train --config my.yaml

Each process has the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and a GPU of its own where
there are any. jmarl train, the experiments and jmarl.join_processes() read them. Flags may be written with underscores.

exit codes: 0 done; 75 all processes were interrupted and saved; else that of the first process that failed (128 + signal)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    where = parser.add_argument_group("where")
    number = dict(type=int, metavar="N")
    flag(where, "--nproc-per-node", **number, help="processes on this host")
    flag(where, "--nnodes", **number, default=1, help="hosts, each with this many processes; default: 1")
    flag(where, "--node-rank", **number, default=0, help="number of this host, from 0")
    flag(where, "--master-addr", metavar="HOST", default="", help="name of host 0, for several hosts")
    flag(where, "--master-port", **number, default=0, help=f"port on host 0; default: a free one, {PORT} with several hosts")
    flag(where, "--devices-per-process", **number, help="GPUs of a process, by default 1; or CPU devices")
    flag(
        where,
        "--strategy",
        choices=("fsdp", "ddp"),
        help="divide weights over all devices, or replicate them: a setting of train",
    )
    again = parser.add_argument_group("when a process fails")
    flag(again, "--restarts", **number, default=0, help="start all again, at most N times; train continues from its checkpoint")
    flag(
        again,
        "--elastic",
        action="store_true",
        help="without the one that failed first (on one host, with mesh auto or data=all)",
    )
    flag(
        again,
        "--grace",
        type=float,
        metavar="SECONDS",
        default=15.0,
        help="from SIGTERM to SIGKILL for the others; default: 15",
    )
    flag(parser, "--log-dir", metavar="DIR", help="where rank_N.txt are; default: logs in the run's directory, or logs")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="train --config FILE, a script FILE.py, or -m MODULE")


def flag(group: argparse._ActionsContainer, name: str, **settings: object) -> None:
    """Add a flag that may be written with underscores too, as those of torchrun."""
    group.add_argument(name, **settings)  # type: ignore[arg-type]
    other = "--" + name[2:].replace("-", "_")
    if other != name:
        hidden = {key: value for key, value in settings.items() if key != "metavar"}
        group.add_argument(other, **hidden | dict(help=argparse.SUPPRESS, default=argparse.SUPPRESS))  # type: ignore[arg-type]


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    check(args)
    words = [*args.command]
    words = words[1:] if words[:1] == ["jmarl"] else words
    process_command(words, [*COMMANDS])  # refuses what cannot be started
    directory = "logs"
    if words[0] == "train":
        directory, has_mesh = run_directory(words)
        if args.strategy:
            words += ["--set", f"strategy={args.strategy}", *([] if has_mesh else ["mesh=data=all"])]
    elif args.strategy:
        words += ["--strategy", args.strategy]
    logs = Path(args.log_dir or directory)
    again = [*without_resume(words), "--resume", "auto"] if words[0] == "train" else words
    to_stderr(f"{args.nproc_per_node} processes on this host, their output is in {logs}/rank_N.txt")
    settings = Launch(
        tuple(process_command(words, [*COMMANDS])), tuple(process_command(again, [*COMMANDS])), args.nproc_per_node, logs,
        args.nnodes, args.node_rank, args.master_addr, args.master_port or (PORT if args.nnodes > 1 else 0),
        args.devices_per_process, args.restarts, args.elastic, args.grace,
    )  # fmt: skip
    return launch(settings, lambda text: print(f"jmarl: {text}", file=sys.stderr, flush=True))


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not fit each other."""
    for name, value in (("--nproc-per-node", args.nproc_per_node), ("--nnodes", args.nnodes)):
        if value is None or value < 1:
            raise ValueError(f"{name} {value} is not allowed: give a number of at least 1")
    if args.restarts < 0 or (args.devices_per_process or 1) < 1:
        raise ValueError("--restarts is at least 0, and --devices-per-process at least 1")
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank} is not allowed: from 0 to {args.nnodes - 1}, the --nnodes")
    if args.nnodes > 1 and not args.master_addr:
        raise ValueError(f"--nnodes {args.nnodes} needs --master-addr, the name of host 0")
    if args.elastic and (args.nnodes > 1 or not args.restarts):
        raise ValueError("--elastic needs --restarts N and one host: launchers of several hosts do not know of each other")


def run_directory(words: Sequence[str]) -> tuple[str, bool]:
    """Return the directory for logs of `train ...`, inside that of its run, and whether a mesh is given.

    Only files and flags are read: JAX, which would take the devices, is not imported."""
    from jmarl.cli.configuration import choose_directory, own_settings, read_sources

    args = parser_for(words).parse_args(words)
    names, sources, _ = read_sources(args)
    own, finish = own_settings(sources)
    kind = {"sft": "texts", "dpo": "pairs"}.get(own["algorithm"].value if "algorithm" in own else "", "rollouts")
    with warnings.catch_warnings(), contextlib.suppress(ValueError):  # the processes show both, with their places
        warnings.simplefilter("ignore")
        settings = finish(own, kind)
        choose_directory(settings, Path(names[0]).stem)
        return f"{expand_home(settings['output_dir'].value)}/logs", "mesh" in settings
    return "logs", "mesh" in own


def without_resume(words: Sequence[str]) -> list[str]:
    """Return the words without the flag --resume and its value."""
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--resume":
            if words and not words[0].startswith("-"):
                words.pop(0)
        elif not word.startswith("--resume="):
            rest.append(word)
    return rest
