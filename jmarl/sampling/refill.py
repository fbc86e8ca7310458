"""Sample the rows of a step, and let rows of the next step take the slots of those that have ended.

A batch ends with its longest row, and by then most slots are free. Here they take the next step's rows at once, which so begin
under the parameters of this step: at most one update off-policy. The behavior policy's log-probabilities are those that were
sampled, and truncated importance sampling weights what changed (`importance_cap`). Rows in the middle keep the keys and values
that they have (as in PipelineRL, arXiv 2509.19128); prompts that have not begun are computed again with the new parameters.

The rows that have begun are `Pending`. They belong to the sampler of the run (`EarlyRows`), and no other room looks into them;
a checkpoint saves them, with their keys and values, with the state, so a resumed run is bit-equal. Left out: several turns,
devices that share an agent, and evaluations, which sample with one set of parameters. Agents that do not act are sampled all
the same, and their completions ignored.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jaxtyping import Array, Int

from jmarl.config import Sampling
from jmarl.hardware import dtype_on
from jmarl.memory import ProgramCall, explain_memory
from jmarl.models import decoding
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import Params
from jmarl.models.lora import model_of
from jmarl.models.platforms import COMPILER_OPTIONS, fuses_decoding, steps_per_chunk, use_panels
from jmarl.models.sharding import model_on, on_devices, state_specs
from jmarl.randomness import TRAIN
from jmarl.sampling.generate import SampleRequest, StepSampler, stack_program
from jmarl.sampling.sampler import RowIds, SampleInputs, empty_completions, ids_in_prompts, prepare, row_keys
from jmarl.sampling.slots import (
    Decoder,
    Slots,
    begin,
    decode_chunk,
    empty_slots,
    fewer_slots,
    finish_in_fewer_slots,
    for_decoder,
    from_decoder,
    num_live,
    prompts_of_view,
    put_slots,
    select_slots,
    take_prompts,
)
from jmarl.sampling.stack_program import Prompts, SampleProgram, stop_of_prompts
from jmarl.sampling.stop_texts import vocabulary
from jmarl.team import Team
from jmarl.types import PLAIN, TRACES, Completions, TeamState, Vocabulary


class Pending(NamedTuple):
    """The rows of a stack's next step, of which some have begun."""

    slots: Slots  # without a clock, and with P prompts in place of a copy for each slot; also a single agent has an agent axis
    out: Completions  # arrays [A, row, ...] of all P * G rows; of those that have not begun, empty
    begun: Int[Array, " agent"]  # number of rows that have begun: the first ones
    prompts: Prompts  # of these rows


def empty_pending(
    prompts: Prompts,
    group: int,
    model: ModelConfig,
    settings: Sampling,
    platform: str,
    stop: Int[np.ndarray, "*agent_role stop"],
) -> Pending:
    """Return slots of which none is taken. prompts: for their shapes only; the other arguments as for `refill_stack`."""
    ids, lengths = prompts
    a, p, width = ids.shape
    dtype = dtype_on(platform, settings.compute_dtype)
    slots = empty_slots(model, settings, dtype, fuses_decoding(platform, dtype, model), (a, p * group, p, width))
    out = flat_rows(empty_completions((a, p, group, settings.max_new_tokens), stop_of_prompts(stop, a, p)))
    return Pending(slots, out, jnp.zeros(a, jnp.int32), (jnp.zeros(ids.shape, jnp.int32), jnp.zeros(lengths.shape, jnp.int32)))


