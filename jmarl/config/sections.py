"""Settings of episodes, of preferences and of files, and how a bad one is refused. `config` joins them to those of a run."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import numbers
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def check(name: str, given, ok: bool, allowed: str) -> None:
    """Refuse a bad setting, saying what was given and what is allowed."""
    if not ok:
        raise ValueError(f"{name}={given!r} is not allowed: {name} must be {allowed}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the nearest known name, or "" where none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)  # at 0.6 deepspeed is near seed
    return f"; did you mean {near[0]!r}?" if near else ""


def check_names(cls: Any, given: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse a setting that a dataclass does not have, naming one that is near. others: more names that are known."""
    known = [*(field.name for field in dataclasses.fields(cls)), *others]
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known) or f"; help({cls.__name__}) lists its settings"
            raise TypeError(f"{cls.__name__} has no setting {name!r}{meant}")


def with_known_names(cls: type[T]) -> type[T]:
    """A dataclass that names a near one of its settings where it is given one that it does not have; not its subclasses."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args: Any, **given: Any) -> None:
        check_names(cls, given)
        init(self, *args, **given)

    cls.__init__ = checked
    return cls


def check_types(settings: Any) -> None:
    """Refuse settings of a dataclass that are of another type than their field's: a number as a text, as YAML reads 1e-5."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        if not fits(getattr(settings, name), hint):
            allowed = str(getattr(hint, "__name__", hint)) if isinstance(hint, type) else str(hint)
            raise TypeError(f"{name}={getattr(settings, name)!r} is not allowed: {name} must be of type {allowed}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type: of a plain one, a union, or tuples of one (for which lists do, and ints for floats)."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(fits(x, options[0]) for x in value)
    if options:
        return any(fits(value, option) for option in options)
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, hint)


@dataclasses.dataclass(frozen=True)
class Episodes:
    """What an episode is made of."""

    chat: bool = False
    """Put prompts into the tokenizer's chat template."""
    joint_mode: str = "aligned"
    """aligned: completion g of every agent forms a joint action; cross: all G^N combinations do; counterfactual: each
    completion of an agent is judged with the first ones of all others and, where there are several turns, with what was written
    later after those (C3, arXiv 2603.06859)."""
    cross_credit: str = "mean"
    """Return of a completion in cross mode: mean or sum over the joint actions that contain it."""
    num_turns: int = 1
    """Turns of an episode, each a joint action and its answer."""
    branching: str = "tree"
    """tree: every joint action of a turn goes on with a group of completions of its own; chain: with a single one."""
    history: str = "none"
    """What an agent reads in later turns: none, the new prompt alone; append, the conversation so far and the new prompt."""
    long_prompts: str = "error"
    """A prompt that leaves no room for max_new_tokens in the context: error; truncate_left, keep the last tokens that fit (and
    the chat template around them); drop, leave such items out before training, and end an episode before such a later turn.
    Prompts that formatters write are checked for all items before anything runs; the log counts the others, `long_prompts`."""
    gamma: float = 1.0
    """Discount of the next turn's return."""
    early_termination_threshold: float | None = None
    """A node whose mean reward is above this is not played on; None: all are."""
    sample_parts: int = 1
    """Sample the prompts of a turn in so many parts (as far as they can be divided; 1 where history is append), and compute the
    rewards of one part while the next is sampled: for rewards that take long, such as those of programs. The environment is
    then asked once for each part, in a thread of its own."""
    overlap_rewards: bool = True
    """False: wait for the rewards of a part before the next is sampled, all in one thread, as several seeds in one program do.
    The numbers are the same."""

    def __post_init__(self):
        check("joint_mode", self.joint_mode, self.joint_mode in JOINT_MODES, f"one of {tuple(JOINT_MODES)}")
        check("cross_credit", self.cross_credit, self.cross_credit in ("mean", "sum"), "mean or sum")
        check("num_turns", self.num_turns, self.num_turns >= 1, ">= 1")
        check("branching", self.branching, self.branching in ("tree", "chain"), "tree or chain")
        check("history", self.history, self.history in ("none", "append"), "none or append")
        check("long_prompts", self.long_prompts, self.long_prompts in LONG_PROMPTS, f"one of {LONG_PROMPTS}")
        check("gamma", self.gamma, 0 <= self.gamma <= 1, "in [0, 1]")
        threshold = self.early_termination_threshold
        check("early_termination_threshold", threshold, threshold is None or self.num_turns > 1, "None where num_turns=1")
        check("sample_parts", self.sample_parts, self.sample_parts >= 1, ">= 1")
        object.__setattr__(self, "joint_mode", JOINT_MODES[self.joint_mode])
        if self.num_turns > 1:
            allowed = ("aligned", "counterfactual") if self.branching == "chain" else ("aligned", "cross")
            what = f"one of {allowed} for branching={self.branching} with several turns"
            check("joint_mode", self.joint_mode, self.joint_mode in allowed, what)

    @property
    def forks(self) -> bool:
        """Whether only a node's first joint action is played on, and the others are alternatives to single messages of it."""
        return self.joint_mode == "counterfactual"


