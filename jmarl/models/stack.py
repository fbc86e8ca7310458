"""Stack agents of one architecture on axis 0, and lift functions of one agent to stacks.

A leaf of a stacked pytree is an array [A, ...] of the agents' own, or a `Shared` one without the agent axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from jmarl.processes import exchange
from jmarl.types import Shared

Part = tuple[tuple[int, int], ...]  # where each axis starts and ends
PIECE = 2**26  # bytes of the layers that the host reads at once


def stack_params(agents: Sequence[Any], shardings: Callable[[Any], Any] | None = None) -> Any:
    """Stack the parameters of A agents to one float32 pytree [A, ...]; structures and shapes must be equal.

    Leaves are placed one after the other, see `place_leaves`.

    Args:
      agents: arrays, or leaves that are read when they are needed (`hub.hf_format.StoredLeaf`).
      shardings: from the shapes of the result to its shardings; None: the first device.
    """
    first = jax.tree.structure(agents[0])
    for i, other in enumerate(agents):
        if jax.tree.structure(other) != first:
            raise ValueError(f"agent {i} has other parameters than agent 0: only one architecture fits a stack")

    if shardings is None:
        return _place_all(place_leaves, agents)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(agents), *x.shape), jnp.float32), agents[0])
    return _place_all(place_leaves, agents, shardings(shapes))


def share_params(agents: Sequence[Any], shardings: Callable[[Any], Any] | None = None) -> Any:
    """Return the equal parameters of A agents as one float32 pytree of `Shared` leaves, those of layers as an array for each
    layer. Raises ValueError if they differ. Arguments as of `stack_params`."""
    for i, other in enumerate(agents[1:], 1):
        for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(agents[0])[0], jax.tree.leaves(other), strict=True):
            if x is not y and not np.array_equal(x, y):
                raise ValueError(
                    f"agents 0 and {i} of a stack start from different weights ({jax.tree_util.keystr(path)}), and LoRA has "
                    "one base per stack: give them one model, or train all weights (lora_rank=0)"
                )

    def place(leaves: Sequence[Any], in_layers: bool, sharding: Any = None) -> Shared:
        (leaf,), to = leaves, sharding and sharding.value
        if not in_layers:
            return Shared(place_leaves([leaf], False, to, shared=True))
        return Shared(tuple(place_leaves([leaf[n]], False, to and to[n], shared=True) for n in range(leaf.shape[0])))

    if shardings is None:
        return _place_all(place, agents[:1])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), agents[0])
    return _place_all(place, agents[:1], shardings(jax.eval_shape(lambda params: share_params([params]), shapes)))


def _place_all(place: Callable[..., Any], agents: Sequence[Any], shardings: Any = None) -> Any:
    """Place the leaves of agents, one after the other. Those without layers come first: the host reads each of them whole,
    while little else is placed."""
    paths, tree = jax.tree_util.tree_flatten_with_path(agents[0])
    leaves = zip(*map(jax.tree.leaves, agents), strict=True)
    targets = [None] * len(paths) if shardings is None else tree.flatten_up_to(shardings)
    calls = [(x, in_layers(path), target) for (path, _), x, target in zip(paths, leaves, targets, strict=True)]
    placed = {i: place(*calls[i]) for i in sorted(range(len(calls)), key=lambda i: calls[i][1])}
    return jax.tree.unflatten(tree, [placed[i] for i in range(len(calls))])


def in_layers(path: Sequence[Any]) -> bool:
    """Return whether the first axis of an agent's leaf is that of the layers, from its path in a pytree of parameters."""
    return any(isinstance(k, jax.tree_util.DictKey) and k.key == "layers" for k in path[:-1])


def name_of(path: Sequence[Any]) -> str:
    """Return the name of a leaf, from its path in a pytree of parameters; of one with an array for each layer, that of all."""
    return next((k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey)), "")