def flat_rows(out: Completions) -> Completions:
    """Return completions with arrays [A, row, ...], without `steps` and cache."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), out._replace(steps=None, cache=None))


@partial(jax.jit, static_argnames=("program",), compiler_options=COMPILER_OPTIONS)
def refill_stack(
    params: Any,
    prompts: tuple[Any, Any],
    row_ids: tuple[RowIds, RowIds],
    stop: Int[Array, "*agent_role stop"],
    pending: Pending,
    vocabulary: Vocabulary = PLAIN,
    *,
    program: SampleProgram,
) -> tuple[Completions, Pending]:
    """Sample the completions [A, R * P, G, T] of a step of a stack, and begin those of the next step.

    Args:
        params: parameters [A, ...], on one device or on a mesh that splits only agents.
        prompts: token ids [A, R * P, S] and lengths [A, R * P] of this step and of the next, each with an S of its own.
        row_ids: the numbers that random keys follow from, of both steps.
        stop: ids that end a completion, see `stack_program.sample_stack`.
        pending: what the step before has begun.
        vocabulary: what the sampler knows of the tokens.
        program: the static settings.
    """
    TRACES["refill"] += 1
    group, settings, mesh, agents = program.group, program.settings, program.mesh, len(prompts[0][0])
    model = model_on(mesh, program.config)
    width = max(ids.shape[-1] for ids, _ in (*prompts, pending.prompts))
    ids = jnp.concatenate([pad_last(jnp.asarray(ids), width) for ids, _ in prompts], 1)
    lengths, next_width = jnp.concatenate([lengths for _, lengths in prompts], 1), prompts[1][0].shape[-1]
    keys = jnp.concatenate([row_keys(x, group) for x in row_ids], 1)
    own_core = mesh is not None and mesh.size > 1
    panels = use_panels(program.platform, keys.shape[1] // 2 * group, settings.compute_dtype, own_core)
    fused = fuses_decoding(program.platform, settings.compute_dtype, model)

    stop = jnp.concatenate([stop_of_prompts(stop, agents, ids.shape[1] // 2)] * 2, 1)

    def on_device(
        params: Params, ids: Array, lengths: Array, keys: Array, stop: Array, pending: Pending
    ) -> tuple[Completions, Pending]:
        inputs = SampleInputs(ids, lengths, keys, stop, vocabulary=vocabulary)
        decoder = prepare(params, model, settings, inputs, panels, fused)
        done, begun = refill(decoder, inputs, settings, pending, steps_per_chunk(program.platform))
        return done, cut(begun, next_width, fused)

    arrays, agent = (ids, lengths, keys, stop, pending), P("agent")
    return on_devices(on_device, mesh, (state_specs(mesh, params), *[agent] * len(arrays)), agent)(params, *arrays)


def refill(
    decoder: Decoder, inputs: SampleInputs, settings: Sampling, pending: Pending, steps: int
) -> tuple[Completions, Pending]:
    """Return `refill_stack` for prefilled prompts. inputs: of this step and the next. steps: steps of a chunk."""
    (a, p, group), vocab = inputs.keys.shape, decoder.view.params["embed"].shape[-2]
    rows = p // 2 * group  # of a step
    seen = ids_in_prompts(inputs, vocab).reshape(a, -1, vocab) if settings.repetition_penalty != 1 else None
    stop = jnp.broadcast_to(inputs.stop, (a, p, inputs.stop.shape[-1]))[:, p // 2 :]
    following = flat_rows(empty_completions((a, p // 2, group, settings.max_new_tokens), stop))
    out = jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), pending.out, following)
    fewer = fewer_slots(rows, settings.max_new_tokens, rows, inputs.prompts.shape[-1])
    limit = fewer[0] if fewer else 0

    def step_goes_on(slots: Slots) -> Array:
        return jnp.any(slots.live & (slots.row < rows))

    def goes_on(state: tuple[Slots, Completions, Array]) -> Array:
        slots, _, begun = state
        some_to_begin = jnp.any(begun < 2 * rows)
        unfinished = jnp.any(begun < rows) | step_goes_on(slots)
        return unfinished & (some_to_begin | (num_live(slots.live) > limit))

    def chunk(state: tuple[Slots, Completions, Array]) -> tuple[Slots, Completions, Array]:
        slots, out, begun = state
        slots, begun = fill(decoder, slots, begun, seen)
        return *decode_chunk(decoder, slots, out, steps), begun

    def finish(slots: Slots, out: Completions) -> tuple[Slots, Completions]:
        last, out = finish_in_fewer_slots(decoder, slots, out, fewer, steps, step_goes_on)
        return put_slots(decoder, last, slots), out

    slots = to_slots(pending, inputs.prompts.shape[-1], group, decoder)
    slots, out, begun = lax.while_loop(goes_on, chunk, (slots, out, pending.begun))
    if fewer:  # nothing is left to begin
        slots, out = lax.cond(step_goes_on(slots), finish, lambda *state: state, slots, out)
    done = jax.tree.map(lambda x: x[:, :rows].reshape(a, p // 2, group, *x.shape[2:]), out)
    done = done._replace(steps=done.action_mask.sum(-1).max((1, 2)).astype(jnp.int32))
    slots = to_pending(slots._replace(row=jnp.maximum(slots.row - rows, 0)), p // 2, decoder)
    prompts = inputs.prompts[:, p // 2 :], inputs.lengths[:, p // 2 :]
    return done, Pending(slots, jax.tree.map(lambda x: x[:, rows:], out), begun - rows, prompts)


def to_slots(pending: Pending, width: int, group: int, decoder: Decoder) -> Slots:
    """Return the slots of pending rows as a decoder reads them, with prompts padded to this width, and a clock at 0.

    group: completions per prompt; rows are numbered prompt by prompt."""
    prompts, mask = decoding.resize(pending.slots.prompts, width, decoder.fused), pad_last(pending.slots.prompt_mask, width)
    slots = for_decoder(pending.slots._replace(prompts=prompts, prompt_mask=mask))
    prompts, mask = take_prompts(decoder, slots.prompts, slots.prompt_mask, slots.row // group)
    return slots._replace(clock=jnp.int32(0), prompts=prompts, prompt_mask=mask)


def to_pending(slots: Slots, first: int, decoder: Decoder) -> Slots:
    """Return the slots of `Pending`: without a clock, with one copy of each prompt, and with an agent axis on all arrays.

    first: number of the next step's first prompt. All rows under way follow prompts of that step."""
    numbers = jnp.arange(first, decoder.first_tokens.shape[1])
    prompts, mask = prompts_of_view(decoder, jnp.broadcast_to(numbers, (len(slots.row), first)))
    cache = slots.cache if decoder.fused else decoding.roll(slots.cache, -slots.clock)
    return from_decoder(slots._replace(clock=None, cache=cache, prompts=prompts, prompt_mask=mask))


