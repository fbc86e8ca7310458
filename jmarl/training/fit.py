"""Train a team on given data: pairs of which one was preferred (dpo, madpo, reward_model) or texts (sft). One step:

    examples = pairs or texts of the step      host; their order is determined by (seed, step)
    batches  = arrays of them                  reference log-probabilities are computed once, before the first step
    state    = update(state, batches)          the jitted update of rollouts, with another loss
    metrics of the step before                 host; one step late

Settings, checkpoints, logs and exact resume are those of `train`. Settings of rollouts have no effect here and are refused.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm, find_row, resolve
from jmarl.config import Episodes, Sampling, TrainConfig, flat
from jmarl.learning.per_agent import (
    check_agents,
    check_stacks,
    held_agents,
    initial_state,
    update_one_stack,
    with_adapters,
)
from jmarl.learning.update import update_keys
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.team import Team, bases, initial_params, policies, save_team, without_gradients
from jmarl.training.files import fingerprint
from jmarl.training.files.failed_update import read_failed_update
from jmarl.training.files.run_directory import check_directory, open_run, resume
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.logs.metrics_writer import LOSS_TAG, MetricsWriter
from jmarl.training.logs.step_log import StepLog, update_metrics
from jmarl.training.loop import Advanced, loop
from jmarl.training.preferences.encoding import (
    Encoded,
    encode_pairs,
    encode_trajectories,
    pair_batches,
    pair_scores,
    reference_scores,
    text_batches,
    text_logprobs,
    with_team_margin,
)
from jmarl.training.preferences.pairs import Pair, Trajectory
from jmarl.types import Data, TeamState

USED_BY_DATA = ("chat", "compute_dtype")  # settings of episodes and sampling that given data have as well
UNUSED_BY_DATA = {field.name for cls in (Episodes, Sampling) for field in dataclasses.fields(cls)}.difference(USED_BY_DATA)
UNUSED_BY_DATA |= {"eval_generations", "eval_temperature"}


class FitResult(NamedTuple):
    """The result of a run on data."""

    team: Team
    state: TeamState  # without gradients
    losses: list[float]  # mean over agents, for each update that this process made
    before: dict[str, float] | None  # on the held-out data before training; None when resumed or without such data
    after: dict[str, float] | None  # on the held-out data after training
    interrupted: bool = False  # by Ctrl+C or SIGTERM before the last update
    unsaved: str = ""  # why the last checkpoint or the models could not be written; empty: they were, or none were to be

    def save(self, directory: str | Path) -> None:
        """Write the trained agents as Hugging Face directories `agent_0/`, `agent_1/`, ..."""
        save_team(directory, self.team, policies(self.state))

    def __repr__(self) -> str:  # without the weights
        last = f"the last of {len(self.losses)} with loss {self.losses[-1]:.4g}" if self.losses else "none of them now"
        stopped = ", interrupted" * self.interrupted
        return f"FitResult({int(self.state.step)} updates, {last}, held out {self.before} -> {self.after}{stopped})"


class Examples(NamedTuple):
    """Data as token ids, with the reference's log-probabilities."""

    encoded: list[list[Encoded]]  # [M][N]
    reference: np.ndarray | None  # [M, N, 2] of pairs


