"""The table of algorithms: a row is an advantage estimator, a loss and their defaults.

A single-agent method is a team of one. The loss's options are settings of `Learning` that are None until a row or the user
gives them a value (`option`); one that a row has no use for is refused (`check_options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmarl.config import CHOICES, did_you_mean
from jmarl.rl.advantages import ESTIMATORS
from jmarl.rl.losses import cispo, clipped_surrogate, cross_entropy, policy_gradient, preference
from jmarl.types import Named


class Algorithm(NamedTuple):
    advantage: str  # a key of advantages.ESTIMATORS; gae: of each token, by a critic; of rows on data: what the loss is of
    scale: str  # what the advantages are divided by, unless the config says otherwise
    loss: Callable
    aggregation: str  # how the loss averages tokens, unless the config says otherwise
    min_group: int = 1  # completions a prompt that the baseline needs
    paper: str = ""
    options: Mapping[str, str] = {}  # arguments of the loss -> the setting that each comes from
    defaults: Mapping[str, Any] = {}  # settings that this row has another default for
    critic: str | None = None  # own: of every agent; central: one of the team, which reads the prompts of all
    grouping: str = "turn"  # rows compared with each other are those of one turn, or of a whole episode
    data: str = "rollouts"  # learned from: rollouts of the policy, pairs of completions, or texts
    rounds: bool = False  # pairs are made anew every so many updates
    learned: bool = False  # a reward model learns from them, and the team from its scores, by another row


DEFAULTS: dict[str, Any] = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.2,
    "ratio_level": "token",
    "dual_clip": 0.0,
    "mask_overlong": False,
    "ema_decay": 0.95,
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
    "pairs_per_prompt": 4,
    "comparator": "current",
    "comparator_lag": 1,
    "comparator_model": None,
    "comparator_url": None,
    "round_updates": 10,
    "replay": "current",
    "replay_k": 2,
    "replay_lambda": 0.5,
    "rl_algorithm": "magrpo",
    "reward_updates": 50,
    "reward_learning_rate": 1e-5,
}
OF_ROLLOUTS: dict[str, Any] = {  # settings of rows that learn from rollouts, and how they are switched off
    "advantage_scale": None,
    "loss_aggregation": None,
    "importance_cap": None,
    "old_logprobs": "sampler",
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "num_epochs": 1,
    "num_minibatches": 1,
    "dynamic_sampling": 0,
}
GROUP_BASELINES = ("group_mean", "leave_one_out", "max_baseline")  # advantages that are 0 where a group's returns are equal
BOUNDS = {"eps_low": "clip_eps_low", "eps_high": "clip_eps_high"}
CLIPPING = BOUNDS | {"level": "ratio_level", "dual": "dual_clip"}
CRITIC = ("gae_lambda", "critic_learning_rate", "value_clip")  # settings of rows with a critic
PREFERENCE = {"kind": "preference_loss", "beta": "beta", "smoothing": "label_smoothing"}
SELECTION = ("batch_size", "pair_selection", "pairs_per_prompt")  # settings of rows that make pairs of rollouts
COMPARATOR = ("comparator", "comparator_lag", "comparator_model", "comparator_url", "round_updates")
REPLAY = ("replay", "replay_k", "replay_lambda")
REWARD_MODEL = ("rl_algorithm", "reward_updates", "reward_learning_rate")
PAPER = {"iac": "CoLLM-DC, arXiv 2601.21972", "maac": "CoLLM-CC, arXiv 2601.21972", "ppo": "arXiv 1707.06347"}

ALGORITHMS = Named(
    {
        "mareinforce": Algorithm("raw", "none", policy_gradient, "token_mean", 1, "REINFORCE, Williams 1992, for teams"),
        "magrpo": Algorithm("group_mean", "none", policy_gradient, "token_mean", 2, "arXiv 2508.04652"),
        "marloo": Algorithm("leave_one_out", "none", policy_gradient, "token_mean", 2, "arXiv 2402.14740, for teams"),
        "maremax": Algorithm("max_baseline", "none", policy_gradient, "token_mean", 2, "CoMLRL's variant of arXiv 2310.10505"),
        "remax": Algorithm("greedy_baseline", "none", policy_gradient, "token_mean", 1, "arXiv 2310.10505"),
        "grpo": Algorithm("group_mean", "std", clipped_surrogate, "sequence_mean", 2, "arXiv 2402.03300", CLIPPING),
        "dr_grpo": Algorithm("group_mean", "none", clipped_surrogate, "constant", 2, "arXiv 2503.20783", CLIPPING),
        "dapo": Algorithm(
            "group_mean",
            "std",
            clipped_surrogate,
            "token_mean",
            2,
            "arXiv 2503.14476",
            CLIPPING,
            {"clip_eps_high": 0.28, "mask_overlong": True},
        ),
        "gspo": Algorithm(
            "group_mean",
            "std",
            clipped_surrogate,
            "sequence_mean",
            2,
            "arXiv 2507.18071",
            CLIPPING,
            {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "ratio_level": "sequence"},
        ),
        "cispo": Algorithm(
            "group_mean",
            "std",
            cispo,
            "token_mean",
            2,
            "arXiv 2506.13585",
            BOUNDS,
            {"clip_eps_low": 1.0, "clip_eps_high": 0.28},
        ),
        "at_grpo": Algorithm("group_mean", "std", clipped_surrogate, "token_mean", 2, "arXiv 2510.11062", CLIPPING),
        "dr_mas": Algorithm(
            "group_mean", "std", clipped_surrogate, "token_mean", 2, "arXiv 2602.08847", CLIPPING, grouping="episode"
        ),
        "rae": Algorithm("ema_baseline", "none", clipped_surrogate, "token_mean", 1, "SPIRAL, arXiv 2506.24119", CLIPPING),
        "iac": Algorithm("value_baseline", "none", policy_gradient, "token_mean", 1, PAPER["iac"], critic="own"),
        "maac": Algorithm("value_baseline", "none", policy_gradient, "token_mean", 1, PAPER["maac"], critic="central"),
        "ppo": Algorithm(
            "gae", "batch_std", clipped_surrogate, "token_mean", 1, PAPER["ppo"], CLIPPING, {"gae_lambda": 0.95}, critic="own"
        ),
        "ippo": Algorithm(
            "gae",
            "batch_std",
            clipped_surrogate,
            "token_mean",
            1,
            "arXiv 2011.09533",
            CLIPPING,
            {"gae_lambda": 0.95},
            critic="own",
        ),
        "mappo": Algorithm(
            "value_baseline",
            "batch_std",
            clipped_surrogate,
            "token_mean",
            1,
            "arXiv 2103.01955",
            CLIPPING,
            {"gae_lambda": 0.95},
            critic="central",
        ),
        "c3": Algorithm("leave_one_out", "none", policy_gradient, "token_mean", 2, "arXiv 2603.06859"),
        "dpo": Algorithm("margin", "none", preference, "pair_mean", 1, "arXiv 2305.18290", PREFERENCE, data="pairs"),
        "madpo": Algorithm(
            "joint_margin", "none", preference, "pair_mean", 2, "arXiv 2305.18290, for teams", PREFERENCE, data="pairs"
        ),
        "madpo_iter": Algorithm(
            "joint_margin",
            "none",
            preference,
            "pair_mean",
            2,
            "arXiv 2312.11456, for teams",
            PREFERENCE,
            {"pair_selection": "comparator_reward"},
            data="pairs",
            rounds=True,
        ),
        "reward_model": Algorithm(
            "score_margin",
            "none",
            preference,
            "pair_mean",
            1,
            "Bradley and Terry 1952; arXiv 2203.02155",
            {"beta": "beta", "smoothing": "label_smoothing"},
            {"beta": 1.0},
            data="pairs",
        ),
        "marlhf": Algorithm(
            "score_margin",
            "none",
            preference,
            "pair_mean",
            2,
            "arXiv 2203.02155, for teams",
            {"smoothing": "label_smoothing"},
            data="pairs",
            learned=True,
        ),
        "marlhf_iter": Algorithm(
            "score_margin",
            "none",
            preference,
            "pair_mean",
            2,
            "the same in rounds",
            {"smoothing": "label_smoothing"},
            {"pair_selection": "comparator_reward"},
            data="pairs",
            rounds=True,
            learned=True,
        ),
        "sft": Algorithm("imitation", "none", cross_entropy, "token_mean", 1, "behaviour cloning; world model", data="texts"),
    }
)


def algorithm(name: str) -> Algorithm:
    """The row of that name; an unknown name is an error that names all, and one that is near."""
    if name not in ALGORITHMS:
        meant = did_you_mean(name, ALGORITHMS) or "."
        raise ValueError(f"algorithm={name!r} is unknown{meant} Known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def check_row(name: str, learning: Any) -> None:
    """Refuse a row of rollouts whose parts do not fit each other, such as one of a user's own: before anything is sampled."""
    row = algorithm(name)
    if row.data != "rollouts":
        return
    parts = {"advantage": (*ESTIMATORS, "gae"), "critic": (None, "own", "central")}
    parts |= {"scale": CHOICES["advantage_scale"][1:], "aggregation": CHOICES["loss_aggregation"][1:]}
    for part, known in parts.items():
        if getattr(row, part) not in known:
            raise ValueError(f"the row {name!r} has {part}={getattr(row, part)!r}, which must be one of {known}")
    numbers, same = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.bool_)
    if row.advantage in ESTIMATORS:
        made = _tried(name, "estimator", ESTIMATORS[row.advantage], numbers, same)
        if getattr(made, "shape", None) != (2,):
            raise ValueError(f"the estimator of {name!r} must return an advantage for each return; for [2] it made {made}")
    options = {argument: option(setting, getattr(learning, setting), row) for argument, setting in row.options.items()}
    flat = options.get("level", "token") == "token"  # any tokens, in place of those of whole completions
    tokens = jax.ShapeDtypeStruct((2,) if flat else (1, 1, 2), jnp.float32)
    made = _tried(name, "loss", lambda *arrays: row.loss(*arrays, **options), *[tokens] * 4)
    pair = made if isinstance(made, tuple | list) and len(made) == 2 else (None, None)
    if getattr(pair[0], "shape", None) != () or not isinstance(pair[1], dict):
        raise ValueError(f"the loss of {name!r} must return a number (a sum over tokens) and a dict of metrics; it made {made}")


