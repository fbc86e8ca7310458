"""The table of algorithms.

A row is an advantage estimator, a loss and their defaults; a single-agent method is a team of one. To add an algorithm, add a
row:

    ALGORITHMS["mine"] = AlgorithmRow(loss=policy_gradient, estimator=my_estimator, min_group=2)

`resolve.resolve` makes an `Algorithm` of a row and the settings of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jmarl.config import Aggregation, Scale, check, check_fields, did_you_mean
from jmarl.rl.advantages import AcrossTurns, Estimator, alignment, group_mean, leave_one_out, max_baseline, raw
from jmarl.rl.losses import cispo, clipped_surrogate, cross_entropy, policy_gradient, preference


@dataclasses.dataclass(frozen=True, eq=False)  # equal only to itself: two rows never share a compiled program
class AlgorithmRow:
    """One row of the table.

    Attributes:
        loss: arrays -> (scalar, metrics); see `rl.losses`.
        estimator: the advantages of one group; see `rl.advantages`.
        baseline: what is subtracted from returns before the estimator: nothing, the return of the greedy completion, the moving
            average of the role's returns (ema), or the value of a critic.
        per_token: a critic gives the advantage of each token (GAE), in place of an estimator.
        scale: default of `advantage_scale`.
        aggregation: default of `loss_aggregation`.
        min_group: the fewest completions of a prompt that the baseline needs.
        options: argument of the loss -> the setting that it comes from.
        defaults: settings whose default differs from `DEFAULTS`.
        critic: own (one per agent) or central (one of the team, which reads the prompts of all agents).
        grouping: whether the returns of one turn, or of a whole episode, are compared.
        data: what the team learns from: rollouts of the policy, pairs of completions, or texts.
        margin: what the loss of pairs compares: log-probabilities of each agent (own), their sum over the team (joint), or
            scores of a value head (score).
        rounds: new pairs are made every `round_updates` updates.
        learned: a reward model learns from the pairs, and the team learns from its scores by another row (`rl_algorithm`).
        across_turns: the advantages of all agents in all turns -> what is added to them; see `rl.advantages.alignment`.
        for_teams: for a single agent only: the algorithms for several agents. Empty: for any number.
        paper: its reference.
    """

    loss: Callable
    estimator: Estimator = raw
    baseline: Literal["none", "greedy", "ema", "critic"] = "none"
    per_token: bool = False
    scale: Scale = "none"
    aggregation: Aggregation | Literal["pair_mean"] = "token_mean"
    min_group: int = 1
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    critic: Literal["own", "central"] | None = None
    grouping: Literal["turn", "episode"] = "turn"
    data: Literal["rollouts", "pairs", "texts"] = "rollouts"
    margin: Literal["own", "joint", "score"] | None = None
    rounds: bool = False
    learned: bool = False
    across_turns: AcrossTurns | None = None
    for_teams: tuple[str, ...] = ()
    paper: str = ""

    def __post_init__(self) -> None:
        # Without this check an unknown name would act like another one: every scale that is not known divides by nothing.
        check_fields(self, ("baseline", "scale", "aggregation", "critic", "grouping", "data", "margin"))
        alone = self.baseline == "none" and self.critic is None and self.grouping == "turn"
        check("across_turns", self.across_turns, alone or not self.across_turns, "None beside a baseline, critic or grouping")
        check("aggregation", self.aggregation, self.aggregation != "pair_mean" or self.data == "pairs", "a mean of tokens")

    @property
    def compares_group(self) -> bool:
        """Whether advantages compare the returns of a group, so that they are 0 where all returns are equal."""
        return self.data == "rollouts" and self.estimator is not raw and not self.per_token

    @property
    def trains_team(self) -> bool:
        """Whether a team learns by the row, and not a reward model alone."""
        return self.margin != "score" or self.learned

    @property
    def makes_pairs(self) -> bool:
        """Whether pairs are made of the team's own completions. Other rows that learn from data need given data."""
        return self.learned or self.margin == "joint"


DEFAULTS: dict[str, Any] = {  # of settings that are None until a row or the user gives them a value
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.2,
    "ratio_level": "token",
    "dual_clip": 0.0,
    "mask_overlong": False,
    "ema_decay": 0.95,
    "align_coef": 0.5,
    "gae_lambda": 1.0,
    "critic_type": "v",
    "separate_critic": True,
    "critic_learning_rate": None,
    "value_coef": 0.5,
    "value_clip": 0.0,
    "beta": 0.1,
    "preference_loss": "sigmoid",
    "label_smoothing": 0.0,
    "reference_free": False,
    "bc_weight": 1.0,
    "world_model_weight": 0.0,
    "batch_size": 8,
    "pair_selection": "reward_gap",
    "num_candidates": None,
    "pairs_per_prompt": 4,
    "comparator": "current",
    "comparator_lag": 1,
    "comparator_model": None,
    "comparator_url": None,
    "round_prompts": None,
    "round_updates": 10,
    "replay": "current",
    "replay_k": 2,
    "replay_lambda": 0.5,
    "rl_algorithm": "magrpo",
    "reward_updates": 50,
    "reward_learning_rate": 1e-5,
}
ASYNC_CAP = 2.0  # default of importance_cap where completions may be off-policy
BOUNDS = {"eps_low": "clip_eps_low", "eps_high": "clip_eps_high"}
CLIPPING = BOUNDS | {"level": "ratio_level", "dual": "dual_clip"}
PREFERENCE = {"kind": "preference_loss", "beta": "beta", "smoothing": "label_smoothing"}
ROUNDS = (
    "comparator",
    "comparator_lag",
    "comparator_model",
    "comparator_url",
    "round_prompts",
    "round_updates",
    "replay",
    "replay_k",
    "replay_lambda",
)
REWARD_MODEL = ("rl_algorithm", "reward_updates", "reward_learning_rate")


