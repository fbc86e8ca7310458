"""Divide models, batches and caches over a mesh of devices with the axes `agent`, `data` and `model`.

`MESH_AXES` is the one table from what an axis of an array means to the axis of the mesh that divides it; `models.weights` says
what those of weights mean. An axis that the mesh does not divide evenly stays whole.

========  ===========================================================================================================
`agent`   whole agents; nothing is exchanged
`data`    rows of a batch, and the hidden axis of weights, moments and the reference (fully sharded data parallelism,
          arXiv 1910.02054 and 2304.11277): a layer's weights are gathered in the compute dtype where they are used, and
          their gradients reduced and scattered. With strategy=ddp weights stay whole and their gradients are added up
`model`   heads, feed-forward and vocabulary (tensor parallelism, arXiv 1909.08053)
========  ===========================================================================================================

`on_devices` divides programs over `agent` and `data` by hand: each device runs the program of one device on its agents and its
rows, and the only exchange is what is written in it. The compiler divides over `model`. Separate devices for agents also pay
on one CPU: with as many virtual devices as cores (`JAX_NUM_CPU_DEVICES`), agents run in parallel instead of sharing every
operation.

Outside `jit`, `x[0]` or `jnp.concatenate` of arrays on several devices also runs a program that exchanges data. So completions
and batches are on the host, and only `stack.take_agents` and `stack.unstack`, which wait for the result, index weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jmarl.models.config import ModelConfig
from jmarl.models.stack import is_placed, is_shared, name_of
from jmarl.models.weights import ADAPTERS, LAYERS, WEIGHTS
from jmarl.processes import exchange
from jmarl.processes.exchange import to_devices
from jmarl.types import Shared

AXES = ("agent", "data", "model")
BY_HAND = ("agent", "data")  # divided by `on_devices`
STRATEGIES = ("fsdp", "ddp")

MESH_AXES = {  # what an axis means, of weights the letters of `models.weights` -> the axis of the mesh that divides it
    "agent": "agent",
    "row": "data",  # prompts of a batch, with their completions
    "D": "data",
    "K": "model",
    "F": "model",
    "M": "model",  # of each expert
    "1": None,
    "C": None,  # recurrent layers stay whole
    "W": None,
    "N": None,
    "v": None,
    "E": None,  # experts stay together: blocks of tokens read any of them
    "V": "model",
    None: None,  # layers, and all that stays whole
}


def _meanings(axes: str, name: str = LAYERS) -> tuple[str | None, ...]:
    """Return what the axes of a stack's weight mean. Vectors of the sizes D, h, N and v stay whole."""
    if axes in ("D", "h", "N", "v"):
        return ("agent",)
    first = ("agent", None) if name.startswith(LAYERS) else ("agent",)
    return (*first, *(word[0] for word in axes.split()))


MEANINGS = {name.removeprefix(LAYERS): _meanings(weight.axes, name) for name, weight in WEIGHTS.items()}
# Adapters: a [A, L, D, rank] and b [A, L, rank, D]; axes other than D stay whole
MEANINGS |= {f"{name}.a": ("agent", None, "D", None) for name, adapter in ADAPTERS.items() if adapter.inputs == "D"}
MEANINGS |= {f"{name}.b": ("agent", None, None, "D") for name, adapter in ADAPTERS.items() if adapter.outputs == "D"}
OTHER = ("agent",)  # value heads, counters


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """The devices of a stack, and how they divide its weights. Hashable: an argument of programs."""

    mesh: Mesh
    strategy: str = "fsdp"

    @property
    def shape(self) -> dict[str, int]:
        """The number of devices along each axis."""
        return dict(self.mesh.shape)

    @property
    def size(self) -> int:
        """The number of devices."""
        return int(self.mesh.size)

    def axes(self, meanings: Sequence[str | None], shape: Sequence[int]) -> P:
        """Return which mesh axis divides each axis of an array. Axes that are not divided evenly stay whole."""
        table = MESH_AXES if self.strategy == "fsdp" else MESH_AXES | {"D": None}
        names = [table[meaning] for meaning in meanings]
        return P(*(name if name and n % self.shape[name] == 0 else None for name, n in zip(names, shape, strict=False)))


