"""Train a team on data: pairs of which one was preferred (dpo, madpo, reward_model) or texts (sft). One step:

    rows     = pairs or texts of the step      host; their order follows from (seed, step) alone
    batches  = arrays of them                  reference log-probabilities were made once, before the first step
    state    = update(state, batches)          the same jitted update as of rollouts, with another loss
    metrics of the step before                 host; one step late

Like `train`, of which it has the settings, checkpoints, logs and exact resume. Left out: settings of rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import algorithm, check_options, option
from jmarl.config import Episodes, Sampling, TrainConfig
from jmarl.learning.data_objective import scores_values
from jmarl.learning.per_agent import adapted, check_agents, check_stacks, held_at, initial_state, learn
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.team import Team, bases, without_gradients
from jmarl.training.files import fingerprint
from jmarl.training.files.failed_update import read_failed_update
from jmarl.training.files.run_directory import check_directory, open_run, resume
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.logs.metrics_writer import LOSS_TAG, MetricsWriter
from jmarl.training.logs.step_log import StepLog, update_metrics
from jmarl.training.loop import Advanced, loop
from jmarl.training.preferences.encoding import (
    Coded,
    encode_pairs,
    encode_trajectories,
    pair_batches,
    pair_scores,
    reference_scores,
    text_batches,
    text_scores,
    with_others,
)
from jmarl.training.preferences.pairs import Pair, Trajectory
from jmarl.types import Data, TeamState

READ_TOO = ("chat", "compute_dtype")  # settings of episodes and of sampling that given data have as well
OF_WRITING = {field.name for of in (Episodes, Sampling) for field in dataclasses.fields(of)}.difference(READ_TOO)
OF_WRITING |= {"num_prompts", "num_generations", "eval_generations", "eval_temperature"}


class FitResult(NamedTuple):
    """What a run on data ends with; its agents are had as those of a `TrainResult`."""

    state: TeamState  # without gradients
    losses: list[float]  # mean over agents of each update that this process made
    before: dict[str, float] | None  # on the held-out data before training; None when resumed or without such data
    after: dict[str, float] | None  # and after it
    interrupted: bool = False  # these two as of a `TrainResult`
    unsaved: str = ""

    def __repr__(self) -> str:  # without the weights
        about = f"the last of {len(self.losses)} with loss {self.losses[-1]:.4g}" if self.losses else "none of them now"
        stopped = ", interrupted" * self.interrupted
        return f"FitResult({int(self.state.step)} updates, {about}, held out {self.before} -> {self.after}{stopped})"


class Examples(NamedTuple):
    """Data as token ids, with what the reference says of them."""

    coded: list[list[Coded]]  # [M][N]
    reference: np.ndarray | None  # [M, N, 2] of pairs


def fit(
    team: Team,
    params: Sequence[Any],
    data: Sequence[Pair] | Sequence[Trajectory],
    cfg: TrainConfig,
    *,
    eval_data: Sequence[Pair] | Sequence[Trajectory] = (),
    wandb_config: dict | None = None,
) -> FitResult:
    """Train a team on pairs or trajectories and return its final state.

    params: each stack's parameters [A, ...], as `make_team` returns them; consumed, and before that the reference.
    eval_data: held out; played back before and after training and every `eval_every` updates.
    """
    check_fit(cfg, wandb_config)
    check_data(data, cfg)
    if eval_data:
        check_data(eval_data, cfg)
    check_agents(cfg, team.num_agents)
    check_stacks(cfg, team)
    learning, mesh = cfg.learning(), sharding.mesh_for(cfg.mesh, [len(s.members) for s in team.stacks])
    params = adapted(team, params, cfg, mesh)
    if scores_values(learning):  # one that has learned before keeps its head
        params = [of_stack if "value" in of_stack else with_value_head(of_stack) for of_stack in params]
    params = [sharding.place(of_stack, mesh) for of_stack in params]
    examples, held_out = (encode(team, params, of, cfg) for of in (data, eval_data))
    state = initial_state(team, params, cfg, mesh)
    about: dict[str, Any] = {"team": team.describe(), "critics": [], "data": fingerprint.of_data(data)}
    about["initial"] = initial_digests(params, cfg)
    if cfg.replay_rollout:
        return replay(team, state, about, cfg)
    with open_run(cfg, state, about, wandb_config) as opened, explain_memory():
        log, saves = FitLog(team, cfg, opened.writer), Saves(cfg, opened.savers)
        result = run(team, opened.state, examples, held_out, cfg, log, saves)
        headless = cfg.output_dir and cfg.save_models and not scores_values(learning)  # as models they would have no head
        if headless and not result.interrupted:
            result = result._replace(unsaved=write_models(cfg, team, result.state) or result.unsaved)
    return result


def initial_digests(params: Sequence[Any], cfg: TrainConfig) -> list[str]:
    """Of each stack the digest of the parameters that a reference is made of, which must not change where a run goes on; with
    LoRA the digest of the bases says it."""
    referred = algorithm(cfg.algorithm).advantage in ("margin", "joint_margin") and not cfg.reference_free
    return [lora.digest(of_stack) for of_stack in params] if referred and not cfg.lora_rank else []


def replay(team: Team, state: TeamState, about: dict[str, Any], cfg: TrainConfig) -> FitResult:
    """As `train.replay`."""
    failed = read_failed_update(cfg)
    if cfg.resume:
        state = resume(cfg, state, {"config": dataclasses.asdict(cfg), **about, "bases": bases(state)}, read_only=True)
    state, learned = update(team, state._replace(step=jnp.full_like(state.step, failed.step)), failed.data, cfg)
    row = update_metrics(team, jax.device_get(learned))
    print(json.dumps({"step": failed.step} | row, indent=1), flush=True)
    return FitResult(without_gradients(state), [], None, None)


def run(
    team: Team,
    state: TeamState,
    examples: Examples,
    held_out: Examples,
    cfg: TrainConfig,
    log: FitLog,
    saves: Saves,
) -> FitResult:
    """The loop from `state` on."""

    def evaluated(state: TeamState) -> dict[str, float]:
        return evaluate(team, [lora.model_of(s) for s in state.stacks], held_out, cfg)

    def advance(step: int, state: TeamState) -> Advanced:
        chosen = examples_at(step, len(examples.coded), batch_size(cfg), cfg.seed)
        batches = batches_of(team, examples, chosen, cfg)
        state, learned = update(team, state, batches, cfg)
        tokens = sum(len(row) for i in chosen for c in examples.coded[i] for row in c.rows)
        return state, partial(log.step, step, learned, tokens, batches)

    done = loop(state, cfg, log, saves, advance, evaluated if held_out.coded else None)
    return FitResult(done.state, log.losses, done.before, done.after, done.interrupted, done.unsaved)


def examples_at(step: int, count: int, size: int, seed: int) -> list[int]:
    """Indices of a step's examples: every epoch is a new order of all of them, from (seed, epoch) alone; a last part that does
    not fill a batch is left for the next epoch's draw."""
    size = min(size, count)
    per_epoch = count // size
    epoch, at = divmod(step, per_epoch)
    return np.random.default_rng((seed, epoch)).permutation(count)[at * size : (at + 1) * size].tolist()


