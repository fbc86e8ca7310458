"""The table of algorithms, and how a row and a configuration become the `Algorithm` that the jitted programs are made of.

A row is an advantage estimator, a loss and their defaults; a single-agent method is a team of one. To add an algorithm, add a
row:

    ALGORITHMS["mine"] = AlgorithmRow(loss=policy_gradient, estimator=my_estimator, min_group=2)

`resolve` is called once per run, before anything is traced. It fills every setting that is None with the row's default and
refuses settings that the row does not use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jmarl.config import Critic, LoRA, Loss, Optimizer, Preference, TrainConfig, did_you_mean, flat
from jmarl.rl.advantages import Estimator, group_mean, leave_one_out, max_baseline, raw
from jmarl.rl.losses import cispo, clipped_surrogate, cross_entropy, policy_gradient, preference


@dataclasses.dataclass(frozen=True, eq=False)  # equal only to itself: two rows never share a compiled program
class AlgorithmRow:
    """One row of the table.

    loss: arrays -> (scalar, metrics), see `rl.losses`. estimator: advantages of one group, see `rl.advantages`. baseline: what
    is subtracted from returns first: nothing, the return of the greedy completion, the moving average of the role's
        returns, or a critic's value.
    per_token: advantages of tokens by a critic (GAE), in place of an estimator. scale, aggregation: defaults of
    `advantage_scale` and `loss_aggregation`. min_group: fewest completions of a prompt that the baseline needs. options:
    argument of the loss -> the setting that it comes from. defaults: settings that this row has another default for. critic:
    own, one of every agent; central, one of the team, which reads the prompts of all agents. grouping: rows that are compared
    are those of one turn, or of a whole episode. data: what is learned from: rollouts of the policy, pairs of completions, or
    texts. margin: what the loss of pairs compares: log-probabilities of each agent (own) or summed over the team (joint), or
    scores of a
        value head (score).
    rounds: pairs are made again every `round_updates` updates.
    learned: a reward model learns from the pairs, and the team learns from its scores by another row (`rl_algorithm`).
    """

    loss: Callable
    estimator: Estimator = raw
    baseline: Literal["none", "greedy", "ema", "critic"] = "none"
    per_token: bool = False
    scale: str = "none"
    aggregation: str = "token_mean"
    min_group: int = 1
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    critic: Literal["own", "central"] | None = None
    grouping: Literal["turn", "episode"] = "turn"
    data: Literal["rollouts", "pairs", "texts"] = "rollouts"
    margin: Literal["own", "joint", "score"] | None = None
    rounds: bool = False
    learned: bool = False
    paper: str = ""

    @property
    def compares_group(self) -> bool:
        """Whether advantages compare the returns of a group, so that they are 0 where all returns are equal."""
        return self.data == "rollouts" and self.estimator is not raw and not self.per_token

    @property
    def makes_pairs(self) -> bool:
        """Whether pairs are made of what the team itself writes; other rows that learn from data are given theirs."""
        return self.learned or self.margin == "joint"


DEFAULTS: dict[str, Any] = {  # of settings that are None until a row or the user gives them a value
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
NUMBERS = ("ema_decay", "gae_lambda", "value_coef", "value_clip", "bc_weight", "world_model_weight")  # fields of `Algorithm`
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
}
BOUNDS = {"eps_low": "clip_eps_low", "eps_high": "clip_eps_high"}
CLIPPING = BOUNDS | {"level": "ratio_level", "dual": "dual_clip"}
PREFERENCE = {"kind": "preference_loss", "beta": "beta", "smoothing": "label_smoothing"}
ROUNDS = (
    "comparator",
    "comparator_lag",
    "comparator_model",
    "comparator_url",
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
    "ppo": _clipped(per_token=True, scale="batch_std", defaults={"gae_lambda": 0.95}, critic="own", paper="arXiv 1707.06347"),
    "ippo": _clipped(per_token=True, scale="batch_std", defaults={"gae_lambda": 0.95}, critic="own", paper="arXiv 2011.09533"),
    "mappo": _clipped(
        baseline="critic", scale="batch_std", defaults={"gae_lambda": 0.95}, critic="central", paper="arXiv 2103.01955"
    ),
    "c3": AlgorithmRow(policy_gradient, leave_one_out, min_group=2, paper="arXiv 2603.06859"),
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


def find_row(name: str) -> AlgorithmRow:
    """Return the row of a name; an unknown name is a ValueError that names the nearest and lists all."""
    if name not in ALGORITHMS:
        meant = did_you_mean(name, ALGORITHMS) or "."
        raise ValueError(f"algorithm={name!r} is unknown{meant} Known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A row with all of its settings: functions and numbers, hashable, the static argument of the jitted programs.

    The sections have no None where the row uses the setting. `optimizer` may hold a value for each agent until `learning.per_agent` makes it that
    of one stack."""

    row: AlgorithmRow
    loss: Loss
    critic: Critic
    optimizer: Optimizer
    lora: LoRA
    loss_options: tuple[tuple[str, Any], ...]  # arguments of row.loss
    ema_decay: float
    gae_lambda: float
    value_coef: float
    value_clip: float
    bc_weight: float
    world_model_weight: float
    num_updates: int  # length of the learning rate schedule
    temperature: float
    max_new_tokens: int
    compute_dtype: str
    ipo: bool = False  # margins are means over tokens, not sums
    preference: Preference = dataclasses.field(default=Preference(), compare=False)  # not read by jitted programs
    name: str = dataclasses.field(default="", compare=False)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the loss."""
        return dict(self.loss_options)

    @property
    def has_value_head(self) -> bool:
        """Whether values come from a second head of the agent itself."""
        return self.row.critic == "own" and not self.critic.separate_critic

    @property
    def value_kind(self) -> str:
        """Where critics give values: for every token (`token`), or once per completion, before it (`v`) or after it (`q`)."""
        return "token" if self.row.per_token else self.critic.critic_type or "v"

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of an update."""
        return self.optimizer.num_epochs * self.optimizer.num_minibatches

    def with_optimizer(self, **settings: Any) -> Algorithm:
        """Return a copy with some settings of the optimizer changed."""
        return dataclasses.replace(self, optimizer=dataclasses.replace(self.optimizer, **settings))


