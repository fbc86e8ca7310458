"""Constraints between settings that depend on the algorithm: rows as in `config.constraints`.

The conditions read the record that `facts` makes: all settings by their short names, the row of the algorithm, and what the
caller adds. Those that depend on the team, the seeds or given data are in `run_constraints`.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from jmarl.algorithms.table import ALGORITHMS, DEFAULTS, REWARD_MODEL, ROUNDS, AlgorithmRow, find_row
from jmarl.config import Preference, TrainConfig, flat, per_agent_values
from jmarl.config.constraints import Constraint

PER_AGENT = ("learning_rate", "max_grad_norm", "weight_decay")  # settings with one number for all agents, or one per agent

ONLY_ROLLOUTS: dict[str, Any] = {  # settings of rows that learn from rollouts, and their value when off
    "advantage_scale": None,
    "loss_aggregation": None,
    "importance_cap": None,
    "old_logprobs": "sampler",
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "num_epochs": 1,
    "num_minibatches": 1,
    "dynamic_sampling": 0,
    "async_steps": 0,
}


def facts(cfg: TrainConfig, **more: Any) -> SimpleNamespace:
    """Return what constraints read: the settings, the row of the algorithm, the completions of a prompt (group) with the
    setting that says how many (group_name), and more."""
    settings, row = flat(cfg), find_row(cfg.algorithm)
    name = "num_candidates" if row.makes_pairs and settings["num_candidates"] else "num_generations"
    return SimpleNamespace(**(settings | {"row": row, "group": settings[name], "group_name": name} | more))


def used_settings(row: AlgorithmRow) -> set[str]:
    """Return the settings among `DEFAULTS` that a row uses."""
    names = {*row.options.values()}
    if row.data == "rollouts":
        names.add("mask_overlong")
        names |= {"ema_decay"} if row.baseline == "ema" else set()
        if row.critic:
            names |= {"gae_lambda", "critic_learning_rate", "value_clip"}
            names |= {"separate_critic", "value_coef"} if row.critic == "own" else set()
            names |= set() if row.per_token else {"critic_type"}
        return names
    names |= {"batch_size"}
    names |= {"bc_weight", "world_model_weight"} if row.data == "texts" else set()
    names |= {"reference_free"} if row.margin in ("own", "joint") else set()
    names |= {"num_candidates", "pair_selection", "pairs_per_prompt"} if row.makes_pairs else set()
    names |= {*REWARD_MODEL} if row.learned else set()
    return names | ({*ROUNDS} if row.rounds else set())


def users(setting: str) -> str:
    """Return the names of the algorithms that use a setting."""
    return ", ".join(name for name, row in ALGORITHMS.items() if setting in used_settings(row))


def smallest_group(s: Any) -> int:
    """Return the fewest completions of a prompt that the baseline needs."""
    return 2 if s.row.critic and s.critic_type == "q" else s.row.min_group


def has_value_baseline(s: Any) -> bool:
    """Return whether the baseline is a value of a critic or the greedy completion's return."""
    return bool(s.row.critic) or s.row.baseline == "greedy"


ELSEWHERE = {"beta": ". The beta of TRL's GRPO is kl_coef"}  # settings that mean another one elsewhere

# fmt: off
# --- settings that a row does not use, alone or together with others

USED: list[Constraint] = [
    (name, lambda s, x=name: getattr(s, x) is None or x in used_settings(s.row),
     lambda s, x=name: f"{x}={getattr(s, x)!r} has no effect for algorithm={s.algorithm!r}; it is for {users(x)}"
                        f"{ELSEWHERE.get(x, '')}")
    for name in DEFAULTS
]

# Of a row that trains a reward model: its other settings are for the row that trains the team.
USED_BY_REWARD_MODELS = [row for row in USED if row[0] in {field.name for field in dataclasses.fields(Preference)}]

ROW: list[Constraint] = [
    *USED,
    *[(name, lambda s, x=name, y=off: s.row.data == "rollouts" or getattr(s, x) == y,
       f"{name}={{s.{name}!r}} has no effect for algorithm={{s.algorithm!r}}, which learns from {{s.row.data}}: leave it at "
       f"{off!r}")
      for name, off in ONLY_ROLLOUTS.items()],
    ("advantage_scale", lambda s: not s.row.per_token or s.advantage_scale != "std",
     "advantage_scale='std' has no effect on advantages of tokens: use batch_std, running_std or none"),
    ("value_clip", lambda s: not s.value_clip or (s.num_epochs * s.num_minibatches > 1 and s.row.critic != "central"),
     "value_clip={s.value_clip} never clips if a critic makes one step on a batch: own critics make several with num_epochs or "
     "num_minibatches, a central one never does"),
    ("critic_learning_rate", lambda s: s.critic_learning_rate is None or s.separate_critic is not False,
     "critic_learning_rate is for separate critics; a value head learns with its agent, weighted by value_coef"),
    ("importance_level", lambda s: s.importance_level == "token" or s.importance_cap is not None or s.async_steps,
     "importance_level={s.importance_level!r} needs importance_cap, which is off"),
    ("value_coef", lambda s: s.value_coef is None or s.separate_critic is False,
     "value_coef={s.value_coef} weights a value head on the agent: set separate_critic to false"),
]

