"""Results on a mesh of eight virtual devices equal those on one device, and every device holds its share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jmarl.models import sharding

ROOT = Path(__file__).resolve().parents[2]
MESH = "agent=2,data=2,model=2"

SCRIPT = """
import json, sys, tempfile
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec
from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.learning.optimizer import init_state
from jmarl.models import sharding
from jmarl.models.hub.agents import load_agent
from jmarl.sampling import slots
from jmarl.team import Team, make_team
from jmarl.runs import train
from jmarl.runs.prepare import start
from jmarl.learning.team_update import update_team
from jmarl.runs.rollouts import rollout_batches, play_step, sampler_of

agents = [load_agent(path) for path in sys.argv[2:]]
one = TrainConfig.of(num_updates=2, num_prompts=2, num_generations=4, max_new_tokens=6, learning_rate=1e-2, adam_eps=1e-4,
                     algorithm="grpo", kl_coef=0.1, mesh="agent=1", top_k=3, progress=False)
meshed = one.replace(mesh=sys.argv[1])
items = [{"prompt": text} for text in ("The answer is", "def add(first, second):", "apples and pears", "Two agents")]
reward = make_reward(lambda a, b: [len(x) - 0.5 * len(set(y)) for x, y in zip(a, b)], num_agents=2)
formatters = [lambda item: item["prompt"], lambda item: item["prompt"] + " or"]
out = {"devices": jax.device_count()}

def differ(a, b):  # the largest absolute difference between two trees
    pairs = zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True)
    return max(float(np.abs(x - np.asarray(y)).max()) for x, y in pairs)

env = RewardEnvironment(reward, formatters, lambda **_: [" more", " or less"])

def run(cfg):  # one step of training in its parts, over two turns
    cfg = cfg.replace(num_turns=2, history="append", branching="chain")
    team, params = make_team(agents)
    setup, state = start(team, params, cfg)
    rollout = play_step(sampler_of(setup.team, state), setup, items[:2], env, 0)
    state, metrics = update_team(setup, state, rollout_batches(setup, state, rollout))
    return jax.device_get([turn.completions[0] for turn in rollout.turns]), state.stacks[0], jax.device_get(metrics[0])

samples1, state1, metrics1 = run(one)
out["lengths"] = sorted(set(samples1[0].action_mask.sum(-1).ravel().tolist()))
out["moved"] = differ(state1.params, state1.reference)
for name in ("agent=2", sys.argv[1]):
    samples, state, metrics = run(one.replace(mesh=name))
    pairs = list(zip(samples, samples1, strict=True))
    equal = [(x.tokens == y.tokens).all() and (x.action_mask == y.action_mask).all() for x, y in pairs]
    out[name] = dict(tokens=bool(all(equal)), logprobs=max(differ(x.logprobs, y.logprobs) for x, y in pairs),
                     params=differ(state.params, state1.params), opt_state=differ(state.opt_state, state1.opt_state),
                     metrics=differ(metrics, metrics1), devices=len(jax.tree.leaves(state.params)[0].sharding.device_set))
out["auto"] = [dict((sharding.mesh_for("auto", n) or sharding.make_mesh("agent=1")).shape) for n in ([2], [3, 6], [2, 3], [32])]

def sample_long(name):  # 16 rows of each agent, which move into 4 slots
    slots.SHORTEST = 64  # the context of these models is short
    cfg = one.replace(mesh=name, max_new_tokens=64, num_prompts=4)
    team, params = make_team(agents)
    setup, state = start(team, params, cfg)
    return play_step(sampler_of(setup.team, state), setup, items, env, 0).turns[0].completions[0]

out["long"] = bool((sample_long("agent=1").tokens == sample_long("agent=2").tokens).all())

with tempfile.TemporaryDirectory() as where:  # completions of the next step begin on one device and end on two
    early = [one.replace(mesh="agent=1", async_steps=1, num_updates=n, max_new_tokens=24) for n in (3, 1)]
    whole = train.train(Team.of(agents), RewardEnvironment(reward, formatters), items, early[0])
    kept = dict(output_dir=where, save_every=1)
    train.train(Team.of(agents), RewardEnvironment(reward, formatters), items, early[1].replace(**kept))
    moved = early[0].replace(mesh="agent=2", resume=True, **kept)
    moved = train.train(Team.of(agents), RewardEnvironment(reward, formatters), items, moved)
