"""Who learns in a run, and how: everything that does not change from step to step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig
from jmarl.lazy import Table
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


# --- critics besides the agents ----------------------------------------------------------------------------------------

CRITICS = Table[Callable[..., tuple[tuple[StackSpec, ...], list[Any]]]](
    {"own": "jmarl.learning.critics:make_own_critics", "central": "jmarl.learning.critics:make_central_critic"}
)


def make_critics(
    team: Team, params: Sequence[Any], algorithm: Algorithm, seed: int = 0
) -> tuple[tuple[StackSpec, ...], list[Any]]:
    """Return the critics of an algorithm, one per stack or one of the team, and the parameters [A, ...] of each stack of them,
    with new value heads. There are none where agents have no critic besides them.

    They start from their agents, whose params are copied, or from the team's critic model. With LoRA the adapters are copied
    and the base is shared. seed: of new adapters over the critic model."""
    if algorithm.critic_kind in CRITICS:
        return CRITICS[str(algorithm.critic_kind)](team, params, algorithm, seed)
    if team.critic is not None:
        raise ValueError(f"the team has a critic model, but algorithm={algorithm.name!r} has no critic besides its agents")
    return (), []


def critic_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return how critics learn: without a KL term, with their own learning rate; a central one makes one step per batch."""
    if algorithm.critic_kind is None:
        return algorithm
    settings: dict[str, Any] = dict(
        learning_rate=algorithm.critic.critic_learning_rate or algorithm.optimizer.learning_rate, target_kl=None
    )
    if algorithm.critic_kind == "central":
        settings |= dict(num_epochs=1, num_minibatches=1)
    loss = dataclasses.replace(algorithm.loss, kl_coef=0.0, kl_target=None)
    return dataclasses.replace(algorithm, loss=loss).with_optimizer(**settings)


def mesh_of_critics(algorithm: Algorithm, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of the critics: the agents' for own critics, the same devices as those of one model for a central one."""
    return mesh_of_one_model(mesh) if algorithm.critic_kind == "central" else mesh