def place_leaves(leaves: Sequence[Any], in_layers: bool, sharding: Any = None, shared: bool = False) -> Array:
    """Return the same leaf of A agents as one float32 array [A, ...] on devices.

    Of a leaf in layers the host has some at a time (`PIECE` bytes): each is read once, and goes to all devices.

    Args:
      leaves: arrays, or leaves that are read when they are needed.
      sharding: of the result; None: the first device.
      shared: return the only leaf without the agent axis.
    """
    if any(isinstance(x, jax.Array) for x in leaves):  # on devices already, or traced
        whole = [jnp.asarray(x, jnp.float32) for x in leaves]
        array = whole[0] if shared else jnp.stack(whole)
        return array if sharding is None else exchange.to_devices(array, sharding)
    shape, devices = (len(leaves), *leaves[0].shape), dict[Part, list[Any]]()
    if sharding is None:
        devices[tuple((0, n) for n in shape)] = [None]
    else:
        for device, index in sharding.addressable_devices_indices_map(shape[1:] if shared else shape).items():
            index = (slice(None), *index) if shared else index
            part = tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))
            devices.setdefault(part, []).append(device)
    arrays: dict[Any, Array] = {}  # device -> its part
    for layers in _pieces(list(devices), in_layers):
        for part, piece in read_parts(leaves, in_layers, list(devices), layers).items():
            size = tuple(stop - start for start, stop in part)[shared:]
            for device in devices[part]:
                array = _with_layers(arrays.pop(device, None), piece[0] if shared else piece, size, layers, device)
                arrays[device] = jax.block_until_ready(array)  # the memory of the piece is free then
    own = list(arrays.values())
    return own[0] if sharding is None else jax.make_array_from_single_device_arrays(shape[shared:], sharding, own)


def _pieces(parts: Sequence[Part], in_layers: bool) -> list[slice]:
    """Return which layers of a leaf's parts are read at once."""
    if not in_layers:
        return [slice(None)]
    shapes = [[stop - start for start, stop in part] for part in parts]
    count = shapes[0][1]
    step = max(PIECE * count // sum(4 * math.prod(shape) for shape in shapes), 1)
    return [slice(n, min(n + step, count)) for n in range(0, count, step)]


def _with_layers(array: Array | None, piece: np.ndarray, shape: tuple[int, ...], layers: slice, device: Any) -> Array:
    """Return the part of a leaf on a device, of this shape, in which some layers are read."""
    if piece.shape == shape:  # copied, because `device_put` on CPUs uses the memory of numpy, which cannot be donated
        return jnp.array(piece, device=device)
    array = jnp.zeros(shape, jnp.float32, device=device) if array is None else array
    axis = next(i for i, (n, m) in enumerate(zip(shape, piece.shape, strict=True)) if n != m)
    return _set_layers(array, jax.device_put(piece, device), layers.start, axis)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_layers(array: Array, piece: Array, first: Any, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(array, piece, first, axis)


def read_parts(
    leaves: Sequence[Any], in_layers: bool, parts: Sequence[Part], layers: slice = slice(None)
) -> dict[Part, np.ndarray]:
    """Return parts of the array [A, ...] of A leaves, on the host; of leaves in layers, those of `layers` only. Layers are not
    divided."""
    numbers = range(*layers.indices(leaves[0].shape[0])) if in_layers else [...]
    arrays = {}
    for part in parts:
        shape = [stop - start for start, stop in part]
        arrays[part] = np.empty([shape[0], len(numbers), *shape[2:]] if in_layers else shape, np.float32)
    different = {id(x): x for x in leaves}
    for i, n in enumerate(numbers):
        read = {key: np.asarray(x[n] if in_layers else x) for key, x in different.items()}
        for part, array in arrays.items():
            index = tuple(slice(start, stop) for start, stop in part[1 + in_layers :])
            for a in range(*part[0]):
                array[a - part[0][0], i if in_layers else ...] = read[id(leaves[a])][index]
    return arrays


def per_agent(f: Callable, mode: str) -> Callable:
    """Lift f of one agent to stacked pytrees [A, ...].

    mode: `vmap`, all agents at once; `map`, one after the other, with the temporary memory of one.
    """

    def lifted(*stacked: Any) -> Any:
        own, with_shared = own_leaves(stacked)

        def one_agent(own: Sequence[Any]) -> Any:
            return f(*with_shared(own))

        if own[0].shape[0] == 1:  # without an axis of size 1, which XLA's matrix products would carry along
            return jax.tree.map(lambda x: jnp.asarray(x)[None], one_agent([x[0] for x in own]))
        return lax.map(one_agent, own) if mode == "map" else jax.vmap(one_agent)(own)

    return lifted


def in_turn(compute: Callable, change: Callable, state: Any, *stacked: Any) -> tuple[Any, Any]:
    """Change the state of one agent after the other; each new state takes the place of the old one in memory.

    Args:
      compute: a function of one agent's state and arrays. Returns what `change` needs.
      change: a function of one agent's state, the result of `compute` and the arrays. Returns the new state, and anything else.
    """
    own, with_shared = own_leaves(stacked)

    def take(state: Any, i: Array | int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), state)

    def one_agent(state: Any, inputs: tuple[Array, list[Array]]) -> tuple[Any, Any]:
        i, own = inputs
        computed = compute(take(state, i), *with_shared(own))
        # Taken again behind a barrier: otherwise XLA would copy the agent's whole state before it computes.
        state, computed = lax.optimization_barrier((state, computed))
        new, out = change(take(state, i), computed, *with_shared(own))
        return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), state, new), out

    return lax.scan(one_agent, state, (jnp.arange(own[0].shape[0]), own))


