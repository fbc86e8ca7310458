"""Let agents imitate an environment's solver before they are trained, for tasks that they hardly ever solve by chance.

If all completions of a group have the same reward, reinforcement learning has no signal. A small model that has imitated some
solutions writes in the right format, and is right often enough to learn from rewards:

    demonstrations = demonstrate(env, env.tasks("train", 128))
    agents = imitate(agents, demonstrations, TrainConfig.of(algorithm="sft", num_updates=16, learning_rate=1e-4))
    team, params = make_team(agents)
    train(team, env, ...)

Each agent imitates its own messages by cross entropy (`sft`), in a run of its own. Its prompts are those of training with
history none: the observations of single turns. Left out: imitation in the middle of training, adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.calls.copies import copies
from jmarl.envs.data import Trajectory
from jmarl.envs.messages import SimulatedEnvironment, as_text_environment
from jmarl.envs.mixture import Mixture
from jmarl.envs.vector import Fault, LockStep, reset_once, solve_once, step_once
from jmarl.files.interrupt import Interrupted
from jmarl.models.agent import Agent
from jmarl.randomness import DRAW
from jmarl.runs.train import fit
from jmarl.team import agents_of, make_team, policies

NUM_SOLUTIONS = 256  # tasks that solvers play if no number is given


def demonstrate(
    env: TextEnvironment | SimulatedEnvironment,
    tasks: Sequence[dict],
    slips: float = 0.0,
    seed: int = 0,
    answers: bool = False,
) -> list[list[Trajectory]]:
    """Play tasks with `env.solve`, and return the demonstrations of each agent [N]: a trajectory per message.

    The reward of a trajectory is the sum of the team's rewards in its episode.

    Args:
        env: the environment of one episode.
        tasks: its tasks.
        slips: probability that the solver's message for an earlier task (which may also be right) is played instead. The
            demonstration still contains the right message, so that agents learn to answer mistakes of the others (noise
            injection: DART, arXiv 1703.09327).
        seed: of the slips and the environment.
        answers: also return the environment's answer to each message, which a world model predicts: what the agent reads next,
            or at the end of the episode "Done. Reward: 1". Not with slips, whose answers are to other messages.

    Raises:
        NotImplementedError: the environment has no solver.
    """
    if not 0 <= slips <= 1:
        raise ValueError(f"slips={slips} is not allowed: give a probability from 0 to 1")
    if slips and answers:
        raise ValueError(f"slips={slips} does not go with answers: they would answer messages that are not in the trajectory")
    env = as_text_environment(env)
    if not isinstance(env, TextEnvironment):
        raise TypeError(f"{env!r:.80} cannot be demonstrated: give the environment of one episode, a TextEnvironment")
    demonstrations: list[list[Trajectory]] = [[] for _ in range(env.num_agents)]
    rng, earlier = np.random.default_rng(seed), dict[tuple[int, int], str]()  # (turn, agent) -> message for the task before
    for task in tasks:
        messages, total = _play_solution(env, task, slips, rng, earlier)
        for n, prompt, text, answer in messages:
            observations = (prompt, answer) if answers and answer is not None else (prompt,)
            demonstrations[n].append(Trajectory(observations, (text,), total))
    return demonstrations


def _play_solution(
    env: TextEnvironment, task: dict, slips: float, rng: np.random.Generator, earlier: dict[tuple[int, int], str]
) -> tuple[list[tuple[int, Any, str, Any]], float]:
    """Play one task as `demonstrate` says. Return (agent, prompt, message, answer) of all messages, and the sum of rewards.

    earlier: messages for the task before, which are replaced.
    """
    written: list[tuple[int, Any, str, Any]] = []
    total = 0.0
    state, prompts = _check_fault(reset_once(env, task, int(rng.integers(2**63))))
    for turn in range(env.max_turns):
        solution = _check_fault(solve_once(env, state))
        messages = [text or "" for text in solution]
        acting = [n for n, text in enumerate(solution) if prompts[n] is not None and text is not None]
        for n in acting:
            text = messages[n]
            slip = earlier.get((turn, n), text)
            earlier[turn, n] = text
            messages[n] = slip if rng.random() < slips else text
        step = _check_fault(step_once(env, state, messages, int(rng.integers(2**63))))
        total += float(np.mean(step.reward))
        end = f"Done. Reward: {float(np.mean(step.reward)):g}"
        written += [(n, prompts[n], solution[n], end if step.done else step.observations[n]) for n in acting]
        if step.done:
            break
        state, prompts = step.state, step.observations
    return written, total


def demonstrate_in_lock_step(
    env: Environment, tasks: Sequence[dict], seed: int = 0, answers: bool = False
) -> list[list[Trajectory]]:
    """Return the demonstrations of an environment that plays many episodes at once, in their first turns.

    env: an `Environment` with `solve(state)`, as that of `TextEnvironment`. Other arguments and the result as in `demonstrate`.
    """
    if not callable(getattr(env, "solve", None)):
        raise NotImplementedError(
            f"{type(env).__name__} has no solver of its own: add solve(state) -> one text (or None) per agent"
        )
    rng = np.random.default_rng(seed)
    states, prompts = env.reset(copies(tasks), rng)
    solutions = [env.solve(state) for state in states]  # type: ignore[attr-defined]
    actions = [[text or "" for text in column] for column in zip(*solutions, strict=True)]
    answer = env.step(states, actions, rng)
    continuing = np.flatnonzero(~answer.done).tolist()
    later = dict(zip(continuing, zip(*env.observe([answer.after[i] for i in continuing])[1], strict=True), strict=True))
    demonstrations: list[list[Trajectory]] = [[] for _ in actions]
    for i, solution in enumerate(solutions):
        reward = float(answer.result.total[i])
        for n, text in enumerate(solution):
            if text is None:
                continue
            following = (later[i][n] if i in later else f"Done. Reward: {reward:g}",) if answers else ()
            demonstrations[n].append(Trajectory((prompts[n][i], *following), (text,), reward))
    return demonstrations


def collect_solutions(
    env: Any, split: str, limit: int | None, seed: int = 0, answers: bool = False, min_reward: float | None = None
) -> list[Trajectory]:
    """Return messages of the solver of an environment, or of those of a mixture in equal parts.

    Args:
        env: an environment in lock step, as of `vectorize`, or a `Mixture` of such.
        split: of its tasks, train or eval.
        limit: solve so many tasks and return at most as many messages; None: all messages for NUM_SOLUTIONS tasks.
        answers: see `demonstrate`.
        min_reward: leave out messages of episodes with a lower sum of rewards. Raises ValueError if it leaves none.
    """
    members = list(env.environments.values()) if isinstance(env, Mixture) else [env]
    collected: list[Trajectory] = []
    for member in members:
        tasks = member.tasks(split, -(-(limit or NUM_SOLUTIONS) // len(members)), seed)
        try:
            if isinstance(member, LockStep):
                by_agent = demonstrate(member.env, tasks, seed=seed, answers=answers)
            else:
                by_agent = demonstrate_in_lock_step(member, tasks, seed, answers)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; or give trajectories, which `jmarl collect` writes") from error
        collected += [trajectory._replace(agent=f"agent {n}") for n, own in enumerate(by_agent) for trajectory in own]
    enough = [t for t in collected if min_reward is None or t.reward >= min_reward]
    if not enough:
        best = f"the best has {max(t.reward for t in collected):g}" if collected else "there are no tasks"
        raise ValueError(f"min_reward={min_reward} leaves no trajectory: {best}")
    drawn = np.random.default_rng((seed, DRAW)).permutation(len(enough))[:limit]
    return [enough[i] for i in sorted(drawn)]


def _check_fault(answer: Any) -> Any:
    """Return an environment's answer. Raises RuntimeError if it is a fault."""
    if isinstance(answer, Fault):
        raise RuntimeError(f"a demonstration could not be played: {answer.reason}")
    return answer


