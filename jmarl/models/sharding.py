"""Place arrays on a mesh of devices with the axes `agent`, `data` and `model`.

`jit` with shardings replaces `pmap`: the same program runs on one device or on many. `RULES` says along which mesh axis each
array axis of a parameter is split: agents over `agent`; heads, feed-forward and vocabulary over `model` (tensor parallelism);
the hidden size over `data`, so that every device holds its share of parameters and optimizer state (fully sharded data
parallelism). Rows of a batch are split over `data`. An axis that the mesh does not divide evenly is not split.

Nothing is exchanged over `agent`. On a mesh of that axis alone, each device runs the program of one device (`over_agents`); on
any other mesh the compiler partitions the program. Separate devices for agents also pay on one CPU: with as many virtual
devices as cores (`JAX_NUM_CPU_DEVICES`), agents run in parallel instead of sharing every operation.

Outside `jit`, `x[0]` or `jnp.concatenate` of arrays on several devices also runs a program that exchanges data. So completions
and batches are on the host, and only `stack.take_agents` and `stack.unstack`, which wait for the result, index weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmarl.models.config import ModelConfig
from jmarl.models.stack import is_placed, is_shared
from jmarl.types import Shared

AXES = ("agent", "data", "model")

RULES = {  # parameter name -> mesh axis of each array axis, the agent axis first
    "embed": ("agent", "model", "data"),  # [A, V, D]
    "lm_head": ("agent", "data", "model"),  # [A, D, V]
    "qkv": ("agent", None, "data", "model"),  # [A, L, D, E]: E = K * (Q+2) * h
    "qkv_bias": ("agent", None, "model"),  # [A, L, E]
    "out": ("agent", None, "model", "data"),  # [A, L, K * Q * h, D]
    "gate": ("agent", None, "data", "model"),  # [A, L, D, F], like up
    "up": ("agent", None, "data", "model"),
    "down": ("agent", None, "model", "data"),  # [A, L, F, D]
}
OTHER = ("agent",)  # norms, counters


def require_one_process() -> None:
    """Raise RuntimeError in one of several processes of `jax.distributed`: rollouts, logs and checkpoints need all agents."""
    if jax.process_count() > 1:
        raise RuntimeError(
            f"training runs in one process, and jax.distributed has joined {jax.process_count()}: start a single one, whose "
            "devices `mesh` can all use"
        )


def make_mesh(text: str) -> Mesh:
    """Return a mesh from text such as `agent=2,data=2,model=2`, or `data=all`; axes left out have size 1."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    text = f"data={jax.device_count()}" if text == "data=all" else text
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r}: cannot read {part!r}; write for instance 'agent=2,data=2,model=2' with {AXES}, or auto"
            )
        sizes[name.strip()] = int(size)
    needed = math.prod(sizes.values())
    if needed > jax.device_count():
        raise ValueError(
            f"mesh={text!r} needs {needed} devices, this process has {jax.device_count()}: use a smaller mesh or auto "
            f"(CPUs can be split before Python starts: JAX_NUM_CPU_DEVICES={needed})"
        )
    auto = (AxisType.Auto,) * 3
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=auto, devices=jax.devices()[:needed])


def mesh_for(text: str, agents: Sequence[int]) -> Mesh | None:
    """Return the mesh of the setting `mesh`.

    `auto` spreads agents over as many devices as divide the number of `agents` of each stack; None if that is one device, as
    for `data=all`. For other text see `make_mesh`.
    """
    if text == "data=all" and jax.device_count() == 1:
        return None
    if text != "auto":
        return make_mesh(text)
    common = math.gcd(*agents)
    size = max(n for n in range(1, min(common, jax.device_count()) + 1) if common % n == 0)
    return make_mesh(f"agent={size}") if size > 1 else None


def mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh that a pytree of arrays is placed on; None without one, and while a function is traced."""
    leaf = jax.tree.leaves(tree)[0]
    mesh = leaf.sharding.mesh if is_placed(leaf) and isinstance(leaf.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def mesh_of_one_model(mesh: Mesh | None) -> Mesh | None:
    """Return the part of a mesh for a single model, such as a central critic; None if that is one device."""
    if mesh is None or mesh.size == mesh.shape["agent"]:
        return None
    return Mesh(mesh.devices[:1], AXES, axis_types=mesh.axis_types)


def splits_only_agents(mesh: Mesh | None, agents: int) -> bool:
    """Return whether the mesh splits nothing but agents, with the same number on each device.

    If it has data or model axes, XLA's partitioner aborts on programs that are split by hand over one axis (jax 0.10.2, CPUs).
    """
    return mesh is not None and mesh.size == mesh.shape["agent"] and agents % mesh.size == 0


def model_on(mesh: Mesh | None, agents: int, model: ModelConfig) -> ModelConfig:
    """Return the architecture for programs on a mesh: a GPU's own attention cannot be split inside an agent."""
    whole = mesh is None or splits_only_agents(mesh, agents)
    return model if whole else dataclasses.replace(model, fused_attention=False)


def over_agents(f: Callable, mesh: Mesh | None, agents: int) -> Callable:
    """Return f, a function of stacks [A, ...]; on a mesh that splits only agents, every device runs it on its own agents."""
    if not splits_only_agents(mesh, agents):
        return f

    def run_on_devices(*stacks: Any) -> Any:
        specs = jax.tree.map(lambda x: Shared(P()) if is_shared(x) else P("agent"), stacks, is_leaf=is_shared)
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("agent"), check_vma=False)(*stacks)

    return run_on_devices


def _sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
    """Return the sharding of an array; an axis that is not a multiple of its mesh axis is not split."""
    return NamedSharding(mesh, P(*(a if a and n % mesh.shape[a] == 0 else None for a, n in zip(axes, shape, strict=False))))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Return the shardings of a stack's state: of parameters, moments and the reference by the parameter's name in `RULES`.

    Shared arrays have no agent axis.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        axes = RULES.get(names[-1], OTHER) if names else OTHER
        return Shared(_sharding(mesh, leaf.shape, axes[1:])) if is_shared(leaf) else _sharding(mesh, leaf.shape, axes)

    return jax.tree_util.tree_map_with_path(sharding, state, is_leaf=is_shared)


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Place parameters [A, ...] or a stack's state on a mesh; without one, return them unchanged.

    Old arrays are freed if they are split, except shared ones, which several stacks may use.
    """

    def move(x: Any, sharding: Any) -> Any:
        if is_shared(x):
            return Shared(jax.device_put(x.value, sharding.value))
        new = jax.device_put(x, sharding)
        # `donate` frees nothing if the devices differ (jax 0.10.2), so delete the old array here, but only if it was split:
        # otherwise the new array may use its memory.
        is_split = sharding.shard_shape(x.shape) != x.shape
        if is_split and isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(sharding, x.ndim):
            x.delete()
        return new

    return tree if mesh is None else jax.tree.map(move, tree, state_shardings(mesh, tree), is_leaf=is_shared)


def place_agents(tree: Any, mesh: Mesh | None) -> Any:
    """Place arrays [A, ...] on a mesh that splits only agents; without one, on the first device."""
    return jax.device_put(tree, jax.devices()[0] if mesh is None else NamedSharding(mesh, P("agent")))


def put(tree: Any, mesh: Mesh | None) -> Any:
    """Place arrays on a mesh like `place`; without one, on the first device."""
    return jax.device_put(tree, jax.devices()[0]) if mesh is None else place(tree, mesh)


def batch_shardings(mesh: Mesh, batch: Any) -> Any:
    """Return the shardings of arrays [A, P, ...]."""
    return jax.tree.map(lambda x: _sharding(mesh, x.shape, ("agent", "data")), batch)


def constrain(state: Any, mesh: Mesh | None) -> Any:
    """Constrain a stack's state inside `jit` to its `state_shardings`."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))
