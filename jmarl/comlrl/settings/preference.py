"""The settings of trainers that learn from preferences: pairs of the team's completions, rounds, learned rewards."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jmarl.algorithms import find_row
from jmarl.algorithms.constraints import used_settings
from jmarl.comlrl.settings.rollouts import Advantage, Devices, RolloutConfig, critic_settings
from jmarl.config import Count, NotNegative, Positive, Range, TrainConfig, check

CHAT_FORMATS = ("openai", "openai_chat", "chat")
# Settings of the comparator `api` that must have one of these values.
API_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "comparator_api_format": (CHAT_FORMATS, f"one of {CHAT_FORMATS}: the service needs an OpenAI-compatible API"),
    "comparator_api_headers": ((None, {}), "None: requests have the header Authorization only"),
    "comparator_api_extra_body": ((None, {}), "None: requests have the settings of sampling only"),
    "comparator_api_key": ((None, ""), "None: set the environment variable COMPARATOR_API_KEY"),
    "comparator_api_key_env": ((None, "", "COMPARATOR_API_KEY"), "COMPARATOR_API_KEY: the key is read from this variable"),
    "comparator_api_key_header": (("Authorization",), "Authorization"),
    "comparator_api_key_prefix": (("Bearer",), "Bearer"),
}


class PreferenceConfig(RolloutConfig):
    """`RolloutConfig` of algorithms that learn from pairs of the team's completions."""

    collaboration_mode: Literal["decentralized", "centralized"] = "decentralized"
    """centralized: one model writes for all roles, see `trainers.centralized`."""
    num_turns: Count = 1
    preference_num_candidates: Count = 80
    """Completions of each prompt and agent, of which pairs are made (num_candidates)."""
    pairs_per_prompt: Annotated[int, Range(0, note="0 is no limit")] | None = 16
    """Pairs kept of a prompt; None or 0: all."""
    pair_selection: Literal["reward_gap", "all", "random", "comparator_reward"] | None = "reward_gap"
    beta: Positive | None = 0.1
    advantage_mode: Advantage = "mean"
    """No effect: rl_algorithm chooses the baseline of MARLHF, and pairs have none."""
    use_environment_step: bool = True
    environment_steps_per_pair: Count = 2

    @property
    def candidates(self) -> int:
        return self.num_candidates or self.preference_num_candidates

    @property
    def pairs_per_update(self) -> int:
        return self.batch_size or self.train_batch_size or self.rollout_buffer_size

    def pairs_of(self, num_items: int) -> int:
        """Return the number of pairs of this many items, if completions have rewards enough."""
        limited = self.pair_selection != "all" and self.pairs_per_prompt
        return num_items * (self.pairs_per_prompt or 0) if limited else num_items * self.candidates

    def updates_on_pairs(self, pairs: int) -> int:
        """Return the number of updates in num_train_epochs passes over pairs."""
        return math.ceil(self.num_train_epochs * pairs / self.pairs_per_update)

    def run_settings(self, num_items: int) -> dict[str, Any]:
        settings = super().run_settings(num_items)
        limit = 0 if self.pair_selection == "all" else self.pairs_per_prompt or 0
        return settings | {
            "num_candidates": self.candidates,
            "pairs_per_prompt": limit,
            "batch_size": self.pairs_per_update,
            "cross_credit": "mean",
        }


class PairsConfig(PreferenceConfig):
    """`PreferenceConfig` of the preference loss. Every update draws train_batch_size pairs, by default rollout_buffer_size.

    num_generations is another name of preference_num_candidates, and num_prompts are sampled at once. Margins are relative to
    the untrained team; reference_free=True compares log-probabilities alone, as CoMLRL does."""

    num_generations: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def candidates(self) -> int:
        return self.num_generations or super().candidates

    @property
    def prompts_per_update(self) -> int:
        return self.num_prompts or 1

    def run_settings(self, num_items: int) -> dict[str, Any]:
        settings = super().run_settings(num_items) | {"num_generations": self.candidates}
        return settings | {"eval_every": self.eval_interval if self.eval_every is None else self.eval_every}


