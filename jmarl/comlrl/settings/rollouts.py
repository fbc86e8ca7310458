"""The settings of trainers that sample completions, and how those of CoMLRL become ours.

Of two settings that mean the same, the one of `TrainConfig` counts if it is set.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

from jmarl.algorithms import find_row
from jmarl.comlrl.settings.base import ANY, RULES, TrainerConfig
from jmarl.config import Count, CountOrOff, NotNegative, Positive, Range, Share, check

Devices = str | tuple[str, ...] | None
Advantage = Literal["mean", "raw", "max", "rloo"]
ADVANTAGES = {"mean": "magrpo", "raw": "mareinforce", "max": "maremax", "rloo": "marloo"}
SCALED = ("magrpo", "mareinforce", "maremax", "marloo", "iac", "maac")  # algorithms that advantage_normalization scales


class Unwritten(int):
    """The default of num_turns: 2, as in CoMLRL, if the trainer has an external_transition; else 1."""


class RolloutConfig(TrainerConfig):
    """`TrainerConfig` of trainers that sample, with the settings of CoMLRL 1.4.3 and its defaults.

    A script that leaves a setting out describes the same run as there, with these exceptions: early_termination_threshold is
    None (CoMLRL: -0.2, which ends nearly all episodes after their first turn; write it to have it), gradients are clipped at
    max_grad_norm=1 and weight_decay is 0 (CoMLRL: no clip, 0.01), and discount is applied (CoMLRL's actor-critics apply it, its
    other trainers read it and do not). Narrow sampling explores little, and samples from another distribution than the one that
    is scored: temperature=1, top_p=1, top_k=0 gives the exact policy gradient.
    """

    num_turns: Count = Unwritten(2)
    """Turns of an episode; by default 2 with an external_transition and 1 without."""
    num_prompts: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Prompts of an update; None: as many as fill rollout_buffer_size."""
    rollout_buffer_size: Count = 2
    """Samples of an agent that make an update. A sample is a node of the episode's tree (a prompt with its group), for
    actor-critics one completion."""
    train_batch_size: Count | None = None
    """Samples of an optimizer step; None: all of rollout_buffer_size."""
    eval_every: CountOrOff | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Updates between evaluations; None: as many as eval_interval prompts take."""
    eval_interval: CountOrOff = 16
    """Training prompts between evaluations; 0: only before and after training."""
    eval_num_samples: Annotated[int, Range(0)] | None = 4  # pyright: ignore[reportIncompatibleVariableOverride]
    """Evaluate on the first items of eval_dataset only (0 counts as 1, as in CoMLRL); None: on all."""
    eval_generations: Count = 1
    eval_batch_size: Count = 1
    advantage_normalization: bool = True
    """Divide advantages by their std: over the group (advantage_scale="std"), in actor-critics over the batch ("batch_std")."""
    reference_kl_enabled: bool = False
    """Subtract reference_kl_coef times the KL to the untrained policy from returns (kl_coef with kl_in="reward" and
    kl_estimator="k3")."""
    reference_kl_coef: NotNegative = 0.1
    reference_devices: Devices = None
    parallel_training: Literal["none", "null", "mp"] | None = "none"
    """mp: spread agents over the devices that are there (mesh="auto"). none: one device, if agent_devices names one."""
    agent_devices: Devices = None

    @property
    def turns(self) -> int:
        """Turns of an episode if the trainer has no external_transition."""
        return 1 if isinstance(self.num_turns, Unwritten) else self.num_turns

    @property
    def policy_algorithm(self) -> str:
        """The row of the table that learns from rollouts, which may be a part of the run only."""
        return self.resolved_algorithm

    @property
    def centralized(self) -> bool:
        """Whether one model writes for all roles."""
        return vars(self).get("collaboration_mode") == "centralized"

    @property
    def other_models(self) -> dict[str, str]:
        """The models that settings name, by the argument of the trainer."""
        names = {argument: vars(self).get(f"{argument}_name") for argument in ("reward_model", "critic_model")}
        return {argument: name for argument, name in names.items() if name is not None}

    @property
    def samples_per_prompt(self) -> int:
        """Samples of an agent that one prompt gives, see rollout_buffer_size."""
        if find_row(self.policy_algorithm).critic:
            return self.num_generations * self.turns
        branches = self.num_generations ** ((self.num_agents or 2) if self.joint_mode == "cross" else 1)
        return sum(branches**turn for turn in range(self.turns))

    @property
    def prompts_per_update(self) -> int:
        return self.num_prompts or math.ceil(self.rollout_buffer_size / self.samples_per_prompt)

    def __post_init__(self) -> None:
        for name, field in SAME.items():
            if all(getattr(self, x) != self.defaults()[x] for x in (name, field)):
                raise TypeError(f"{type(self).__name__}: {name} and {field} are the same setting, give one of them")
        super().__post_init__()

    def for_transition(self, transition: Any) -> RolloutConfig:
        """Return the settings of a trainer with or without an external_transition."""
        turns = int(self.num_turns) if transition is not None else self.turns
        return dataclasses.replace(self, num_turns=turns) if isinstance(self.num_turns, Unwritten) else self

    def without_effect(self) -> list[str]:
        """Return the settings that differ from their default and change nothing, each with the reason."""
        reasons = {name: reason for name, (allowed, reason) in RULES.items() if allowed is ANY}
        given = {name: value for name, value in vars(self).items() if name in reasons and value != self.defaults()[name]}
        lines = [f"{name}={value!r} ({reasons[name]})" for name, value in given.items()]
        if self.turns > 1 and (self.train_batch_size or self.rollout_buffer_size) < self.rollout_buffer_size:
            lines.append(f"train_batch_size={self.train_batch_size} (an update on several turns is one step)")
        return lines

    def run_settings(self, num_items: int) -> dict[str, Any]:
        settings = super().run_settings(num_items) | {"num_turns": self.turns, "num_prompts": self.prompts_per_update}
        if self.turns == 1:
            settings["early_termination_threshold"] = None
        if self.eval_every is None:
            settings["eval_every"] = math.ceil(self.eval_interval / self.prompts_per_update)
        if self.parallel_training in ("none", "null", None) and self.mesh == "auto" and one_device(self.agent_devices):
            settings["mesh"] = "agent=1"
        if find_row(self.policy_algorithm).data == "rollouts":
            settings |= self.update_settings()
        return settings

    def update_settings(self) -> dict[str, Any]:
        """Return the settings of updates on rollouts that CoMLRL's names stand for."""
        row, settings = find_row(self.policy_algorithm), {}
        if self.advantage_scale is None and self.policy_algorithm in SCALED:
            settings["advantage_scale"] = ("batch_std" if row.critic else "std") if self.advantage_normalization else "none"
        elif self.advantage_scale is None and not self.advantage_normalization:
            settings["advantage_scale"] = "none"
        if self.reference_kl_enabled:
            estimator = self.kl_estimator or "k3"
            settings |= {"kl_coef": self.reference_kl_coef, "kl_in": "reward", "kl_estimator": estimator}
        if self.joint_mode != "cross":
            settings["cross_credit"] = "mean"
        return settings | {"num_minibatches": self.minibatches()}

    def minibatches(self) -> int:
        """Return the optimizer steps of an update. Episodes of several turns have one, because CoMLRL's later steps would learn
        from stale samples."""
        samples = self.prompts_per_update * self.samples_per_prompt
        size = self.train_batch_size or samples
        if self.num_minibatches > 1 or self.turns > 1 or size >= samples:
            return self.num_minibatches
        allowed = f"a divisor of the {samples} samples of an update, which follow from rollout_buffer_size and num_prompts"
        check("train_batch_size", size, samples % size == 0, allowed)
        return samples // size

    def count_updates(self, num_items: int) -> int:
        return math.ceil(self.num_train_epochs * math.ceil(num_items / self.prompts_per_update))


