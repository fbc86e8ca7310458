"""Agents that begin by imitating an environment's own solver, for tasks that they can hardly ever solve by chance.

Where no completion of a group is better than the others, reinforcement learns nothing. A small model that was shown some
solutions writes in the right form, and is right often enough to be reinforced:

    shown = demonstrate(env, env.tasks("train", 128))
    agents = imitate(agents, shown, TrainConfig(algorithm="sft", num_updates=16, learning_rate=1e-4))
    team, params = make_team(agents)
    train(team, env, ...)

Each agent imitates its own part, alone, by cross entropy (`sft`), and reads what it reads in training with history none: what
the environment shows in that turn. Left out: imitating in the middle of training, adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.config import TrainConfig
from jmarl.envs.base import TextEnvironment
from jmarl.envs.messages import SimulatedEnvironment, as_text_environment
from jmarl.envs.vector import Fault, reset_once, solve_once, step_once
from jmarl.models.hub.agents import Agent
from jmarl.team import agents_of, make_team, policies
from jmarl.training.files.interrupt import Interrupted
from jmarl.training.fit import fit
from jmarl.training.preferences.pairs import Trajectory


def demonstrate(
    env: TextEnvironment | SimulatedEnvironment, tasks: Sequence[dict], slips: float = 0.0, seed: int = 0
) -> list[list[Trajectory]]:
    """What each agent [N] reads and writes where `env.solve` plays: a trajectory for each message. Agents for which it has
    none have an empty list. Raises NotImplementedError if the environment has no solver.

    slips: share of messages in whose place the solver's for an earlier task is played (which may also be right). What is shown
    is the right one all the same, so the agents that act next are shown what to make of a mistake (noise injection: DART,
    arXiv 1703.09327).
    """
    if not 0 <= slips <= 1:
        raise ValueError(f"slips={slips}: give a share, from 0 to 1")
    env = as_text_environment(env)
    if not isinstance(env, TextEnvironment):
        raise TypeError(f"{env!r:.80} cannot be demonstrated: give the environment of one episode, a TextEnvironment")
    made: list[list[Trajectory]] = [[] for _ in range(env.num_agents)]
    rng, before = np.random.default_rng(seed), dict[tuple[int, int], str]()
    for task in tasks:
        state, read = _answered(reset_once(env, task, int(rng.integers(2**63))))
        for turn in range(env.max_turns):
            said = _answered(solve_once(env, state))
            played = [text or "" for text in said]
            for n, (prompt, text) in enumerate(zip(read, said, strict=True)):
                if prompt is not None and text is not None:
                    made[n].append(Trajectory((prompt,), (text,)))
                    slip = before.get((turn, n), text)
                    before[turn, n] = text
                    played[n] = slip if rng.random() < slips else text
            step = _answered(step_once(env, state, played, int(rng.integers(2**63))))
            if step.done:
                break
            state, read = step.state, step.observations
    return made


def _answered(found: Any) -> Any:
    """Refuses a fault."""
    if isinstance(found, Fault):
        raise RuntimeError(f"a demonstration could not be played: {found.reason}")
    return found


def imitate(agents: Sequence[Agent], shown: Sequence[Sequence[Trajectory]], cfg: TrainConfig) -> list[Agent]:
    """Agents that have imitated what each of them was shown [N]; those that were shown nothing are as they were.

    cfg: of algorithm sft; `chat` as in the training that follows; `batch_size` messages an update. With an output directory,
    each agent's run lies in `agent_0/`, ….
    """
    if len(agents) != len(shown):
        raise ValueError(f"{len(agents)} agents were given, and demonstrations of {len(shown)}")
    return [_imitated(agent, n, of, cfg) if of else agent for n, (agent, of) in enumerate(zip(agents, shown, strict=True))]


def _imitated(agent: Agent, number: int, shown: Sequence[Trajectory], cfg: TrainConfig) -> Agent:
    folder = f"{cfg.run.output_dir}/agent_{number}" if cfg.run.output_dir else ""
    team, params = make_team([agent])
    result = fit(team, shown, cfg.replace(output_dir=folder), params=params)
    if result.interrupted:
        raise Interrupted(f"while agent {number} imitated, after {int(result.state.step)} of {cfg.run.num_updates} updates")
    return agents_of(team, policies(result.state))[0]._replace(name=agent.name)