LONG_PROMPTS = ("error", "truncate_left", "drop")
JOINT_MODES = {name: name for name in ("aligned", "cross", "counterfactual")} | {"align": "aligned", "crossed": "cross"}


@dataclasses.dataclass(frozen=True)
class Preferences:
    """How rows that learn from data take it, and how pairs are made of what a team writes. None: as the row says."""

    batch_size: int | None = None
    """Pairs or texts an update, of rows that learn from data; None: 8."""
    pair_selection: str | None = None
    """Which pairs of a prompt are kept: reward_gap (largest first), all, random, or comparator_reward (the best of the
    comparator's first); None: reward_gap, in madpo_iter and marlhf_iter comparator_reward."""
    pairs_per_prompt: int | None = None
    """Pairs kept of a prompt, 0 is no limit; None: 4."""
    comparator: str | None = None
    """Whom the present policy's completions are compared with, one by one, in rounds: current (other completions of its own),
    initial (the untrained team), history (the team comparator_lag rounds ago), model (comparator_model), api
    (comparator_url); None: current."""
    comparator_lag: int | None = None
    """How many rounds ago the comparator of kind history was the policy; None: 1."""
    comparator_model: str | None = None
    """Model of the comparator of kind model: a name, a directory, a .gguf file or a hub id; of kind api its name there."""
    comparator_url: str | None = None
    """Where the comparator of kind api answers: an OpenAI-compatible address such as http://localhost:8000/v1; its key is read
    from the environment variable COMPARATOR_API_KEY."""
    round_updates: int | None = None
    """Updates on a round's pairs before the next round makes new ones; None: 10."""
    replay: str | None = None
    """Rounds whose pairs are learned from: current, nearest_k (the newest replay_k), all, or lambda_decay (all, by weights
    replay_lambda ^ age); None: current."""
    replay_k: int | None = None
    """Rounds of replay nearest_k; None: 2."""
    replay_lambda: float | None = None
    """Decay of replay lambda_decay, in [0, 1]; None: 0.5."""
    rl_algorithm: str | None = None
    """Row that marlhf and marlhf_iter train the team by, on the reward model's scores; None: magrpo."""
    reward_updates: int | None = None
    """Updates of the reward model before the team is trained (in marlhf_iter: of every round); None: 50."""
    reward_learning_rate: float | None = None
    """Learning rate of the reward model; None: 1e-5."""

    def __post_init__(self):
        for name, allowed in PREFERENCE_CHOICES.items():
            check(name, getattr(self, name), getattr(self, name) in (None, *allowed), f"one of {allowed}, or None")
        for name in ("batch_size", "comparator_lag", "round_updates", "replay_k", "reward_updates"):
            check(name, getattr(self, name), getattr(self, name) is None or getattr(self, name) >= 1, ">= 1, or None")
        limit, decay, rate = self.pairs_per_prompt, self.replay_lambda, self.reward_learning_rate
        check("pairs_per_prompt", limit, limit is None or limit >= 0, ">= 0 (0 is no limit), or None")
        check("replay_lambda", decay, decay is None or 0 <= decay <= 1, "in [0, 1], or None")
        check("reward_learning_rate", rate, rate is None or rate > 0, "> 0, or None")
        for setting, (owner, needed) in NEEDS.items():
            value, said = getattr(self, setting), getattr(self, owner)
            allowed = f"None where {owner}={said!r}: it is for {owner}={' and '.join(needed)}"
            check(setting, value, value is None or said in needed, allowed)
        for setting, kind in (("comparator_model", "model"), ("comparator_url", "api")):
            given = getattr(self, setting)
            check(setting, given, given is not None or self.comparator != kind, f"given for comparator={kind}")