# --- meshes ------------------------------------------------------------------------------------------------------------


def make_mesh(text: str, strategy: str = "fsdp", devices: Sequence[Any] | None = None) -> DeviceMesh:
    """Return a mesh from text such as `agent=2,data=2,model=2`, or `data=all`; axes left out have size 1.

    devices: None: those of this process.
    """
    devices = jax.devices() if devices is None else devices
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    text = f"data={len(devices)}" if text == "data=all" else text
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r}: cannot read {part!r}; write for instance 'agent=2,data=2,model=2' with {AXES}, or auto"
            )
        sizes[name.strip()] = int(size)
    needed = math.prod(sizes.values())
    if needed > len(devices):
        raise ValueError(
            f"mesh={text!r} needs {needed} devices, this process has {len(devices)}: use a smaller mesh or auto "
            f"(CPUs can be split before Python starts: JAX_NUM_CPU_DEVICES={needed})"
        )
    return _mesh_of(np.array(devices[:needed]).reshape(*sizes.values()), strategy)


def _mesh_of(devices: np.ndarray, strategy: str) -> DeviceMesh:
    return DeviceMesh(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3), strategy)


def mesh_for(
    text: str, agents: Sequence[int], strategy: str = "fsdp", devices: Sequence[Any] | None = None
) -> DeviceMesh | None:
    """Return the mesh of the setting `mesh`; None for one device.

    `auto` spreads agents over as many devices as divide the number of `agents` of each stack, and in several processes divides
    rows and weights by the rest. For other text see `make_mesh`.
    Raises ValueError for a mesh whose agent axis does not divide them.
    """
    devices = jax.devices() if devices is None else devices
    if text != "auto":
        mesh = make_mesh(text, strategy, devices)
        for count in agents:
            if count % mesh.shape["agent"]:
                raise ValueError(
                    f"mesh={text!r} spreads whole agents, and {count} agents of one model cannot be divided by "
                    f"agent={mesh.shape['agent']}: use a divisor, such as agent={math.gcd(*agents)}"
                )
        if mesh.size < len(devices) and exchange.count() > 1:
            raise ValueError(
                f"mesh={text!r} has {mesh.size} devices, and the {exchange.count()} processes of this run have {len(devices)}: "
                "a mesh of several processes has all their devices; set auto, or start fewer"
            )
        return mesh if mesh.size > 1 else None
    if exchange.count() > 1:
        return make_mesh(mesh_of_processes(agents, len(devices)), strategy, devices)
    size = largest_agent_axis(agents, len(devices))
    return make_mesh(f"agent={size}", strategy, devices) if size > 1 else None


def mesh_of_processes(agents: Sequence[int], num_devices: int) -> str:
    """Return the mesh of the devices of several processes, of which each must be used: agents first, then rows and weights."""
    size = next(n for n in range(min(math.gcd(*agents), num_devices), 0, -1) if math.gcd(*agents) % n == num_devices % n == 0)
    return f"agent={size},data={num_devices // size}"


def largest_agent_axis(agents: Sequence[int], num_devices: int) -> int:
    """Return over how many devices whole agents can be spread. agents: the number of each stack."""
    common = math.gcd(*agents)
    return max(n for n in range(1, min(common, num_devices) + 1) if common % n == 0)