def cut(pending: Pending, width: int, fused: bool) -> Pending:
    """Return pending rows whose prompts, none of which is longer, are padded to this width."""
    ids, lengths = pending.prompts
    prompts, mask = decoding.resize(pending.slots.prompts, width, fused), pending.slots.prompt_mask[..., :width]
    return pending._replace(
        slots=pending.slots._replace(prompts=prompts, prompt_mask=mask), prompts=(ids[..., :width], lengths)
    )


def pad_last(x: Array, width: int) -> Array:
    """Return an array padded with zeros to this size of the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def fill(decoder: Decoder, slots: Slots, begun: Int[Array, " agent"], seen: Array | None) -> tuple[Slots, Array]:
    """Let rows that have not begun take the free slots. Returns the slots, and how many rows have begun."""
    first = decoder.first_tokens.reshape(len(begun), -1)  # of all rows
    row = begun[:, None] + jnp.cumsum(~slots.live, 1) - 1
    begins = ~slots.live & (row < first.shape[1])
    row = jnp.minimum(row, first.shape[1] - 1)

    def place(slots: Slots) -> Slots:
        numbers = row // decoder.first_tokens.shape[-1]
        prompts, masks = prompts_of_view(decoder, numbers)
        new = slots._replace(
            row=row,
            t=jnp.zeros_like(row),
            token=jnp.take_along_axis(first, row, 1),
            live=jnp.ones_like(begins),
            cache=begin(decoder, slots.cache, numbers),
            prompts=prompts,
            prompt_mask=masks,
            seen=None if seen is None else jnp.take_along_axis(seen, row[..., None], 1),
            text=None if slots.text is None else jnp.zeros_like(row),
        )
        return select_slots(decoder, begins, new, slots)

    return lax.cond(jnp.any(begins), place, lambda slots: slots, slots), begun + begins.sum(1)


class EarlyRows(StepSampler):
    """The sampler of a run with async_steps, to which early rows belong; a checkpoint saves them with the state."""

    def __init__(self, team: Team):
        super().__init__(team)
        self.rows: dict[int, tuple[Pending, ...]] = {}  # step -> those of each stack; of a step until its update is made

    def take(self, state: TeamState) -> TeamState:
        self.rows = {int(state.step): state.pending}
        return state._replace(pending=())

    def put_back(self, state: TeamState) -> TeamState:
        return state._replace(pending=self.at(int(state.step)))

    def at(self, step: int) -> tuple[Pending, ...]:
        for earlier in [number for number in self.rows if number < step]:
            jax.tree.map(lambda x: x.delete(), self.rows.pop(earlier))  # callers hold the first ones too
        return self.rows.get(step, ())

    def sample(
        self, params: Sequence[Any], step: int, following: SampleRequest | None, request: SampleRequest
    ) -> tuple[Completions, ...]:
        if following is None or request.randomness.purpose != TRAIN:
            return super().sample(params, step, following, request)
        pending = self.at(step)
        check_same_prompts(pending, request)
        completions, self.rows[step + 1] = refill_team(self.team, params, pending, request, following)
        return completions

    def notes(self, step: int, completions: Sequence[Completions]) -> dict[str, float]:
        """Return the share of a step's tokens that the step before has sampled."""
        if not (pending := self.at(step)):
            return {}
        early, tokens = (sum(int(x.action_mask.sum()) for x in part) for part in ([x.out for x in pending], completions))
        return {"off_policy": early / max(1, tokens)}


