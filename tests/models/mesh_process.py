"""Answer questions about runs on meshes of virtual devices, of which most ask how far results are from those of one device.

Run by `test_sharding.py`: python mesh_process.py DIRECTORY DIRECTORY, of two models. JAX_NUM_CPU_DEVICES must be 8. A line of
the input is a JSON list of the name of a function and its arguments; the line that answers it is the JSON of its result.
"""

import functools
import json
import sys
import tempfile

import jax
import numpy as np

import jmarl.comlrl.trainers
import jmarl.mrlm.core  # noqa: F401
from jmarl import evaluate, fit, train, train_seeds
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.evaluation.cross_play import cross_play
from jmarl.models import sharding
from jmarl.models.hub.agents import load_agent, open_agent
from jmarl.preferences.pairs import Pair
from jmarl.runs.kinds.rollouts import play_step, sampler_of
from jmarl.runs.start import start
from jmarl.sampling import slots
from jmarl.team import Team, make_team, stack_agents

DIRECTORIES, TORCH = sys.argv[1:], "torch" in sys.modules
MESHES = ("data=8", "agent=2,data=4", "agent=2,data=2,model=2")
ONE = "agent=1"
ITEMS = [{"prompt": text} for text in ("The answer is", "def add(first, second):", "apples and pears", "Two agents")]
FORMATTERS = [lambda item: item["prompt"], lambda item: item["prompt"] + " or"]
PAIRS = [
    Pair(("The answer is", "apples and"), (" four", " pears"), (" no idea", " no")),
    Pair(("Two", "def"), (" a b", " c"), (" f", " g")),
]
STOP = ("er", "q")
BASE = dict(num_updates=2, num_prompts=2, num_generations=4, max_new_tokens=6, learning_rate=1e-2, adam_eps=1e-4, top_k=3,
            algorithm="grpo", progress=False)  # fmt: skip
TWO_TURNS, OWN_CRITICS, CENTRAL, PAIRED = "full weights, two turns", "own critics", "central critic", "given pairs"
VARIANTS = {  # name -> settings
    TWO_TURNS: dict(kl_coef=0.1, num_turns=2, history="append", branching="chain"),
    "adapters": dict(lora_rank=4, lora_dropout=0.1, kl_coef=0.1, num_prompts=3, learning_rate=3e-3),
    OWN_CRITICS: dict(
        algorithm="ippo", num_epochs=2, num_minibatches=2, kl_coef=0.1, kl_in="reward", advantage_scale="none",
        learning_rate=1e-3,
    ),
    CENTRAL: dict(algorithm="maac", kl_coef=0.1, learning_rate=1e-3),
    "several seeds, dynamic sampling": dict(
        num_prompts=3, learning_rate=(1e-2, 3e-3), update_order="alternating", dynamic_sampling=1
    ),
    "rounds of preferences, replicated weights": dict(algorithm="madpo_iter", num_candidates=4, batch_size=2, strategy="ddp"),
    PAIRED: dict(algorithm="dpo", batch_size=2, num_updates=3, learning_rate=1e-2, adam_eps=1e-4, progress=False),
}  # fmt: skip


def reward(a, b, prompts):  # equal rewards, and no gradient, for items that begin with an a
    return [0.0 if p.startswith("a") else len(x) - 0.5 * len(set(y)) for x, y, p in zip(a, b, prompts, strict=True)]


REWARD = make_reward(reward, num_agents=2)


def difference(a, b):
    """The largest absolute difference between two trees."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)


@functools.cache
def agents():
    return [open_agent(path) for path in DIRECTORIES]


def run(variant, mesh, **changes):
    """State and rewards of a run."""
    settings = (VARIANTS[variant] if variant == PAIRED else BASE | VARIANTS[variant]) | changes
    cfg, team = TrainConfig.of(**settings, mesh=mesh), Team.of(agents()[:1] * 2 if "lora_rank" in settings else agents())
    if variant == PAIRED:
        return fit(team, PAIRS, cfg).state, 0.0
    env = RewardEnvironment(REWARD, FORMATTERS, (lambda **_: [" more", " or less"]) if "num_turns" in settings else None)
    if variant.startswith("several seeds"):
        results = train_seeds(team, env, ITEMS, cfg, seeds=(0, 1))
        return [x.state for x in results], [x.rewards for x in results]
    result = train(team, env, ITEMS, cfg)
    return result.state, result.rewards


result_of = functools.cache(run)


def trained(variant, mesh):
    """Differences of rewards and of the whole state from those of one device."""
    (state, rewards), (one, expected) = result_of(variant, mesh), result_of(variant, ONE)
    return difference(rewards, expected), difference(state, one)


def shares(variant, mesh):
    """For each leaf of the state, by its path: its bytes, and those on each device, without repetition."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(result_of(variant, mesh)[0])[0]:
        sizes = dict.fromkeys(jax.devices(), 0)
        for shard in leaf.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
        found[jax.tree_util.keystr(path)] = [leaf.nbytes, *sorted(set(sizes.values()))]
    return found


