"""Constraints between settings: the table, and the one function that reads it.

A row is (setting, condition, sentence). The condition is a function of a record with the settings as attributes. The sentence
says what is wrong where the condition does not hold: a text with fields of the record in braces, or a function that writes it
of the record. One that begins with "must be" gets the setting and its value in front. The rows below are about settings of one
class of this room, and are read when it is made; those that depend on the algorithm, the team or the data are in
`algorithms.constraints`.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from jmarl.config.validation import per_agent_values

Constraint = tuple[str, Callable[[Any], Any], str | Callable[[Any], str]]

CHANGES = ("data", "reward", "environment", "held_out")  # what `allow_changed` can allow
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # Hugging Face's names

PERTURBED = ("learning_rate", "max_grad_norm", "weight_decay", "kl_coef")  # settings that programs read as arrays [A]

# A setting of one optimizer -> that optimizer, and the default.
ONLY_WITH = {"adam_b1": ("adamw", 0.9), "adam_b2": ("adamw", 0.999), "adam_eps": ("adamw", 1e-8), "momentum": ("sgd", 0.0)}

# Algorithm -> settings of its episodes, whatever else is given.
EPISODES_OF: dict[str, dict[str, Any]] = {"c3": {"joint_mode": "counterfactual", "branching": "chain"}}

# Arguments of `apply_chat_template` that are no values of a template, or follow from the prompt.
NOT_OF_TEMPLATES = {
    "messages", "conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "strftime_now",
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "padding", "truncation", "max_length",
}  # fmt: skip

# Setting of preferences -> the setting that it belongs to, and the values of that one which it is for.
ONLY_FOR = {
    "comparator_lag": ("comparator", ("history",)),
    "comparator_model": ("comparator", ("model", "api")),
    "comparator_url": ("comparator", ("api",)),
    "replay_k": ("replay", ("nearest_k",)),
    "replay_lambda": ("replay", ("lambda_decay",)),
}

# Setting of a task -> its value when off, and the setting without which it has no effect.
ONLY_BESIDE: dict[str, tuple[Any, str]] = {
    "options": ({}, "environment"),
    "subset": (None, "data"),
    "split": ("train", "data"),
    "reward": (None, "data"),
    "formatters": ((), "reward"),
    "external_transition": (None, "reward"),
    "in_turns": (False, "external_transition"),
    "reward_weights": ((), "reward"),
    "on_error": ("raise", "reward"),
    "pool_workers": (2, "pool"),
    "max_error_share": (0.5, "reward"),
}


def require(constraints: Iterable[Constraint], s: Any) -> None:
    """Raise a ValueError with the sentence of the first constraint that does not hold. s: the settings, as attributes."""
    for setting, holds, sentence in constraints:
        if not holds(s):
            text = sentence(s) if callable(sentence) else sentence.format(s=s)
            if text.startswith("must be "):
                text = f"{setting}={getattr(s, setting)!r} is not allowed: {setting} {text}"
            raise ValueError(text)


def off_unless(setting: str, off: Any, holds: Callable[[Any], Any], where: str) -> Constraint:
    """Return the constraint of a setting that must be off unless a condition holds. where: the rest of the sentence."""
    text = repr(off).replace("{", "{{").replace("}", "}}")
    return setting, lambda s: getattr(s, setting) == off or holds(s), f"must be {text} {where}"


def joint_modes(branching: str) -> tuple[str, str]:
    """Return the joint modes of episodes with several turns."""
    return ("aligned", "counterfactual") if branching == "chain" else ("aligned", "cross")


def reserved_names(kwargs: Iterable[str]) -> list[str]:
    """Return names that are no values of a chat template."""
    return sorted(NOT_OF_TEMPLATES.intersection(kwargs))


def is_date(text: str) -> bool:
    """Return whether a text is a date such as 2026-11-26."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def are_factors(value: Any) -> bool:
    """Return whether a value is a list of finite numbers > 0, at least one."""
    numbers = value if isinstance(value, list | tuple) else ()
    return bool(numbers) and all(type(x) in (int, float) and 0 < x < math.inf for x in numbers)


