"""What the experiments share to begin a run: common settings, and teams that may first imitate solved tasks. Not an
experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from experiments.report import evaluation_line
from jmarl.algorithms import find_row
from jmarl.config import SECTION_OF, Count, CountOrOff, Positive, TrainConfig, check, check_fields, flat
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate
from jmarl.files.run_directory import resolve_resume
from jmarl.models.hub.agents import Agent, load_agent, open_agent
from jmarl.preferences.pairs import Trajectory
from jmarl.runs.checks import check_agents, check_settings
from jmarl.runs.imitation import demonstrate, imitate
from jmarl.runs.records import TrainResult
from jmarl.runs.train import train
from jmarl.team import Team, make_team


@dataclasses.dataclass(frozen=True)
class TeamTraining(TrainConfig):
    """How a team learns, which model it starts from, and how many tasks are held out."""

    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a Hub id."""
    held_out: CountOrOff = 32
    """Held-out tasks to evaluate on before and after training; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        self.check_together()
        self.check_run()
        check_agents(self, self.num_agents)

    @property
    def num_agents(self) -> int:
        """The number of agents of the team."""
        return 2

    def check_together(self) -> None:
        """Raise a ValueError for settings that do not fit each other."""

    def check_run(self) -> None:
        """Raise a ValueError for settings that no run could train with, before any model is loaded."""
        check_settings(self)


@dataclasses.dataclass(frozen=True)
class ImitationConfig(TeamTraining):
    """How a team learns, and how many solved tasks it imitates first."""

    demonstrations: CountOrOff = 0
    """Tasks whose solutions, by the environment's own solver, each agent imitates before training. Each message of a solution
    must fit into max_new_tokens. 0: none."""
    imitation_updates: Count = 24
    """Updates of the imitation."""
    imitation_batch_size: Count = 8
    """Messages per update of the imitation."""
    imitation_learning_rate: Positive = 1e-4
    """Learning rate of the imitation."""

    def check_together(self) -> None:
        super().check_together()
        if self.demonstrations:
            for ok, allowed in (
                (not self.lora.lora_rank, "0 with LoRA, whose agents must start from the same weights"),
                (not self.run.frozen_agents, "0 with frozen agents, because imitation would change them"),
                (self.episodes.history == "none", "0 with history=append, because each turn is imitated alone"),
            ):
                check("demonstrations", self.demonstrations, ok, allowed)
            return
        for field in dataclasses.fields(self):
            if field.name.startswith("imitation_"):
                value = getattr(self, field.name)
                check(field.name, value, value == field.default, "left out without demonstrations")


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Options of the benchmarks; each prints one JSON object."""

    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a Hub id."""
    group: Count = 4
    """Completions per prompt."""
    max_new_tokens: Count = 64
    """Length of all completions; none ends earlier."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class TrainingBenchOptions(BenchOptions):
    """Options of the benchmarks that train."""

    per_agent: Literal["map", "vmap"] = "map"
    """Gradients of agents on one device: map (one after the other) or vmap (at once)."""
    mesh: str = "auto"
    """Devices by axis; agent=1 is one device; auto: agents over all devices."""
    micro_batches: Count = 1
    """Parts of an update whose gradients are added up, to save memory."""


def train_config(options: Any, **settings: Any) -> TrainConfig:
    """Return a TrainConfig of those fields of a dataclass that are settings of it. settings: further ones."""
    names = [field.name for field in dataclasses.fields(options) if field.name in ("algorithm", *SECTION_OF)]
    return TrainConfig.of(**{name: getattr(options, name) for name in names}, **settings)


def load_team(model: str, num_agents: int, cfg: TrainConfig, shared_weights: bool = False) -> tuple[Team, list[Any]]:
    """Return a team whose agents all start from one model, and the parameters [A, ...] of its stacks."""
    return make_team([open_agent(model)] * num_agents, shared_weights, lora=cfg.lora.lora_rank > 0)