def mesh_of_one_model(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the same devices as a mesh for a single model, such as a central critic: those of the agent axis divide rows."""
    if mesh is None or mesh.size == 1:
        return None
    devices = mesh.mesh.devices
    return _mesh_of(devices.reshape(1, -1, devices.shape[2]), mesh.strategy)


# --- programs ----------------------------------------------------------------------------------------------------------


def model_on(mesh: DeviceMesh | None, model: ModelConfig) -> ModelConfig:
    """Return the architecture as programs on a mesh read it: which parts of rows and weights a device has."""
    if mesh is None:
        return model
    if mesh.shape["model"] > 1 and model.delta is not None:
        raise ValueError(
            f"mesh: model={mesh.shape['model']} is not allowed for {model.family}: the heads of its recurrent layers are "
            "not divided over devices; use the axes agent and data"
        )
    parts = mesh.shape["data"]
    splits_weights = mesh.strategy == "fsdp" and parts > 1 and model.hidden_size % parts == 0
    own_kernel = model.placement.fused_attention and mesh.shape["model"] == 1  # which the compiler cannot divide
    return model.placed(fused_attention=own_kernel, row_parts=parts, splits_weights=splits_weights)


def spec_of(*meanings: str | None) -> Any:
    """Return which mesh axes divide an array whose axes mean this, where all of them are divided evenly."""
    return P(*(MESH_AXES[meaning] for meaning in meanings))


def by_hand(specs: Any) -> Any:
    """Return specifications without the axes that the compiler divides."""

    def keep(spec: P) -> P:
        return P(*(name if name in BY_HAND else None for name in spec))

    return jax.tree.map(keep, specs, is_leaf=lambda x: isinstance(x, P))


def on_devices(f: Callable, mesh: DeviceMesh | None, inputs: Any, outputs: Any) -> Callable:
    """Return f such that each device of a mesh runs it on its agents and its part of what `data` divides.

    inputs, outputs: specifications of the arguments and of the result, or of subtrees of them.
    """
    if mesh is None:
        return f
    names = set(AXES if mesh.shape["model"] == 1 else BY_HAND)
    specs = by_hand(inputs), by_hand(outputs)
    return jax.shard_map(f, mesh=mesh.mesh, in_specs=specs[0], out_specs=specs[1], axis_names=names, check_vma=False)


def agent_specs(tree: Any) -> Any:
    """Return specifications that divide arrays [A, ...] over `agent` only."""
    return jax.tree.map(lambda x: Shared(P()) if is_shared(x) else P("agent"), tree, is_leaf=is_shared)


def meanings_of(path: Sequence[Any]) -> tuple[str | None, ...]:
    """Return what the axes of a leaf mean, from its path in a pytree of parameters or of a state."""
    names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
    return MEANINGS.get(".".join(names[-2:]), MEANINGS.get(names[-1], OTHER)) if names else OTHER


def state_specs(mesh: DeviceMesh | None, state: Any) -> Any:
    """Return which mesh axes divide the arrays of parameters or of a stack's state: parameters, moments and the reference by
    the parameter's name in `MEANINGS`. Shared arrays have no agent axis. Without a mesh there are none."""
    if mesh is None:
        return None

    def spec(path: tuple[Any, ...], leaf: Any) -> Any:
        meanings = meanings_of(path)
        if not is_shared(leaf):
            return mesh.axes(meanings, leaf.shape)
        own = meanings[2 if isinstance(leaf.value, tuple) else 1 :]  # a tuple has no axis of layers either
        return Shared(jax.tree.map(lambda x: mesh.axes(own, x.shape), leaf.value))

    return jax.tree_util.tree_map_with_path(spec, state, is_leaf=is_shared)


def gather(params: Any, model: ModelConfig, names: Sequence[str] | None = None) -> Any:
    """Return weights whole, of a stack, an agent or a layer, inside `on_devices`; their gradient is added up over `data`, and
    each device gets its part.

    names: of the weights to gather; None: all.
    """
    if not model.placement.splits_weights:
        return params

    def whole(path: tuple[Any, ...], x: Array) -> Array:
        meanings = meanings_of(path)
        if "D" not in meanings or (names is not None and name_of(path) not in names):
            return x  # the axis is counted from the last one, because x may have an agent axis or not
        return lax.all_gather(x, "data", axis=meanings.index("D") - len(meanings) + x.ndim, tiled=True)

    return jax.tree_util.tree_map_with_path(whole, params)


def sum_gradients(grads: Any, model: ModelConfig) -> Any:
    """Return one agent's gradients, added up over the devices of `data`. Those of divided weights are, by `gather`."""
    if model.placement.row_parts == 1:
        return grads

    def total(path: tuple[Any, ...], x: Array) -> Array:
        return x if model.placement.splits_weights and "D" in meanings_of(path) else lax.psum(x, "data")

    return jax.tree_util.tree_map_with_path(total, grads)


def norm(tree: Any) -> Array:
    """Return the global norm of one agent's gradients, of which each device has a part, inside `on_devices`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    squares = [(meanings_of(path), jnp.sum(jnp.square(x))) for path, x in leaves]
    parts = [x for meanings, x in squares if "D" in meanings]
    whole = [x for meanings, x in squares if "D" not in meanings]
    total = sum(whole, jnp.float32(0))
    return jnp.sqrt(total + lax.psum(sum(parts, jnp.float32(0)), "data"))


# --- placement ---------------------------------------------------------------------------------------------------------


def state_shardings(mesh: DeviceMesh, state: Any) -> Any:
    """Return the shardings of parameters or of a stack's state, see `state_specs`."""
    return shardings(mesh, state_specs(mesh, state))


def shardings(mesh: DeviceMesh, specs: Any) -> Any:
    """Return the shardings of specifications."""
    return jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def place(tree: Any, mesh: DeviceMesh | None) -> Any:
    """Place parameters [A, ...] or a stack's state on a mesh; without one, return them unchanged.

    Old arrays are freed if they are split, except shared ones, which several stacks may use.
    """

    def move(x: Any, sharding: Any) -> Any:
        if is_shared(x):
            return Shared(to_devices(x.value, sharding.value))
        new = to_devices(x, sharding)
        # `donate` frees nothing if the devices differ (jax 0.10.2), so delete the old array here, but only if it was split:
        # otherwise the new array may use its memory.
        is_split = sharding.shard_shape(x.shape) != x.shape
        if is_split and is_placed(x) and not x.sharding.is_equivalent_to(sharding, x.ndim):
            x.delete()
        return new

    return tree if mesh is None else jax.tree.map(move, tree, state_shardings(mesh, tree), is_leaf=is_shared)


def copy_to(tree: Any, mesh: DeviceMesh | None) -> Any:
    """Return parameters [A, ...] on a mesh, or without one on the first device; the arrays given are kept."""
    if mesh is not None:
        return to_devices(tree, state_shardings(mesh, tree))
    first = exchange.own_device()

    def move(x: Any) -> Any:  # those that are there stay uncommitted, for which programs are compiled already
        return x if is_placed(x) and x.sharding.device_set == {first} else jax.device_put(x, first)

    return jax.tree.map(move, tree)


def place_agents(tree: Any, mesh: DeviceMesh | None) -> Any:
    """Place arrays [A, ...] on a mesh, divided by agents only; without one, on the first device."""
    if mesh is None:
        return jax.device_put(tree, exchange.own_device())
    return to_devices(tree, NamedSharding(mesh.mesh, P("agent")))


def shapes_on(tree: Any, mesh: DeviceMesh) -> Any:
    """Return the shapes of arrays [A, ...] as `place_agents` places them; nothing is moved."""
    agents = NamedSharding(mesh.mesh, P("agent"))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=agents), tree)


def put(tree: Any, mesh: DeviceMesh | None) -> Any:
    """Place arrays on a mesh like `place`; without one, on the first device."""
    return jax.device_put(tree, exchange.own_device()) if mesh is None else place(tree, mesh)


def constrain(state: Any, mesh: DeviceMesh | None) -> Any:
    """Constrain a stack's state inside `jit` to its `state_shardings`."""
    return state if mesh is None else lax.with_sharding_constraint(state, state_shardings(mesh, state))
