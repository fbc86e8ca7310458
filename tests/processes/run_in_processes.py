"""Runs of one process or of several, whose results `test_runs_in_processes.py` compares.

python run_in_processes.py OUT MODEL MODEL [RUN ...]: process 0 writes rewards, metric rows and states of the named runs. Then,
with the environment variable FAULT, comes a run in which something goes wrong, or one that continues from there.
"""

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import jmarl

jmarl.join_processes(timeout=30)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import cache_key  # noqa: E402

from jmarl import cross_play, evaluate, fit, generate, make_team, train  # noqa: E402
from jmarl.config import TrainConfig  # noqa: E402
from jmarl.envs.base import Step, TextEnvironment  # noqa: E402
from jmarl.envs.reward_environment import RewardEnvironment  # noqa: E402
from jmarl.envs.rewards import make_reward  # noqa: E402
from jmarl.envs.vector import LockStep  # noqa: E402
from jmarl.learning.team_update import update_team  # noqa: E402
from jmarl.models.hub.agents import open_agent  # noqa: E402
from jmarl.models.stack import to_host, unstack  # noqa: E402
from jmarl.processes import exchange  # noqa: E402
from jmarl.runs import loop  # noqa: E402
from jmarl.runs.start import place_team  # noqa: E402
from jmarl.team import Team, policies, save_team  # noqa: E402
from tests.models.mesh_process import FORMATTERS, ITEMS, PAIRS  # noqa: E402
from tests.processes.exchanging import exchange_all  # noqa: E402

# Process 0 compiles for all, and they keep its programs together. On CPUs the keys of a program differ between processes by the
# order of their devices, which the compiled code does not depend on: without this line the others wait for keys of their own.
assert callable(cache_key._hash_accelerator_config)
cache_key._hash_accelerator_config = cache_key._hash_devices
jax.config.update("jax_share_binary_between_hosts", True)
jax.config.update("jax_share_binary_between_hosts_timeout_ms", 200_000)

BASE = dict(num_updates=3, num_prompts=2, num_generations=4, max_new_tokens=6, learning_rate=1e-2, adam_eps=1e-4, top_k=3,
            progress=False, tensorboard=False, save_every=0)  # fmt: skip
DPO = dict(algorithm="dpo", batch_size=2, num_updates=3, learning_rate=1e-2, adam_eps=1e-4, progress=False, tensorboard=False,
           save_every=0)  # fmt: skip
TURNS, ADAPTERS, CENTRAL, GIVEN = "two turns", "own critics and adapters", "central critic in an environment", "pairs"
RUNS = {  # name -> settings
    TURNS: dict(BASE, algorithm="magrpo", num_turns=2, history="append", branching="chain", save_every=1),
    ADAPTERS: dict(BASE, algorithm="ippo", lora_rank=4, learning_rate=3e-3),
    CENTRAL: dict(BASE, algorithm="maac", learning_rate=1e-3, num_updates=4, eval_generations=4),
    GIVEN: DPO,
}
AGAIN = "two turns, again"  # continues from a copy of the directory
EXCHANGE, PLAY, SHARDS = "exchange", "play", "shards"


def reward(a, b, rng):
    """A reward that ranks the joint actions of the whole step, and draws random numbers."""
    if exchange.number():
        raise AssertionError("the reward is called in the first process only")
    return np.argsort(np.argsort([len(x) - 0.5 * len(set(y)) for x, y in zip(a, b, strict=True)])) + rng.random(len(a))


class Chance(TextEnvironment):
    """Rewards depend on the random numbers of each episode. Each process plays its share.

    The environment variable FAULT_OF_EPISODES is what goes wrong in one process: an error in its 1st episode, an end in its
    5th, which in each of two is the first one of its second step."""

    roles = ("first", "second")

    played = 0

    def reset(self, task, rng):
        return {"draw": float(rng.random())}, [task["prompt"], task["prompt"] + " or"]

    def step(self, state, messages, rng):
        Chance.played += 1
        fault, _, process = os.environ.get("FAULT_OF_EPISODES", "").partition(" of ")
        if process and int(process) == exchange.number() and Chance.played == (5 if fault in ("killed", "stopped") else 1):
            if fault == "killed":
                time.sleep(20)  # and the others wait for it before
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stopped":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise ValueError(fault)
        return Step(state, ["", ""], len(messages[0]) * state["draw"] + float(rng.random()), True)


def tokens_of(items, rollout):
    """A metric of evaluations, which is computed in the first process only."""
    if exchange.number():
        raise AssertionError("eval_metrics is called in the first process only")
    return {"tokens": float(sum(c.action_mask.sum() for c in rollout.turns[0].completions)) / len(items)}


