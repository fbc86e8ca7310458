"""Batches, losses and updates of one stack, for tests of learning."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.config import Run
from jmarl.learning import step
from jmarl.learning.program import make_program
from jmarl.models.stack import unstack
from jmarl.objectives.objective import model_outputs
from jmarl.objectives.policy import initial_running
from jmarl.objectives.table import critic_objective, objective_of
from jmarl.types import Batch


def rollouts(prompts, prompt_lengths, tokens, action_mask, old_logprobs, ended, rewards, groups=None, **fields):
    """A `Batch` of one role without a baseline; completions of a prompt are a group unless groups are given."""
    shape = np.shape(rewards)
    groups = np.broadcast_to(np.arange(shape[1], dtype=np.int32)[:, None], shape) if groups is None else groups
    others = dict(
        truncated_logprobs=old_logprobs,
        roles=np.zeros(shape, np.int32),
        values=np.zeros((*shape, 1), np.float32),
        ref_logprobs=np.zeros((*shape, 1), np.float32),
        penalty=np.zeros((*shape, 1), np.float32),
    )
    batch = Batch(
        prompts=prompts, prompt_lengths=prompt_lengths, tokens=tokens, action_mask=action_mask, old_logprobs=old_logprobs,
        ended=ended, rewards=rewards, groups=groups, **others | fields,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch)


# One program each, not one per operation.
_inputs = jax.jit(step.loss_inputs, static_argnums=(5, 6, 7))
minibatches = jax.jit(step.minibatches, static_argnums=(1, 2))


def loss_inputs(batch, running, model, algorithm, *, reference=None, params=None, critic=False):
    """The inputs of the loss of one agent's batch, and metrics of the batch."""
    objective = critic_objective(algorithm) if critic else objective_of(algorithm)
    running = running or unstack(initial_running(1, 1, 0.0), 0)  # None: of no use
    return _inputs(params or reference or {}, reference, running, batch, None, model, objective, algorithm)


def loss_of_inputs(params, inputs, model, algorithm, objective=None, base=None):
    """The loss of one agent's inputs and its metrics. objective: None: that of the algorithm."""
    outputs = model_outputs(params, base, inputs, model, algorithm)
    return (objective or objective_of(algorithm)).loss(outputs, inputs.targets, algorithm)


def agent_gradients(params, batch, running, model, algorithm, reference=None):
    """The gradients and metrics of one agent from its batch."""
    static = model, objective_of(algorithm), algorithm
    inputs, batch_metrics = step.loss_inputs(params, reference, running, batch, None, *static)
    grads, metrics = step.gradients(params, reference, inputs, *static)
    return grads, metrics | batch_metrics


def stack_program(state, *, model, algorithm, active=None, keys=None):
    """The program of a stack of agents. active: those that learn, None: all; keys: of the update, None: minibatches keep their
    order."""
    count = state.skipped.shape[0]
    members = [(agent,) for agent in range(count)]
    program = make_program(model, members, algorithm, Run(), number=0, team_size=count, mesh=None)
    return dataclasses.replace(program, active=lambda step: active, keys=lambda step: keys)


def update_stack(state, batch, *, number=0, **settings):
    """The state and the metrics of a stack of agents after one update; the state is donated. number: of the update; settings:
    of `stack_program`."""
    return stack_program(state, **settings)(state, batch, number)


def put(array, index, value):
    """A copy of an array with other values at an index."""
    array = array.copy()
    array[index] = value
    return array


assert_equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def assert_close(got, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, expected)
