"""What `jmarl collect --format` writes: the trajectory of an agent as its chat messages, or in ATIF, harbor's format.

Both have what one agent read and wrote, in order; a prompt that is a text is a message of the user. Lone surrogates, which
other readers refuse, are U+FFFD. Left out: token ids, and with them the metrics of ATIF.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jmarl.columns import valid
from jmarl.files.run_files import version_of

ATIF = "ATIF-v1.7"
SOURCES = {"system": "system", "assistant": "agent"}  # of ATIF, by the role of a message; all others are the user's


def formatted(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a row of `jmarl collect` in a format of `FORMATS`."""
    given = FORMATS[name](row)
    return given if given is row else json.loads(valid(json.dumps(given, ensure_ascii=False)))


def conversation(row: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, str], int | None]]:
    """Yield the messages of a row; those that the agent wrote with the number of the action, those that it read with None."""
    for number, (observation, action) in enumerate(zip(row["observations"], row["actions"], strict=True)):
        is_text = isinstance(observation, str)
        yield from ((m, None) for m in ([{"role": "user", "content": observation}] if is_text else observation["messages"]))
        yield action, number


def rewards_of(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None]:
    """Return the reward of each action, and their sum; None if one is not valid."""
    rewards = row["rewards"] if "rewards" in row else row["metadata"]["invalid_rewards"]
    values = [reward["value"] for reward in rewards]
    return rewards, None if None in values else sum(values)


def to_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages, the sum of the rewards, and as metadata the reward and the return of each message of the agent."""
    rewards, total = rewards_of(row)
    metadata = {name: value for name, value in row["metadata"].items() if name != "invalid_rewards"}
    messages = [dict(message) for message, _ in conversation(row)]
    return {"messages": messages, "reward": total, "metadata": metadata | {"session_id": session_of(row), "rewards": rewards}}


def to_atif(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trajectory in ATIF. Agents of an episode share its session_id."""
    metadata, (rewards, total) = row["metadata"], rewards_of(row)
    steps = []
    for message, number in conversation(row):
        source = SOURCES.get(message["role"], "user")
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": message["content"]}
        if number is not None:
            extra = {name: metadata[f"{name}s"][number] for name in ("turn", "return")} | {"ended": metadata["ended"][number]}
            step |= {"llm_call_count": 1, "extra": extra | {"reward": rewards[number]}}
        elif source == "agent":  # an example in the prompt
            step |= {"llm_call_count": 0, "is_copied_context": True}
        elif message["role"] not in ("user", *SOURCES):
            step["extra"] = {"role": message["role"]}
        steps.append(step)
    agent, session = metadata["agent"], session_of(row)
    return {
        "schema_version": ATIF,
        "session_id": session,
        "trajectory_id": f"{session}-agent-{agent}-turn-{metadata['turns'][0]}",
        "agent": {"name": metadata["role"], "version": version_of("jmarl") or "unknown", "extra": {"agent": agent}},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps), "extra": {"reward": total, "return": metadata["return"]}},
        "extra": {name: metadata[name] for name in ("episode", "task_number", "task", "seed", "num_turns")},
    }


def session_of(row: Mapping[str, Any]) -> str:
    """Return what the trajectories of an episode have in common."""
    return f"seed-{row['metadata']['seed']}-episode-{row['metadata']['episode']}"


FORMATS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "trajectories": lambda row: row,
    "messages": to_messages,
    "atif": to_atif,
}
