"""No gradient of an update goes through the logarithms that cuDNN's attention can return: its backward pass drops them.

XLA's form has their gradient, so parity on CPUs would not show the error. The update is traced for cuDNN here, without CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jmarl.config import TrainConfig
from jmarl.learning.program import StackProgram, update_agents
from jmarl.learning.team_update import lower_team
from jmarl.models import gpu
from jmarl.models.config import ModelConfig
from jmarl.models.sharding import shapes_on
from jmarl.plan.plan import describe_team
from jmarl.plan.programs import shapes_of_run
from jmarl.rollout.make_batches import rollout_batches
from jmarl.rollout.zeros import zero_rollout

MODEL = ModelConfig("qwen2", 320, 32, 64, 2, 4, 2, 8, 256, qkv_bias=True)


@pytest.fixture(autouse=True)
def traced_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuDNN's attention be traced, and return the trace of an update in place of its program."""

    def trace(program: StackProgram, state: Any, batch: Any, step: Any) -> ClosedJaxpr:
        return jax.make_jaxpr(functools.partial(update_agents, program))(*program.arguments(state, batch, step, shapes_on))

    monkeypatch.setattr(gpu, "has_cuda", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(StackProgram, "lower", trace)


def jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Yield a jaxpr and all that it calls."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from jaxprs(value.jaxpr if isinstance(value, ClosedJaxpr) else value)


def attentions(jaxpr: Jaxpr, kind: str) -> list[tuple[Jaxpr, JaxprEqn]]:
    """Return the calls of cuDNN's attention, `fwd` or `bwd`, each with the jaxpr that it is in."""
    return [(x, e) for x in jaxprs(jaxpr) for e in x.eqns if e.primitive.name.startswith(f"dot_product_attention_{kind}")]


def misuses(jaxpr: Jaxpr) -> list[str]:
    """Return the users of the logarithms of any forward pass, other than cuDNN's own backward pass."""
    names = []
    for inside, forward in attentions(jaxpr, "fwd"):
        for logarithms in forward.outvars[1:]:
            users = [e.primitive.name for e in inside.eqns if any(x is logarithms for x in e.invars)]
            users += ["returned"] * any(x is logarithms for x in inside.outvars)
            names += [name for name in users if not name.startswith("dot_product_attention_bwd")]
    return names


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"per_agent": "vmap"}, {"lora_rank": 4}, {"remat": "full", "micro_batches": 2}])
def test_no_gradient_of_an_update_goes_through_logarithms(settings: dict[str, Any]) -> None:
    given = dict(num_prompts=2, num_generations=2, max_new_tokens=8, compute_dtype="bfloat16") | settings
    cfg, team = TrainConfig.of(**given), describe_team([("a", MODEL, None)] * 2, shared_weights=False)
    setup, state = shapes_of_run(team, cfg, jax.devices("cpu")[:1])
    [(_, _, traced)] = lower_team(setup, state, rollout_batches(setup, state, zero_rollout(setup, [16])))
    assert attentions(traced.jaxpr, "fwd") and attentions(traced.jaxpr, "bwd")
    assert misuses(traced.jaxpr) == []


def test_a_plan_does_not_use_the_devices_that_are_here() -> None:
    """Its shapes are on the planned device, and arrays of a mesh of other devices cannot join them."""
    cfg, team = TrainConfig.of(mesh="agent=1"), describe_team([("a", MODEL, None)] * 2, shared_weights=False)
    setup, _ = shapes_of_run(team, cfg, jax.devices("cpu")[:1])
    assert setup.team.stacks[0].mesh is None and [program.mesh for program in setup.programs] == [None]


def test_a_gradient_through_logarithms_is_seen() -> None:
    """As of two parts of the keys that are joined by the sums of their weights."""
    q = jnp.ones((2, 8, 4, 8), jnp.bfloat16)
    lengths = jnp.full(2, 8)

    def joined(q: jax.Array) -> jax.Array:
        out, logs = gpu._attend_with_logs("cudnn", q, q, q, lengths)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(jax.nn.sigmoid(logs))

    assert misuses(jax.make_jaxpr(jax.grad(joined))(q).jaxpr)