def batch_size(cfg: TrainConfig) -> int:
    return option("batch_size", cfg.batch_size, algorithm(cfg.algorithm))


def encode(team: Team, params: Sequence[Any], data: Sequence, cfg: TrainConfig) -> Examples:
    """Data as token ids, and what the team that params are of says of pairs."""
    if algorithm(cfg.algorithm).data == "texts":
        return Examples(encode_trajectories(team, data, cfg.chat), None)
    coded = encode_pairs(team, data, cfg.chat)
    if not coded:
        return Examples(coded, None)
    return Examples(coded, reference_scores(team, params, coded, batch_size(cfg), cfg.learning(), cfg.per_agent))


def batches_of(team: Team, examples: Examples, chosen: Sequence[int], cfg: TrainConfig) -> tuple[Data, ...]:
    """Each stack's batch of some examples."""
    coded = [examples.coded[i] for i in chosen]
    if algorithm(cfg.algorithm).data == "texts":
        return text_batches(team, coded, batch_size(cfg))
    reference = None if examples.reference is None else examples.reference[list(chosen)]
    return pair_batches(team, coded, reference, batch_size(cfg), cfg.learning())


def update(team: Team, state: TeamState, batches: Sequence[Data], cfg: TrainConfig) -> tuple[TeamState, list[dict]]:
    """One update of every stack; the state is donated. Returns each stack's metrics [A], on the device."""
    learning = cfg.learning()
    if joint(cfg) and team.num_agents > 1:
        batches = with_others(team, [lora.model_of(s) for s in state.stacks], batches, learning, cfg.per_agent)  # type: ignore[arg-type]
    stacks, learned, held = [], [], held_at(cfg, team.num_agents, state.step)
    for i, (spec, stack, batch) in enumerate(zip(team.stacks, state.stacks, batches, strict=True)):
        batch = batch._replace(dropout=lora.dropout_keys(cfg, cfg.seed, state.step, i, len(spec.members)))
        stack, metrics = learn(cfg, team, spec, stack, batch, learning=learning, held=held)
        stacks.append(stack)
        learned.append(metrics)
    return TeamState(state.step + 1, tuple(stacks)), learned