def _clipped(estimator: Estimator = raw, **fields: Any) -> AlgorithmRow:
    return AlgorithmRow(**{"loss": clipped_surrogate, "estimator": estimator, "options": CLIPPING} | fields)


def _grpo(**fields: Any) -> AlgorithmRow:
    return _clipped(group_mean, **{"scale": "std", "min_group": 2} | fields)


def _ppo(**fields: Any) -> AlgorithmRow:
    return _clipped(scale="batch_std", defaults={"gae_lambda": 0.95}, **fields)


def _pairs(margin: str, **fields: Any) -> AlgorithmRow:
    row: dict[str, Any] = {
        "loss": preference,
        "data": "pairs",
        "margin": margin,
        "aggregation": "pair_mean",
        "options": PREFERENCE,
    }
    return AlgorithmRow(**row | fields)


ALGORITHMS: dict[str, AlgorithmRow] = {
    "mareinforce": AlgorithmRow(policy_gradient, paper="REINFORCE, Williams 1992, for teams"),
    "magrpo": AlgorithmRow(policy_gradient, group_mean, min_group=2, paper="arXiv 2508.04652"),
    "marloo": AlgorithmRow(policy_gradient, leave_one_out, min_group=2, paper="arXiv 2402.14740, for teams"),
    "maremax": AlgorithmRow(policy_gradient, max_baseline, min_group=2, paper="CoMLRL's variant of arXiv 2310.10505"),
    "remax": AlgorithmRow(policy_gradient, baseline="greedy", paper="arXiv 2310.10505"),
    "grpo": _grpo(aggregation="sequence_mean", paper="arXiv 2402.03300"),
    "dr_grpo": _grpo(scale="none", aggregation="constant", paper="arXiv 2503.20783"),
    "dapo": _grpo(defaults={"clip_eps_high": 0.28, "mask_overlong": True}, paper="arXiv 2503.14476"),
    "gspo": _grpo(
        aggregation="sequence_mean",
        defaults={"clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "ratio_level": "sequence"},
        paper="arXiv 2507.18071",
    ),
    "cispo": _grpo(loss=cispo, options=BOUNDS, defaults={"clip_eps_low": 1.0, "clip_eps_high": 0.28}, paper="arXiv 2506.13585"),
    "at_grpo": _grpo(paper="arXiv 2510.11062"),
    "dr_mas": _grpo(grouping="episode", paper="arXiv 2602.08847"),
    "rae": _clipped(baseline="ema", paper="SPIRAL, arXiv 2506.24119"),
    "iac": AlgorithmRow(policy_gradient, baseline="critic", critic="own", paper="CoLLM-DC, arXiv 2601.21972"),
    "maac": AlgorithmRow(policy_gradient, baseline="critic", critic="central", paper="CoLLM-CC, arXiv 2601.21972"),
    "ppo": _ppo(per_token=True, critic="own", for_teams=("ippo", "mappo"), paper="arXiv 1707.06347"),
    "ippo": _ppo(per_token=True, critic="own", paper="arXiv 2011.09533"),
    "mappo": _ppo(baseline="critic", critic="central", paper="arXiv 2103.01955"),
    "c3": AlgorithmRow(policy_gradient, leave_one_out, min_group=2, paper="arXiv 2603.06859"),
    "adalign": AlgorithmRow(
        policy_gradient, leave_one_out, min_group=2, across_turns=alignment, paper="arXiv 2406.14662, 2511.19405"
    ),
    "dpo": _pairs("own", paper="arXiv 2305.18290"),
    "madpo": _pairs("joint", min_group=2, paper="arXiv 2305.18290, for teams"),
    "madpo_iter": _pairs(
        "joint",
        min_group=2,
        rounds=True,
        defaults={"pair_selection": "comparator_reward"},
        paper="arXiv 2312.11456, for teams",
    ),
    "reward_model": _pairs(
        "score",
        options={"beta": "beta", "smoothing": "label_smoothing"},
        defaults={"beta": 1.0},
        paper="Bradley and Terry 1952; arXiv 2203.02155",
    ),
    "marlhf": _pairs(
        "score", min_group=2, learned=True, options={"smoothing": "label_smoothing"}, paper="arXiv 2203.02155, for teams"
    ),
    "marlhf_iter": _pairs(
        "score",
        min_group=2,
        learned=True,
        rounds=True,
        options={"smoothing": "label_smoothing"},
        defaults={"pair_selection": "comparator_reward"},
        paper="marlhf in rounds",
    ),
    "sft": AlgorithmRow(cross_entropy, data="texts", paper="behavior cloning; world model"),
}


@functools.cache  # equal rows share their compiled programs
def row_of_loss(loss: Callable) -> AlgorithmRow:
    """Return the row of a loss alone: with the advantages of magrpo, and those settings of clipped losses that it takes,
    except what a `functools.partial` gives it."""
    takes = {*inspect.signature(loss).parameters} - {*(loss.keywords if isinstance(loss, functools.partial) else ())}
    options = {name: setting for name, setting in CLIPPING.items() if name in takes}
    return AlgorithmRow(loss, group_mean, min_group=2, options=options)


def find_row(name: str) -> AlgorithmRow:
    """Return the row of a name. Raises a ValueError with the nearest and all known names if it is unknown."""
    if not isinstance(name, str) or name not in ALGORITHMS:
        meant = did_you_mean(str(name), ALGORITHMS) or "."
        raise ValueError(f"algorithm={name!r} is unknown{meant} Known: {', '.join(ALGORITHMS)}, and your own as file.py:NAME")
    return ALGORITHMS[name]
