"""`jmarl serve --openenv ENV`: offer one seat of an environment to clients of OpenEnv; a team plays the others. And the team of
`jmarl serve --models`, for both.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmarl.cli.main import find_own_modules, to_stderr
from jmarl.cli.teams.match import built, options_of
from jmarl.cli.teams.sources import load_source
from jmarl.config import check
from jmarl.remote import Access

if TYPE_CHECKING:  # imported in the functions: without a team there is no jax
    from jmarl.cli.teams.sources import TeamSource
    from jmarl.config import TrainConfig
    from jmarl.serving import TeamSeats
    from jmarl.team import Team


def add_openenv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a seat."""
    seat = parser.add_argument_group("a seat of an environment")
    text = "offer one seat of this environment to clients of OpenEnv; --models plays the other seats"
    seat.add_argument("--openenv", metavar="ENV", help=text)
    seat.add_argument("--option", action="append", metavar="KEY=VALUE", help="argument of its constructor")
    seat.add_argument("--seat", type=int, metavar="N", help="number of the role; default: 0")
    seat.add_argument("--split", choices=("train", "eval"), help="its tasks; default: train")


def run_openenv(args: argparse.Namespace, access: Access) -> int:
    """Serve until SIGTERM or Ctrl+C."""
    if importlib.util.find_spec("websockets") is None:
        raise ValueError("--openenv needs websockets: pip install 'jmarl[serve]'")
    check("--sessions", args.sessions, args.sessions > 0, "a number above 0")
    check("--idle-timeout", args.idle_timeout, args.idle_timeout > 0, "a number above 0")
    check("--call-timeout", args.call_timeout, 0 < args.call_timeout < 1 << 30, "a number above 0")
    check("--grace", args.grace, args.grace >= 0, "a number of seconds")
    from jmarl.remote import Seat, serve_seat

    find_own_modules()
    env, name, _ = built(args.openenv, options_of(args.option or []))
    if len(env.roles) == 1 and args.models:
        raise ValueError(f"--models plays the other seats, and environment {name!r} has one: remove it")
    others = others_of(args, env.roles, name) if args.models and 0 <= args.seat < len(env.roles) else None
    seat = Seat(env, args.seat, others, args.split, args.call_timeout)
    return serve_seat(seat, access, args.sessions, args.idle_timeout, to_stderr, args.grace)


def others_of(args: argparse.Namespace, roles: Sequence[str], name: str) -> TeamSeats:
    """Return the team of `--models`, with one agent for each role of an environment."""
    from jmarl.serving import TeamSeats

    team, cfg, _ = load_team(args, roles, name)
    cfg = cfg.replace(progress=False)
    return TeamSeats(team, cfg if args.max_new_tokens is None else cfg.replace(max_new_tokens=args.max_new_tokens))


def load_team(
    args: argparse.Namespace, roles: Sequence[str] | None = None, name: str = ""
) -> tuple[Team, TrainConfig, TeamSource]:
    """Return the team of `--models`, the settings of its run for this platform, and where it comes from.

    roles: of the environment that is called `name`, one agent for each; None: all agents that there are.
    """
    import jax

    from jmarl.algorithms import on_platform
    from jmarl.config import TrainConfig
    from jmarl.runs.precompile import keep_programs
    from jmarl.team import Team

    to_stderr(f"reading {' '.join(args.models)} ...")
    source = load_source(args.models, args.base_model)
    keep_programs(to_stderr)
    shared = source.experiment is not None and source.experiment.team.shared_weights
    agents = source.agents if roles is None else source.agents_for(roles, name)
    cfg = on_platform(source.cfg or TrainConfig(), jax.default_backend())
    return Team.of(agents, shared_weights=shared), cfg, source
