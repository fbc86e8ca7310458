"""The agents that an experiment begins with: a model's, which may first imitate solved tasks. No experiment itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.report import told
from jmarl.config import TrainConfig, check
from jmarl.demonstrations import imitate
from jmarl.evaluate import evaluate
from jmarl.lockstep import LockStep, TextEnvironment
from jmarl.team import Team, make_team
from jmarl.weights import Agent, load_agent


@dataclasses.dataclass(frozen=True)
class Demonstrated(TrainConfig):
    """The model, and what it is shown."""

    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a hub id."""
    demonstrations: int = 0
    """Tasks whose solution by the environment's own solver each agent imitates before the team is trained; 0: none."""
    imitation_slips: float = 0.0
    """Share of the solver's messages in whose place a wrong one is played, for the others to see what to make of it."""
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
        check("demonstrations", shown, not shown or not self.lora_rank, "0 with LoRA, whose agents begin with the same weights")
        check("imitation_slips", self.imitation_slips, 0 <= self.imitation_slips <= 1, "in [0, 1]")
        for field in dataclasses.fields(Demonstrated):
            given = getattr(self, field.name)
            used = shown > 0 or not field.name.startswith("imitation_") or given == field.default
            check(field.name, given, used, "left out without demonstrations")
        for name in ("imitation_updates", "imitation_batch_size"):
            check(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")


def start(
    cfg: Demonstrated, env: TextEnvironment, items: list[dict], held_out: list[dict], agents: list[Agent] | None = None
) -> tuple[Team, list[Any]]:
    """A team and its parameters. agents: in place of the model's."""
    agents = agents or [load_agent(cfg.model)] * env.num_agents
    if cfg.demonstrations:
        if held_out:
            team, params = make_team(agents)
            print(f"held-out untrained: {told(evaluate(team, params, held_out, LockStep(env), cfg))}", flush=True)
        alike = {name: getattr(cfg, name) for name in ("seed", "chat", "compute_dtype", "remat", "progress")}
        how = TrainConfig(
            algorithm="sft", num_updates=cfg.imitation_updates, batch_size=cfg.imitation_batch_size,
            learning_rate=cfg.imitation_learning_rate, **alike,
        )  # fmt: skip
        agents = imitate(agents, env, items[: cfg.demonstrations], how, cfg.imitation_slips)
    return make_team(agents, lora=cfg.lora_rank > 0)