def result_of(name, agents, out):
    """Rewards, metric rows and the state of a run; and the models of its state, if they are saved."""
    settings = RUNS[TURNS if name == AGAIN else name]
    keeps = bool(settings["save_every"])
    where = dict(output_dir=f"{out}/{name}", resume="auto" if keeps else False, save_models=keeps or "lora_rank" in settings)
    allowed = "reward" if name == AGAIN else None  # it is of another module in the process that goes on
    cfg = TrainConfig.of(**settings, **where, allow_changed=allowed, mesh="auto")
    team = Team.of(agents[:1] * 2 if "lora_rank" in settings else agents)
    if name == GIVEN:
        result = fit(team, PAIRS, cfg)
    elif name == CENTRAL:
        result = train(team, Chance(), ITEMS, cfg, eval_items=ITEMS[:2], eval_metrics=tokens_of)
    else:
        transition = (lambda **_: [" more", " or less"]) if "num_turns" in settings else None
        result = train(team, RewardEnvironment(make_reward(reward, num_agents=2), FORMATTERS, transition), ITEMS, cfg)
    state = jax.tree.leaves(to_host(result.state))
    own = [to_host(unstack(policies(result.state)[0], a)) for a in range(2)] if name == TURNS else []
    return [getattr(result, "rewards", []), rows_of(cfg.run.output_dir), state, own]


def played(agents):
    """Returns of two evaluations, texts of `generate`, and what is refused in several processes."""
    cfg, env = TrainConfig.of(**BASE, eval_generations=3), RewardEnvironment(make_reward(reward, num_agents=2), FORMATTERS)
    team, params = make_team(agents)
    results = [evaluate(team, params, ITEMS, world, cfg) for world in (env, LockStep(Chance(), 2))]
    texts = generate(team, [[item["prompt"] for item in ITEMS]] * 2, cfg, params=params)
    refused = []
    if exchange.count() > 1:
        early = TrainConfig.of(**BASE, async_steps=1)
        for call in (
            lambda: cross_play([agents, agents[::-1]], ITEMS, env, cfg),
            lambda: train(Team.of(agents), env, ITEMS, early),
        ):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                refused.append(str(error))
    return [result.rollout.joint_returns[0] for result in results], texts, refused


def saved(agents, out):
    """Save agents whose weights are divided over the model axis. Returns the share of them that this process has."""
    _, team, params = place_team(agents, TrainConfig.of(num_updates=1, mesh="model=4"))
    save_team(f"{out}/{SHARDS}", team, params)
    own, whole = (
        sum(sizes) for sizes in zip(*((x.addressable_data(0).size, x.size) for x in jax.tree.leaves(params)), strict=True)
    )
    return own / whole


def rows_of(directory):
    """The numbers of a run's rows that do not depend on time."""
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time", "exchange/", "tokens_per_s", "compiles", "step_s"))}
        for row in rows
    ]


def failing_update(setup, state, batches):
    """Update the team; process 1 fails at its second update, outside an exchange."""
    if exchange.number() == 1 and int(state.step) == 1:
        raise ValueError("bad update")
    return update_team(setup, state, batches)


def trained(agents, out, directory):
    """Train in the environment, with checkpoints. Returns whether it was interrupted; process 0 writes the state."""
    cfg = TrainConfig.of(**RUNS[CENTRAL] | dict(save_every=1), output_dir=f"{out}/{directory}", resume="auto")
    result = train(Team.of(agents), Chance(), ITEMS, cfg)
    state = jax.tree.leaves(to_host(result.state))
    print(f"ended after {int(result.state.step)} updates", flush=True)
    if exchange.is_first():
        Path(out, "state.pkl").write_bytes(pickle.dumps(state))
    return result.interrupted


def main(out, *arguments):
    agents, names, fault = [open_agent(path) for path in arguments[:2]], arguments[2:], os.environ.get("FAULT", "")
    others = {EXCHANGE: exchange_all, PLAY: lambda: played(agents), SHARDS: lambda: saved(agents, out)}
    results = {name: others[name]() if name in others else result_of(name, agents, out) for name in names}
    if names and exchange.is_first():
        Path(out, "results.pkl").write_bytes(pickle.dumps((results, jax.process_count(), jax.device_count())))
    Chance.played, os.environ["FAULT_OF_EPISODES"] = 0, fault
    if (fault or not names) and trained(agents, out, "run"):
        return 75
    if fault == "update":
        loop.update_team = failing_update
        trained(agents, out, "other run")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