def resumed():
    """A run that makes an update on each of two meshes and is read on one device: steps, and how far what was read is from what
    was saved and from the state of a whole run on one device."""
    with tempfile.TemporaryDirectory() as where:
        first, saved, read = (
            run(
                CENTRAL, mesh, output_dir=where, save_every=1, num_updates=n, resume=i > 0, save_models=False, tensorboard=False
            )[0]
            for i, (mesh, n) in enumerate(((MESHES[2], 1), (MESHES[0], 2), (ONE, 2)))
        )
    return [int(x.step) for x in (first, saved, read)], difference(saved, read), difference(read, result_of(CENTRAL, ONE)[0])


def early():
    """Differences of rows that begin early on one device and go on on two: steps, states, rewards."""
    env, base = RewardEnvironment(REWARD, FORMATTERS), dict(BASE, num_updates=3, async_steps=1, max_new_tokens=24, stop=STOP)
    whole = train(Team.of(agents()), env, ITEMS, TrainConfig.of(**base, mesh=ONE))
    with tempfile.TemporaryDirectory() as where:
        for n, mesh in ((1, ONE), (3, "agent=2")):
            changes = dict(base, output_dir=where, save_every=1, resume=n > 1, num_updates=n, mesh=mesh)
            moved = train(Team.of(agents()), env, ITEMS, TrainConfig.of(**changes))
    return int(moved.state.step), difference(moved.state, whole.state), difference(moved.rewards, whole.rewards[1:])


@functools.cache
def long_tokens(mesh):
    """Tokens of 16 long rows of each agent, which move into fewer slots."""
    cfg = TrainConfig.of(**dict(BASE, max_new_tokens=64, num_prompts=4, stop=STOP, mesh=mesh))
    team, params = make_team(agents())
    setup, state = start(team, params, cfg)
    shortest, slots.SHORTEST = slots.SHORTEST, 64  # the context of these models is short
    rollout = play_step(sampler_of(setup, state), setup, ITEMS, RewardEnvironment(REWARD, FORMATTERS), 0)
    slots.SHORTEST = shortest
    return rollout.turns[0].completions[0].tokens


def long(mesh):
    """Whether such tokens are those of one device."""
    return bool((long_tokens(mesh) == long_tokens(ONE)).all())


@functools.cache
def returns(mesh):
    """Returns of an evaluation and of every pairing of two teams."""
    cfg, env = TrainConfig.of(**BASE, eval_generations=3, mesh=mesh), RewardEnvironment(REWARD, FORMATTERS)
    team, params = make_team(agents())
    evaluation = evaluate(team, params, ITEMS[:3], env, cfg)
    pairings = cross_play([agents(), agents()[::-1]], ITEMS[:3], env, cfg)
    return [evaluation.rollout.joint_returns[0], pairings.rewards]


def played(mesh):
    """How far such returns are from those of one device."""
    return difference(returns(mesh), returns(ONE))


def divided(mesh, lora):
    """Whether weights that are read from files to a mesh equal those that are moved there, and lie like them."""
    directories = DIRECTORIES[:1] * 2 if lora else DIRECTORIES
    devices = sharding.make_mesh(mesh)
    at_once, moved = (
        stack_agents(Team.of([load(path) for path in directories]).on(on).stacks, [load(path) for path in directories], lora)
        for load, on in ((open_agent, devices), (load_agent, None))
    )
    pairs = list(zip(*map(jax.tree.leaves, (at_once, [sharding.place(stack, devices) for stack in moved])), strict=True))
    equal = all((np.asarray(x) == np.asarray(y)).all() for x, y in pairs)
    return equal and all(x.sharding == y.sharding and x.dtype == y.dtype for x, y in pairs)


def again():
    """The error where parameters that were put on a mesh are used once more."""
    team, params = make_team(agents())
    start(team, params, TrainConfig.of(**BASE, mesh="data=8"))
    try:
        start(team, params, TrainConfig.of(**BASE, mesh="data=8"))
    except ValueError as error:
        return str(error)


def imports_torch():
    """Whether torch was imported with the library and its front ends."""
    return TORCH


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(globals()[name](*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