class LearnedRewardConfig(PreferenceConfig):
    """`PreferenceConfig` of training on a learned reward. rl_algorithm names the algorithm that trains the team. Updates are
    those of the team, counted by prompts as in `RolloutConfig`; num_generations is for them, preference_num_candidates for
    pairs."""

    rl_algorithm: str | None = "magrpo"
    reward_learning_rate: Positive | None = 1e-5
    reward_updates: Count | None = None
    """Updates of the reward model; None: reward_num_train_epochs passes over the pairs."""
    reward_num_train_epochs: Count = 1
    reward_train_batch_size: Count = 1
    """Pairs of an update of the reward model (batch_size)."""
    reward_model_name: str | None = None
    """What the reward model starts from; None: reward_model= of the trainer, or the first agent."""
    reward_model_device: str | None = "cuda:0"
    reward_max_length: int | None = None
    reward_freeze_backbone: bool = False
    critic_model_name: str | None = None
    """What critics of rl_algorithm start from; None: critic_model= of the trainer, or their agents."""
    critic_type: Literal["v", "q"] | None = "v"
    separate_critic: bool | None = True
    value_coef: NotNegative | None = 0.6
    value_clip: NotNegative | None = 0.2
    critic_devices: Devices = None
    critic_value_head_hidden_dim: int | None = None
    value_head_hidden_dim: int | None = None

    @property
    def policy_algorithm(self) -> str:
        return self.rl_algorithm or "magrpo"

    @property
    def pairs_per_update(self) -> int:
        return self.batch_size or self.reward_train_batch_size

    def run_settings(self, num_items: int) -> dict[str, Any]:
        settings = super().run_settings(num_items)
        updates = math.ceil(self.reward_num_train_epochs * self.pairs_of(num_items) / self.pairs_per_update)
        beta = self.beta if self.beta != self.defaults()["beta"] else None
        return settings | {"beta": beta, "reward_updates": self.reward_updates or updates}

    def update_settings(self) -> dict[str, Any]:
        settings, used = super().update_settings(), used_settings(find_row(self.policy_algorithm))
        critic = critic_settings(self, settings["num_minibatches"]) if "value_clip" in used else {}
        names = ("critic_learning_rate", "value_coef", "value_clip")
        settings |= {name: critic.get(name) for name in names}
        return settings | {name: getattr(self, name) if name in used else None for name in ("critic_type", "separate_critic")}


if TYPE_CHECKING:
    Base = PreferenceConfig
else:  # a dataclass that inherits fields would also override those of the class beside it
    Base = object


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsSettings(Base):
    """Settings of num_iterations rounds, to be mixed into a `PreferenceConfig`.

    Each round makes pairs of all items (or of num_prompts, if that is set), on which the updates of num_train_epochs passes
    are made."""

    num_iterations: Count = 6
    """Rounds, if num_updates is not set."""
    preference_num_candidates: Count = 20
    pairs_per_prompt: Annotated[int, Range(0, note="0 is no limit")] | None = 4
    pair_selection: Literal["reward_gap", "all", "random", "comparator_reward"] | None = "comparator_reward"
    comparator: Literal["current", "initial", "history", "model", "api"] | None = "current"
    comparator_generation_mode: Literal["decentralized", "centralized"] = "decentralized"
    comparator_centralized_agent_index: int = 0
    comparator_model_name: str | None = None
    comparator_agents: tuple[str, ...] | None = None
    """Names of one model for all agents; comparator_model_name is the same."""
    comparator_devices: Devices = None
    comparator_num_candidates: Count | None = None
    comparator_api_url: str | None = None
    comparator_api_model: str | None = None
    comparator_api_format: str = "generic"
    comparator_api_max_n_per_request: Count | None = None
    comparator_api_timeout: Positive = 120.0
    comparator_api_headers: dict | None = None
    comparator_api_key: str | None = None
    comparator_api_key_env: str | None = None
    comparator_api_key_header: str = "Authorization"
    comparator_api_key_prefix: str = "Bearer"
    comparator_api_response_field: str = "completions"
    comparator_api_extra_body: dict | None = None
    replay: Literal["current", "nearest_k", "all", "lambda_decay"] | None = "current"
    preference_replay_sample_size: Count | None = None
    """Pairs that a round learns from, drawn from the rounds of replay; None: as many as it makes."""
    preference_replay_dir: str | None = None
    log_reward_distribution: bool = False
    policy_checkpoint_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.comparator == "api" and self.comparator_api_url:
            for name, (allowed, text) in API_ONLY.items():
                check(name, getattr(self, name), getattr(self, name) in allowed, text)
        given, own = self.comparator_num_candidates, self.candidates
        check("comparator_num_candidates", given, given in (None, own), f"None or {own}, as of the team")
        names = set(self.comparator_agents or ()) | ({self.comparator_model_name} - {None})
        check("comparator_agents", self.comparator_agents, len(names) < 2, "names of one model, which writes for all agents")

    def items_of_round(self, num_items: int) -> int:
        return min(num_items, self.num_prompts or num_items)

    def pairs_of_round(self, num_items: int) -> int:
        return self.preference_replay_sample_size or self.pairs_of(self.items_of_round(num_items))

    def updates_per_round(self, num_items: int) -> int:
        raise NotImplementedError

    def count_updates(self, num_items: int) -> int:
        return self.num_iterations * self.updates_per_round(num_items)

    def train_config(self, num_items: int) -> TrainConfig:
        config = super().train_config(num_items)
        return config if self.num_updates else config.replace(round_updates=self.updates_per_round(num_items))

    def run_settings(self, num_items: int) -> dict[str, Any]:
        settings = super().run_settings(num_items) | {"round_prompts": self.items_of_round(num_items)}
        model, url = self.comparator_model, self.comparator_url
        if self.comparator == "model":
            model = model or self.comparator_model_name or next(iter(self.comparator_agents or ()), None)
        elif self.comparator == "api":
            model = model or self.comparator_api_model
            url = url or (self.comparator_api_url or "").rstrip("/").removesuffix("/chat/completions") or None
        one_round = self.replay == "current" and self.replay_k == 1
        return settings | {"comparator_model": model, "comparator_url": url, "replay_k": None if one_round else self.replay_k}