def resolve(cfg: TrainConfig) -> Algorithm:
    """Fill the settings of a run with the defaults of its row. Raises ValueError for settings that the row does not use."""
    row = find_row(cfg.algorithm)
    check_settings_of_row(cfg)

    def filled(section: Any) -> Any:
        names = [field.name for field in dataclasses.fields(section) if field.name in DEFAULTS]
        missing = [name for name in names if getattr(section, name) is None]
        return _fill(section, {name: row.defaults.get(name, DEFAULTS[name]) for name in missing})

    loss = filled(cfg.loss)
    estimator = loss.kl_estimator or {"loss": "k3", "reward": "k1"}[loss.kl_in]
    loss = _fill(
        loss,
        {
            "advantage_scale": loss.advantage_scale or row.scale,
            "loss_aggregation": loss.loss_aggregation or row.aggregation,
            "kl_estimator": estimator,
        },
    )
    sections = {"loss": loss, "critic": filled(cfg.critic), "preference": filled(cfg.preference)}
    values = {
        field.name: getattr(section, field.name) for section in sections.values() for field in dataclasses.fields(section)
    }
    constant = cfg.optimizer.lr_schedule == "constant"  # runs of any length then share one program
    return Algorithm(
        row=row,
        **sections,
        optimizer=cfg.optimizer,
        lora=cfg.lora,
        loss_options=tuple((argument, values[setting]) for argument, setting in row.options.items()),
        **{name: values[name] for name in NUMBERS},
        num_updates=cfg.optimizer.warmup_updates + 1 if constant else cfg.run.num_updates,
        temperature=cfg.sampling.temperature,
        max_new_tokens=cfg.sampling.max_new_tokens,
        compute_dtype=cfg.sampling.compute_dtype,
        ipo=row.data == "pairs" and row.margin != "score" and values["preference_loss"] == "ipo",
        name=cfg.algorithm,
    )


