"""The records that cross `jit`: NamedTuples of arrays, each field with its axes.

Axis letters: A agents of a stack, P prompts, G completions a prompt (the group), T completion tokens, S prompt tokens,
N all agents of the team. A stack of shared weights has A = 1 and its roles side by side on the prompt axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

TRACES: Counter[str] = Counter()  # programs traced so far in this process, by name: one a compile; buckets keep it small


class Shared(NamedTuple):
    """An array without the agent axis, in a pytree of arrays [A, ...]: the agents of the stack have it together. Functions of
    one agent (`stack.per_agent`) see the array alone."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


class Completions(NamedTuple):
    """What a stack sampled."""

    tokens: jax.Array  # [A, P, G, T] int32; after the end: the first stop id
    action_mask: jax.Array  # [A, P, G, T] bool: tokens the agent chose, the ending one included
    logprobs: jax.Array  # [A, P, G, T] float32, of the whole vocabulary at the sampling temperature
    truncated_logprobs: jax.Array  # [A, P, G, T] float32, of the distribution really sampled from
    ended: jax.Array  # [A, P, G] bool: the agent ended the completion itself
    steps: jax.Array  # [A] int32: decode steps run before every row on the device had ended
    cache: Any = None  # keys and values [A, ...] that a later turn can continue from, if requested


Array = Any  # of a device, or of the host until an update takes it


class Batch(NamedTuple):
    """What a stack learns from in one update."""

    prompts: Array  # [A, P, S] int32, padded on the right
    prompt_lengths: Array  # [A, P] int32
    tokens: Array  # [A, P, G, T] int32
    action_mask: Array  # [A, P, G, T] bool
    old_logprobs: Array  # [A, P, G, T] float32: the behaviour policy's, whole vocabulary
    ended: Array  # [A, P, G] bool: the agent ended the completion itself, it was not cut off
    rewards: Array  # [A, P, G] float32, the returns; NaN where invalid: the row is then masked
    groups: Any  # [A, P, G] int32: rows with equal numbers are a group; None: the completions of each prompt are
    roles: Any = None  # [A, P, G] int32: which of its parameter set's roles wrote the row; None: there is only one
    truncated_logprobs: Any = None  # [A, P, G, T] float32: of the distribution really sampled from
    values: Any = None  # [A, P, G, T or 1] float32, what a critic expected (or what the greedy completion got), if there is one
    # and it does not say so only as it learns (`critics.judges_as_it_learns`)
    ref_logprobs: Any = None  # [A, P, G, T] float32: the reference's, where agents and critics need them alike
    penalty: Any = None  # [A, P, G, T] float32, with them: what the KL term takes from the reward of each token
    keys: Any = None  # [A] typed keys of the update's dropout and of the order of its minibatches, if it needs any


class PreferenceBatch(NamedTuple):
    """Pairs of completions of which the first was preferred. A pair is one joint action against another on one item; each agent
    learns from its own part of it."""

    prompts: jax.Array  # [A, P, S] int32, padded on the right
    prompt_lengths: jax.Array  # [A, P] int32
    tokens: jax.Array  # [A, P, 2, T] int32: chosen, rejected
    action_mask: jax.Array  # [A, P, 2, T] bool: tokens of the completions, the ending one included
    reference: jax.Array  # [A, P, 2] float32: the completions' log-probabilities under the reference
    team_margin: jax.Array  # [A, P] float32: margin of the pair's other agents, see `losses.preference`
    valid: jax.Array  # [A, P] bool: False is padding
    keys: Any = None  # as in `Batch`


class TextBatch(NamedTuple):
    """Texts to imitate or to predict; G = 1."""

    prompts: jax.Array  # [A, P, S] int32, padded on the right
    prompt_lengths: jax.Array  # [A, P] int32
    tokens: jax.Array  # [A, P, 1, T] int32
    kinds: jax.Array  # [A, P, 1, T] int32: 0 padding, 1 written by the agent, 2 what it was answered
    keys: Any = None  # as in `Batch`


Data = Batch | PreferenceBatch | TextBatch


class Batches(NamedTuple):
    """What a team learns from in one update."""

    stacks: Sequence[Data]  # one per stack
    critics: Sequence[Batch] = ()  # one per stack of critics; empty if there are none besides the agents


class PerAgent(NamedTuple):
    """Settings that the agents of a stack have of their own; None: the algorithm's, for all of them."""

    learning_rate: Any = None  # [A] float32: multiplies the schedule, whose peak is then 1
    max_grad_norm: Any = None  # [A] float32
    weight_decay: Any = None  # [A] float32
    held: Any = None  # [A] bool: these agents do not learn in this update


class Running(NamedTuple):
    """What an agent remembers of earlier updates beside its optimiser; R roles."""

    baseline: jax.Array  # [A, R] float32: moving average of each role's returns
    count: jax.Array  # [A] float32: returns so far, and so are the next two
    mean: jax.Array  # [A] float32: their mean
    squares: jax.Array  # [A] float32: sum of their squared deviations from it
    kl_coef: jax.Array  # [A] float32: weight of the KL term, which moves where it has a target


class StackState(NamedTuple):
    """Everything about a stack that training changes, and its frozen reference."""

    params: Any  # pytree [A, ...] float32: the master weights
    opt_state: Any  # pytree [A, ...]
    reference: Any  # pytree [A, ...] like params, or None when no KL term asks for it
    skipped: jax.Array  # [A] int32: optimiser steps skipped because a loss or gradient was not finite
    running: Running
    grads: Any  # pytree [A, ...] like params: of the last update, zeros before the first; None in checkpoints and results.
    # Kept on CPUs for their memory: given back to a virtual machine's host, it costs a tenth of a step to have it again
    base: Any = None  # with LoRA the frozen parameters, each `Shared`; params are then adapters; never in checkpoints


class TeamState(NamedTuple):
    """What a checkpoint holds; with the seed it determines everything that follows."""

    step: jax.Array  # [] int32: updates done
    stacks: tuple[StackState, ...]
    critics: tuple[StackState, ...] = ()  # of each stack its own, or a single one of the whole team; see `critics`
