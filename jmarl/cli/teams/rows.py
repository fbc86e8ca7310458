"""What the agents of a rollout read and wrote, as the rows of `jmarl collect`; see there what is in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jmarl.cli.teams.match import Match
from jmarl.models.hub.messages import ChatPrompt

if TYPE_CHECKING:
    from jmarl.rollout.turns import Rollout
    from jmarl.team import Team


def episodes_of(rollout: Rollout, match: Match, tasks: Sequence[dict], first_task: int) -> list[tuple[float, list[dict]]]:
    """Return the return (mean over agents) and the rows of each episode of a rollout that does not branch.

    tasks: of the rollout. first_task: number of the first of them."""
    from jmarl.rl.returns import episode_path

    ended = ended_of(match.team, rollout)
    parents, counts = [turn.parents for turn in rollout.turns], [len(turn.joint) for turn in rollout.turns]
    num_tasks, num_joint = rollout.turns[0].rewards.shape[:2]
    episodes = []
    for p in range(num_tasks):
        for j in range(num_joint):
            path = episode_path(parents, counts, p, j)
            returns = rollout.joint_returns[0][p, j]
            shared = {
                "episode": (first_task + p) * num_joint + j,
                "task_number": first_task + p,
                "task": tasks[p],
                "return": number(returns.mean()),
                "seed": match.cfg.run.seed,
            }
            rows = []
            for agent, role in enumerate(match.env.roles):
                for row in rows_of(rollout, path, agent, match.cfg.episodes, ended):
                    rows.append(row | {"metadata": shared | {"agent": agent, "role": role} | row["metadata"]})
            episodes.append((float(returns.mean()), rows))
    return episodes


def ended_of(team: Team, rollout: Rollout) -> list[list[Any]]:
    """Return for each turn and agent which completions [P, G] ended; the others were cut off at max_new_tokens."""
    import numpy as np

    from jmarl.team import to_agents

    return [to_agents(team, [np.asarray(stack.ended) for stack in turn.completions]) for turn in rollout.turns]


def rows_of(
    rollout: Rollout, path: Sequence[tuple[int, int]], agent: int, episodes: Any, ended: Sequence[Sequence[Any]]
) -> list[dict]:
    """Return the rows of one agent in one episode: one per turn in which it acts, or one in all with history append."""
    steps = []
    for t, (p, j) in enumerate(path):
        turn = rollout.turns[t]
        if not turn.acts[agent, p]:
            continue
        g = turn.joint[j, agent]
        prompt = turn.prompts[agent][p]
        k = p * len(turn.joint) + j
        components, measures = (finite_at(numbers, k) for numbers in (turn.parts, turn.measures))
        observation: Any = prompt
        if episodes.chat_settings.of(agent) or isinstance(prompt, ChatPrompt):
            messages = prompt.messages if isinstance(prompt, ChatPrompt) else ({"role": "user", "content": prompt},)
            observation = {"messages": [dict(message) for message in messages], "done": False}
        steps.append(
            {
                "observation": observation,
                "action": {"role": "assistant", "content": turn.texts[agent][p][g]},
                "reward": {"value": number(turn.rewards[p, j, agent]), "components": components, "info": measures},
                "turn": t,
                "return": number(rollout.joint_returns[t][p, j, agent]),
                "ended": bool(ended[t][agent][p, g]),
            }
        )
    conversations = [steps] if episodes.history == "append" else [[step] for step in steps]
    return [conversation_row(conversation, len(path)) for conversation in conversations if conversation]


def conversation_row(steps: Sequence[dict], num_turns: int) -> dict:
    """Return a trajectory of some steps of an agent. num_turns: of the whole episode."""
    row = {
        "observations": [step["observation"] for step in steps],
        "actions": [step["action"] for step in steps],
        "rewards": [step["reward"] for step in steps],
        "metadata": {
            "turns": [step["turn"] for step in steps],
            "num_turns": num_turns,
            "ended": [step["ended"] for step in steps],
            "returns": [step["return"] for step in steps],
        },
    }
    if any(step["reward"]["value"] is None for step in steps):
        row["metadata"]["invalid_rewards"] = row.pop("rewards")
    return row


def finite_at(numbers: Mapping[str, Any], k: int) -> dict[str, float]:
    """Return the numbers of joint action k by name, without those that are not finite."""
    return {name: float(values[k]) for name, values in numbers.items() if math.isfinite(values[k])}


def number(value: Any) -> float | None:
    """Return a number as JSON has it; None if it is not finite."""
    return float(value) if math.isfinite(value) else None
