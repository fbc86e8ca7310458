"""Learn from given data: encode pairs or texts, draw those of a step, and make batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig
from jmarl.learning.setup import Setup
from jmarl.learning.update import update_keys
from jmarl.models import lora
from jmarl.team import Team
from jmarl.training.loop import Source
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
from jmarl.training.records import Drawn
from jmarl.types import Batches, Data, TeamState


class Examples(NamedTuple):
    """Data as token ids, with the reference's log-probabilities."""

    encoded: Sequence[Sequence[Encoded]]  # [M][N]
    reference: np.ndarray | None  # [M, N, 2] of pairs


def data_source(setup: Setup, examples: Examples, held_out: Examples) -> Source:
    """Return what a run on data learns from: each step draws the next of the examples."""
    team, algorithm, cfg = setup.team, setup.algorithm, setup.cfg

    def draw(step: int, state: TeamState) -> Drawn:
        chosen = examples_at(step, len(examples.encoded), batch_size(algorithm), cfg.run.seed)
        return drawn(team, select(examples, chosen), algorithm)

    def evaluate(state: TeamState) -> dict[str, float]:
        return evaluate_on_data(team, [lora.model_of(stack) for stack in state.stacks], held_out, algorithm)

    def make_batches(state: TeamState, experience: Drawn) -> Batches:
        return drawn_batches(setup, state, experience)

    return Source(draw, make_batches, evaluate if held_out.encoded else None)


def select(examples: Examples, chosen: Sequence[int]) -> Examples:
    """Return the examples of these numbers."""
    reference = None if examples.reference is None else examples.reference[list(chosen)]
    return Examples([examples.encoded[i] for i in chosen], reference)


def drawn(team: Team, examples: Examples, algorithm: Algorithm) -> Drawn:
    """Return examples as what a step learns from."""
    tokens = sum(len(row) for example in examples.encoded for agent in example for row in agent.rows)
    return Drawn(data_batches(team, examples, algorithm), tokens)


def drawn_batches(setup: Setup, state: TeamState, experience: Drawn) -> Batches:
    """Return what each stack learns from: with the margins of the pair's other agents, and the random keys of the update."""
    team, algorithm, batches = setup.team, setup.algorithm, experience.batches
    if algorithm.row.margin == "joint" and team.num_agents > 1:
        params = [lora.model_of(stack) for stack in state.stacks]
        batches = with_team_margin(team, params, batches, algorithm)  # type: ignore[arg-type]
    counts = [len(spec.members) for spec in team.stacks]
    keys = [update_keys(algorithm, setup.cfg.run.seed, state.step, i, count) for i, count in enumerate(counts)]
    return Batches([batch._replace(keys=key) for batch, key in zip(batches, keys, strict=True)])


def examples_at(step: int, count: int, size: int, seed: int) -> list[int]:
    """Return the indices of a step's examples. Every epoch is a new order of all of them, determined by (seed, epoch); a last
    part that does not fill a batch is left out."""
    size = min(size, count)
    epoch, batch = divmod(step, count // size)
    return np.random.default_rng((seed, epoch)).permutation(count)[batch * size : (batch + 1) * size].tolist()


def batch_size(algorithm: Algorithm) -> int:
    """Return how many examples an update learns from."""
    return algorithm.preference.batch_size or 1


def encode(team: Team, params: Sequence[Any], data: Sequence, algorithm: Algorithm, cfg: TrainConfig) -> Examples:
    """Return data as token ids, with the log-probabilities of pairs under params, the reference."""
    if algorithm.row.data == "texts":
        return Examples(encode_trajectories(team, data, cfg.episodes.chat), None)
    encoded = encode_pairs(team, data, cfg.episodes.chat)
    if not encoded:
        return Examples(encoded, None)
    return Examples(encoded, reference_scores(team, params, encoded, batch_size(algorithm), algorithm))


def data_batches(team: Team, examples: Examples, algorithm: Algorithm) -> tuple[Data, ...]:
    """Return each stack's batch of up to `batch_size` examples."""
    if algorithm.row.data == "texts":
        return text_batches(team, examples.encoded, batch_size(algorithm))
    return pair_batches(team, examples.encoded, examples.reference, batch_size(algorithm), algorithm)


def evaluate_on_data(team: Team, params: Sequence[Any], held_out: Examples, algorithm: Algorithm) -> dict[str, float]:
    """Return the mean loss on held-out data and, of pairs, the accuracy: the share that the team, or each agent, ranks as the
    data does."""
    if algorithm.row.data == "texts":
        return evaluate_on_texts(team, params, held_out, algorithm)
    size, scores = batch_size(algorithm), []
    for i in range(0, len(held_out.encoded), size):
        part = select(held_out, range(i, min(i + size, len(held_out.encoded))))
        batches: Any = data_batches(team, part, algorithm)
        scores.append(pair_scores(team, params, batches, algorithm)[: len(part.encoded)])
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
        part = select(held_out, range(i, min(i + size, len(held_out.encoded))))
        batch: Any = data_batches(team, part, algorithm)[0]
        logp = text_logprobs(team, params, batch, algorithm)
        for kind in (1, 2):
            mask = np.asarray(batch.kinds) == kind
            sums[kind - 1] -= logp[mask].sum()
            counts[kind - 1] += mask.sum()
    nll = sums / np.maximum(counts, 1)
    weights = [algorithm.bc_weight, algorithm.world_model_weight]
    return {"loss": float(nll @ weights), "nll": float(nll[0])} | ({"nll_world": float(nll[1])} if counts[1] else {})


def check_micro_batches(algorithm: Algorithm) -> None:
    """Raise a ValueError for more micro-batches than an update has pairs or texts."""
    parts, size = algorithm.optimizer.micro_batches, batch_size(algorithm)
    if parts > size:
        raise ValueError(f"micro_batches={parts} is more than batch_size={size}: use fewer")
