"""Runs on given data: each step learns from the next pairs or texts.

Their examples are encoded and drawn here, also for others that learn from pairs, and evaluated on held-out data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm, find_row
from jmarl.algorithms.constraints import HELD_OUT, facts
from jmarl.config import TrainConfig
from jmarl.config.constraints import require
from jmarl.learning.setup import Setup
from jmarl.logs.data_log import DataLog
from jmarl.logs.goodput import CLOCK
from jmarl.memory import are_shapes
from jmarl.models import lora
from jmarl.models.stack import to_host
from jmarl.preferences.encoding import (
    AgentTokens,
    Examples,
    encode_pairs,
    encode_trajectories,
    example_scores,
    pair_batches,
    text_batches,
    token_numbers,
    with_reference,
    with_team_margin,
)
from jmarl.preferences.long_rows import rows_that_fit
from jmarl.preferences.pairs import shared_examples
from jmarl.rollout.experience import DataExperience, Source
from jmarl.runs.checks import check_data, check_fit, check_team
from jmarl.runs.run import Kind, PreparedRun, Task, fingerprints
from jmarl.runs.start import in_chosen_context
from jmarl.sampling.generate import NO_LIMIT
from jmarl.team import Team, policies
from jmarl.types import Batches, Data, TeamState


def check(cfg: TrainConfig, team: Team, task: Task, wandb_config: dict | None) -> tuple[Task, dict[str, Any], TrainConfig]:
    """Check a run on given data, and encode these. See `Kind.check`."""
    check_fit(cfg, wandb_config)
    check_data(task.items, cfg)
    if not isinstance(task.held_out, list | tuple) or task.held_out:
        check_data(task.held_out, cfg)
    require([HELD_OUT], facts(cfg, held_out=task.held_out))
    check_team(team, cfg)
    data = fingerprints(task.items, task.held_out)
    cfg = in_chosen_context(team, cfg, partial(needs_long_context, team, [*task.items, *task.held_out], cfg))
    (items, examples), (others, held_out) = fitting_data(team.in_context(cfg.run.long_context), task.items, task.held_out, cfg)
    overlap = shared_examples(items, others)
    return task._replace(items=items, held_out=others, overlap=overlap, examples=(examples, held_out)), data, cfg


def longest(setup: Setup, task: Task) -> DataExperience:
    """Return an example with the longest prompts and rows of the data. See `Kind.longest`."""
    longest = [AgentTokens(*longest_of(parts)) for parts in zip(*task.examples[0].tokens, strict=True)]
    return draw_examples(setup.team, Examples([longest]), setup.algorithm)


def data_source(run: PreparedRun, state: TeamState) -> Source:
    """Return the source of a run on given data, with the log-probabilities of its pairs under the initial weights."""
    team, algorithm, cfg = run.team, run.setup.algorithm, run.cfg
    with CLOCK.phase("reference" if algorithm.row.data == "pairs" else "data"):
        params = policies(state)
        size = batch_size(algorithm)
        examples, held_out = (with_reference(team, params, part.tokens, size, algorithm) for part in run.task.examples)

    def draw(step: int, state: TeamState) -> DataExperience:
        with CLOCK.phase("data"):
            numbers = examples_at(step, len(examples.tokens), batch_size(algorithm), cfg.run.seed)
            return draw_examples(team, examples.take(numbers), algorithm)

    def evaluate(state: TeamState) -> dict[str, float]:
        return evaluate_on_data(team, [lora.model_of(stack) for stack in state.stacks], held_out, algorithm)

    scores = needs_team_margin(run.setup)
    return Source(draw, evaluate if held_out.tokens else None, waits=lambda step: scores)


# --- examples ----------------------------------------------------------------------------------------------------------------


def encode(team: Team, params: Sequence[Any], data: Sequence, algorithm: Algorithm, cfg: TrainConfig) -> Examples:
    """Return sampled pairs as token ids, with their log-probabilities under params, the reference."""
    return with_reference(team, params, encode_tokens(team, data, cfg), batch_size(algorithm), algorithm)


def encode_tokens(team: Team, data: Sequence, cfg: TrainConfig) -> list[list[AgentTokens]]:
    """Return data as token ids [M][N] of any length."""
    encode_data = encode_trajectories if find_row(cfg.algorithm).data == "texts" else encode_pairs
    return encode_data(team, data, cfg.episodes.chat_settings)


def fitting_data(team: Team, data: Sequence, held_out: Sequence, cfg: TrainConfig) -> list[tuple[Sequence, Examples]]:
    """Return the data and held-out data that fit the agents' contexts, see `Episodes.long_prompts`, and as token ids."""
    kind = "trajectories" if find_row(cfg.algorithm).data == "texts" else "pairs"
    fitting = []
    for part, name in ((data, kind), (held_out, f"held-out {kind}")):
        part, tokens = rows_that_fit(team, part, encode_tokens(team, part, cfg), cfg.episodes, name)
        fitting.append((part, Examples(tokens)))
    return fitting