def imitate(agents: Sequence[Agent], demonstrations: Sequence[Sequence[Trajectory]], cfg: TrainConfig) -> list[Agent]:
    """Train each agent on its demonstrations, and return the new agents. Agents without demonstrations are unchanged.

    Args:
        agents: [N].
        demonstrations: [N], from `demonstrate`.
        cfg: with algorithm sft, and `chat` as in the training that follows; an update learns from `batch_size` messages. In an
            output directory the run of each agent has its own folder `agent_0/`, ...
    """
    if len(agents) != len(demonstrations):
        raise ValueError(f"{len(agents)} agents were given, and demonstrations of {len(demonstrations)}: give one per agent")
    new_agents = list(agents)
    for n, (agent, trajectories) in enumerate(zip(agents, demonstrations, strict=True)):
        if not trajectories:
            continue
        folder = f"{cfg.run.output_dir}/agent_{n}" if cfg.run.output_dir else ""
        team, params = make_team([agent])
        own = cfg.replace(output_dir=folder, chat=bool(cfg.episodes.chat_settings.of(n)))
        result = fit(team, trajectories, own, params=params)
        if result.interrupted:
            raise Interrupted(f"while agent {n} imitated, after {int(result.state.step)} of {cfg.run.num_updates} updates")
        new_agents[n] = agents_of(result.team, policies(result.state))[0]._replace(name=agent.name)
    return new_agents