def load_and_train(
    cfg: TeamTraining,
    env: TextEnvironment | Environment,
    items: list[dict],
    held_out: list[dict],
    shared_weights: bool = False,
) -> TrainResult:
    """Train a team whose agents all start from `cfg.model`."""
    team = Team.load([cfg.model] * cfg.num_agents, shared_weights=shared_weights)
    return train(team, env, items, cfg, eval_items=held_out)


def imitate_and_train(
    cfg: ImitationConfig, env: TextEnvironment, num_tasks: int, agents: list[Agent] | None = None, slips: float = 0.0
) -> TrainResult:
    """Train a team on tasks of an environment, after imitating if `cfg` says so. agents and slips: as for `start`."""
    items, held_out = env.tasks("train", num_tasks, cfg.run.seed), env.tasks("eval", cfg.held_out)
    team, params = start(cfg, env, items, held_out, agents, slips)
    return train(team, env, items, cfg, params=params, eval_items=held_out)


def start(
    cfg: ImitationConfig,
    env: TextEnvironment,
    items: list[dict],
    held_out: list[dict],
    agents: list[Agent] | None = None,
    slips: float = 0.0,
) -> tuple[Team, list[Any]]:
    """Return the team that training starts from, and the parameters [A, ...] of its stacks.

    Args:
        items: tasks to train on; the first `cfg.demonstrations` of them are imitated.
        held_out: tasks to evaluate on before imitating.
        agents: the agents before imitating; None: all from `cfg.model`.
        slips: see `demonstrate`.
    """
    agents = agents or [load_agent(cfg.model)] * env.num_agents
    cfg = resolve_resume(cfg)
    in_checkpoint = cfg.run.resume and find_row(cfg.algorithm).data == "rollouts"  # for other rows the reference policy is not
    if cfg.demonstrations and not in_checkpoint:
        enough = cfg.demonstrations <= len(items)
        check("demonstrations", cfg.demonstrations, enough, f"at most {len(items)}, the number of tasks to train on")
        shown = demonstrate(env, items[: cfg.demonstrations], slips, cfg.run.seed)
        check_lengths(agents, shown, cfg.sampling.max_new_tokens)
        if held_out and not cfg.run.resume:
            untrained = evaluate(*make_team(agents), held_out, LockStep(env), cfg)
            print(f"held-out untrained: {evaluation_line(untrained)}", flush=True)
        agents = imitate(agents, shown, imitation_settings(cfg))
    return make_team(agents, lora=cfg.lora.lora_rank > 0)


def imitation_settings(cfg: ImitationConfig) -> TrainConfig:
    """Return the settings of the imitation."""
    names = ("seed", "chat", "chat_template_kwargs", "chat_date", "compute_dtype", "remat", "progress", "log_every")
    shared = {name: flat(cfg)[name] for name in names}
    return TrainConfig.of(
        algorithm="sft", num_updates=cfg.imitation_updates, batch_size=cfg.imitation_batch_size,
        micro_batches=cfg.optimizer.micro_batches_of(cfg.imitation_batch_size), learning_rate=cfg.imitation_learning_rate,
        output_dir=f"{cfg.run.output_dir}/imitation" if cfg.run.output_dir else "",
        save_every=0, **shared,  # no checkpoints: it takes minutes, and a resumed run repeats it
    )  # fmt: skip


def check_lengths(agents: Sequence[Agent], shown: Sequence[Sequence[Trajectory]], max_new_tokens: int) -> None:
    """Raise a ValueError for demonstrations that are longer than the agents may write."""
    for agent, trajectories in zip(agents, shown, strict=True):
        lengths = (len(agent.tokenizer.encode(message.actions[0], add_special_tokens=False)) + 1 for message in trajectories)
        longest = max(lengths, default=0)
        check("max_new_tokens", max_new_tokens, longest <= max_new_tokens, f"at least {longest}, the longest demonstration")
