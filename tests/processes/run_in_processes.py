"""Runs of one process or of several, whose results `test_runs_in_processes.py` compares.

python run_in_processes.py OUT MODEL MODEL [RUN ...]: process 0 writes rewards, metric rows and states of the named runs.
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

from jmarl import fit, train  # noqa: E402
from jmarl.config import TrainConfig  # noqa: E402
from jmarl.envs.base import Step, TextEnvironment  # noqa: E402
from jmarl.envs.reward_environment import RewardEnvironment  # noqa: E402
from jmarl.envs.rewards import make_reward  # noqa: E402
from jmarl.learning.team_update import update_team  # noqa: E402
from jmarl.models.hub.agents import open_agent  # noqa: E402
from jmarl.models.stack import to_host, unstack  # noqa: E402
from jmarl.processes import exchange  # noqa: E402
from jmarl.runs import loop  # noqa: E402
from jmarl.team import Team, policies  # noqa: E402
from tests.models.mesh_process import FORMATTERS, ITEMS, PAIRS  # noqa: E402

BASE = dict(num_updates=3, num_prompts=2, num_generations=4, max_new_tokens=6, learning_rate=1e-2, adam_eps=1e-4, top_k=3,
            progress=False, tensorboard=False, save_every=0)  # fmt: skip
DPO = dict(algorithm="dpo", batch_size=2, num_updates=3, learning_rate=1e-2, adam_eps=1e-4, progress=False, tensorboard=False,
           save_every=0)  # fmt: skip
RUNS = {  # name -> settings
    "two turns": dict(BASE, algorithm="magrpo", num_turns=2, history="append", branching="chain", save_every=1),
    "own critics and adapters": dict(BASE, algorithm="ippo", lora_rank=4, learning_rate=3e-3),
    "central critic in an environment": dict(BASE, algorithm="maac", learning_rate=1e-3),
    "pairs": DPO,
}


def reward(a, b, rng):
    """A reward that ranks the joint actions of the whole step, and draws random numbers."""
    if exchange.number():
        raise AssertionError("the reward is called in the first process only")
    return np.argsort(np.argsort([len(x) - 0.5 * len(set(y)) for x, y in zip(a, b, strict=True)])) + rng.random(len(a))


class Chance(TextEnvironment):
    """Rewards depend on the random numbers of each episode. Each process plays its share.

    The environment variable FAULT says what goes wrong in one of them, in its 9th episode."""

    roles = ("first", "second")

    played = 0

    def reset(self, task, rng):
        return {"draw": float(rng.random())}, [task["prompt"], task["prompt"] + " or"]

    def step(self, state, messages, rng):
        Chance.played += 1
        fault, _, process = os.environ.get("FAULT", "").partition(" of ")
        if process and int(process) == exchange.number() and Chance.played == 9:  # each of two processes plays 4 of 8 in a step
            if fault == "killed":
                time.sleep(20)  # and the others wait for it before
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stopped":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise ValueError(fault)
        return Step(state, ["", ""], len(messages[0]) * state["draw"] + float(rng.random()), True)


def result_of(name, agents, out):
    """Rewards, metric rows and the state of a run; and whether the models in its directory are those of the state."""
    settings = RUNS[name]
    keeps = bool(settings["save_every"])
    where = dict(output_dir=f"{out}/{name}", resume="auto" if keeps else False, save_models=keeps or "lora_rank" in settings)
    cfg = TrainConfig.of(**settings, **where, mesh="auto")
    team = Team.of(agents[:1] * 2 if "lora_rank" in settings else agents)
    if name == "pairs":
        result = fit(team, PAIRS, cfg)
    elif "environment" in name:
        result = train(team, Chance(), ITEMS, cfg)
    else:
        transition = (lambda **_: [" more", " or less"]) if "num_turns" in settings else None
        result = train(team, RewardEnvironment(make_reward(reward, num_agents=2), FORMATTERS, transition), ITEMS, cfg)
    state = jax.tree.leaves(to_host(result.state))
    own = [to_host(unstack(policies(result.state)[0], a)) for a in range(2)] if name == "two turns" else []
    return [getattr(result, "rewards", []), rows_of(cfg.run.output_dir), state, own]


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


def trained(agents, out):
    """Train five updates, and return the exit code of a command. Process 0 writes the state at the end."""
    cfg = TrainConfig.of(**BASE | dict(num_updates=5, save_every=1), output_dir=f"{out}/run", resume="auto")
    if os.environ.get("FAULT") == "update":
        loop.update_team = failing_update
    result = train(Team.of(agents), Chance(), ITEMS, cfg)
    state = jax.tree.leaves(to_host(result.state))
    print(f"ended after {int(result.state.step)} updates", flush=True)
    if exchange.is_first():
        Path(out, "state.pkl").write_bytes(pickle.dumps(state))
    return 75 if result.interrupted else 0


def main(out, *arguments):
    agents, names = [open_agent(path) for path in arguments[:2]], arguments[2:]
    if not names:
        return trained(agents, out)
    results = {name: result_of(name, agents, out) for name in names}
    if exchange.is_first():
        Path(out, "results.pkl").write_bytes(pickle.dumps((results, jax.process_count(), jax.device_count())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