PREFERENCE_CHOICES = {
    "pair_selection": ("reward_gap", "all", "random", "comparator_reward"),
    "comparator": ("current", "initial", "history", "model", "api"),
    "replay": ("current", "nearest_k", "all", "lambda_decay"),
}
NEEDS = {  # a setting -> the setting and its values that it is for
    "comparator_lag": ("comparator", ("history",)),
    "comparator_model": ("comparator", ("model", "api")),
    "comparator_url": ("comparator", ("api",)),
    "replay_k": ("replay", ("nearest_k",)),
    "replay_lambda": ("replay", ("lambda_decay",)),
}


@dataclasses.dataclass(frozen=True)
class Files:
    """What a run writes to its directory, and how it goes on from there."""

    output_dir: str = ""
    """Where metrics, checkpoints and final models go; empty: nothing is written."""
    resume: bool = False
    """Go on from the newest checkpoint in output_dir."""
    strict_checkpoints: bool = False
    """Refuse to resume where the newest checkpoint is damaged; else it is set aside and the one before is used."""
    allow_changed: str | None = None
    """Resume although these are not what they were, separated by commas: data, reward."""
    save_every: int | None = None
    """Updates between checkpoints in output_dir; None: by time, see save_minutes; 0: none. Where they are made, one is made at
    the end too, and where the run is interrupted or fails."""
    save_minutes: float = 3.0
    """Minutes between checkpoints where save_every is None, or 20 times what the last one took, whichever is more."""
    save_total_limit: int = 2
    """Checkpoints kept."""
    stop_after_nonfinite: int = 3
    """Stop with an error after so many updates in a row in which an agent's loss or gradient was not finite or no reward was
    valid; 0: never."""
    replay_rollout: str = ""
    """Make the one update of this file alone, such as the failed_update_N.pkl of a run that stopped, and print what it
    measures; with resume on the weights of the newest checkpoint."""
    save_models: bool = True
    """Write the trained agents to output_dir/models at the end: all weights of each, with LoRA merged and as an adapter."""

    def __post_init__(self):
        for name in ("resume", "save_every"):
            check(name, getattr(self, name), not getattr(self, name) or bool(self.output_dir), "off without output_dir")
        check(
            "save_every", self.save_every, self.save_every is None or self.save_every >= 0, ">= 0 (0 is off), or None: by time"
        )
        check("save_minutes", self.save_minutes, self.save_minutes >= 0, ">= 0")
        unknown = [name for name in self.changes_allowed if name not in MAY_BE_ALLOWED]
        check("allow_changed", self.allow_changed, not unknown, f"some of {','.join(MAY_BE_ALLOWED)}")
        check("save_total_limit", self.save_total_limit, self.save_total_limit >= 1, ">= 1")
        check("stop_after_nonfinite", self.stop_after_nonfinite, self.stop_after_nonfinite >= 0, ">= 0 (0 is off)")

    @property
    def saves(self) -> bool:
        """Whether the run makes checkpoints."""
        return bool(self.output_dir) and self.save_every != 0

    @property
    def changes_allowed(self) -> list[str]:
        return [name.strip() for name in (self.allow_changed or "").split(",") if name.strip()]


MAY_BE_ALLOWED = ("data", "reward")