# A setting of CoMLRL -> the setting here that means the same.
SAME = {
    "advantage_normalization": "advantage_scale",
    "reference_kl_enabled": "kl_coef",
    "rollout_buffer_size": "num_prompts",
    "train_batch_size": "num_minibatches",
    "eval_interval": "eval_every",
}


def one_device(devices: Devices) -> bool:
    """Return whether devices name a single one, such as "cuda:0" or ["cuda:0", "cuda:0"]."""
    names = {devices} if isinstance(devices, str) else set(devices or ())
    return len(names) == 1 and names != {"auto"}


class ReinforceConfig(RolloutConfig):
    """`RolloutConfig` of trainers without a critic, which differ in advantage_mode."""

    cross_credit: Literal["mean", "sum"] = "sum"
    """As in `Episodes`; CoMLRL sums."""
    advantage_mode: Advantage = "mean"
    """The baseline of advantages: mean (MAGRPO), raw (MAREINFORCE: none), max (MAReMax) or rloo (MARLOO)."""

    @property
    def resolved_algorithm(self) -> str:
        is_default = self.algorithm == self.defaults()["algorithm"]
        return ADVANTAGES[self.advantage_mode] if is_default else self.algorithm


class ActorCriticConfig(RolloutConfig):
    """`RolloutConfig` of trainers with critics. As in CoMLRL, one completion per prompt and no top-k.

    value_loss_coef (value_coef) scales the loss of a critic that is a head of its agent; Adam makes a separate critic
    independent of it. value_clip_range (value_clip) clips the values of such heads, where an update makes several steps."""

    num_generations: Count = 1
    num_train_epochs: Positive = 40
    rollout_buffer_size: Count = 8
    top_k: Annotated[int, Range(0, note="0 is off")] = 0
    log_every: Count = 1
    critic_type: Literal["v", "q"] | None = "v"
    gae_lambda: Share | None = 0.0
    """As in `Critic`; CoMLRL's target is the reward and the discounted value of the next turn."""
    critic_learning_rate: Positive | None = 5e-6
    value_coef: NotNegative | None = 0.6
    critic_devices: Devices = None

    def update_settings(self) -> dict[str, Any]:
        settings = super().update_settings()
        return settings | critic_settings(self, settings["num_minibatches"])


def critic_settings(config: RolloutConfig, minibatches: int) -> dict[str, Any]:
    """Return the settings of critics that have an effect, the others None.

    A separate critic has its learning rate, a value head its weight and, in several steps on a batch, its clip."""
    own = find_row(config.policy_algorithm).critic == "own"
    head = own and config.separate_critic is False
    several = config.num_epochs * minibatches > 1
    return {
        "separate_critic": None if config.separate_critic and not own else config.separate_critic,  # a central one always is
        "critic_learning_rate": None if head else config.critic_learning_rate,
        "value_coef": config.value_coef if head else None,
        "value_clip": config.value_clip if head and several else None,
    }