def is_shared(x: Any) -> bool:
    """Return whether x is a `Shared` leaf."""
    return isinstance(x, Shared)


def own_leaves(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves [A, ...] of a stacked pytree that are not shared, and a function from one agent's part of them to the
    whole pytree of that agent."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_shared)

    def with_shared(own: Sequence[Any]) -> Any:
        remaining = iter(own)
        return structure.unflatten([x.value if is_shared(x) else next(remaining) for x in leaves])

    return [x for x in leaves if not is_shared(x)], with_shared


def map_own(f: Callable, tree: Any) -> Any:
    """Apply f to the leaves that are not shared."""
    return jax.tree.map(lambda x: x if is_shared(x) else f(x), tree, is_leaf=is_shared)


def is_placed(x: Any) -> bool:
    """Return whether x is an array on a device: not one of numpy, and no tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def take_agents(x: Any, index: int | slice) -> Any:
    """Return x[index] of an array [A, ...] that may lie on several devices, and wait for it.

    With many programs in flight that move data between devices, XLA for CPUs can deadlock (1 of 30 starts of four seeds did).
    """
    return jax.block_until_ready(x[index]) if is_placed(x) else x[index]


def unstack(tree: Any, agent: int) -> Any:
    """Return one agent's part of a stacked pytree, shared leaves included.

    Arrays on several devices are copied to the host, those of several processes to each of them.
    """

    def take(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or len(x.sharding.device_set) == 1:
            return x[agent]
        if not x.is_fully_addressable:  # shards of other processes would stay unset
            return exchange.to_host(_agent_of(x, agent))
        array = np.empty(x.shape[1:], x.dtype)
        for shard in x.addressable_shards:
            first, last, _ = shard.index[0].indices(len(x))
            if first <= agent < last:
                array[shard.index[1:]] = shard.data[agent - first]
        return array

    own, with_shared = own_leaves(tree)
    return with_shared([take(x) for x in own])


@partial(jax.jit, static_argnums=1)
def _agent_of(x: Array, agent: int) -> Array:
    """Return x[agent], divided as XLA likes."""
    return x[agent]


def array_library(arrays: Any) -> Any:
    """Return numpy for a pytree of arrays that are all on the host, jax.numpy for others."""
    return np if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(arrays)) else jnp


def to_host(arrays: Any) -> Any:
    """Copy a pytree of arrays to the host, whole to that of each process; a no-op if all are there already."""
    return arrays if array_library(arrays) is np else exchange.to_host(arrays)
