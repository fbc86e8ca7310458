"""Who learns in a run, and how: everything that does not change from step to step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig
from jmarl.learning.critics import critic_algorithm
from jmarl.learning.program import StackProgram, make_program
from jmarl.models.sharding import DeviceMesh, mesh_of_one_model
from jmarl.team import StackSpec, Team


class Setup(NamedTuple):
    """The team, its critics, the resolved algorithm of the agents, the settings of the run, and the programs of its updates."""

    team: Team
    critics: tuple[StackSpec, ...]  # one per stack, or one of the team; empty: there are none besides the agents
    algorithm: Algorithm  # the settings of the optimizer are changed here only, see `make_setup`
    cfg: TrainConfig
    seeds: tuple[int, ...]  # of each run, where several are in the same stacks; empty: that of the settings
    programs: tuple[StackProgram, ...]  # one per stack
    critic_programs: tuple[StackProgram, ...]  # one per stack of critics besides the agents


def make_setup(
    team: Team, critics: tuple[StackSpec, ...], algorithm: Algorithm, cfg: TrainConfig, seeds: Sequence[int] = ()
) -> Setup:
    """Return the setup of a run, with the programs of its updates.

    algorithm: of the agents; critics and `cfg` get its settings of the optimizer. seeds: of each run, where several are in the
    same stacks; empty: of the settings.
    """
    cfg = dataclasses.replace(cfg, optimizer=algorithm.optimizer)

    def programs(specs: Sequence[StackSpec], algorithm: Algorithm, critic: bool) -> tuple[StackProgram, ...]:
        options: Any = dict(team_size=team.num_agents, seeds=seeds, critic=critic)
        return tuple(
            make_program(spec.config, spec.members, algorithm, cfg.run, number=i, mesh=spec.mesh, **options)
            for i, spec in enumerate(specs, critic * len(team.stacks))
        )

    both = programs(team.stacks, algorithm, False), programs(critics, critic_algorithm(algorithm), True)
    return Setup(team, critics, algorithm, cfg, tuple(seeds), *both)


def mesh_of_critics(algorithm: Algorithm, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of the critics: the agents' for own critics, the same devices as those of one model for a central one."""
    return mesh_of_one_model(mesh) if algorithm.critic_kind == "central" else mesh