def _tried(name: str, part: str, f: Callable, *arguments: Any) -> Any:
    """The shapes of what f makes."""
    try:
        return jax.eval_shape(f, *arguments)
    except Exception as error:
        raise ValueError(f"the {part} of {name!r} cannot be computed: {type(error).__name__}: {error}") from error


def option(name: str, given: Any, row: Algorithm) -> Any:
    """The value of a setting: what was given, or the row's default."""
    return row.defaults.get(name, DEFAULTS[name]) if given is None else given


def makes_pairs(row: Algorithm) -> bool:
    """Whether a row has pairs made of what the team itself writes; other rows on data are given theirs."""
    return row.learned or row.advantage == "joint_margin"


def uses(row: Algorithm) -> set[str]:
    """The settings among `DEFAULTS` that mean something for a row."""
    if row.data != "rollouts":
        found = {"bc_weight", "world_model_weight"} if row.data == "texts" else set()
        found |= {"reference_free"} if row.advantage in ("margin", "joint_margin") else set()
        found |= {*SELECTION} if makes_pairs(row) else set()
        found |= {*REWARD_MODEL} if row.learned else set()
        return {*row.options.values(), "batch_size", *found, *((*COMPARATOR, *REPLAY) if row.rounds else ())}
    found = {"mask_overlong", *row.options.values()}
    if row.advantage == "ema_baseline":
        found.add("ema_decay")
    if row.critic:
        found |= {*CRITIC, *(["separate_critic", "value_coef"] if row.critic == "own" else [])}
        found |= {"critic_type"} if row.advantage == "value_baseline" else set()
    return found