def joint(cfg: TrainConfig) -> bool:
    """Whether a pair's margin is that of all its agents together."""
    return algorithm(cfg.algorithm).advantage == "joint_margin"


def evaluate(team: Team, params: Sequence[Any], held_out: Examples, cfg: TrainConfig) -> dict[str, float]:
    """Of held-out data: mean loss, and of pairs the accuracy (share that the team, or each agent, ranks as the data does)."""
    if algorithm(cfg.algorithm).data == "texts":
        return texts_evaluated(team, params, held_out, cfg)
    size, learning, found = batch_size(cfg), cfg.learning(), []
    for i in range(0, len(held_out.coded), size):
        chosen = list(range(i, min(i + size, len(held_out.coded))))
        batches: Any = batches_of(team, held_out, chosen, cfg)
        found.append(pair_scores(team, params, batches, learning, cfg.per_agent)[: len(chosen)])
    scores = np.concatenate(found)
    margins = scores[..., 0] - scores[..., 1]  # [M, N]
    margins = margins.sum(1, keepdims=True) if joint(cfg) else margins
    row = algorithm(cfg.algorithm)
    options = {argument: option(name, getattr(cfg, name), row) for argument, name in row.options.items()}
    loss, metrics = jax.device_get(row.loss(margins.ravel(), np.full(margins.size, 1 / margins.size, np.float32), **options))
    return {"loss": float(loss), "accuracy": float(metrics["accuracy"].mean()), "margin": float(margins.mean())}


def texts_evaluated(team: Team, params: Sequence[Any], held_out: Examples, cfg: TrainConfig) -> dict[str, float]:
    """Mean surprise of held-out texts, in nats a token: of what agents wrote, of what they were answered, and both weighed."""
    size, row = batch_size(cfg), algorithm(cfg.algorithm)
    sums, counts = np.zeros(2), np.zeros(2)
    for i in range(0, len(held_out.coded), size):
        batch: Any = batches_of(team, held_out, range(i, min(i + size, len(held_out.coded))), cfg)[0]
        logp = text_scores(team, params, batch, cfg.learning(), cfg.per_agent)
        for kind in (1, 2):
            here = np.asarray(batch.kinds) == kind
            sums[kind - 1] -= logp[here].sum()
            counts[kind - 1] += here.sum()
    nll = sums / np.maximum(counts, 1)
    weights = [option(name, getattr(cfg, name), row) for name in ("bc_weight", "world_model_weight")]
    return {"loss": float(nll @ weights), "nll": float(nll[0])} | ({"nll_world": float(nll[1])} if counts[1] else {})