out["early"] = [int(moved.state.step), differ(moved.state, whole.state), differ(moved.rewards, whole.rewards[1:])]

shares = out["shares"] = {}  # leaf -> set of shares of its bytes over devices
for path, leaf in jax.tree_util.tree_flatten_with_path(state._asdict())[0]:
    sizes = dict.fromkeys(jax.devices(), 0)
    for shard in leaf.addressable_shards:
        sizes[shard.device] += shard.data.nbytes
    shares[jax.tree_util.keystr(path)] = [leaf.nbytes, *sorted(set(sizes.values()))]

results = [train.train(Team.of(agents), RewardEnvironment(reward, formatters), items, cfg) for cfg in (meshed, one)]
out["train"] = differ(results[0].state, results[1].state)
out["rewards"] = differ(results[0].rewards, results[1].rewards)
out["steps"] = int(results[0].state.step)

with tempfile.TemporaryDirectory() as where:  # an update here, the next one there
    for cfg, changes in ((one, dict(num_updates=1)), (meshed, dict(resume=True))):
        cfg = cfg.replace(output_dir=where, save_every=1, **changes)
        moved = train.train(Team.of(agents), RewardEnvironment(reward, formatters), items, cfg)
out["moved there"] = [int(moved.state.step), differ(moved.state, results[1].state)]

team, params = make_team(agents)
apart = one.replace(mesh="agent=2", algorithm="maac")
_, state = start(team, params, apart)
out["central"] = sorted({len(x.sharding.device_set) for x in jax.tree.leaves(state.critics)})

def flat(a, b, prompts):  # equal rewards, and no gradient, for items that begin with an a
    return [0.0 if p.startswith("a") else len(x) - 0.5 * len(set(y)) for x, y, p in zip(a, b, prompts)]

variants = {
    "own": dict(learning_rate=(1e-2, 3e-3), update_order="alternating", dynamic_sampling=1),
    "penalty": dict(algorithm="ippo", kl_in="reward", advantage_scale="none", learning_rate=1e-3, top_k=0),
}
for variant, changes in variants.items():
    states, meshes = {}, ("agent=2", sys.argv[1])
    for name in ("agent=1", *meshes):
        cfg = one.replace(mesh=name, **changes)
        result = train.train(Team.of(agents), RewardEnvironment(make_reward(flat, num_agents=2), formatters), items, cfg)
        states[name] = result.state.stacks[0].params
    out[variant] = [differ(states["agent=1"], states[name]) for name in meshes]

mesh = sharding.make_mesh(sys.argv[1])
_, params = make_team(agents)
init_state(params, resolve(one), mesh)
try:
    init_state(params, resolve(one), mesh)
except ValueError as error:
    out["again"] = str(error)
odd = {"qkv": jnp.zeros((3, 2, 31, 65)), "embed": jnp.zeros((2, 321, 32)), "attn_norm": jnp.zeros((2, 2, 32))}
out["odd"] = {name: list(s.spec) for name, s in sharding.state_shardings(mesh, odd).items()}
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def facts(tiny_dir):
    """Results of `SCRIPT` in a process with eight virtual CPU devices."""
    directories = [str(tiny_dir("qwen2", seed=seed)) for seed in (0, 1)]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, MESH, *directories], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("mesh, devices", [("agent=2", 2), (MESH, 8)])
def test_the_sampler_on_a_mesh_equals_one_device(facts, mesh, devices):
    """Equal tokens, and log-probabilities up to the order of sums; also in a second turn that continues from the cache."""
    assert facts["devices"] == 8 and facts[mesh]["devices"] == devices
    assert facts[mesh]["tokens"] and facts[mesh]["logprobs"] < 1e-5
    assert facts["lengths"][-1] == 6


@pytest.mark.long
def test_rows_move_into_fewer_slots_on_each_device(facts):
    assert facts["long"]