def fit(
    team: Team,
    data: Sequence[Pair] | Sequence[Trajectory],
    cfg: TrainConfig,
    *,
    params: Sequence[Any] | None = None,
    eval_data: Sequence[Pair] | Sequence[Trajectory] = (),
    wandb_config: dict | None = None,
) -> FitResult:
    """Train a team on pairs or trajectories and return its final state.

    params: each stack's parameters [A, ...], as `make_team` returns them; consumed, and before that the reference.
    eval_data: held out; evaluated before and after training and every `eval_every` updates.
    """
    algorithm = check_fit(cfg, wandb_config)
    check_data(data, cfg)
    if eval_data:
        check_data(eval_data, cfg)
    check_agents(cfg, team.num_agents)
    check_stacks(cfg, team)
    mesh = sharding.mesh_for(cfg.run.mesh, [len(s.members) for s in team.stacks])
    params = with_adapters(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfg, mesh)
    scores = algorithm.row.margin == "score"
    if scores:  # parameters that were trained before keep their head
        params = [stack if "value" in stack else with_value_head(stack) for stack in params]
    params = [sharding.place(stack, mesh) for stack in params]
    examples, held_out = (encode(team, params, part, algorithm, cfg) for part in (data, eval_data))
    state = initial_state(team, params, algorithm, cfg.run, mesh)
    identity: dict[str, Any] = {"team": team.describe(), "critics": [], "data": fingerprint.of_data(data)}
    identity["initial"] = initial_digests(params, algorithm)
    if cfg.run.replay_rollout:
        return replay_data_update(team, state, identity, algorithm, cfg)
    with open_run(cfg, state, identity, wandb_config) as opened, explain_memory():
        log, saves = FitLog(team, cfg, opened.writer), Saves(cfg.run, opened.savers)
        result = fit_from(team, opened.state, examples, held_out, algorithm, cfg, log, saves)
        # Models with a value head are not written: they would lose it.
        if cfg.run.output_dir and cfg.run.save_models and not scores and not result.interrupted:
            result = result._replace(unsaved=write_models(cfg.run, team, result.state) or result.unsaved)
    return result


def initial_digests(params: Sequence[Any], algorithm: Algorithm) -> list[str]:
    """Return the digest of each stack's parameters if a reference is made of them: they must be the same when a run is resumed.
    With LoRA the digest of the bases says it."""
    has_reference = algorithm.row.margin in ("own", "joint") and not algorithm.preference.reference_free
    return [lora.digest(stack) for stack in params] if has_reference and not algorithm.lora.lora_rank else []


def replay_data_update(
    team: Team, state: TeamState, identity: dict[str, Any], algorithm: Algorithm, cfg: TrainConfig
) -> FitResult:
    """Make the one update of a file (`replay_rollout`) and print its metrics; nothing is written."""
    failed = read_failed_update(cfg)
    if cfg.run.resume:
        state = resume(cfg, state, {"config": flat(cfg), **identity, "bases": bases(state)}, read_only=True)
    state = state._replace(step=jnp.full_like(state.step, failed.step))  # determines its random keys
    state, metrics = update_on_data(team, state, failed.data, algorithm, cfg)
    row = update_metrics(team, jax.device_get(metrics))
    print(json.dumps({"step": failed.step} | row, indent=1), flush=True)
    return FitResult(team, without_gradients(state), [], None, None)


def fit_from(
    team: Team,
    state: TeamState,
    examples: Examples,
    held_out: Examples,
    algorithm: Algorithm,
    cfg: TrainConfig,
    log: FitLog,
    saves: Saves,
) -> FitResult:
    """Run the loop from `state` on."""

    def evaluate(state: TeamState) -> dict[str, float]:
        return evaluate_on_data(team, [lora.model_of(s) for s in state.stacks], held_out, algorithm)

    def advance(step: int, state: TeamState) -> Advanced:
        chosen = examples_at(step, len(examples.encoded), batch_size(algorithm), cfg.run.seed)
        batches = data_batches(team, examples, chosen, algorithm)
        state, metrics = update_on_data(team, state, batches, algorithm, cfg)
        tokens = sum(len(row) for i in chosen for agent in examples.encoded[i] for row in agent.rows)
        return state, partial(log.step, step, metrics, tokens, batches)

    done = loop(state, cfg.run, log, saves, advance, evaluate if held_out.encoded else None)
    return FitResult(team, done.state, log.losses, done.before, done.after, done.interrupted, done.unsaved)


