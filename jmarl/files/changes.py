"""What may change when a run resumes, and what must not: settings, team, environment, data, held-out items and reward."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.config import CHANGES, SECTIONS, TrainConfig, flat
from jmarl.files.identity.fingerprint import difference, doubts

# Settings of files, logs, evaluations and devices, and the length of the run. `mesh` puts the same weights on other devices,
# `held_out` is a setting of experiments.
MAY_CHANGE = {
    "resume", "resume_step", "strict_checkpoints", "allow_changed", "num_updates", "tensorboard", "trackio", "save_every",
    "save_minutes", "save_total_limit", "save_models", "stop_after_nonfinite", "replay_rollout", "log_every", "eval_every",
    "max_completions_mb", "log_tokens", "eval_generations", "eval_temperature", "overlap_rewards", "mesh", "strategy",
    "held_out", "output_dir", "progress", "rewards_divided", "keep_best", "keep_every",
}  # fmt: skip
# Settings that an error in the middle of a run advises to change: prompts of later turns that are too long, too little memory,
# batches that cannot be split, updates that are not finite. They change what is learned, so each change is recorded.
ADVISED = {
    "long_prompts", "history", "num_turns", "max_new_tokens", "num_prompts", "num_generations", "num_minibatches", "batch_size",
    "sample_parts", "micro_batches", "remat", "per_agent", "compute_dtype", "gae_lambda", "learning_rate",
    "critic_learning_rate", "max_grad_norm",
}  # fmt: skip
# What completions that have begun early (async_steps) depend on.
CHANGES_PENDING = {"long_prompts", "max_new_tokens", "num_prompts", "num_generations", "compute_dtype", *CHANGES} - {"held_out"}
# Of a checkpoint's metadata; what else is in it must be equal.
WITH_OWN_WORDS = {"config", "team", "critics", "bases", "initial", "options", "error_handling", *CHANGES}
UNRECORDED = {"resume", "resume_step", "allow_changed", "progress"}


class CannotGoOn(ValueError):
    """A run cannot be resumed as requested, or cannot start because the directory holds an unfinished run."""


def check_changes(cfg: TrainConfig, old: dict[str, Any], new: dict[str, Any], step: int) -> dict[str, str]:
    """Compare the metadata of a checkpoint with that of this run. Raises `CannotGoOn` if a difference is not allowed.

    Returns:
        The allowed differences that are recorded: name -> description.
    """
    config = json.loads(json.dumps(new["config"]))  # as in a checkpoint, where tuples are lists
    # A checkpoint of an older version lacks newer settings, which then have their defaults.
    defaults = flat(TrainConfig()) | {f.name: f.default for f in dataclasses.fields(cfg) if f.name not in SECTIONS}
    old_config = json.loads(json.dumps({k: x for k, x in defaults.items() if x is not dataclasses.MISSING})) | old["config"]
    changes = changed(dict.fromkeys(config) | old_config, config)
    errors = [text for name, text in changes.items() if name not in MAY_CHANGE | ADVISED]
    for name in ("team", "critics"):
        errors += [f"{name}: {change}" for change in team_changes(old.get(name, []), json.loads(json.dumps(new[name])))]
    if old.get("bases", []) != new["bases"]:
        errors.append("bases: the frozen weights of LoRA differ from those that the adapters were trained on")
    if (old.get("initial") or new.get("initial")) != new.get("initial"):  # an older version may not have recorded them
        errors.append("initial: other weights before training, which are the reference")
    others = json.loads(json.dumps({name: x for name, x in new.items() if name not in WITH_OWN_WORDS}))
    errors += changed(old, others).values()
    # A checkpoint of an older version lacks newer fingerprints, or entries of them: those are not compared.
    given = {name: (old.get(name, new.get(name, {})), new.get(name, {})) for name in (*CHANGES, "options")}
    fingerprints = {name: difference(name, *given[name]) for name in ("data", "reward", "held_out")}
    before, now = given["environment"]
    names = dict.fromkeys({**before, **now})
    texts = [*changed(names | before, names | now, "{}").values(), *sorted(changed(*given["options"], "{}").values())]
    if "reward functions" not in given["reward"][1]:  # the environment is not one of a reward: this code is its own
        texts = [*filter(None, [fingerprints.pop("reward").removeprefix("reward: ")]), *texts]
    fingerprints["environment"] = f"environment: {', '.join(texts)}" if texts else ""
    refused = [name for name, text in fingerprints.items() if text and name not in cfg.run.allowed_changes]
    errors += [fingerprints[name] for name in refused]
    if errors:
        lines = "".join(f"\n  {error}" for error in errors)
        hint = f"\nallow_changed={','.join(refused)} resumes with the new {' and '.join(refused)}" if refused else ""
        if len(errors) > len(refused):
            hint += "\ngive what the run began with, which its config.yaml has, or choose another output_dir for a new run"
        raise CannotGoOn(
            f"cannot resume from step {step} in {cfg.run.output_dir}: it was made with other settings:{lines}{hint}"
        )
    if unsure := doubts(*given["reward"]):
        warnings.warn(
            f"the reward or environment may have other parameters than before step {step}: {', '.join(unsure)}. The source of "
            "the code with this whole number cannot be seen, so it may also be a counter: define it in a file",
            stacklevel=2,
        )
    changes |= changed(old.get("error_handling", {}), new.get("error_handling", {}), "{} of rewards:")
    recorded = {name: text for name, text in changes.items() if name not in UNRECORDED}
    return recorded | {name: text for name, text in fingerprints.items() if text}


def changed(old: Mapping[str, Any], new: Mapping[str, Any], label: str = "{}:") -> dict[str, str]:
    """Return a line for each entry that both have and that differs. label: with {} in the place of its name."""
    both = {name: (old[name], x) for name, x in new.items() if name in old}
    return {name: f"{label.format(name)} {was!r} -> {x!r}" for name, (was, x) in both.items() if was != x}


def team_changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what differs between two results of `Team.describe`, a line each. Fields that an older version did not write are
    not compared."""
    if len(old) != len(new) or any(not _contains(stack, was) for was, stack in zip(old, new, strict=True)):
        return ["other models, tokenizers or roles"]
    names = {"template": "chat template", "ends": "end tokens", "special_tokens": "special tokens", "encoding": "tokenizer"}
    changes = []
    for was, stack in zip(old, new, strict=True):
        order = [agent for roles in stack["members"] for agent in roles]
        for agent, before, now in zip(order, was.get("agents", ()), stack.get("agents", ()), strict=False):
            different = [text for name, text in names.items() if before[name] != now[name]]
            changes += [f"agent {agent} has another {' and '.join(different)}"] if different else []
    return changes


def _contains(stack: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    """Return whether the architecture, members and vocabulary of a stack are those of an older description."""
    same = all(stack[name] == was[name] for name in ("members", "tokenizer"))
    return same and all(stack["config"].get(name) == value for name, value in was["config"].items())