@pytest.mark.long
def test_rows_that_began_early_go_on_on_another_mesh(facts):
    """With async_steps=1, a first update on one device and two on two equal three updates on one."""
    steps, difference, rewards = facts["early"]
    assert steps == 3 and difference < 1e-4 and rewards < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("variant", ["own", "penalty"])
def test_settings_of_single_agents_on_a_mesh(facts, variant):
    """own: learning rate per agent, alternating updates, replaced prompts; penalty: KL penalty for agents and critics."""
    assert max(facts[variant]) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["agent=2", MESH])
def test_the_update_on_a_mesh_equals_one_device(facts, mesh):
    assert max(facts[mesh]["params"], facts[mesh]["opt_state"]) < 1e-5 and facts[mesh]["metrics"] < 1e-4
    assert facts["moved"] > 1e-3, "the update should have changed something"


@pytest.mark.long
def test_auto_spreads_agents_over_devices(facts):
    """Eight devices: 2 agents on 2; stacks of 3 and 6 on 3; 2 and 3 have no common divisor; 32 agents, 4 on each."""
    assert [shape["agent"] for shape in facts["auto"]] == [2, 3, 1, 8]
    assert all(shape["data"] == shape["model"] == 1 for shape in facts["auto"])


@pytest.mark.long
def test_training_on_a_mesh_equals_one_device(facts):
    """`train` with --mesh, two updates from start to end."""
    assert facts["steps"] == 2 and facts["train"] < 1e-5 and facts["rewards"] < 1e-6


@pytest.mark.long
def test_a_run_resumes_on_another_mesh(facts):
    """A first update on one device and a second on eight equal two updates on one."""
    steps, difference = facts["moved there"]
    assert steps == 2 and difference < 1e-5


@pytest.mark.long
def test_a_central_critic_is_on_one_device(facts):
    """It starts as a copy of an agent that is on several devices, each of which would otherwise compute it."""
    assert facts["central"] == [1]


@pytest.mark.long
def test_parameters_put_on_a_mesh_are_consumed(facts):
    """The state takes their memory; a second use raises an error."""
    assert "parameters of stack 0 were consumed by an earlier run" in facts["again"]


@pytest.mark.long
def test_every_device_holds_its_share(facts):
    """An eighth of every matrix, of its reference and of both its Adam moments; half of the small vectors (their agent);
    so each device holds an eighth of the bytes and at most a few percent more."""
    seen = set()
    for path, (total, *of_devices) in facts["shares"].items():
        name = path.split("'")[-2] if "layers" in path or "embed" in path else path
        matrix = name in ("embed", "qkv", "out", "gate", "up", "down")
        share = 8 if matrix else 4 if name == "qkv_bias" else 2
        assert of_devices == [total // share], path
        seen |= {(name, field) for field in ("'params'", "mu", "nu", "'reference'") if matrix and field in path}
    assert len(seen) == 6 * 4
    held, whole = (sum(size[i] for size in facts["shares"].values()) for i in (1, 0))
    assert whole / 8 <= held < 1.05 * whole / 8


@pytest.mark.long
def test_an_axis_that_does_not_divide_is_not_split(facts):
    """Three agents, hidden size 31, 65 columns; a vocabulary of 321; and a vector that is split by agent only."""
    assert facts["odd"] == {
        "qkv": [None, None, None, None],
        "embed": ["agent", None, "data"],
        "attn_norm": ["agent"],
    }


@pytest.mark.parametrize("text", ["agents=2", "agent=0", "agent", "agent=2,", "agent=2;data=2", "agent=-1", "data=1.5"])
def test_mesh_text_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"cannot read .*write for instance 'agent=2,data=2,model=2'"):
        sharding.make_mesh(text)


def test_a_mesh_larger_than_the_machine_names_both_numbers():
    with pytest.raises(ValueError, match=r"mesh='agent=500,data=3' needs 1500 devices, this process has \d+"):
        sharding.make_mesh("agent=500,data=3")


def test_axes_left_out_have_size_one():
    assert dict(sharding.make_mesh("data=1").shape) == {"agent": 1, "data": 1, "model": 1}
