"""From a row of the table and the settings of a run to the `Algorithm` that jitted programs are compiled for.

`resolve` is called once per run, before anything is traced. It fills every setting that is None with the row's default, those
that are auto as far as the platform says it, and refuses settings that the row does not use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from jmarl.algorithms.constraints import ROW, USED_BY_REWARD_MODELS, facts
from jmarl.algorithms.table import ASYNC_CAP, DEFAULTS, AlgorithmRow, find_row
from jmarl.columns import AGENT, check_names
from jmarl.config import Critic, LoRA, Loss, Optimizer, Preference, TrainConfig
from jmarl.config.constraints import require
from jmarl.hardware import GPU, dtype_on

C = TypeVar("C", bound=TrainConfig)

NUMBERS = ("ema_decay", "gae_lambda", "value_coef", "value_clip", "bc_weight", "world_model_weight")  # fields of `Algorithm`


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A row with all of its settings: functions and numbers, hashable, the static argument of the jitted programs.

    Settings that the row uses are not None. `optimizer` may hold one value per agent; `learning.per_agent` then picks those of
    a stack."""

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
    divides_rows: bool = False  # whether a mesh divides the rows of a batch: then no device sees the values of all of them
    preference: Preference = dataclasses.field(default=Preference(), compare=False)  # not read by jitted programs
    name: str = dataclasses.field(default="", compare=False)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the loss."""
        return dict(self.loss_options)

    @property
    def loss_of(self) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """The loss of the row with its options: arrays -> (scalar, metrics)."""
        return functools.partial(self.row.loss, **self.options)

    @property
    def critic_kind(self) -> Literal["head", "own", "central"] | None:
        """Where values come from: a second head of the agent itself (head), a critic of each agent (own) or one of the team
        (central). None: there are none."""
        return "head" if self.row.critic == "own" and not self.critic.separate_critic else self.row.critic

    @property
    def has_greedy_baseline(self) -> bool:
        """Whether the return of a greedy completion is subtracted from the returns."""
        return self.row.baseline == "greedy"

    @property
    def compares_scores(self) -> bool:
        """Whether pairs are compared by the scores of a value head, as of a reward model, and not by log-probabilities."""
        return self.row.margin == "score"

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities of pairs are compared with those under the initial weights."""
        return self.row.data == "pairs" and not self.compares_scores and not self.preference.reference_free

    @property
    def value_kind(self) -> str:
        """Where critics give values: for every token (`token`), or once per completion, before it (`v`) or after it (`q`)."""
        return "token" if self.row.per_token else self.critic.critic_type or "v"

    @property
    def reuses_values(self) -> bool:
        """Whether agents learn from the values that the update of their critic computes: if that is one step on the whole batch
        on one device, without dropout. Own critics then learn first."""
        one_pass = self.steps_per_update == 1 and self.optimizer.micro_batches == 1 and not self.divides_rows
        return self.value_kind == "token" and one_pass and not self.lora.lora_dropout

    @property
    def micro_batches(self) -> int:
        """Parts of an optimizer step. Raises ValueError while it is not chosen, see `learning.choose`."""
        parts = self.optimizer.micro_batches
        if parts == "auto":
            raise ValueError("micro_batches=auto is chosen on a GPU when a run starts, and here is none: give a number")
        return parts

    @property
    def remat(self) -> str:
        """What the backward pass keeps. Raises ValueError while it is not chosen."""
        if self.optimizer.remat == "auto":
            raise ValueError("remat=auto is chosen on a GPU when a run starts, and here is none: give none, dots or full")
        return self.optimizer.remat

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
    require(USED_BY_REWARD_MODELS if row.learned else ROW, facts(cfg))
    cfg = on_platform(cfg, jax.default_backend())

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
            "importance_cap": loss.importance_cap or (ASYNC_CAP if cfg.episodes.async_steps else None),
        },
    )
    sections = {"loss": loss, "critic": filled(cfg.critic), "preference": filled(cfg.preference)}
    values = {
        field.name: getattr(section, field.name) for section in sections.values() for field in dataclasses.fields(section)
    }
    if unknown := sorted(set(row.options.values()) - values.keys()):
        raise ValueError(f"options of {cfg.algorithm!r} name {unknown[0]!r}, which is no setting of loss, critic or preference")
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