def value_kind(learning: Any) -> str:
    """Where a row's critic gives values: for every token (`token`), or once a completion, before it (`v`) or after it (`q`)."""
    row = algorithm(learning.algorithm)
    return "token" if row.advantage == "gae" else option("critic_type", learning.critic_type, row)


def shares_critic(learning: Any) -> bool:
    """Whether the values come from a second head of the actor itself."""
    row = algorithm(learning.algorithm)
    return row.critic == "own" and not option("separate_critic", learning.separate_critic, row)


def check_used(settings: Mapping[str, Any], name: str) -> None:
    """Refuse settings among `DEFAULTS` that an algorithm's row has no use for."""
    row = algorithm(name)
    for setting in DEFAULTS:
        if settings.get(setting) is not None and setting not in uses(row):
            others = ", ".join(name for name, other in ALGORITHMS.items() if setting in uses(other))
            raise ValueError(f"{setting}={settings[setting]!r} has no meaning for algorithm={name!r}; it is for {others}")


def check_options(settings: Mapping[str, Any]) -> None:
    """Refuse settings that the algorithm's row has no use for, also together with others."""
    row = algorithm(settings["algorithm"])
    check_used(settings, settings["algorithm"])
    for setting, off in OF_ROLLOUTS.items() if row.data != "rollouts" else ():
        if settings.get(setting, off) != off:
            raise ValueError(
                f"{setting}={settings[setting]!r} has no meaning for algorithm={settings['algorithm']!r}, which learns from "
                f"{row.data}: leave it at {off!r}"
            )
    if row.advantage == "gae" and settings["advantage_scale"] == "std":
        raise ValueError("advantage_scale='std' has no meaning for advantages of tokens: use batch_std, running_std or none")
    steps, separate = settings["num_epochs"] * settings["num_minibatches"], settings["separate_critic"] is not False
    if settings["value_clip"] and (steps == 1 or row.critic == "central"):
        raise ValueError(
            f"value_clip={settings['value_clip']} never clips where a critic makes one step on a batch: own critics make "
            "several with num_epochs or num_minibatches, a central one never does"
        )
    if settings["critic_learning_rate"] is not None and not separate:
        raise ValueError(
            "critic_learning_rate is for separate critics; a value head learns with its agent, weighed by value_coef"
        )
    if settings["importance_level"] != "token" and settings["importance_cap"] is None:
        raise ValueError(f"importance_level={settings['importance_level']!r} needs importance_cap, which is off")
    if settings["value_coef"] is not None and separate:
        raise ValueError(f"value_coef={settings['value_coef']} weighs a value head on the actor: set separate_critic to false")