def _fill(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a section with values that are no longer checked: what is None there may depend on another setting."""
    new = object.__new__(type(section))
    for field in dataclasses.fields(section):
        object.__setattr__(new, field.name, values.get(field.name, getattr(section, field.name)))
    return new


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
    names |= {"pair_selection", "pairs_per_prompt"} if row.makes_pairs else set()
    names |= {*REWARD_MODEL} if row.learned else set()
    return names | ({*ROUNDS} if row.rounds else set())


def check_used(settings: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError for a setting that is given and that the algorithm's row does not use."""
    used = used_settings(find_row(name))
    for setting in DEFAULTS:
        if settings.get(setting) is not None and setting not in used:
            users = ", ".join(other for other, row in ALGORITHMS.items() if setting in used_settings(row))
            raise ValueError(f"{setting}={settings[setting]!r} has no effect for algorithm={name!r}; it is for {users}")


def check_settings_of_row(cfg: TrainConfig) -> None:
    """Raise a ValueError for settings that the algorithm's row does not use, alone or together with others."""
    row, settings = find_row(cfg.algorithm), flat(cfg)
    if row.learned:  # the other settings are for the row that trains the team
        check_used({field.name: settings[field.name] for field in dataclasses.fields(cfg.preference)}, cfg.algorithm)
        return
    check_used(settings, cfg.algorithm)
    for setting, off in ONLY_ROLLOUTS.items() if row.data != "rollouts" else ():
        if settings[setting] != off:
            raise ValueError(
                f"{setting}={settings[setting]!r} has no effect for algorithm={cfg.algorithm!r}, which learns from {row.data}: "
                f"leave it at {off!r}"
            )
    if row.per_token and cfg.loss.advantage_scale == "std":
        raise ValueError("advantage_scale='std' has no effect on advantages of tokens: use batch_std, running_std or none")
    separate = cfg.critic.separate_critic is not False
    one_step = cfg.optimizer.num_epochs * cfg.optimizer.num_minibatches == 1
    if cfg.critic.value_clip and (one_step or row.critic == "central"):
        raise ValueError(
            f"value_clip={cfg.critic.value_clip} never clips if a critic makes one step on a batch: own critics make several "
            "with num_epochs or num_minibatches, a central one never does"
        )
    if cfg.critic.critic_learning_rate is not None and not separate:
        raise ValueError(
            "critic_learning_rate is for separate critics; a value head learns with its agent, weighted by value_coef"
        )
    if cfg.loss.importance_level != "token" and cfg.loss.importance_cap is None:
        raise ValueError(f"importance_level={cfg.loss.importance_level!r} needs importance_cap, which is off")
    if cfg.critic.value_coef is not None and separate:
        raise ValueError(f"value_coef={cfg.critic.value_coef} weights a value head on the agent: set separate_critic to false")


def check_row(algorithm: Algorithm) -> None:
    """Check the functions of a row that learns from rollouts, such as one of a user's own, before anything is sampled.

    Raises ValueError where the estimator or the loss cannot be traced or returns something of another shape."""
    row, name = algorithm.row, algorithm.name
    if row.data != "rollouts":
        return
    returns, valid = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.bool_)
    result = _trace(name, "estimator", row.estimator, returns, valid)
    if getattr(result, "shape", None) != (2,):
        raise ValueError(f"the estimator of {name!r} must return an advantage for each return; for [2] it returned {result}")
    options = algorithm.options
    per_token = options.get("level", "token") == "token"  # any tokens, in place of those of whole completions
    tokens = jax.ShapeDtypeStruct((2,) if per_token else (1, 1, 2), jnp.float32)
    result = _trace(name, "loss", lambda *arrays: row.loss(*arrays, **options), *[tokens] * 4)
    pair = result if isinstance(result, tuple | list) and len(result) == 2 else (None, None)
    if getattr(pair[0], "shape", None) != () or not isinstance(pair[1], dict):
        raise ValueError(
            f"the loss of {name!r} must return a scalar (a sum over tokens) and a dict of metrics; it returned {result}"
        )


def _trace(name: str, part: str, f: Callable, *arguments: Any) -> Any:
    """Return the shapes of what f returns."""
    try:
        return jax.eval_shape(f, *arguments)
    except Exception as error:
        raise ValueError(f"the {part} of {name!r} cannot be computed: {type(error).__name__}: {error}") from error
