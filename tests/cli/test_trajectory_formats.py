"""`jmarl collect --format`: rows as chat messages and as ATIF, by the rules of their readers."""

from __future__ import annotations

import importlib
import json
from typing import Any

from jmarl import load_trajectories
from jmarl.cli.teams.formats import formatted

HOSTILE = "<script>alert(1)</script>\x00 \u202eabc \ud800 \U0001f600\n</s> " + 9999 * "x"
READABLE = HOSTILE.replace("\ud800", "\ufffd")
ATIF = {  # the fields of ATIF-v1.7 by object, those that must be there in capitals; others are errors
    "trajectory": "SCHEMA_VERSION session_id trajectory_id AGENT STEPS notes final_metrics continued_trajectory_ref extra "
    "subagent_trajectories",
    "agent": "NAME VERSION model_name tool_definitions extra",
    "step": "STEP_ID timestamp SOURCE model_name reasoning_effort MESSAGE reasoning_content tool_calls observation metrics "
    "is_copied_context llm_call_count extra",
    "final_metrics": "total_prompt_tokens total_completion_tokens total_cached_tokens total_cost_usd total_steps extra",
}
AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def check_fields(value, kind):
    fields = ATIF[kind].split()
    assert {*value} <= {name.lower() for name in fields} and {*value} >= {name.lower() for name in fields if name.isupper()}


def check_atif(line):
    """Check a line by the rules of ATIF-v1.7, and by harbor's own models where it is installed (Python 3.12)."""
    trajectory = json.loads(line)
    check_fields(trajectory, "trajectory")
    check_fields(trajectory["agent"], "agent")
    check_fields(trajectory["final_metrics"], "final_metrics")
    assert trajectory["schema_version"] == "ATIF-v1.7" and trajectory["steps"]
    for number, step in enumerate(trajectory["steps"], 1):
        check_fields(step, "step")
        assert step["step_id"] == number and step["source"] in ("system", "user", "agent") and isinstance(step["message"], str)
        assert step["source"] == "agent" or not AGENT_ONLY & {*step}
        assert step.get("llm_call_count") or not {"metrics", "reasoning_content"} & {*step}
    try:
        models = importlib.import_module("harbor.models.trajectories")
    except ModuleNotFoundError:
        return trajectory
    read = models.Trajectory.model_validate_json(line)
    assert read.to_json_dict(exclude_none=False).items() >= {name: trajectory[name] for name in ("session_id", "extra")}.items()
    return trajectory


def row(agent=0, **changes) -> dict[str, Any]:
    """A row of two turns, of which the first has a system message and an example."""
    chat = [("system", "be brief"), ("user", "1?"), ("assistant", "one"), ("tool", HOSTILE)]
    messages = [{"role": role, "content": content} for role, content in chat]
    rewards = [{"value": value, "components": {"right": value}, "info": {}} for value in (0.5, -1.0)]
    metadata = {
        "episode": 3, "task_number": 1, "task": {"text": HOSTILE}, "return": -0.25, "seed": 7, "agent": agent,
        "role": ("writer", "critic")[agent], "turns": [0, 2], "num_turns": 3, "ended": [True, False], "returns": [-0.5, -1.0],
    }  # fmt: skip
    actions = [{"role": "assistant", "content": text} for text in (HOSTILE, "")]
    given = {"observations": [{"messages": messages, "done": False}, "and now?"], "actions": actions, "rewards": rewards}
    return given | {"metadata": metadata} | changes


def line_of(given, name):
    return json.dumps(formatted(given, name), ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate is left


def test_agents_of_an_episode_are_trajectories_of_atif_with_one_session_id():
    first, second = (check_atif(line_of(row(agent), "atif")) for agent in (0, 1))
    assert first["session_id"] == second["session_id"] and first["trajectory_id"] != second["trajectory_id"]
    assert first["session_id"] != check_atif(line_of(row(metadata=row()["metadata"] | {"episode": 4}), "atif"))["session_id"]
    assert [(step["source"], step["message"]) for step in first["steps"]] == [
        ("system", "be brief"), ("user", "1?"), ("agent", "one"), ("user", READABLE), ("agent", READABLE),
        ("user", "and now?"), ("agent", ""),
    ]  # fmt: skip
    assert [step.get("llm_call_count") for step in first["steps"]] == [None, None, 0, None, 1, None, 1]
    assert [step["extra"]["return"] for step in first["steps"] if step.get("llm_call_count")] == [-0.5, -1.0]
    assert first["steps"][4]["extra"] == {"turn": 0, "return": -0.5, "ended": True, "reward": row()["rewards"][0]}
    assert first["steps"][3]["extra"] == {"role": "tool"} and second["agent"]["name"] == "critic"
    assert first["final_metrics"] == {"total_steps": 7, "extra": {"reward": -0.5, "return": -0.25}}


def test_messages_are_what_an_agent_read_and_wrote_and_the_metadata_has_their_rewards_and_returns():
    given = row()
    read = json.loads(line_of(given, "messages"))
    wrote = [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": ""}]
    answer = {"role": "assistant", "content": READABLE}
    assert read["messages"][:3] == given["observations"][0]["messages"][:3]
    assert read["messages"][3:] == [{"role": "tool", "content": READABLE}, answer, *wrote]
    assert read["reward"] == -0.5 and read["metadata"]["rewards"] == given["rewards"]
    assert read["metadata"]["returns"] == [-0.5, -1.0] and read["metadata"]["session_id"] == "seed-7-episode-3"


def test_a_row_without_a_valid_reward_has_none_in_both_formats():
    given = row()
    del given["rewards"]
    given["metadata"]["invalid_rewards"] = [{"value": None}, {"value": 1.0}]
    read = json.loads(line_of(given, "messages"))
    assert read["reward"] is None and "invalid_rewards" not in read["metadata"]
    trajectory = check_atif(line_of(given, "atif"))
    assert trajectory["final_metrics"]["extra"]["reward"] is None
    assert trajectory["steps"][4]["extra"]["reward"] == {"value": None}


def test_sft_reads_messages_as_it_reads_trajectories(tmp_path):
    given = row(observations=["1?", "and now?"])
    for name in ("messages", "trajectories"):
        (tmp_path / f"{name}.jsonl").write_bytes(json.dumps(formatted(given, name)).encode())
    [messages], [trajectory] = (load_trajectories(tmp_path / f"{name}.jsonl") for name in ("messages", "trajectories"))
    assert messages.reward == trajectory.reward == -0.5 and len(messages.actions) == 2
    assert messages.actions[0] == READABLE and trajectory.actions[0] == HOSTILE


def test_trajectories_are_written_as_they_are():
    assert formatted(given := row(), "trajectories") is given
