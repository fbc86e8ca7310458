"""Make batches of completions, concatenate them and select their rows, inside `jit` or outside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.models.stack import array_library
from jmarl.types import Batch, Completions

PER_TOKEN = ("tokens", "action_mask", "old_logprobs", "truncated_logprobs")


def with_explicit_groups(batch: Batch) -> Batch:
    """Return a batch [A, P, G] whose groups are numbers, where they were those of its prompts (None)."""
    if batch.groups is not None:
        return batch
    numbers = array_library(batch.rewards).arange(batch.rewards.shape[1], dtype=np.int32)[:, None]
    return batch._replace(groups=array_library(batch.rewards).broadcast_to(numbers, batch.rewards.shape))


def one_per_prompt(batch: Batch) -> Batch:
    """Return the batch with each completion [A, P, G] as the only one of its own prompt [A, P * G, 1]."""
    batch = with_explicit_groups(batch)
    group = batch.rewards.shape[2]
    prompts, lengths = (array_library(x).repeat(x, group, 1) for x in (batch.prompts, batch.prompt_lengths))
    rows = batch._replace(prompts=None, prompt_lengths=None, keys=None)
    rows = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, 1, *x.shape[3:]), rows)
    return rows._replace(prompts=prompts, prompt_lengths=lengths, keys=batch.keys)


def concatenate_prompts(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches along the prompt axis; prompts are padded to the longest."""
    if any(part.groups is not None for part in parts):
        parts = [with_explicit_groups(part) for part in parts]
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


def take_rows(batch: Batch, rows: np.ndarray | None) -> Batch:
    """Return these rows [A, rows] of the prompt axis of each agent's batch, without a valid reward for -1; None: all rows."""
    if rows is None:
        return batch
    batch = jax.tree.map(lambda x: x[np.arange(len(rows))[:, None], rows], batch)
    return batch._replace(rewards=np.where(rows[..., None] < 0, np.float32(np.nan), batch.rewards))


def critic_positions(batch: Batch, kind: str, prompts_only: bool) -> Batch:
    """Return an agent's batch as its critic reads it: only the prompts if only they matter (`prompts_only`), one more token for
    type q."""
    if kind == "v":
        return batch._replace(**{name: getattr(batch, name)[..., :1] for name in PER_TOKEN}) if prompts_only else batch
    longer = {name: array_library(x).pad(x, ((0, 0),) * 3 + ((0, 1),)) for name in PER_TOKEN for x in [getattr(batch, name)]}
    return batch._replace(**longer)


def concatenate_agents(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches of different agents along the agent axis, padded to the widest; padding has no valid reward."""
    if len({part.rewards.shape[2] for part in parts}) > 1:
        parts = [one_per_prompt(part) for part in parts]
    elif any(part.groups is not None for part in parts):
        parts = [with_explicit_groups(part) for part in parts]
    fill_values = {"rewards": jnp.nan, "prompt_lengths": 1}

    def concatenate(name: str, arrays: Sequence[Any]) -> Any:
        if arrays[0] is None:
            return None
        xp = array_library(arrays)
        if len({x.shape[1:] for x in arrays}) == 1:
            return xp.concatenate(arrays)
        widest, fill = np.max([x.shape for x in arrays], 0)[1:], fill_values.get(name, 0)
        paddings = [[(0, 0), *zip([0] * widest.size, widest - x.shape[1:], strict=True)] for x in arrays]
        padded = [xp.pad(x, p, constant_values=fill) if np.any(p) else x for x, p in zip(arrays, paddings, strict=True)]
        return xp.concatenate(padded)

    return Batch(*(concatenate(name, arrays) for name, arrays in zip(Batch._fields, zip(*parts, strict=True), strict=True)))


def round_up_to_quarter(steps: int, completions: Completions) -> int:
    """Return how many tokens of completions a batch keeps: enough for `steps`, in quarters of max_new_tokens."""
    size = completions.tokens.shape[-1]
    return next(q for q in (-(-size * k // 4) for k in (1, 2, 3, 4)) if q >= steps)


def make_batch(
    encoded: tuple[jax.Array | np.ndarray, jax.Array | np.ndarray],
    completions: Completions,
    returns: np.ndarray,
    groups: np.ndarray | None,
    size: int,
    *,
    roles: int = 1,
    values: np.ndarray | None = None,
) -> Batch:
    """Return a stack's batch of one turn.

    encoded: prompts [A, P, S] and their lengths [A, P], roles side by side on the prompt axis; returns and values [A, P, G];
    groups: the group of each prompt [P], None: the completions of each prompt are one; size: tokens of the completions to keep.
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
        groups=None if groups is None else np.broadcast_to(np.asarray(groups, np.int32)[:, None], returns.shape),
        roles=np.broadcast_to(np.asarray(role_of_prompt, np.int32)[:, None], returns.shape),
        truncated_logprobs=completions.truncated_logprobs[..., :size],
        values=None if values is None else np.asarray(values, np.float32)[..., None],
    )