def is_json(value: Any) -> bool:
    """Return whether JSON has a value, which is not null."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) is not None
    except (TypeError, ValueError):
        return False


# fmt: off
# --- sections of TrainConfig

SAMPLING: list[Constraint] = [
    ("min_new_tokens", lambda s: s.min_new_tokens <= s.max_new_tokens, "must be 0..max_new_tokens={s.max_new_tokens}"),
    ("stop", lambda s: all(s.stop_texts) and not re.search("[\ud800-\udfff]", "".join(s.stop_texts)),
     "must be texts that are not empty and that UTF-8 can write"),
    ("stop", lambda s: len("".join(s.stop_texts).encode()) <= 256, "must be texts of at most 256 bytes in all"),
]

EPISODES: list[Constraint] = [
    off_unless("early_termination_threshold", None, lambda s: s.num_turns > 1, "where num_turns=1"),
    ("joint_mode", lambda s: s.num_turns == 1 or s.joint_mode in joint_modes(s.branching),
     lambda s: f"must be one of {joint_modes(s.branching)} for branching={s.branching} with several turns"),
    ("chat_date", lambda s: s.chat_date == "auto" or is_date(s.chat_date), "must be auto, or a date: 2026-11-26"),
    ("chat_template_kwargs", lambda s: not reserved_names(s.chat_template_kwargs),
     lambda s: f"must be without {reserved_names(s.chat_template_kwargs)[0]!r}, which jmarl sets"),
    ("chat_template_kwargs", lambda s: is_json(s.chat_template_kwargs),
     "must be values that JSON has (texts, numbers, true, null, lists, dicts), which checkpoints keep"),
    off_unless("async_steps", 0, lambda s: s.num_turns == 1, "with num_turns={s.num_turns}"),
    off_unless("async_steps", 0, lambda s: s.sample_parts == 1, "with sample_parts={s.sample_parts}"),
    off_unless("async_steps", 0, lambda s: s.dynamic_sampling == 0, "with dynamic_sampling={s.dynamic_sampling}"),
]

LOSS: list[Constraint] = [
    off_unless("kl_target", None, lambda s: s.kl_coef > 0, "where kl_coef=0"),
    ("dual_clip", lambda s: not s.dual_clip or s.dual_clip > 1, "must be > 1, or 0 (off)"),
]

OPTIMIZER: list[Constraint] = [
    *[off_unless(name, default, lambda s, x=owner: x in per_agent_values(s.optimizer), f"without optimizer={owner}")
      for name, (owner, default) in ONLY_WITH.items()],
    off_unless("target_kl", None, lambda s: s.num_epochs * s.num_minibatches > 1, "where a batch is one optimizer step"),
]

LEAGUE: list[Constraint] = [
    *[off_unless(name, default, lambda s: s.snapshots or s.strangers, "where snapshots=0 without strangers, which is no league")
      for name, default in {"opponents": "uniform", "opponent_share": 0.5, "opponents_at_once": 1}.items()],
    *[off_unless(name, default, lambda s: s.snapshots, "where snapshots=0")
      for name, default in {"snapshot_dtype": "float32", "snapshot_every": 10}.items()],
    ("opponents", lambda s: s.opponents in ("uniform", "winrate") or not s.strangers,
     "must be uniform or winrate where there are strangers: latest and nash meet slots alone"),
]

POPULATION: list[Constraint] = [
    *[off_unless(name, default, lambda s: s.members, "where members=0, which is no population")
      for name, default in (("exploit_every", 20), ("perturb", {"learning_rate": [0.8, 1.25]}))],
    ("members", lambda s: s.members != 1, "must be 0, or at least 2: one member has no other to copy"),
    ("perturb", lambda s: {*s.perturb} <= {*PERTURBED},
     lambda s: f"perturb={s.perturb} is not allowed: members may differ in {', '.join(PERTURBED)}, which programs read as "
               f"arrays; {next(name for name in s.perturb if name not in PERTURBED)!r} is none of these"),
    ("perturb", lambda s: all(map(are_factors, s.perturb.values())),
     "must be a list of numbers > 0 for each setting, such as {{'learning_rate': [0.8, 1.25]}}"),
]

LORA: list[Constraint] = [
    ("lora_targets", lambda s: {*s.target_names} <= {*LORA_TARGETS} and len({*s.target_names}) == len(s.target_names),
     f"must be all, or some of {','.join(LORA_TARGETS)}, each once"),
    *[off_unless(name, off, lambda s: s.lora_rank, "where lora_rank=0, which has no adapters")
      for name, off in {"lora_alpha": None, "lora_dropout": 0, "lora_targets": None}.items()],
]

PREFERENCE: list[Constraint] = [
    ("label_smoothing", lambda s: not s.label_smoothing or s.preference_loss in (None, "sigmoid"),
     "must be 0 or None where preference_loss is hinge or ipo"),
    *[off_unless(name, None, lambda s, x=owner, y=values: getattr(s, x) in y,
                 f"where {owner}={{s.{owner}!r}}: it is for {owner}={' and '.join(values)}")
      for name, (owner, values) in ONLY_FOR.items()],
    *[(name, lambda s, x=name, y=comparator: getattr(s, x) is not None or s.comparator != y,
       f"must be set for comparator={comparator}")
      for name, comparator in (("comparator_model", "model"), ("comparator_url", "api"))],
]

RUN: list[Constraint] = [
    off_unless("talk_swap", False, lambda s: s.talk_every, "where talk_every=0"),
    ("frozen_agents", lambda s: min(s.frozen_agents, default=0) >= 0 and len({*s.frozen_agents}) == len(s.frozen_agents),
     "must be different numbers >= 0"),
    off_unless("alternate_every", 1, lambda s: s.update_order == "alternating", "where update_order is simultaneous"),
    ("resume", lambda s: not s.resume or s.output_dir, "must be off without output_dir"),
    ("save_every", lambda s: not s.save_every or s.output_dir, "must be off without output_dir"),
    ("trackio", lambda s: not s.trackio or s.output_dir, "must be empty without output_dir, where the name of its run is kept"),
    off_unless("resume_step", None, lambda s: s.resume is True, "without resume"),
    ("resume", lambda s: not (s.resume == "auto" and s.save_every == 0),
     "must be True or False where save_every=0, which makes no checkpoints"),
    ("keep_best", lambda s: not s.keep_best or s.best_column[0].startswith("eval/"),
     "must be true (the held-out reward) or a column of evaluations, such as eval/reward, or eval/loss min"),
    ("allow_changed", lambda s: {*s.allowed_changes} <= {*CHANGES}, f"must be some of {','.join(CHANGES)}"),
]

# Read when a run is checked: it needs all of them.
DIRECTORY: list[Constraint] = [
    ("keep_best", lambda s: not s.keep_best or s.output_dir, "must be off without output_dir, where the best weights are kept"),
    ("keep_best", lambda s: not s.keep_best or s.save_every != 0, "must be off where save_every=0, which makes no checkpoints"),
    ("keep_every", lambda s: not s.keep_every or (s.output_dir and s.save_every != 0),
     "must be 0 without output_dir, and where save_every=0, which makes no checkpoints"),
    ("log_tokens", lambda s: not s.log_tokens or (s.output_dir and s.max_completions_mb),
     "must be 0 without output_dir, and where max_completions_mb=0, which keeps no completions"),
    ("keep_best", lambda s: not s.keep_best or s.eval_every,
     "must be off where eval_every=0: set eval_every, the updates between the evaluations that the best is chosen from"),
]

# --- the whole of TrainConfig, and the other parts of ExperimentConfig

TALK = {  # setting -> (what restricts it, its values, in words, why)
    "num_generations": ("talk_every", lambda x: x > 1, "2 or more", "which compares the messages of a group"),
    "history": ("talk_every", lambda x: x == "none", "none", "where agents would read their own words again"),
    "joint_mode": ("talk_every", lambda x: x == "aligned", "aligned", "which compares all episodes of a group"),
    "num_prompts": ("talk_swap", lambda x: x > 1, "2 or more", "which exchanges messages between the tasks of a step"),
    "sample_parts": ("talk_swap", lambda x: x == 1, "1", "which exchanges messages between all tasks of a step"),
    "dynamic_sampling": ("talk_swap", lambda x: x == 0, "0", "which plays the first tasks of a step again"),
}

TRAIN: list[Constraint] = [
    *[(name, lambda s, x=name, y=owner, z=holds: not getattr(s, y) or z(getattr(s, x)),
       f"must be {value} where {owner}={{s.{owner}}}, {why}")
      for name, (owner, holds, value, why) in TALK.items()],
    ("joint_mode", lambda s: s.joint_mode in ("aligned", EPISODES_OF.get(s.algorithm, {}).get("joint_mode", s.joint_mode)),
     lambda s: f"must be {EPISODES_OF[s.algorithm]['joint_mode']} for algorithm={s.algorithm}"),
    ("num_updates", lambda s: s.lr_schedule == "constant" or s.num_updates > s.warmup_updates,
     "must be > warmup_updates={s.warmup_updates} for lr_schedule={s.lr_schedule}"),
    ("exploit_every", lambda s: not s.members or (s.eval_every and s.exploit_every % s.eval_every == 0),
     "must be a multiple of eval_every={s.eval_every}, the updates between the evaluations that members are ranked by"),
    *[("perturb", lambda s, x=name: not s.members or x not in s.perturb or any(per_agent_values(getattr(s, x))),
       f"perturb={{s.perturb}} has no effect on {name}=0: set it, or remove it from perturb")
      for name in ("weight_decay", "kl_coef")],
    ("perturb", lambda s: not s.members or "kl_coef" not in s.perturb or s.kl_target is None,
     "perturb={s.perturb} does not go with kl_target={s.kl_target}, which adapts kl_coef: leave one of them out"),
]

TEAM: list[Constraint] = [
    ("models", lambda s: s.models, "must be one name, path or Hub id per agent, or one for all agents"),
    ("num_agents", lambda s: s.num_agents is None or len(s.models) in (1, s.num_agents),
     lambda s: f"must be None or {len(s.models)}, the number of models"),
    ("roles", lambda s: len(s.roles) in (0, s.size), "must be one text per agent, {s.size}, or none"),
]

TASK: list[Constraint] = [
    ("reward", lambda s: s.reward != (), "must be module:function, a list of these, or None"),
    ("reward_weights", lambda s: len(s.reward_weights) in (0, len(s.reward_names)),
     lambda s: f"must be one number for each of the {len(s.reward_names)} rewards, or empty"),
    off_unless("train_envs", (), lambda s: s.environment is None, "beside environment"),
    ("data", lambda s: (s.data is None) == (s.trains_in_environments or bool(s.eval_envs)),
     "must be set, or one of environment and eval_envs, but not both"),
    *[off_unless(name, off, lambda s, x=owner: getattr(s, x) is not None, f"without {owner}")
      for name, (off, owner) in ONLY_BESIDE.items()],
    off_unless("timeout", None, lambda s: s.reward is not None or s.pool is not None, "without reward or pool"),
    off_unless("pool", None, lambda s: s.reward is not None or s.data is None, "without reward or environment"),
    ("timeout", lambda s: s.pool is None or s.reward is None or s.timeout is not None,
     "must be a number of seconds, the limit of a call, where pool={s.pool} calls rewards"),
    off_unless("eval_envs", (), lambda s: not s.trains_in_environments or s.held_out != 0,
               "beside other environments where held_out is 0: nothing is evaluated"),
    off_unless("held_out_split", "test", lambda s: isinstance(s.held_out, str), "where held_out is a number"),
]

EXPERIMENT: list[Constraint] = [
    ("seeds", lambda s: not s.members or not s.seeds or len(s.seeds) == s.members,
     "must be empty, or one per member of the population, {s.members}"),
    ("keep_best", lambda s: not s.keep_best or s.held_out != 0,
     "must be off where held_out is 0: set held_out, the tasks that the best is chosen by"),
    ("roles", lambda s: not s.roles or s.reward is not None, "must be empty without data and a reward"),
    off_unless("eval_metrics", None, lambda s: s.held_out != 0, "where held_out is 0: nothing is evaluated"),
    ("formatters", lambda s: len(s.formatters) in (0, 1, s.size), "must be one for all agents, or one per agent, {s.size}"),
]