def empty_rows(team: Team, request: SampleRequest, platform: str) -> tuple[Pending, ...]:
    """Return the early rows of each stack before the first step: none has begun. request: of a step, for its shapes."""
    stacks, options = zip(team.stacks, request.encoded, strict=True), (request.settings, platform)
    return tuple(empty_pending(prompts, request.group, spec.config, *options, spec.stops) for spec, prompts in stacks)


def lower_step(team: Team, state: TeamState, request: SampleRequest, following: SampleRequest) -> Sequence[Lowered]:
    """Return the programs that sample a step. following: the request of the next step."""
    params = [model_of(stack) for stack in state.stacks]
    return refill_team(team, params, state.pending, request, following, refill_stack.lower)


def check_same_prompts(pending: Sequence[Pending], request: SampleRequest) -> None:
    """Raise a ValueError if rows that have begun answer other prompts than those of this step."""
    for stack, (ids, lengths) in zip(pending, request.encoded, strict=True):
        begun, numbers = np.asarray(stack.begun) > 0, np.asarray(stack.prompts[1])
        width = min(ids.shape[-1], stack.prompts[0].shape[-1])
        same = np.all(numbers == lengths) and np.all(np.asarray(stack.prompts[0])[..., :width] == ids[..., :width])
        if np.any(begun) and not same:
            raise ValueError(
                "async_steps=1: the environment wrote other prompts for this step than when its first completions were "
                "sampled. `reset` must depend on the items and the random generator only; with other data start a new run"
            )


def refill_team(
    team: Team,
    params: Sequence[Any],
    pending: Sequence[Pending],
    request: SampleRequest,
    following: SampleRequest,
    call: Callable[..., Any] = refill_stack,
) -> Any:
    """Return the completions of a step and what the next has begun, each of every stack.

    call: `refill_stack`, or `refill_stack.lower`: then returns the programs of all stacks.
    """

    def call_stack(i: int, call: Callable[..., Any]) -> Any:
        spec, weights = team.stacks[i], params[i]
        program, row_ids = stack_program(i, spec, weights, request)
        _, next_ids = stack_program(i, spec, weights, following)
        prompts = request.encoded[i], following.encoded[i]
        known = vocabulary(spec, request.settings.stop_texts)
        return call(weights, prompts, (row_ids, next_ids), spec.stops, pending[i], known, program=program)

    def described(i: int) -> ProgramCall:
        a, count, width = request.encoded[i][0].shape
        shape = "sampling", a, 2 * count, request.group, width, request.settings.max_new_tokens
        return ProgramCall(*shape, 1, call_stack(i, refill_stack.lower))

    stacks = range(len(team.stacks))
    if call is not refill_stack:
        return [call_stack(i, call) for i in stacks]
    with explain_memory(lambda: [described(i) for i in stacks]):
        return tuple(zip(*jax.block_until_ready([call_stack(i, call) for i in stacks]), strict=True))