def check_data(data: Sequence, cfg: TrainConfig) -> None:
    """Refuse data that are not what the algorithm learns from."""
    texts = algorithm(cfg.algorithm).data == "texts"
    if not data:
        raise ValueError("there is no data to train on")
    wanted, reader = (Trajectory, "load_trajectories") if texts else (Pair, "load_pairs")
    if not isinstance(data[0], wanted):
        raise TypeError(
            f"algorithm={cfg.algorithm!r} learns from a list of {wanted.__name__}, got {type(data[0]).__name__}: read data "
            f"with jmarl.training.preferences.pairs.{reader}"
        )


def check_fit(cfg: TrainConfig, wandb_config: dict | None) -> None:
    """Refuse settings that do not fit each other, this machine or the output directory; experiments call it before they load
    models."""
    sharding.require_one_process()
    row = algorithm(cfg.algorithm)
    if row.data == "rollouts" or row.rounds or row.learned:
        raise ValueError(f"algorithm={cfg.algorithm!r} learns from what the team writes: use jmarl.training.train.train")
    if wandb_config is not None and not cfg.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
    for field in dataclasses.fields(TrainConfig):
        if field.name in OF_WRITING and getattr(cfg, field.name) != field.default:
            raise ValueError(
                f"{field.name}={getattr(cfg, field.name)!r} has no meaning for algorithm={cfg.algorithm!r} on given data, "
                f"where nothing is written: leave it at {field.default!r}"
            )
    check_parts(cfg)
    check_options(dataclasses.asdict(cfg))
    check_directory(cfg)


def check_parts(cfg: TrainConfig) -> None:
    """Refuse more micro-batches than an update has pairs or texts."""
    if cfg.micro_batches > batch_size(cfg):
        raise ValueError(f"micro_batches={cfg.micro_batches} is more than batch_size={batch_size(cfg)}: use fewer")


class FitLog(StepLog):
    """Logs of a run on data."""

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None):
        super().__init__(team, cfg, writer)
        self.losses: list[float] = []

    def step(self, step: int, learned: list[dict[str, jax.Array]], tokens: int, batches: Sequence[Data]) -> None:
        """Keep a step to be written later. batches: each stack's, that it learned from."""
        self.flush()  # waits for the update before, whose time is none of this one's
        now = time.monotonic()
        self.keep(step, learned, tokens, now - self._started, batches)
        self._started = now

    def _learned_from(self, step: int, learned: list, tokens: int, seconds: float, batches: Sequence[Data]) -> tuple:
        texts = [
            [spec.tokenizer.batch_decode(np.asarray(batch.tokens).reshape(-1, batch.tokens.shape[-1]))]
            for spec, batch in zip(self.team.stacks, batches, strict=True)
        ]
        return jax.device_get(tuple(batches)), {"texts": texts}

    def _row(self, step: int, learned: list, tokens: int, seconds: float, batches: Sequence[Data]) -> dict[str, float]:
        row = update_metrics(self.team, jax.device_get(learned))
        losses = [row[name] for n in range(self.team.num_agents) if (name := f"agent_{n}/loss") in row]  # held agents have none
        self.losses.append(float(np.mean(losses)))
        return row | {LOSS_TAG: self.losses[-1], "time/step_s": seconds, "tokens_per_s": tokens / seconds}

    def evaluation(self, updates: int, result: dict[str, float], began: float) -> None:
        if self.writer is not None and not self.was_evaluated(updates):
            self.writer.write(max(updates - 1, 0), {"eval/updates": updates} | {f"eval/{k}": v for k, v in result.items()})
        self._started += time.monotonic() - began