def needs_long_context(team: Team, data: Sequence, cfg: TrainConfig) -> bool:
    """Return whether an example has more tokens than the short one of a model's two contexts has room for."""
    if not any(spec.config.has_two_contexts for spec in team.stacks):
        return False
    limits = [spec.config.context if spec.config.has_two_contexts else NO_LIMIT for spec in team.agent_specs]
    rows = encode_tokens(team.in_context(long=True), data, cfg)
    return any(part.length > limits[n] for parts in rows for n, part in enumerate(parts))


def examples_at(step: int, count: int, size: int, seed: int) -> list[int]:
    """Return the numbers of a step's examples.

    Every epoch is a new order of all of them, determined by (seed, epoch); what is left at its end and does not fill a batch is
    not used in this epoch."""
    size = min(size, count)
    epoch, batch = divmod(step, count // size)
    return np.random.default_rng((seed, epoch)).permutation(count)[batch * size : (batch + 1) * size].tolist()


def batch_size(algorithm: Algorithm) -> int:
    """Return how many examples an update learns from."""
    return algorithm.preference.batch_size or 1


def draw_examples(team: Team, examples: Examples, algorithm: Algorithm) -> DataExperience:
    """Return the experience of a step: the batches of its examples."""
    num_tokens = sum(len(row) for example in examples.tokens for part in example for row in part.rows)
    return DataExperience(data_batches(team, examples, algorithm), num_tokens)


def data_batches(team: Team, examples: Examples, algorithm: Algorithm) -> tuple[Data, ...]:
    """Return each stack's batch of up to `batch_size` examples."""
    if algorithm.row.data == "texts":
        return text_batches(team, examples, batch_size(algorithm))
    return pair_batches(team, examples, batch_size(algorithm), algorithm)


def complete_batches(setup: Setup, state: TeamState, experience: DataExperience) -> Batches:
    """Return what the stacks learn from: the batches with the margins of other agents."""
    team, algorithm, batches = setup.team, setup.algorithm, experience.batches
    if needs_team_margin(setup) and not are_shapes(state.stacks):
        params = [lora.model_of(stack) for stack in state.stacks]
        batches = with_team_margin(team, params, batches, algorithm)  # type: ignore[arg-type]
    return Batches(batches)


def needs_team_margin(setup: Setup) -> bool:
    """Return whether the batches of an agent have the margins of the others, under the parameters before the update."""
    return setup.algorithm.row.margin == "joint" and setup.team.num_agents > 1


def evaluate_on_data(team: Team, params: Sequence[Any], held_out: Examples, algorithm: Algorithm) -> dict[str, float]:
    """Return the mean loss on held-out data, and for pairs also the mean margin and the accuracy.

    Accuracy is the share of pairs that the team (if the loss has a joint margin) or an agent ranks as the data does. The margin
    is not times beta as TRL's `rewards/margins`."""
    if algorithm.row.data == "texts":
        return evaluate_on_texts(team, params, held_out, algorithm)
    scores = example_scores(team, params, held_out, batch_size(algorithm), algorithm)
    margins = scores[..., 0] - scores[..., 1]  # [M, N]
    margins = margins.sum(1, keepdims=True) if algorithm.row.margin == "joint" else margins
    weights = jnp.full(margins.size, 1 / margins.size, jnp.float32)
    loss, metrics = to_host(algorithm.loss_of(jnp.asarray(margins.ravel()), weights))
    return {"loss": float(loss), "accuracy": float(metrics["accuracy"].mean()), "margin": float(margins.mean())}


def evaluate_on_texts(team: Team, params: Sequence[Any], held_out: Examples, algorithm: Algorithm) -> dict[str, float]:
    """Return the mean negative log-probability per token of held-out texts, in nats.

    `nll` is of the tokens that the agent wrote, `nll_world` of the observations that followed, `loss` the weighted sum."""
    size, sums, counts = batch_size(algorithm), np.zeros(2), np.zeros(2)
    for i in range(0, len(held_out.tokens), size):
        (batch,) = text_batches(team, held_out.take(range(i, min(i + size, len(held_out.tokens)))), size)
        logp = to_host(token_numbers(params[0], team.stacks[0], batch, algorithm))
        masks = [np.asarray(batch.kinds) == kind for kind in (1, 2)]
        sums -= [logp[mask].sum() for mask in masks]
        counts += [mask.sum() for mask in masks]
    nll = sums / np.maximum(counts, 1)
    weights = [algorithm.bc_weight, algorithm.world_model_weight]
    return {"loss": float(nll @ weights), "nll": float(nll[0])} | ({"nll_world": float(nll[1])} if counts[1] else {})


def longest_of(parts: Sequence[AgentTokens]) -> tuple[list[int], tuple[list[int], ...], list[int]]:
    """Return a prompt and rows as long as the longest of one agent, and the kinds of their tokens."""
    prompt, row = (max(map(len, x)) for x in ([part.prompt for part in parts], [row for part in parts for row in part.rows]))
    return [0] * prompt, ([0] * row,) * len(parts[0].rows), [1] * row


GIVEN = Kind(check, longest, complete_batches, data_source, DataLog)
