"""A run: everything of it that does not change from step to step, and the task that it learns."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, describe
from jmarl.evaluation.evaluate import EvalMetrics
from jmarl.files.identity import fingerprint
from jmarl.learning.setup import Setup
from jmarl.logs.step_log import StepLog
from jmarl.models import lora
from jmarl.rollout.experience import Source
from jmarl.runs.start import start
from jmarl.team import Team, policies
from jmarl.types import Batches, TeamState


class Task(NamedTuple):
    """What a run learns from: an environment and items to play, or given data."""

    env: Any  # a reward function, the result of `make_reward`, or an environment; None: items are pairs or trajectories
    items: Any
    held_out: Any = ()
    eval_metrics: EvalMetrics | None = None  # further metrics of an evaluation
    overlap: str = ""  # a line that counts the held-out items that are also trained on; empty if there are none
    examples: Any = ()  # of given data: the items, and the held-out items, as token ids (`preferences.encoding.Examples`)
    fit: Callable[..., Any] | None = None  # `jmarl.fit`, for algorithms that train a reward model


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run that is checked, with settings that are resolved. A reward model that is trained on the way is a run of its own."""

    kind: "Kind"  # where its experience comes from
    setup: Setup  # team, critics, algorithm and settings, none of which is auto
    task: Task  # checked: an `Environment`, and lists of the items that it plays
    identity: dict[str, Any]  # what must not change when it resumes: team, critics, environment, data, reward; JSON values
    given: TrainConfig  # the settings with auto, which reward models choose for themselves

    @property
    def team(self) -> Team:
        """Who learns."""
        return self.setup.team

    @property
    def cfg(self) -> TrainConfig:
        """The settings."""
        return self.setup.cfg


def start_alone(team: Team, params: Sequence[Any], cfg: TrainConfig, task: Task) -> tuple[Setup, TeamState]:
    """Return what `start` returns."""
    del task
    return start(team, params, cfg)


class Kind(NamedTuple):
    """Where the experience of a run comes from, as functions, and its log."""

    check: Callable[[TrainConfig, Team, Task, dict | None], tuple[Task, dict[str, Any], TrainConfig]]
    """(settings, team, task, wandb_config) -> the task with what fits the agents' contexts, the fingerprints of all that was
    given, and the settings with the context, see `config.Run.long_context`. Raises for arguments of a run that are wrong."""
    longest: Callable[[Setup, Task], Any]
    """(setup, task) -> the experience of the largest update, of zeros"""
    make_batches: Callable[[Setup, TeamState, Any], Batches]
    """(setup, state, experience) -> batches of all stacks and critics. If the state has shapes in place of arrays, as where
    updates are compiled before a run, what models compute is 0."""
    source: Callable[[PreparedRun, Any], Source]
    """(run, state at step 0) -> the source of experience, which copies what it needs of the state"""
    log: type[StepLog]
    start: Callable[[Team, Sequence[Any], TrainConfig, Task], tuple[Setup, Any]] = start_alone
    """(team, params, settings, task) -> the setup, and the state at step 0 with what the source keeps in it; of several seeds a
    list"""
    seeds: Sequence[int] = ()  # of several runs that learn together


def identity_of(setup: Setup, state: TeamState, env: Environment | None, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must not change when a run resumes, as JSON values: team, critics, environment, data, held-out items, reward
    and, if they are the reference of preferences, the weights before training. Of LoRA the digests of the bases are compared
    instead.

    state: at step 0. data: fingerprints of items and held-out items.
    """
    algorithm = setup.algorithm
    compared = algorithm.has_reference and not algorithm.lora.lora_rank
    identity = {
        "team": setup.team.describe(),
        "critics": Team(setup.critics).describe(),
        **data,
        "initial": [lora.digest(stack) for stack in policies(state)] if compared else [],
    }
    if env is None:
        return identity
    return identity | {
        "environment": describe(env),
        "options": fingerprint.of_options(env),
        "reward": fingerprint.of_reward(env),
        "error_handling": fingerprint.error_handling(env),
    }


def fingerprints(items: Iterable[Any], held_out: Iterable[Any]) -> dict[str, Any]:
    """Return the fingerprints of the items of a run and of its held-out items."""
    return {"data": fingerprint.of_data(items), "held_out": fingerprint.of_data(held_out)}