# --- a run that samples

SAMPLES: Constraint = (
    "algorithm", lambda s: s.row.data == "rollouts" or s.row.makes_pairs,
    "algorithm={s.algorithm!r} learns from given data: use jmarl.fit",
)

# Of a run that learns from pairs or texts, by the settings of its algorithm. Where a reward model learns, the team learns from
# rollouts, and the model uses at most one part per pair.
MICRO_BATCHES: Constraint = (
    "micro_batches", lambda s: s.row.learned or s.micro_batches == "auto" or s.micro_batches <= (s.batch_size or 1),
    lambda s: f"micro_batches={s.micro_batches} is more than batch_size={s.batch_size or 1}: use fewer",
)

MAKES_PAIRS: list[Constraint] = [
    ("num_turns", lambda s: s.num_turns == 1 and s.joint_mode == "aligned",
     "algorithm={s.algorithm!r} needs num_turns=1 and joint_mode='aligned'; got num_turns={s.num_turns} and "
     "joint_mode={s.joint_mode!r}"),
    MICRO_BATCHES,
    ("temperature", lambda s: s.temperature != 0 or s.comparator != "current",
     "temperature=0 makes all completions of a prompt alike: preferences need temperature > 0"),
    ("pair_selection", lambda s: s.row.rounds or s.pair_selection != "comparator_reward",
     "pair_selection='comparator_reward' needs a comparator: it is for madpo_iter and marlhf_iter"),
]

# A reward model learns, and the team from its scores.
LEARNS_REWARD: list[Constraint] = [
    ("async_steps", lambda s: not s.async_steps,
     "async_steps=1 does not go with algorithm={s.algorithm!r}, whose reward changes: set it to 0"),
    ("rl_algorithm", lambda s: find_row(s.rl_algorithm).data == "rollouts",
     "rl_algorithm={s.rl_algorithm!r} does not learn from rollouts: choose magrpo, grpo, maac, ..."),
    ("num_generations", lambda s: s.group >= s.row.min_group,
     "{s.group_name}={s.group} is too small for algorithm={s.algorithm!r}: pairs need 2; set it higher"),
]

LEARNS: list[Constraint] = [
    ("num_generations", lambda s: s.group >= smallest_group(s),
     lambda s: f"{s.group_name}={s.group} is too small for algorithm={s.algorithm!r}: its baseline needs at least "
               f"{smallest_group(s)} completions of a prompt; set {s.group_name} higher"),
    ("cross_credit", lambda s: s.cross_credit != "sum" or not has_value_baseline(s),
     "cross_credit='sum' does not fit algorithm={s.algorithm!r}: its baseline is of a mean; use cross_credit='mean'"),
    ("joint_mode", lambda s: s.joint_mode != "counterfactual" or not s.dynamic_sampling,
     "joint_mode='counterfactual' does not go with dynamic_sampling={s.dynamic_sampling}: its groups are alternatives to "
     "single completions"),
    ("joint_mode", lambda s: s.joint_mode != "counterfactual" or not has_value_baseline(s),
     "joint_mode='counterfactual' does not go with algorithm={s.algorithm!r}: its groups are alternatives to single "
     "completions"),
    ("dynamic_sampling", lambda s: not s.dynamic_sampling or s.row.compares_group,
     lambda s: f"dynamic_sampling={s.dynamic_sampling} has no effect for algorithm={s.algorithm!r}, whose advantages do not "
               "compare the returns of a group; it is for "
               + ", ".join(name for name, row in ALGORITHMS.items() if row.compares_group)),
]

CENTRAL: list[Constraint] = [  # what a central critic has one of
    (name, lambda s, x=name, y=own: (
        s.row.critic != "central" or len({*per_agent_values(getattr(s, x))}) <= 1 or (y and getattr(s, y) is not None)),
     f"{name}={{s.{name}}} leaves open which the central critic of {{s.algorithm!r}} uses: "
     + (f"set {own}" if own else f"give one {name} for all"))
    for name, own in (dict.fromkeys((*PER_AGENT, "optimizer"), "") | {"learning_rate": "critic_learning_rate"}).items()
]
