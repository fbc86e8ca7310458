"""Pairs and trajectories: reading and writing, selecting pairs, splitting off held-out pairs, replay weights."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jmarl.preferences.pairs import (
    Pair,
    Trajectory,
    load_pairs,
    load_trajectories,
    replay_weights,
    save_pairs,
    select,
    select_against,
    split_by_prompt,
)

NAN = math.nan
CHAT = [{"role": "user", "content": "How many?"}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("rewards", "selection", "limit", "expected"),
    [
        ([0, 1, 3, 3], "reward_gap", 3, [(2, 0), (3, 0), (2, 1)]),
        ([0, 1, 3], "all", 0, [(1, 0), (2, 0), (2, 1)]),
        ([2, 2, 2], "all", 0, []),
        ([2, 2, 2], "reward_gap", 4, []),
        ([0, NAN, 1], "reward_gap", 0, [(2, 0)]),
        ([], "random", 0, []),
    ],
)
def test_pairs_of_one_prompt_are_selected_by_reward(rewards, selection, limit, expected):
    assert select(rewards, selection, limit, np.random.default_rng(0)) == expected


def test_random_selection_shuffles_all_pairs_by_the_seed():
    everything = select([0, 1, 2, 3], "all", 0, np.random.default_rng(0))
    first, again, other = (select([0, 1, 2, 3], "random", 0, np.random.default_rng(s)) for s in (1, 1, 2))
    assert sorted(first) == everything and first == again and first != other
    assert select([0, 1, 2, 3], "random", 2, np.random.default_rng(1)) == first[:2]


@pytest.mark.parametrize(
    ("selection", "limit", "expected"),
    [
        ("all", 0, [(0, True), (1, False), (3, True), (5, True)]),
        ("reward_gap", 2, [(3, True), (1, False)]),
        ("comparator_reward", 0, [(1, False), (5, True), (0, True), (3, True)]),
        ("comparator_reward", 1, [(1, False)]),
    ],
)
def test_completions_are_compared_with_those_of_a_comparator(selection, limit, expected):
    """Index by index. Ties and invalid rewards are left out."""
    own, other = [2.0, 1.0, 5.0, 4.0, NAN, 3.0], [1.0, 3.0, 5.0, 0.0, 1.0, 1.0]
    assert select_against(own, other, selection, limit, np.random.default_rng(0)) == expected


def test_random_comparisons_are_shuffled_by_the_seed():
    own, other = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3.5] * 6
    first, again, another = (select_against(own, other, "random", 0, np.random.default_rng(s)) for s in (1, 1, 2))
    assert sorted(first) == [(i, i > 2) for i in range(6)] and first == again != another


@pytest.mark.parametrize(
    ("replay", "options", "expected"),
    [
        ("lambda_decay", {"decay": 0.5}, [1 / 15, 2 / 15, 4 / 15, 8 / 15]),
        ("lambda_decay", {"decay": 0.0}, [0, 0, 0, 1]),
        ("lambda_decay", {"decay": 1.0}, [0.25] * 4),
        ("current", {}, [0, 0, 0, 1]),
        ("nearest_k", {"k": 3}, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("nearest_k", {"k": 9}, [0.25] * 4),
        ("all", {}, [0.25] * 4),
    ],
)
def test_replay_weights(replay, options, expected):
    np.testing.assert_allclose(replay_weights(4, replay, **options), expected, atol=1e-12)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_saved_pairs_are_loaded_unchanged(tmp_path, suffix):
    pairs = [
        Pair(("a", "b"), ("yes", "x\ny"), ("no", "ü"), (1.0, 0.5)),
        Pair(("a", "b"), ("1", "2"), ("3", "4")),
    ]
    save_pairs(tmp_path / f"pairs.{suffix}", pairs)
    assert load_pairs(tmp_path / f"pairs.{suffix}", 2) == pairs
    alone = [Pair(("a",), ("yes",), ("no",)), Pair((tuple(CHAT),), ("Two.",), ("Many.",), (1.0, 0.5))]
    save_pairs(tmp_path / f"alone.{suffix}", alone)
    assert load_pairs(tmp_path / f"alone.{suffix}") == alone


def test_files_have_rows_as_a_list_or_in_lines(tmp_path):
    """With a suffix or without; with the metadata of MRLM, which may be null."""
    mrlm = {"prompt": CHAT, "chosen": "Two.", "rejected": "Many.", "metadata": {"source": "x"}}
    texts = {"pairs.json": json.dumps([mrlm]), "pairs": json.dumps([mrlm | {"metadata": None}], indent=1)}
    for name, text in (texts | {"pairs.jsonl": f"{json.dumps(mrlm)}\n \n"}).items():
        (tmp_path / name).write_text(text)
        assert load_pairs(tmp_path / name) == [Pair((tuple(CHAT),), ("Two.",), ("Many.",))]


def test_one_prompt_is_repeated_for_all_agents():
    row = {"prompt": "both", "chosen": ["a", "b"], "rejected": ["c", "b"]}
    assert load_pairs([row], 2) == [Pair(("both", "both"), ("a", "b"), ("c", "b"))]
    assert load_pairs([row | {"prompt": CHAT}], 2) == [Pair((tuple(CHAT),) * 2, ("a", "b"), ("c", "b"))]
    assert load_pairs([row | {"prompt": [CHAT, "a"]}], 2) == [Pair((tuple(CHAT), "a"), ("a", "b"), ("c", "b"))]


@pytest.mark.parametrize(
    ("row", "agents", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, 1, r"row 0 has no rejected.*it has \['prompt', 'chosen'\]"),
        ({"chosen": "b", "rejected": "c"}, 1, "row 0 has no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, 1, "holds no pairs that differ: chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}, 1, "rejected is a text"),
        ({"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]}, 2, "chosen has 1 texts for 2 agents"),
        ({"prompt": ["a"], "chosen": ["b", "b"], "rejected": ["c", "d"]}, 2, "prompt has 1 entries for 2 agents"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, 2, "chosen is a list of 2 texts"),
        ({"prompt": [], "chosen": "b", "rejected": "c"}, 1, "a prompt is a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, 1, "a prompt is a text or a list of messages"),
        ({"prompt": [{"content": "a"}], "chosen": "b", "rejected": "c"}, 1, "a prompt is a text or a list of messages"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, 1, "chosen is a text or a list of messages"),
        ({"prompt": "a", "chosen": [1, 2], "rejected": ["c", "d"]}, 2, "chosen is a list of 2 texts"),
        (
            {"prompt": "a", "chosen": [[{"role": "assistant", "content": "b"}]] * 2, "rejected": ["c", "d"]},
            2,
            "chosen is a list of 2 texts.*Messages are read for one agent only",
        ),
        ({"chosen": CHAT + assistant("a"), "rejected": assistant("b")}, 1, "differ before their last"),
        ({"chosen": assistant("a"), "rejected": assistant("b")}, 1, "row 0 has no prompt"),
        ("text", 1, "row 0 is a str"),
    ],
)
def test_a_bad_row_is_an_error_with_its_number(row, agents, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load_pairs([row], agents)


def test_pairs_of_equal_texts_are_left_out():
    """Public preference data has some. For a team all texts must be equal; one shared text is no reason."""
    rows = [{"prompt": "p", "chosen": c, "rejected": r} for c, r in (("a", "b"), ("b", "b"), ("b", "a"), ("c", "c"))]
    with pytest.warns(UserWarning, match=r"2 of 4 pairs of the list given are left out \(row 1 is the first\)"):
        assert [pair.chosen for pair in load_pairs(rows)] == [("a",), ("b",)]
    rows = [{"prompt": "p", "chosen": ["a", "b"], "rejected": r} for r in (["a", "b"], ["a", "c"])]
    with pytest.warns(UserWarning, match="1 of 2 pairs"):
        assert [pair.rejected for pair in load_pairs(rows, 2)] == [("a", "c")]


def test_a_bad_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "broken.json").write_text("[{")
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match=r"broken.json, line \d+, column \d+: not valid JSON"):
        load_pairs(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="empty.json: there are no rows"):
        load_pairs(tmp_path / "empty.json")
    with pytest.raises(FileNotFoundError, match="nowhere.json does not exist"):
        load_pairs(tmp_path / "nowhere.json")
    with pytest.raises(TypeError, match=r"a series of dicts; got a dict of \['prompt'\]"):
        load_pairs({"prompt": ["a"]})
    (tmp_path / "lines.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n\n{"prompt"')
    with pytest.raises(ValueError, match=r"lines.jsonl, line 3, column \d+: not valid JSON"):
        load_pairs(tmp_path / "lines.jsonl")
    (tmp_path / "table.csv").write_text("prompt,chosen,rejected")
    with pytest.raises(ValueError, match="table.csv: there are no rows"):
        load_pairs(tmp_path / "table.csv")


def mrlm_trajectory(repeats, end=True):
    """Return a trajectory of two turns as MRLM writes it. repeats: every observation holds the conversation so far."""
    first, second = {"role": "user", "content": "2 + 2?"}, {"role": "user", "content": "Wrong, again."}
    history = [first, {"role": "assistant", "content": "5"}] if repeats else []
    return {
        "observations": [
            {"messages": [first], "done": False},
            {"messages": [*history, second], "done": False},
            *([{"messages": [], "done": True}] if end else []),
        ],
        "actions": [{"role": "assistant", "content": "5"}, {"role": "assistant", "content": "4"}],
        "rewards": [{"value": -0.5}, {"value": 1.0}],
        "metadata": {},
    }


@pytest.mark.parametrize("repeats", [False, True])
def test_trajectories_of_mrlm_are_read(tmp_path, repeats):
    path = tmp_path / "trajectories.json"
    path.write_text(json.dumps({"trajectories": [mrlm_trajectory(repeats)], "num_trajectories": 1}))
    (trajectory,) = load_trajectories(path)
    assert trajectory.actions == ("5", "4") and trajectory.reward == 0.5
    assert [o[0]["content"] for o in trajectory.observations] == ["2 + 2?", "Wrong, again."]
    assert all(len(o) == 1 for o in trajectory.observations)


def test_observations_may_be_texts_and_rewards_numbers():
    """An observation after the last action is read. Without rewards the sum is NaN."""
    read, wrote = ("2 + 2?", "Wrong, again.", "Right."), ("5", "4")
    row = {"observations": list(read), "actions": list(wrote)}
    assert load_trajectories([row | {"rewards": [-0.5, 1.0]}]) == [Trajectory(read, wrote, 0.5)]
    written = [{"agent": 1, "role": "verifier"}, {"agent": 1}, {}, None]  # what `jmarl collect` writes, and less
    by = [load_trajectories([row | {"metadata": metadata}])[0].agent for metadata in written]
    assert by == ["verifier", "agent 1", "", ""]
    assert math.isnan(load_trajectories([row])[0].reward)


def test_repeated_conversations_are_read_once():
    """The last observation adds nothing."""
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, "abcdef", strict=True)]
    (trajectory,) = load_trajectories([{"observations": [messages[:n] for n in (1, 3, 5, 6)], "actions": ["b", "d", "f"]}])
    assert trajectory.observations == ((messages[0],), (messages[2],), (messages[4],))


def test_trajectories_are_filtered_by_reward():
    rows = [{"prompt": "a", "completion": str(r), "reward": r} for r in (0.0, 0.5, 1.0)]
    assert [t.actions[0] for t in load_trajectories(rows, min_reward=0.5)] == ["0.5", "1.0"]
    with pytest.raises(ValueError, match="min_reward=2 leaves no trajectory: the best of 3 has 1"):
        load_trajectories(rows, min_reward=2)
    with pytest.raises(ValueError, match="row 0 has none"):
        load_trajectories([{"prompt": "a", "completion": "b"}], min_reward=0)
    with pytest.raises(ValueError, match="the list given holds no trajectories"):
        load_trajectories([], min_reward=0)


def test_a_bad_trajectory_is_an_error_with_its_row():
    for part in ("prompt", "completion"):
        with pytest.raises(ValueError, match="row 0 has nothing to imitate"):
            load_trajectories([{part: "a"}])
    for read, wrote in ((2, 4), (1, 2), (3, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"{read} observations for {wrote} actions"):
            load_trajectories([{"observations": ["a"] * read, "actions": ["5"] * wrote}])


def test_held_out_pairs_share_no_prompt_with_training_pairs():
    """With three pairs of each of ten prompts, those of two prompts are held out; with a single prompt every fifth pair. A
    single pair is for training."""
    pairs = [Pair((f"prompt {p}",), (f"{k}",), ("x",)) for p in range(10) for k in range(3)]
    learned, held = split_by_prompt(pairs, 5)
    assert {pair.prompts for pair in held} == {("prompt 0",), ("prompt 5",)} and len(held) == 6 and len(learned) == 24
    assert split_by_prompt(pairs[:6], 5) == (pairs[3:6], pairs[:3])
    assert len(split_by_prompt([pairs[0]._replace(chosen=(str(k),)) for k in range(10)], 5)[1]) == 2
    assert split_by_prompt(pairs[:1], 5) == (pairs[:1], [])


def test_a_column_metadata_of_others_is_not_read():
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "metadata": "from a forum"}
    assert load_pairs([row])[0].rewards is None
    assert load_trajectories([{"observations": ["a"], "actions": ["b"], "metadata": "[]"}])[0].agent == ""


@pytest.mark.parametrize("rewards", [[1], [1, None], "12", ["good", "bad"]])
def test_rewards_of_pairs_are_two_numbers(rewards):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "metadata": {"rewards": rewards}}
    with pytest.raises(ValueError, match="row 0: .*reward.*number.*got "):
        load_pairs([row])


@pytest.mark.parametrize("reward", ["good", [1.0]])
def test_rewards_of_texts_are_numbers(reward):
    with pytest.raises(ValueError, match="row 0: a reward must be a number; got"):
        load_trajectories([{"prompt": "a", "completion": "b", "reward": reward}])
    with pytest.raises(ValueError, match="row 0: a reward must be a number; got"):
        load_trajectories([{"observations": ["a"], "actions": ["b"], "rewards": [reward]}])
