"""`jmarl serve`: offer environments to training on other machines, or a team to other programs.

jmarl serve --environments math,my_module:Env     over gRPC; jax is not imported
jmarl serve --models RUN --http                   over HTTP, as OpenAI's clients speak it
jmarl serve --openenv ENV [--models RUN]          one seat of an environment, over WebSockets as OpenEnv's clients speak it
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmarl.cli.main import add_trust_argument, find_own_modules, to_stderr
from jmarl.cli.teams.match import MODEL_HELP
from jmarl.cli.teams.seats import add_openenv_arguments, load_team, run_openenv
from jmarl.cli.teams.sources import require_trusted_task
from jmarl.config import check
from jmarl.remote import Access, ServerLimits

if TYPE_CHECKING:  # imported in the functions, so that `--help` answers at once
    from jmarl.cli.teams.sources import TeamSource

PORT = 50051  # of a server of environments
EPILOG = """examples:
  jmarl serve --environments math,debate,my_module:Env
  jmarl serve --environments code --workers 4 --rewards my_module:reward
  jmarl serve --config served.yaml --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem
  jmarl serve --models runs/mine --http
  jmarl serve --models smollm2-135m-instruct --http --port 8000
  jmarl serve --openenv math --port 8001
  jmarl serve --models runs/mine --http --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem"""


SEAT_SESSIONS = 16  # of --openenv: each has a thread
LIMITS = {
    "--sessions": ("all_sessions", "open sessions of all clients"),
    "--client-sessions": ("sessions", "open sessions of one client"),
    "--client-bytes": ("client_bytes", "bytes of the sessions of one client, and of its requests under way"),
    "--idle-timeout": ("idle_seconds", "seconds without a call after which a session ends"),
    "--call-timeout": ("call_seconds", "seconds that a call of an environment or reward may take"),
    "--message-bytes": ("message_bytes", "bytes of a message"),
}

DEFAULTS = {"workers": 0, "grace": 300.0, "slots": 8, "max_waiting": 64, "seat": 0, "split": "train"} | {
    flag[2:].replace("-", "_"): getattr(ServerLimits(), name) for flag, (name, _) in LIMITS.items()
}
OTHER_DEFAULTS = {"--models": {"grace": 30.0}, "--openenv": {"sessions": SEAT_SESSIONS}}
FLAGS = {  # flags that have an effect, besides those of access
    "--environments": ["environments", "rewards", "config", "workers", "grace"]
    + [flag[2:].replace("-", "_") for flag in LIMITS],
    "--models": ["models", "base_model", "trust", "names", "http", "slots", "max_waiting", "max_new_tokens", "mesh", "grace"],
    "--openenv": ["openenv", "option", "seat", "split", "models", "base_model", "max_new_tokens", "sessions"]
    + ["idle_timeout", "call_timeout", "grace"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    add_environments_arguments(parser)
    add_models_arguments(parser)
    add_openenv_arguments(parser)
    add_access_arguments(parser)


def add_environments_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which environments and rewards are served, and what clients may use."""
    group = parser.add_argument_group("environments and rewards")
    group.add_argument(
        "--environments", default="", metavar="E[,E...]", help="names such as math, module:Class or file.py:Class"
    )
    group.add_argument("--rewards", default="", metavar="R[,R...]", help="module:function or file.py:function")
    group.add_argument("--config", metavar="FILE", help="YAML file with names, each with {env: math, ...} or {reward: m:f}")
    group.add_argument("--workers", type=int, metavar="N", help="processes of each environment (0: none)")
    text = "seconds for episodes and requests after SIGTERM (300; with --http 30)"
    group.add_argument("--grace", type=float, metavar="S", help=text)
    limits = ServerLimits()
    for flag, (name, text) in LIMITS.items():
        default = getattr(limits, name)
        shown = f"{default}; with --openenv {SEAT_SESSIONS}" if flag == "--sessions" else default
        group.add_argument(flag, type=type(default), metavar="N", help=f"{text} ({shown})")


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which team is served, and how."""
    models = parser.add_argument_group("a team")
    models.add_argument("--models", nargs="+", metavar="M", help=MODEL_HELP)
    text = "models that a run without config.yaml started from, to read its checkpoints"
    models.add_argument("--base-model", nargs="+", metavar="M", help=text)
    add_trust_argument(models)
    text = "names of the agents for clients; default: the roles of the run's environment, else agent_0, ..."
    models.add_argument("--names", nargs="+", metavar="NAME", help=text)
    models.add_argument("--http", action="store_true", help="over HTTP, as OpenAI's clients speak it (/v1/chat/completions)")
    text = "rows of an agent that are sampled side by side (8); more take more memory"
    models.add_argument("--slots", type=int, metavar="N", help=text)
    text = "requests that may wait for a slot (64); others get status 429"
    models.add_argument("--max-waiting", type=int, metavar="N", help=text)
    text = "longest completion, of a request (1024, or that of the training if longer) or of other seats (that of the training)"
    models.add_argument("--max-new-tokens", type=int, metavar="N", help=text)
    text = "devices by axis, such as agent=2; auto; agent=1 is one device; default: as in the run"
    models.add_argument("--mesh", metavar="AXES", help=text)


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where a server listens, and who may connect."""
    access = parser.add_argument_group("who may connect (any other host than this machine needs TLS and a token)")
    access.add_argument("--host", default=Access.host, metavar="H", help="address to listen on (%(default)s)")
    text = f"port; 0: a free one, which is printed; default: {PORT} for environments, else 0"
    access.add_argument("--port", type=int, metavar="N", help=text)
    access.add_argument("--token-file", metavar="FILE", help="file with the token that clients must send")
    access.add_argument("--tls-cert", metavar="FILE", help="certificate of the server, PEM")
    access.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    text = "who signs the certificates that clients must show"
    access.add_argument("--tls-client-ca", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    files = (args.token_file, args.tls_cert, args.tls_key, args.tls_client_ca)
    serves_environments = bool(args.environments or args.rewards or args.config)
    if args.openenv:
        if args.http or serves_environments:
            other = "--http" if args.http else "--environments, --rewards or --config"
            raise ValueError(f"--openenv and {other} exclude each other: run a server for each")
        fill(args, "--openenv")
        return run_openenv(args, Access.of(args.host, args.port or 0, *files, warn=to_stderr))
    if serves_environments == bool(args.models):
        raise ValueError("give --environments (or --config, --rewards), --models or --openenv: a server offers one of them")
    if args.models and not args.http:
        raise ValueError("--models is served over HTTP: add --http")
    if args.http and not args.models:
        raise ValueError("--http is for a team, environments are served over gRPC: remove it")
    fill(args, "--environments" if serves_environments else "--models")
    port = (PORT if serves_environments else 0) if args.port is None else args.port
    access = Access.of(args.host, port, *files, warn=to_stderr)
    return run_environments(args, access) if serves_environments else run_models(args, access)


def fill(args: argparse.Namespace, kind: str) -> None:
    """Set the defaults of flags. kind: of the server. Raises ValueError for flags that have no effect on it."""
    for name in dict.fromkeys(name for names in FLAGS.values() for name in names):
        value = getattr(args, name)  # 0 is given, False and an empty text are not
        if value is not False and value not in (None, "") and name not in FLAGS[kind]:
            raise ValueError(f"--{name.replace('_', '-')} has no effect on a server of {kind}: remove it")
    for name, value in (DEFAULTS | OTHER_DEFAULTS.get(kind, {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def run_environments(args: argparse.Namespace, access: Access) -> int:
    """Serve environments and rewards until SIGTERM or Ctrl+C."""
    if missing := [name for name in ("grpc", "grpc_health") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"serving environments needs {' and '.join(missing)}: pip install 'jmarl[serve]'")
    limits = {}
    for flag, (name, _) in LIMITS.items():
        limits[name] = getattr(args, flag[2:].replace("-", "_"))
        power = 40 if name == "client_bytes" else 30
        check(flag, limits[name], 0 < limits[name] < 1 << power, f"a number above 0 and below 2^{power}")
    check("--workers", args.workers, 0 <= args.workers <= 1024, "a number of processes, or 0 for none")
    check("--grace", args.grace, 0 <= args.grace < 1 << 30, "a number of seconds")
    find_own_modules()
    from jmarl.remote import serve_environments

    offer = args.environments, args.rewards, args.config
    return serve_environments(*offer, access, ServerLimits(**limits), args.workers, args.grace)


def run_models(args: argparse.Namespace, access: Access) -> int:
    """Serve a team until SIGTERM or Ctrl+C."""
    if missing := [name for name in ("uvicorn", "fastapi") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"--http needs {' and '.join(missing)}: pip install 'jmarl[serve]'")
    check("--grace", args.grace, 0 <= args.grace < 1 << 30, "a number of seconds")
    for name, least in (("slots", 1), ("max_waiting", 1), ("max_new_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not allowed: give {least} or more")
    find_own_modules()
    team, cfg, source = load_team(args)
    cfg = cfg if args.mesh is None else cfg.replace(mesh=args.mesh)
    to_stderr(f"{source.text}: {', '.join(names := agent_names(source, args.names, args.trust))}")
    from jmarl.serving import serve_models

    limits = dict(slots=args.slots, max_waiting=args.max_waiting, max_tokens=args.max_new_tokens, grace_s=args.grace)
    return serve_models(team, names, cfg, access, **limits)


def agent_names(source: TeamSource, given: Sequence[str] | None = None, trust: bool = False) -> list[str]:
    """Return the names of agents for clients: those given, else the roles of the environment that their run learned in, else
    agent_0, ..."""
    from jmarl.envs import make

    numbered = [f"agent_{i}" for i in range(len(source.agents))]
    if given is not None:
        if len({*given}) != len(numbered) or len(given) != len(numbered):
            raise ValueError(
                f"--names {' '.join(given)} is not allowed: give {len(numbered)} different names, one for each agent"
            )
        return [*given]
    if source.experiment is None:
        return numbered
    task = source.experiment.task
    entries = task.train_envs or task.eval_envs
    if task.environment is None and len(entries) != 1:  # data, or several environments with roles of their own
        return numbered
    if source.directory is not None:
        require_trusted_task(source.directory, source.experiment, trust)
    name, options = (entries[0].name, entries[0].options) if task.environment is None else (task.environment, task.options)
    try:
        roles = make(name, **options).roles
    except ValueError as error:
        raise ValueError(f"the roles of the run's environment are not known: {error}. Or give --names") from error
    names = [role.replace(" ", "_") for role in roles]
    return names if len({*names}) == len(names) == len(numbered) else numbered
