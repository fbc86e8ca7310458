"""Where arrays live on a mesh of devices with the axes `agent`, `data` and `model`.

`jit` with shardings replaces `pmap`: the same program runs on one device or on many, and agents on different devices are a
sharding choice, not another code path. One table says along which mesh axis each parameter axis is split: agents over
`agent`; heads, feed-forward and vocabulary over `model` (tensor parallelism); the model axis over `data`, so that every
device holds its share of parameters and optimiser state (fully sharded data parallelism). Rows of a batch are split over
`data`. An axis that the mesh does not divide evenly stays whole.

Over `agent` nothing is ever exchanged. A mesh of that axis alone runs the program of one device on each of them
(`over_agents`); any other mesh leaves the partition to the compiler. Agents on devices of their own also pay on one CPU: as
many virtual devices as cores (`JAX_NUM_CPU_DEVICES`) let agents run beside each other instead of sharing every operation.

Outside `jit`, `x[0]` or `jnp.concatenate` of arrays that are spread is a program that exchanges data, too. So completions and
batches are on the host, and weights are cut and joined by `stack.part`, `stack.unstack` and `runs` alone, which wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmarl.models.stack import is_shared
from jmarl.types import Shared

AXES = ("agent", "data", "model")

RULES = {  # parameter name -> mesh axis of each array axis, the agent axis first
    "embed": ("agent", "model", "data"),  # [A, V, D]
    "lm_head": ("agent", "data", "model"),  # [A, D, V]
    "qkv": ("agent", None, "data", "model"),  # [A, L, D, E]: E = K * (Q+2) * h
    "qkv_bias": ("agent", None, "model"),  # [A, L, E]
    "out": ("agent", None, "model", "data"),  # [A, L, K * Q * h, D]
    "gate": ("agent", None, "data", "model"),  # [A, L, D, F], and so is up
    "up": ("agent", None, "data", "model"),
    "down": ("agent", None, "model", "data"),  # [A, L, F, D]
}
OTHER = ("agent",)  # norms, counters


def require_one_process() -> None:
    """Refuse to train in one of several processes of `jax.distributed`: rollouts, logs and checkpoints are those of one."""
    if jax.process_count() > 1:
        raise RuntimeError(
            f"training runs in one process, and jax.distributed has joined {jax.process_count()}: start a single one, whose "
            "devices `mesh` can all use"
        )


def make_mesh(text: str) -> Mesh:
    """A mesh from text such as `agent=2,data=2,model=2`; axes left out have size 1."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r}: cannot read {part!r}; write for instance 'agent=2,data=2,model=2' with {AXES}, or auto"
            )
        sizes[name.strip()] = int(size)
    needed = sizes["agent"] * sizes["data"] * sizes["model"]
    if needed > jax.device_count():
        raise ValueError(
            f"mesh={text!r} needs {needed} devices, this process has {jax.device_count()}: use a smaller mesh or auto "
            f"(CPUs can be split before Python starts: JAX_NUM_CPU_DEVICES={needed})"
        )
    auto = (AxisType.Auto,) * 3
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=auto, devices=jax.devices()[:needed])


def mesh_for(text: str, agents: Sequence[int]) -> Mesh | None:
    """The mesh that a setting asks for. `auto`: agents over devices as far as they divide (`agents` are the stacks' numbers
    of them), None where that is one device; any other text as in `make_mesh`."""
    if text != "auto":
        return make_mesh(text)
    common = math.gcd(*agents)
    size = max(n for n in range(1, min(common, jax.device_count()) + 1) if common % n == 0)
    return make_mesh(f"agent={size}") if size > 1 else None


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays were put on, None if they were not."""
    leaf = jax.tree.leaves(tree)[0]
    mesh = leaf.sharding.mesh if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def of_one_agent(mesh: Mesh | None) -> Mesh | None:
    """The part of a mesh for a model of which there is one, such as a central critic; None where that is a single device."""
    if mesh is None or mesh.size == mesh.shape["agent"]:
        return None
    return Mesh(mesh.devices[:1], AXES, axis_types=mesh.axis_types)


def apart(mesh: Mesh | None, agents: int) -> bool:
    """Whether the mesh only puts agents on devices, equally many on each. With data or model axes beside it, XLA's
    partitioner aborts on programs that are split by hand over one axis only (seen with jax 0.10.2 on CPUs)."""
    return mesh is not None and mesh.size == mesh.shape["agent"] and agents % mesh.size == 0


def over_agents(f: Callable, mesh: Mesh | None, agents: int) -> Callable:
    """f of stacks [A, ...] to stacks [A, ...]; on a mesh of agents alone, every device runs it on its own agents."""
    if not apart(mesh, agents):
        return f

    def spread(*stacks):
        specs = jax.tree.map(lambda x: Shared(P()) if is_shared(x) else P("agent"), stacks, is_leaf=is_shared)
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("agent"), check_vma=False)(*stacks)

    return spread


def _fit(mesh: Mesh, shape: tuple[int, ...], axes: tuple) -> NamedSharding:
    """The sharding of an array; where a dimension is not a multiple of its mesh axis, it stays whole."""
    fitted = [a if a and size % mesh.shape[a] == 0 else None for a, size in zip(axes, shape, strict=False)]
    return NamedSharding(mesh, P(*fitted))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Shardings of a stack's state: parameters, optimiser moments and the reference by the name of the parameter; of what
    agents share the same without the agent axis."""

    def one(path, leaf):
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        axes = RULES.get(names[-1], OTHER) if names else OTHER
        return Shared(_fit(mesh, leaf.shape, axes[1:])) if is_shared(leaf) else _fit(mesh, leaf.shape, axes)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_shared)


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Parameters [A, ...] or a stack's state on a mesh; old arrays that it splits are freed, unless agents share them (several
    stacks may). Without a mesh as they are."""

    def move(x, where):
        if is_shared(x):
            return Shared(jax.device_put(x.value, where.value))
        new = jax.device_put(x, where)
        # `donate` frees nothing where the devices differ (jax 0.10.2), so the old array is deleted here: only one that was
        # cut, because a whole shard shares its memory.
        cut = where.shard_shape(x.shape) != x.shape
        if cut and isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(where, x.ndim):
            x.delete()
        return new

    if mesh is None:
        return tree
    return jax.tree.map(move, tree, state_shardings(mesh, tree), is_leaf=is_shared)


def put(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays on a mesh as `place`, or without one on the first device."""
    return jax.device_put(tree, jax.devices()[0]) if mesh is None else place(tree, mesh)


def batch_shardings(mesh: Mesh, batch: Any) -> Any:
    """Shardings of arrays [A, P, ...]."""
    return jax.tree.map(lambda x: _fit(mesh, x.shape, ("agent", "data")), batch)


def constrain(state: Any, mesh: Mesh | None) -> Any:
    """Inside jit: keep a stack's state where `state_shardings` puts it."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))
