"""Make batches of completions, concatenate them and select their rows, inside `jit` or outside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.models.stack import array_library
from jmarl.types import Batch, Completions, CriticBatch

B = TypeVar("B", Batch, CriticBatch)

PER_TOKEN = ("tokens", "action_mask", "old_logprobs", "truncated_logprobs")


def one_per_prompt(batch: B) -> B:
    """Return the batch with each completion [A, P, G] as the only one of its own prompt [A, P * G, 1]."""
    group = batch.rewards.shape[2]
    prompts, lengths = (array_library(x).repeat(x, group, 1) for x in (batch.prompts, batch.prompt_lengths))
    _, _, *rows = batch
    rows = [x.reshape(x.shape[0], -1, 1, *x.shape[3:]) for x in rows]
    return type(batch)(prompts, lengths, *rows)


def concatenate_prompts(parts: Sequence[B]) -> B:
    """Concatenate batches along the prompt axis; prompts are padded to the longest."""
    width = max(part.prompts.shape[-1] for part in parts)

    def pad(x: Any) -> Any:
        return array_library(x).pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))

    padded = [part._replace(prompts=pad(part.prompts)) for part in parts]
    return jax.tree.map(lambda *x: array_library(x).concatenate(x, 1), *padded)


def select_in_few_sizes(used: np.ndarray, largest: int, smallest: int = 0) -> np.ndarray | None:
    """Return which rows of a batch [A, R, ...] to keep, [A, size], -1 for padding; None to keep all rows as they are.

    Only the rows that are `used` [A, R] are learned from. Where episodes end early, every batch has another number of them, and
    each number would be a program to compile. So size is one of 8, 16, 24, 32, 48, 64, 96, ... (multiples of 8, to spread over
    devices), or `largest`, the most rows that there can be: enough for all used rows, and for `smallest`."""
    count = max(smallest, int(used.sum(1).max()))
    unit = max(8, (1 << (count - 1).bit_length()) // 4)
    size = min(max(largest, count), -(-count // unit) * unit)
    if size == used.shape[1]:
        return None
    rows = np.argsort(~used, 1, kind="stable")[:, :size]
    return np.pad(rows, ((0, 0), (0, size - rows.shape[1])), constant_values=-1)


def take_rows(batch: B, rows: np.ndarray | None) -> B:
    """Return these rows [A, rows] of the prompt axis of each agent's batch, without a valid reward for -1; None: all rows."""
    if rows is None:
        return batch
    batch = jax.tree.map(lambda x: x[np.arange(len(rows))[:, None], rows], batch)
    return batch._replace(rewards=np.where(rows[..., None] < 0, np.float32(np.nan), batch.rewards))


def critic_positions(batch: B, kind: str, prompts_only: bool) -> B:
    """Return an agent's batch as its critic reads it: only the prompts if only they matter (`prompts_only`), one more token for
    type q."""
    per_token = {name: getattr(batch, name) for name in PER_TOKEN if name in batch._fields}
    if kind == "v":
        return batch._replace(**{name: x[..., :1] for name, x in per_token.items()}) if prompts_only else batch
    return batch._replace(**{name: array_library(x).pad(x, ((0, 0),) * 3 + ((0, 1),)) for name, x in per_token.items()})


def critic_batch(batch: Batch) -> CriticBatch:
    """Return what a critic learns from the rollouts of its agents."""
    return CriticBatch(*(getattr(batch, name) for name in CriticBatch._fields))


def concatenate_agents(parts: Sequence[B]) -> B:
    """Concatenate batches of different agents along the agent axis, padded to the widest; padding has no valid reward."""
    if len({part.rewards.shape[2] for part in parts}) > 1:
        parts = [one_per_prompt(part) for part in parts]
    fill_values = {"rewards": jnp.nan, "prompt_lengths": 1}

    def concatenate(name: str, arrays: Sequence[Any]) -> Any:
        xp = array_library(arrays)
        if len({x.shape[1:] for x in arrays}) == 1:
            return xp.concatenate(arrays)
        widest, fill = np.max([x.shape for x in arrays], 0)[1:], fill_values.get(name, 0)
        paddings = [[(0, 0), *zip([0] * widest.size, widest - x.shape[1:], strict=True)] for x in arrays]
        padded = [xp.pad(x, p, constant_values=fill) if np.any(p) else x for x, p in zip(arrays, paddings, strict=True)]
        return xp.concatenate(padded)

    kind = type(parts[0])
    return kind(*(concatenate(name, arrays) for name, arrays in zip(kind._fields, zip(*parts, strict=True), strict=True)))


def round_up_to_quarter(steps: int, completions: Completions) -> int:
    """Return how many tokens of completions a batch keeps: enough for `steps`, in quarters of max_new_tokens."""
    size = completions.tokens.shape[-1]
    return next(q for q in (-(-size * k // 4) for k in (1, 2, 3, 4)) if q >= steps)


def make_batch(
    encoded: tuple[jax.Array | np.ndarray, jax.Array | np.ndarray],
    completions: Completions,
    returns: np.ndarray,
    groups: np.ndarray,
    size: int,
    *,
    roles: int = 1,
    values: np.ndarray | None = None,
) -> Batch:
    """Return a stack's batch of one turn.

    encoded: prompts [A, P, S] and their lengths [A, P], roles side by side on the prompt axis; returns and values [A, P, G];
    groups: the group of each prompt [P]; size: tokens of the completions to keep. values: None: there is no baseline.
    """
    prompts, lengths = encoded
    role_of_prompt = np.repeat(np.arange(roles), prompts.shape[1] // roles)
    return Batch(  # arrays of the host stay there until the update takes them
        prompts=prompts,
        prompt_lengths=lengths,
        tokens=completions.tokens[..., :size],
        action_mask=completions.action_mask[..., :size],
        old_logprobs=completions.logprobs[..., :size],
        ended=completions.ended,
        rewards=np.asarray(returns, np.float32),
        groups=np.broadcast_to(np.asarray(groups, np.int32)[:, None], returns.shape),
        roles=np.broadcast_to(np.asarray(role_of_prompt, np.int32)[:, None], returns.shape),
        truncated_logprobs=completions.truncated_logprobs[..., :size],
        values=np.zeros((*returns.shape, 1), np.float32) if values is None else np.asarray(values, np.float32)[..., None],
        ref_logprobs=np.zeros((*returns.shape, 1), np.float32),
        penalty=np.zeros((*returns.shape, 1), np.float32),
    )