def examples_at(step: int, count: int, size: int, seed: int) -> list[int]:
    """Return the indices of a step's examples. Every epoch is a new order of all of them, determined by (seed, epoch); a last
    part that does not fill a batch is left out."""
    size = min(size, count)
    epoch, batch = divmod(step, count // size)
    return np.random.default_rng((seed, epoch)).permutation(count)[batch * size : (batch + 1) * size].tolist()


def batch_size(algorithm: Algorithm) -> int:
    return algorithm.preference.batch_size or 1


def encode(team: Team, params: Sequence[Any], data: Sequence, algorithm: Algorithm, cfg: TrainConfig) -> Examples:
    """Return data as token ids, with the log-probabilities of pairs under params, the reference."""
    if algorithm.row.data == "texts":
        return Examples(encode_trajectories(team, data, cfg.episodes.chat), None)
    encoded = encode_pairs(team, data, cfg.episodes.chat)
    if not encoded:
        return Examples(encoded, None)
    return Examples(encoded, reference_scores(team, params, encoded, batch_size(algorithm), algorithm))


def data_batches(team: Team, examples: Examples, chosen: Sequence[int], algorithm: Algorithm) -> tuple[Data, ...]:
    """Return each stack's batch of the chosen examples."""
    encoded = [examples.encoded[i] for i in chosen]
    if algorithm.row.data == "texts":
        return text_batches(team, encoded, batch_size(algorithm))
    reference = None if examples.reference is None else examples.reference[list(chosen)]
    return pair_batches(team, encoded, reference, batch_size(algorithm), algorithm)


def update_on_data(
    team: Team, state: TeamState, batches: Sequence[Data], algorithm: Algorithm, cfg: TrainConfig
) -> tuple[TeamState, list[dict[str, Any]]]:
    """Make one update of every stack; the state is donated. Returns each stack's metrics [A], on the device."""
    if algorithm.row.margin == "joint" and team.num_agents > 1:
        params = [lora.model_of(s) for s in state.stacks]
        batches = with_team_margin(team, params, batches, algorithm)  # type: ignore[arg-type]
    stacks, metrics = [], []
    held = held_agents(cfg.run, team.num_agents, state.step)
    for i, (spec, stack, batch) in enumerate(zip(team.stacks, state.stacks, batches, strict=True)):
        keys = update_keys(algorithm, cfg.run.seed, state.step, i, len(spec.members))
        batch = batch._replace(keys=keys)
        stack, stack_metrics, _ = update_one_stack(stack, batch, spec, algorithm, cfg, num_agents=team.num_agents, held=held)
        stacks.append(stack)
        metrics.append(stack_metrics)
    return TeamState(state.step + 1, tuple(stacks)), metrics


def evaluate_on_data(team: Team, params: Sequence[Any], held_out: Examples, algorithm: Algorithm) -> dict[str, float]:
    """Return the mean loss on held-out data and, of pairs, the accuracy: the share that the team, or each agent, ranks as the
    data does."""
    if algorithm.row.data == "texts":
        return evaluate_on_texts(team, params, held_out, algorithm)
    size, scores = batch_size(algorithm), []
    for i in range(0, len(held_out.encoded), size):
        chosen = list(range(i, min(i + size, len(held_out.encoded))))
        batches: Any = data_batches(team, held_out, chosen, algorithm)
        scores.append(pair_scores(team, params, batches, algorithm)[: len(chosen)])
    numbers = np.concatenate(scores)
    margins = numbers[..., 0] - numbers[..., 1]  # [M, N]
    margins = margins.sum(1, keepdims=True) if algorithm.row.margin == "joint" else margins
    weights = np.full(margins.size, 1 / margins.size, np.float32)
    loss, metrics = jax.device_get(algorithm.row.loss(margins.ravel(), weights, **algorithm.options))
    return {"loss": float(loss), "accuracy": float(metrics["accuracy"].mean()), "margin": float(margins.mean())}


def evaluate_on_texts(team: Team, params: Sequence[Any], held_out: Examples, algorithm: Algorithm) -> dict[str, float]:
    """Return the mean negative log-probability per token of held-out texts, in nats: of what agents wrote, of what answered
    them, and both weighted."""
    size = batch_size(algorithm)
    sums, counts = np.zeros(2), np.zeros(2)
    for i in range(0, len(held_out.encoded), size):
        chosen = range(i, min(i + size, len(held_out.encoded)))
        batch: Any = data_batches(team, held_out, chosen, algorithm)[0]
        logp = text_logprobs(team, params, batch, algorithm)
        for kind in (1, 2):
            mask = np.asarray(batch.kinds) == kind
            sums[kind - 1] -= logp[mask].sum()
            counts[kind - 1] += mask.sum()
    nll = sums / np.maximum(counts, 1)
    weights = [algorithm.bc_weight, algorithm.world_model_weight]
    return {"loss": float(nll @ weights), "nll": float(nll[0])} | ({"nll_world": float(nll[1])} if counts[1] else {})


def check_data(data: Sequence, cfg: TrainConfig) -> None:
    """Raise an error for data that are not what the algorithm learns from."""
    if not data:
        raise ValueError("there is no data to train on")
    texts = find_row(cfg.algorithm).data == "texts"
    cls, reader = (Trajectory, "load_trajectories") if texts else (Pair, "load_pairs")
    if not isinstance(data[0], cls):
        raise TypeError(
            f"algorithm={cfg.algorithm!r} learns from a list of {cls.__name__}, got {type(data[0]).__name__}: read data "
            f"with jmarl.{reader}"
        )


def check_fit(cfg: TrainConfig, wandb_config: dict | None) -> Algorithm:
    """Return the algorithm of a run on data. Raises ValueError for settings that do not fit each other, this machine or the
    output directory; experiments call it before they load models."""
    sharding.require_one_process()
    row = find_row(cfg.algorithm)
    if row.data == "rollouts" or row.rounds or row.learned:
        raise ValueError(f"algorithm={cfg.algorithm!r} learns from what the team writes: use jmarl.train")
    if wandb_config is not None and not cfg.run.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
    settings, defaults = flat(cfg), flat(TrainConfig())
    for name in sorted(UNUSED_BY_DATA):
        if settings[name] != defaults[name]:
            raise ValueError(
                f"{name}={settings[name]!r} has no effect for algorithm={cfg.algorithm!r}, which trains on given data; "
                f"leave it at {defaults[name]!r}"
            )
    algorithm = resolve(cfg)
    check_micro_batches(algorithm)
    check_directory(cfg)
    return algorithm


def check_micro_batches(algorithm: Algorithm) -> None:
    """Raise a ValueError for more micro-batches than an update has pairs or texts."""
    parts, size = algorithm.optimizer.micro_batches, batch_size(algorithm)
    if parts > size:
        raise ValueError(f"micro_batches={parts} is more than batch_size={size}: use fewer")


class FitLog(StepLog):
    """Logs of a run on data."""

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None):
        super().__init__(team, cfg, writer)
        self.losses: list[float] = []

    def step(self, step: int, metrics: list[dict[str, jax.Array]], tokens: int, batches: Sequence[Data]) -> None:
        """Keep a step to be written later. batches: each stack's."""
        self.flush()  # waits for the update before, so that its time does not count here
        now = time.monotonic()
        self.keep(step, metrics, tokens, now - self._started, batches)
        self._started = now

    def _learned_from(self, step: int, metrics: list, tokens: int, seconds: float, batches: Sequence[Data]) -> tuple:
        texts = [
            [spec.tokenizer.batch_decode(np.asarray(batch.tokens).reshape(-1, batch.tokens.shape[-1]))]
            for spec, batch in zip(self.team.stacks, batches, strict=True)
        ]
        return jax.device_get(tuple(batches)), {"texts": texts}

    def _row(self, step: int, metrics: list, tokens: int, seconds: float, batches: Sequence[Data]) -> dict[str, float]:
        row = update_metrics(self.team, jax.device_get(metrics))
        losses = [row[name] for n in range(self.team.num_agents) if (name := f"agent_{n}/loss") in row]  # held agents have none
        self.losses.append(float(np.mean(losses)))
        return row | {LOSS_TAG: self.losses[-1], "time/step_s": seconds, "tokens_per_s": tokens / seconds}

    def evaluation(self, updates: int, result: dict[str, float], began: float) -> None:
        if self.writer is not None and not self.was_evaluated(updates):
            self.writer.write(max(updates - 1, 0), {"eval/updates": updates} | {f"eval/{k}": v for k, v in result.items()})
        self._started += time.monotonic() - began
