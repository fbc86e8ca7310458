"""Define the records that cross `jit`: NamedTuples of arrays, each field with its axes.

Axis letters: A agents of a stack, P prompts, G completions per prompt (the group), T completion tokens, S prompt tokens,
N all agents of the team. A stack of shared weights has A = 1, with its roles side by side on the prompt axis.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

TRACES: Counter[str] = Counter()  # how often each program was traced in this process, which is how often it was compiled


class Shared(NamedTuple):
    """An array without the agent axis in a pytree of arrays [A, ...]: all agents of the stack share it.

    Of layers it is a tuple with an array for each layer: the decode loop reads them where they lie, while XLA would copy all
    slices of a stack [L, ...] before it. Functions of one agent (`stack.per_agent`) get the array or the tuple itself.
    """

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


class Vocabulary(NamedTuple):
    """What the sampler of a stack knows of its tokens. A field that is None adds no operation to the program."""

    allowed: Any = None  # [V] bool: ids that may be drawn; None: all
    stops: Any = None  # [state, V] int16: the automaton of stop texts, see `sampling.stop_texts`; None: there are none


PLAIN = Vocabulary()  # all ids may be drawn, and no text ends a completion


class Completions(NamedTuple):
    """Completions that a stack sampled."""

    tokens: jax.Array  # [A, P, G, T] int32; after the end: the first stop id
    action_mask: jax.Array  # [A, P, G, T] bool: tokens that the agent chose, the one that ends included
    logprobs: jax.Array  # [A, P, G, T] float32: over the whole vocabulary, at the sampling temperature
    truncated_logprobs: jax.Array  # [A, P, G, T] float32: under the truncated distribution that was sampled from
    ended: jax.Array  # [A, P, G] bool: the agent ended the completion, it was not cut off
    steps: jax.Array  # [A] int32: decode steps until every row on the device had ended
    cache: Any = None  # pytree [A, ...], `models.decoding.GroupCache`, if the next turn continues from it


Array = Any  # on the host until an update moves it to a device


class Batch(NamedTuple):
    """What a stack learns from in one update: its rollouts."""

    prompts: Array  # [A, P, S] int32, padded on the right
    prompt_lengths: Array  # [A, P] int32
    tokens: Array  # [A, P, G, T] int32
    action_mask: Array  # [A, P, G, T] bool
    old_logprobs: Array  # [A, P, G, T] float32: of the behavior policy, over the whole vocabulary
    truncated_logprobs: Array  # [A, P, G, T] float32: under the truncated distribution that was sampled from
    ended: Array  # [A, P, G] bool: the agent ended the completion, it was not cut off
    rewards: Array  # [A, P, G] float32: the returns; NaN marks an invalid row, which is masked
    groups: Array  # [A, P, G] int32: rows with equal numbers are compared with each other
    roles: Array  # [A, P, G] int32: which role of its parameter set wrote the row
    values: Array  # [A, P, G, T or 1] float32: of a critic, the return of the greedy completion, or what a row adds to
    # advantages (`across_turns`); 0 without
    ref_logprobs: Array  # [A, P, G, T or 1] float32: of the reference, where critics learn the KL term too; else 0
    penalty: Array  # [A, P, G, T or 1] float32, with ref_logprobs: what the KL term subtracts from the reward of each token


class CriticBatch(NamedTuple):
    """What a stack of critics besides the agents learns from in one update."""

    prompts: Array  # [A, P, S] int32, padded on the right
    prompt_lengths: Array  # [A, P] int32
    tokens: Array  # [A, P, G, T] int32: the critic gives a value before each of them
    action_mask: Array  # [A, P, G, T] bool
    rewards: Array  # [A, P, G] float32: the returns; NaN marks an invalid row, which is masked
    values: Array  # [A, P, G, T or 1] float32: before the update; 0 where the update computes them (`reuses_values`)
    penalty: Array  # [A, P, G, T or 1] float32: as in `Batch`


class PreferenceBatch(NamedTuple):
    """Pairs of a chosen and a rejected joint action on one item; each agent learns from its own completions."""

    prompts: jax.Array  # [A, P, S] int32, padded on the right
    prompt_lengths: jax.Array  # [A, P] int32
    tokens: jax.Array  # [A, P, 2, T] int32: chosen, rejected
    action_mask: jax.Array  # [A, P, 2, T] bool: tokens of the completions, the one that ends included
    reference: jax.Array  # [A, P, 2] float32: the completions' log-probabilities under the reference
    team_margin: jax.Array  # [A, P] float32: margin of the pair's other agents, see `losses.preference`
    valid: jax.Array  # [A, P] bool: False is padding


class TextBatch(NamedTuple):
    """Texts to imitate or to predict; G = 1."""

    prompts: jax.Array  # [A, P, S] int32, padded on the right
    prompt_lengths: jax.Array  # [A, P] int32
    tokens: jax.Array  # [A, P, 1, T] int32
    kinds: jax.Array  # [A, P, 1, T] int32: 0 padding, 1 written by the agent, 2 the environment's answer

    @property
    def action_mask(self) -> jax.Array:
        """Tokens of texts: [A, P, 1, T] bool."""
        return self.kinds > 0


Data = Batch | CriticBatch | PreferenceBatch | TextBatch


class Batches(NamedTuple):
    """The data of one update of a team."""

    stacks: Sequence[Data]  # one per stack
    critics: Sequence[CriticBatch] = ()  # one per stack of separate critics, if there are any


class Running(NamedTuple):
    """Running statistics of earlier updates; R roles."""

    baseline: jax.Array  # [A, R] float32: moving average of each role's returns
    num_returns: jax.Array  # [A] float32: number of returns so far
    mean: jax.Array  # [A] float32: their mean
    squares: jax.Array  # [A] float32: sum of their squared deviations from it
    kl_coef: jax.Array  # [A] float32: weight of the KL term, which adapts if it has a target


class StackState(NamedTuple):
    """Everything about a stack that training changes, and its frozen reference."""

    params: Any  # pytree [A, ...] float32: the master weights, or with LoRA the adapters
    opt_state: Any  # pytree [A, ...]
    reference: Any  # pytree [A, ...] like params, or None if there is no KL term
    skipped: jax.Array  # [A] int32: optimizer steps skipped because a loss or gradient was not finite
    running: Running
    grads: Any  # pytree [A, ...] like params: of the last update, zeros before the first, for their memory (see
    # `models.platforms.gradient_memory`); None on other platforms, in checkpoints and in results
    base: Any = None  # with LoRA the frozen parameters, each `Shared`; never in checkpoints
    scales: Mapping[str, jax.Array] = {}  # [A] float32 by setting: factors of a population's members; empty: there is none

    @property
    def frozen(self) -> Any:
        """Weights that no update changes: with LoRA the base, which is the reference too; else the reference, or None."""
        return self.reference if self.base is None else self.base


class TeamState(NamedTuple):
    """The state of a run, which with the seed determines everything that follows; checkpoints omit `grads` and `base`."""

    step: jax.Array  # [] int32: number of updates
    stacks: tuple[StackState, ...]
    critics: tuple[StackState, ...] = ()  # one per stack, or one of the whole team; see `learning.critics`
    pending: tuple[Any, ...] = ()  # of the sampler: completions that have begun, or slots of a league
