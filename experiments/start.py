"""The agents that an experiment begins with: a model's, which may first imitate solved tasks. No experiment itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.report import told
from jmarl.algorithms import find_row
from jmarl.config import TrainConfig, check, flat
from jmarl.envs.base import TextEnvironment
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.team import Team, make_team
from jmarl.training.imitation import demonstrate, imitate
from jmarl.training.preferences.pairs import Trajectory


@dataclasses.dataclass(frozen=True)
class Demonstrated(TrainConfig):
    """The model, and what it is shown."""

    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a hub id."""
    demonstrations: int = 0
    """Tasks whose solution by the environment's own solver each agent imitates before the team is trained; 0: none. Each of
    their messages must fit into max_new_tokens."""
    imitation_updates: int = 24
    """Updates on them."""
    imitation_batch_size: int = 8
    """Messages of such an update."""
    imitation_learning_rate: float = 1e-4
    """Of these updates."""

    def __post_init__(self):
        super().__post_init__()
        shown = self.demonstrations
        check("demonstrations", shown, shown >= 0, "0 or more")
        lora = self.lora.lora_rank
        check("demonstrations", shown, not shown or not lora, "0 with LoRA, whose agents begin with the same weights")
        check("demonstrations", shown, not shown or not self.run.frozen_agents, "0 with frozen agents, which stay as they are")
        check(
            "demonstrations",
            shown,
            not shown or self.episodes.history == "none",
            "0 where history is append: each turn is shown alone",
        )
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            used = shown > 0 or not field.name.startswith("imitation_") or given == field.default
            check(field.name, given, used, "left out without demonstrations")
        for name in ("imitation_updates", "imitation_batch_size"):
            check(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        check("imitation_learning_rate", self.imitation_learning_rate, self.imitation_learning_rate > 0, "above 0")


def start(
    cfg: Demonstrated,
    env: TextEnvironment,
    items: list[dict],
    held_out: list[dict],
    agents: list[Agent] | None = None,
    slips: float = 0.0,
) -> tuple[Team, list[Any]]:
    """A team and its parameters. items: tasks to train on; the first of them are demonstrated. agents: in place of the model's.
    slips: see `demonstrate`."""
    agents = agents or [load_agent(cfg.model)] * env.num_agents
    if cfg.demonstrations and not (cfg.run.resume and find_row(cfg.algorithm).data == "rollouts"):  # whose checkpoint has all
        check(
            "demonstrations", cfg.demonstrations, cfg.demonstrations <= len(items), f"at most the tasks there are, {len(items)}"
        )
        shown = demonstrate(env, items[: cfg.demonstrations], slips, cfg.run.seed)
        check_lengths(agents, shown, cfg.sampling.max_new_tokens)
        if held_out and not cfg.run.resume:
            print(f"held-out untrained: {told(evaluate(*make_team(agents), held_out, LockStep(env), cfg))}", flush=True)
        agents = imitate(agents, shown, imitation(cfg))
    return make_team(agents, lora=cfg.lora.lora_rank > 0)


def imitation(cfg: Demonstrated) -> TrainConfig:
    """Its settings."""
    parts = min(cfg.optimizer.micro_batches, cfg.imitation_batch_size)
    alike = {name: flat(cfg)[name] for name in ("seed", "chat", "compute_dtype", "remat", "progress", "log_every")}
    return TrainConfig.of(
        algorithm="sft", num_updates=cfg.imitation_updates, batch_size=cfg.imitation_batch_size, micro_batches=parts,
        learning_rate=cfg.imitation_learning_rate, output_dir=f"{cfg.run.output_dir}/imitation" if cfg.run.output_dir else "",
        save_every=0, **alike,  # minutes, which are made again
    )  # fmt: skip


def check_lengths(agents: Sequence[Agent], shown: Sequence[Sequence[Trajectory]], max_new_tokens: int) -> None:
    """Refuses demonstrations that the agents could not write."""
    for agent, of in zip(agents, shown, strict=True):
        lengths = (len(agent.tokenizer.encode(one.actions[0], add_special_tokens=False)) + 1 for one in of)
        longest = max(lengths, default=0)
        check("max_new_tokens", max_new_tokens, longest <= max_new_tokens, f"at least {longest}, the longest demonstration")