def policy_config(cfg: TrainConfig) -> TrainConfig:
    """Return the settings for training the team on the scores of a reward model."""
    return cfg.replace(algorithm=cfg.preference.rl_algorithm or DEFAULTS["rl_algorithm"], preference=Preference())


def on_platform(cfg: C, platform: str) -> C:
    """Return settings without auto, as far as the platform says it. On GPUs remat and micro_batches stay: what fits depends on
    the run."""
    if cfg.sampling.compute_dtype == "auto":
        cfg = cfg.replace(compute_dtype=dtype_on(platform))
    return cfg if platform in GPU else with_fastest_updates(cfg)


def with_fastest_updates(cfg: C) -> C:
    """Return settings in which auto of remat and micro_batches is what is fast where memory does not matter."""
    fast: dict[str, Any] = {"remat": "dots", "micro_batches": 1}
    changes = {name: value for name, value in fast.items() if getattr(cfg.optimizer, name) == "auto"}
    return cfg.replace(**changes) if changes else cfg


def _fill(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a section with values that are no longer checked: what is None there may depend on another setting."""
    new = object.__new__(type(section))
    for field in dataclasses.fields(section):
        object.__setattr__(new, field.name, values.get(field.name, getattr(section, field.name)))
    return new


def check_row(algorithm: Algorithm) -> None:
    """Check the functions of a row, such as one of a user's own, before anything is sampled.

    Raises ValueError where the estimator or the loss cannot be traced or returns something of another shape."""
    row, name, options = algorithm.row, algorithm.name, algorithm.options
    if row.data == "pairs":
        margins = jax.ShapeDtypeStruct((2,), jnp.float32)
        check_loss(name, lambda *arrays: algorithm.loss_of(*arrays), margins, margins)
    if row.data != "rollouts":
        return
    returns, valid = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.bool_)
    result = _trace(name, "estimator", row.estimator, returns, valid)
    if getattr(result, "shape", None) != (2,):
        raise ValueError(f"the estimator of {name!r} must return an advantage for each return; for [2] it returned {result}")
    per_token = options.get("level", "token") == "token"  # any tokens, in place of those of whole completions
    tokens = jax.ShapeDtypeStruct((2,) if per_token else (1, 1, 2), jnp.float32)
    with_options = "".join(f", {option}={value!r}" for option, value in options.items())
    try:
        check_loss(name, lambda *arrays: algorithm.loss_of(*arrays), *[tokens] * 4)
    except ValueError as error:
        call = f"loss(logp, old_logp, advantages, weights{with_options})"
        raise ValueError(f"{error}. It is called as {call}, with arrays of jax [tokens]") from error


def check_loss(name: str, loss: Callable, *arrays: jax.ShapeDtypeStruct) -> None:
    """Raise a ValueError where the loss of a row cannot be traced, or returns something of another shape or a metric whose name
    is taken."""
    result = _trace(name, "loss", loss, *arrays)
    pair: Any = result if isinstance(result, tuple | list) and len(result) == 2 else (None, None)
    scalar = getattr(pair[0], "shape", None) == () and jnp.issubdtype(pair[0].dtype, jnp.floating)
    if not scalar or not isinstance(pair[1], dict) or not all(isinstance(key, str) for key in pair[1]):
        returned = jax.tree.map(lambda x: f"{x.dtype}{[*x.shape]}", result)
        wanted = "a scalar (a sum over tokens) and a dict of metrics by name"
        raise ValueError(f"the loss of {name!r} must return {wanted}; it returned {returned}")
    check_names(AGENT, pair[1], f"metric of the loss of {name!r}")


def _trace(name: str, part: str, f: Callable, *arguments: Any) -> Any:
    """Return the shapes of what f returns."""
    try:
        return jax.eval_shape(f, *arguments)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(f"the {part} of {name!r} cannot be compiled: it keeps an array of one call for another") from error
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise ValueError(
            f"the {part} of {name!r} cannot be compiled: it reads values of an array ({type(error).__name__}): use jax.numpy "
            "in place of numpy, jnp.where in place of if, and no float(), int() or .item()"
        ) from error
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"the {part} of {name!r} cannot be computed: {type(error).__name__}: {text}") from error
