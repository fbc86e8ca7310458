"""Batches made of completions, put together and cut to shape, inside `jit` or outside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.models.stack import library
from jmarl.types import Batch, Completions

PER_TOKEN = ("tokens", "action_mask", "old_logprobs", "truncated_logprobs")


def one_a_prompt(batch: Batch) -> Batch:
    """The batch with each completion [A, P, G] as one of a prompt of its own [A, P * G, 1]."""
    group = batch.rewards.shape[2]
    prompts, lengths = (library(x).repeat(x, group, 1) for x in batch[:2])
    of_rows = batch._replace(prompts=None, prompt_lengths=None, dropout=None)
    rest = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, 1, *x.shape[3:]), of_rows)
    return rest._replace(prompts=prompts, prompt_lengths=lengths, dropout=batch.dropout)


def joined(parts: Sequence[Batch]) -> Batch:
    """Batches side by side on the prompt axis, their prompts padded to the longest."""
    width = max(part.prompts.shape[-1] for part in parts)

    def padded(x):
        return library(x).pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))

    wide = [part._replace(prompts=padded(part.prompts)) for part in parts]
    return jax.tree.map(lambda *x: library(x).concatenate(x, 1), *wide)


def in_few_sizes(used: np.ndarray, most: int, least: int = 0) -> np.ndarray | None:
    """Which rows of a batch [A, R, ...] to keep, where only those that are `used` [A, R] are learned from: rows [A, size], with
    -1 for padding. Where episodes end early every batch has another number of them, and each number would be a program to
    compile: here it is one of 8, 16, 24, 32, 48, 64, 96, … (multiples of 8, to spread over devices), or the `most` that there
    can be: enough for all used ones, and for `least`. None: all rows as they are."""
    count = max(least, int(used.sum(1).max()))
    unit = max(8, (1 << (count - 1).bit_length()) // 4)
    size = min(max(most, count), -(-count // unit) * unit)
    if size == used.shape[1]:
        return None
    rows = np.argsort(~used, 1, kind="stable")[:, :size]
    return np.pad(rows, ((0, 0), (0, size - rows.shape[1])), constant_values=-1)


def chosen_rows(batch: Batch, rows: np.ndarray | None) -> Batch:
    """Of each agent's batch these rows [A, rows] of the prompt axis, -1 for ones without a valid reward; None: all."""
    if rows is None:
        return batch
    batch = jax.tree.map(lambda x: x[np.arange(len(rows))[:, None], rows], batch)
    return batch._replace(rewards=np.where(rows[..., None] < 0, np.float32(np.nan), batch.rewards))


def positions(batch: Batch, kind: str, cut: bool) -> Batch:
    """An agent's batch as its critic reads it: the prompts alone if only they matter (`cut`), one token more for type q."""
    if kind == "v":
        return batch._replace(**{name: getattr(batch, name)[..., :1] for name in PER_TOKEN}) if cut else batch
    longer = {name: library(x).pad(x, ((0, 0),) * 3 + ((0, 1),)) for name in PER_TOKEN for x in [getattr(batch, name)]}
    return batch._replace(**longer)


def stacked(parts: Sequence[Batch]) -> Batch:
    """Batches of different agents as one on the agent axis, padded to the widest; rows that pad have no valid reward."""
    if len({part.rewards.shape[2] for part in parts}) > 1:
        parts = [one_a_prompt(part) for part in parts]
    filled = {"rewards": jnp.nan, "prompt_lengths": 1}

    def together(name: str, arrays: Sequence) -> Any:
        if arrays[0] is None:
            return None
        how = library(arrays)
        if len({x.shape[1:] for x in arrays}) == 1:
            return how.concatenate(arrays)
        most, fill = np.max([x.shape for x in arrays], 0)[1:], filled.get(name, 0)
        missing = [[(0, 0), *zip([0] * most.size, most - x.shape[1:], strict=True)] for x in arrays]
        wide = [how.pad(x, m, constant_values=fill) if np.any(m) else x for x, m in zip(arrays, missing, strict=True)]
        return how.concatenate(wide)

    return Batch(*(together(name, arrays) for name, arrays in zip(Batch._fields, zip(*parts, strict=True), strict=True)))


def quarters(steps: int, done: Completions) -> int:
    """How many tokens of completions a batch keeps: enough for `steps`, in quarters of max_new_tokens."""
    size = done.tokens.shape[-1]
    return next(q for q in (-(-size * k // 4) for k in (1, 2, 3, 4)) if q >= steps)


def batch_of(
    encoded: tuple[np.ndarray, np.ndarray],
    done: Completions,
    returns: np.ndarray,
    groups: np.ndarray,
    size: int,
    *,
    roles: int = 1,
    values: np.ndarray | None = None,
) -> Batch:
    """A stack's batch of one turn, from its prompts [A, P, S] and their lengths, returns [A, P, G], the group of each node [P]
    and perhaps values [A, P, G]; token axes are cut to `size`. The roles lie side by side on the prompt axis."""
    ids, lengths = encoded
    of_role = np.repeat(np.arange(roles), ids.shape[1] // roles)
    return Batch(  # arrays of the host stay there until the update takes them
        prompts=ids,
        prompt_lengths=lengths,
        tokens=done.tokens[..., :size],
        action_mask=done.action_mask[..., :size],
        old_logprobs=done.logprobs[..., :size],
        ended=done.ended,
        rewards=np.asarray(returns, np.float32),
        groups=np.broadcast_to(np.asarray(groups, np.int32)[:, None], returns.shape),
        roles=np.broadcast_to(np.asarray(of_role, np.int32)[:, None], returns.shape),
        truncated_logprobs=done.truncated_logprobs[..., :size],
        values=None if values is None else np.asarray(values, np.float32)[..., None],
    )
