"""Compute families, and a layer of experts, on two virtual devices; print as JSON how far results are from those of one device.

Run by `test_family_meshes.py`: python family_mesh_process.py JSON JSON, of objects from cases to directories: whose logits are
computed, and which are trained. JAX_NUM_CPU_DEVICES must be 2.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmarl import train
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.models import decoder, sharding
from jmarl.models.hub.agents import load_agent
from jmarl.models.layers import experts
from jmarl.plan.hlo import Program
from jmarl.team import make_team

TOKENS = np.random.default_rng(0).integers(3, 320, 24)
ITEMS = [{"prompt": text} for text in ("The answer is", "def add(first, second):")]
SETTINGS = dict(
    algorithm="magrpo", num_updates=1, num_prompts=2, num_generations=4, max_new_tokens=8, learning_rate=1e-2, adam_eps=1e-2,
    progress=False,
)  # fmt: skip


def difference(a, b):
    """The largest absolute difference between two trees."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)


def lengths(completions):
    return [float(len(text)) for text in completions]


def divided_logits(agent):
    """How far logits are from those of one device, in parts of the largest, where two devices divide heads, feed-forward layer
    and vocabulary; and into how many parts each weight is divided."""
    mesh, tokens = sharding.make_mesh("model=2"), jnp.asarray(TOKENS)
    cfg, params = sharding.model_on(mesh, agent.config), jax.tree.map(lambda x: jnp.asarray(x)[None], agent.params)
    placed = sharding.copy_to(params, mesh)
    forward = jax.vmap(decoder.forward, (0, None, None))
    specs = sharding.state_specs(mesh, params)
    divided = sharding.on_devices(lambda params, tokens: forward(params, cfg, tokens), mesh, (specs, P()), P("agent"))
    parts = {name: x.nbytes // x.addressable_shards[0].data.nbytes for name, x in placed["layers"].items()}
    one = jax.jit(forward, static_argnums=1)(params, agent.config, tokens)
    return difference(jax.jit(divided)(placed, tokens), one) / float(jnp.abs(one).max()), parts


def divided_experts(tokens=512, dim=32, width=16, count=8, choices=4):
    """Relative differences of what experts return, whose widths two devices divide, and of its gradients; and how often a token
    is added up over devices, forward and backward."""
    assert not experts.reads_all(tokens, choices, count)
    rng, mesh = np.random.default_rng(1), sharding.make_mesh("model=2")
    whole, columns, rows = P("agent"), P("agent", None, None, "model"), P("agent", None, "model")
    if width % 2:  # as axes that a mesh does not divide
        columns = rows = whole
    up, down = ((count, dim, width), columns), ((count, width, dim), rows)
    shapes = {"x": ((tokens, dim), whole), "router": ((dim, count), whole), "gate": up, "up": up, "down": down}
    inputs = {name: jnp.asarray(rng.normal(size=(1, *shape)), jnp.float32) for name, (shape, _) in shapes.items()}
    placed = {name: jax.device_put(x, NamedSharding(mesh.mesh, shapes[name][1])) for name, x in inputs.items()}

    def loss(w):
        routes = experts.route(w["x"], w["router"], choices, normalize=True)
        out = experts.apply_experts(w["x"], routes, w["gate"], w["up"], w["down"], jax.nn.silu)
        return (out**2).sum(), out

    both = jax.vmap(jax.value_and_grad(loss, has_aux=True))
    one = jax.jit(both)(inputs)
    divided = jax.jit(sharding.on_devices(both, mesh, (dict.fromkeys(shapes, whole),), whole)).lower(placed).compile()
    differences = jax.tree.map(lambda a, b: difference(a, b) / float(jnp.abs(b).max()), divided(placed), one)
    added = Program(divided.as_text()).cost().exchanged / 2  # an all-reduce counts twice
    return max(jax.tree.leaves(differences)), added / inputs["x"].nbytes


def updated(agent, mesh):
    """The rewards of an update, and the parameters after it."""
    team, params = make_team([agent])
    env = RewardEnvironment(make_reward(lengths, num_agents=1), [lambda item: item["prompt"]])
    result = train(team, env, ITEMS, TrainConfig.of(**SETTINGS, mesh=mesh), params=params)
    return result.rewards, result.state.stacks[0].params


def divided_update(agent):
    """Differences of an update whose rows are on two devices: of rewards, of parameters, and of these from those before."""
    (one, params), (two, divided) = (updated(agent, mesh) for mesh in ("agent=1", "data=2"))
    before = jax.tree.map(lambda x: x[None], agent.params)
    return difference(one, two), difference(params, divided), difference(params, before)


def main(computed, trained):
    logits = {case: divided_logits(load_agent(path)) for case, path in computed.items()}
    updates = {case: divided_update(load_agent(path)) for case, path in trained.items()}
    return {
        "devices": jax.device_count(),
        "logits": logits,
        "updates": updates,
        "experts": [*divided_experts(), divided_experts(width=5)[0]],
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(json.loads, sys.argv[1:]))))
