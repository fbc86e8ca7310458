"""Who learns in a run, and how: everything that does not change from step to step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig
from jmarl.learning.critics import Critics
from jmarl.learning.program import StackProgram, make_program
from jmarl.memory import ProgramCall
from jmarl.models.sharding import mesh_of_one_model
from jmarl.team import Team


class Setup(NamedTuple):
    """The team, its critics, the resolved algorithm of the agents, the settings of the run, and the programs of its updates."""

    team: Team
    critics: Critics
    algorithm: Algorithm
    cfg: TrainConfig
    mesh: Mesh | None  # of the agents
    seeds: tuple[int, ...]  # of each run, where several are in the same stacks; empty: that of the settings
    programs: tuple[StackProgram, ...]  # one per stack
    critic_programs: tuple[StackProgram, ...]  # one per stack of critics besides the agents

    def calls(self) -> list[ProgramCall]:
        """Return the last call of each program."""
        return [call for program in (*self.programs, *self.critic_programs) for call in program.last_call()]


def make_setup(
    team: Team, critics: Critics, algorithm: Algorithm, cfg: TrainConfig, mesh: Mesh | None, seeds: Sequence[int] = ()
) -> Setup:
    """Return the setup of a run, with the programs of its updates.

    mesh: of the agents. seeds: of each run, where several are in the same stacks; empty: of the settings.
    """
    size = team.num_agents
    programs = tuple(
        make_program(spec.config, spec.members, algorithm, cfg.run, number=i, team_size=size, mesh=mesh, seeds=seeds)
        for i, spec in enumerate(team.stacks)
    )
    options: Any = dict(team_size=size, mesh=mesh_of_critics(algorithm, mesh), seeds=seeds, critic=True)
    critic_programs = tuple(
        make_program(spec.config, spec.members, critics.algorithm, cfg.run, number=i, **options)
        for i, spec in enumerate(critics.specs, len(team.stacks))
    )
    return Setup(team, critics, algorithm, cfg, mesh, tuple(seeds), programs, critic_programs)


def mesh_of_critics(algorithm: Algorithm, mesh: Mesh | None) -> Mesh | None:
    """Return the mesh of the critics: the agents' for own critics, a part of it for a central one."""
    return mesh if algorithm.row.critic == "own" else mesh_of_one_model(mesh)
