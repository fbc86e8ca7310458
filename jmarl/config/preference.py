"""The section of `TrainConfig` for learning from preferences and other given data."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jmarl.config.constraints import PREFERENCE
from jmarl.config.sections import Section
from jmarl.config.validation import Count, Positive, Range, Share


@dataclasses.dataclass(frozen=True, repr=False)
class Preference(Section):
    """The preference loss, how pairs are made of a team's completions, and rounds. None: the algorithm's default."""

    constraints = PREFERENCE
    paths = ("comparator_model",)

    beta: Positive | None = None
    """Scale of the margins in the preference loss: how far the policy may move from the reference (DPO, arXiv 2305.18290).
    None: 0.1, for a reward model 1."""
    preference_loss: Literal["sigmoid", "hinge", "ipo"] | None = None
    """Loss of pairs: sigmoid (DPO), hinge (SLiC, arXiv 2305.10425) or ipo (arXiv 2310.12036); None: sigmoid."""
    label_smoothing: Annotated[float, Range(0, 0.5, high_open=True)] | None = None
    """Share of preferences assumed to be wrong, in the sigmoid loss (cDPO); None: 0."""
    reference_free: bool | None = None
    """Compute margins from the policy's log-probabilities alone, without the reference's; None: False."""
    batch_size: Count | None = None
    """Pairs or texts of an update, in algorithms that learn from data; None: 8."""
    pair_selection: Literal["reward_gap", "all", "random", "comparator_reward"] | None = None
    """Which pairs of a prompt are kept: reward_gap (largest first), all, random, or comparator_reward (best completion of the
    comparator first). None: reward_gap; in madpo_iter and marlhf_iter comparator_reward."""
    num_candidates: Count | None = None
    """Completions of each prompt and agent, of which pairs are made; None: num_generations."""
    pairs_per_prompt: Annotated[int, Range(0, note="0 is no limit")] | None = None
    """Pairs kept of a prompt, 0 is no limit; None: 4."""
    comparator: Literal["current", "initial", "history", "model", "api"] | None = None
    """Whose completions the policy's are compared with in rounds: current (other completions of its own), initial (the
    untrained team), history (the team comparator_lag rounds ago), model (comparator_model) or api (comparator_url); None:
    current."""
    comparator_lag: Count | None = None
    """How many rounds ago the comparator `history` was the policy; None: 1."""
    comparator_model: str | None = None
    """Model of the comparator `model`: a name, a directory, a .gguf file or a hub id; of the comparator `api` its name
    there."""
    comparator_url: str | None = None
    """Address of the comparator `api`, an OpenAI-compatible service such as http://localhost:8000/v1. Its key is read from the
    environment variable COMPARATOR_API_KEY."""
    round_prompts: Count | None = None
    """Prompts of a round, of which num_prompts are sampled at once; None: num_prompts."""
    round_updates: Count | None = None
    """Updates on the pairs of a round before the next round makes new ones; None: 10."""
    replay: Literal["current", "nearest_k", "all", "lambda_decay"] | None = None
    """Rounds whose pairs are used: current, nearest_k (the newest replay_k), all, or lambda_decay (all, with weights
    replay_lambda ^ age); None: current."""
    replay_k: Count | None = None
    """Rounds of replay nearest_k; None: 2."""
    replay_lambda: Share | None = None
    """Decay of replay lambda_decay; None: 0.5."""
    rl_algorithm: str | None = None
    """Algorithm by which marlhf and marlhf_iter train the team on the reward model's scores; None: magrpo."""
    reward_updates: Count | None = None
    """Updates of the reward model before the team is trained (in marlhf_iter: of each round); None: 50."""
    reward_learning_rate: Positive | None = None
    """Learning rate of the reward model that marlhf and marlhf_iter train; None: 1e-5. With algorithm reward_model it is
    learning_rate."""
