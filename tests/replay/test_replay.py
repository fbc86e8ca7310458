"""A step that is made again is the step that was, bit for bit, and nothing in the directory of the run changes."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.files.changes import CannotGoOn
from jmarl.files.checkpoint import saved_steps
from jmarl.logs.completions_file import read_completions
from jmarl.logs.rollout_log import turn_records
from jmarl.replay import alternatives, credit, find_message, make_again, open_step, return_of, say, value_of
from jmarl.replay.messages import Change, sampled_tokens, with_messages
from jmarl.replay.stored import check_record, check_row
from jmarl.replay.values import concordance, rank_correlation, values_of_turn
from jmarl.runs.run import Task
from tests.report.run_directories import watched
from tests.runs.test_faults import first_words, run
from tests.runs.training_process import BASE, ITEMS, KINDS, tiny_team, transition

pytestmark = pytest.mark.long
FIELDS = BASE | KINDS["turns"] | dict(num_updates=4, progress=False)


def files_of(directory):
    return {str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in Path(directory).rglob("*")}


def opened(directory, number, reward=first_words):
    team, params = tiny_team()
    env = RewardEnvironment(make_reward(reward, num_agents=2), [default_formatter] * 2, transition)
    return open_step(directory, TrainConfig.of(**FIELDS), team, Task(env, ITEMS, ITEMS[:2]), number, params=params)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run of two agents and two turns, with checkpoints after updates 2 and 4 of 4."""
    where = tmp_path_factory.mktemp("run")
    run("turns", output_dir=str(where), num_updates=4, save_every=2, tensorboard=False)
    assert saved_steps(where / "checkpoints") == [2, 4]
    return where


@pytest.fixture(scope="module")
def last(directory):
    """Step 4, made again from the checkpoint after update 2."""
    step = opened(directory, 4)
    return step, make_again(step)


def test_a_step_is_made_again_with_the_updates_before_it_and_nothing_in_the_directory_changes(directory):
    before = files_of(directory)
    step = opened(directory, 4)
    lines: list[str] = []
    remade = make_again(step, lines.append)
    stored = [record for record in read_completions(directory / "completions.jsonl.gz") if record["step"] == 4]
    assert (step.first, remade.checked, len(lines)) == (2, 2, 1) and step.seconds > 0
    assert turn_records(step.run.team, remade.rollout)[1]["completions"] == stored[0]["turns"][1]["completions"]
    assert files_of(directory) == before
    assert opened(directory, 2).first == 0, "no checkpoint is before step 2"


def test_a_run_that_is_logged_elsewhere_can_be_made_again(directory):
    """Settings that need an output directory are off, because nothing is written."""
    team, params = tiny_team()
    cfg = TrainConfig.of(**FIELDS, output_dir=str(directory), trackio="project", save_every=2, keep_best=True, eval_every=2)
    env = RewardEnvironment(make_reward(first_words, num_agents=2), [default_formatter] * 2, transition)
    assert not open_step(directory, cfg, team, Task(env, ITEMS, ITEMS[:2]), 4, params=params).run.cfg.run.output_dir


def test_the_same_text_gives_the_identical_step(last):
    """Its caches, tokens and keys are those of the run."""
    step, remade = last
    message = find_message(remade.rollout, task=1, sample=1, agent=0, turn=0)
    text = remade.rollout.turns[0].texts[0][1][1]
    assert turn_records(step.run.team, say(step, remade, message, text)) == turn_records(step.run.team, remade.rollout)


def test_another_message_changes_only_what_comes_after_it(last):
    step, remade = last
    message = find_message(remade.rollout, task=1, sample=1, agent=0, turn=0)
    was, now = (
        turn_records(step.run.team, remade.rollout),
        turn_records(step.run.team, other := say(step, remade, message, "six six")),
    )
    assert now[0]["completions"][0][1][1] == "six six"
    for old, new in zip(was, now, strict=True):
        assert new["prompts"][0][0] == old["prompts"][0][0] and len(new["items"]) == len(old["items"])
    now[0]["completions"][0][1][1] = was[0]["completions"][0][1][1]
    assert now[0]["completions"] == was[0]["completions"] and now[0]["prompts"] == was[0]["prompts"]
    read = [turn["prompts"][1][3] for turn in (was[1], now[1])]  # by the other agent, of the first turn's joint action 1
    assert "six six" in now[1]["prompts"][0][3] and read[0] == read[1]
    for p in (0, 1, 2):  # episodes without the message
        for agent in (0, 1):
            assert now[1]["completions"][agent][p] == was[1]["completions"][agent][p]
    assert np.isfinite(return_of(other, message)).all()


def test_another_message_in_the_last_turn_changes_its_reward_alone(last):
    step, remade = last
    message = find_message(remade.rollout, task=0, sample=0, agent=1, turn=1)
    was, now = turn_records(step.run.team, remade.rollout), turn_records(step.run.team, say(step, remade, message, "two"))
    assert now[0] | {"returns": None} == was[0] | {"returns": None}, "returns count what comes after"
    assert now[1]["completions"][1][message.node] == ["two", was[1]["completions"][1][message.node][1]]
    assert [p for p in range(4) if now[1]["completions"][1][p] != was[1]["completions"][1][p]] == [message.node]


def test_continuations_share_what_comes_before_and_differ_after(last):
    """Continuation 0 is that of the run; an alternative has the same keys as the message itself."""
    step, remade = last
    changes = [Change(0, 0, {}), Change(0, 0, {(0, 0): sampled_tokens(step.run.team, remade.rollout, 0)[0][0][0]})]
    runs = [[turn_records(step.run.team, with_messages(step, remade.state, change, n)) for n in range(3)] for change in changes]
    assert runs[0] == runs[1] and runs[0][0] == turn_records(step.run.team, remade.rollout)
    firsts = [record[0]["completions"] for record in runs[0]]
    assert firsts[0] == firsts[1] == firsts[2]
    assert runs[0][1] != runs[0][2] != runs[0][0]


def test_values_of_the_alternatives_of_a_message_sum_to_zero(last):
    step, remade = last
    message = find_message(remade.rollout, task=0, sample=1, agent=1, turn=0)
    lines: list[str] = []
    returns = alternatives(step, remade, message, 2, lines.append)
    group = remade.rollout.turns[0].texts[1][0]
    assert returns.shape == (len(group), 2, 2) and lines == [
        f"playing {8 * len({*group})} episodes: the 4 of step 4, {2 * len({*group})} times"
    ]
    assert np.allclose(returns[1, 0], return_of(remade.rollout, message), atol=1e-6)
    assert np.allclose(sum(value_of(returns, g)[0] for g in range(len(group))), 0)


def test_credit_compares_values_with_the_stored_advantages(last):
    """With those of the run it is what is computed by hand; with the values themselves it is 1, with their negatives -1."""
    step, remade = last
    old = {"turns": [{name: x for name, x in turn.items() if name != "advantages"} for turn in remade.stored.record["turns"]]}
    for record in (None, old):
        with pytest.raises(ValueError, match="needs the advantages of step 4, which this run has not stored"):
            credit(step, remade._replace(stored=remade.stored._replace(record=record)), 2, print)
    values = [values_of_turn(step, remade, t, 2) for t in (0, 1)]
    stored = [np.array(turn["advantages"]) for turn in remade.stored.record["turns"]]
    assert [x.shape for x in stored] == [(2, 2, 2), (2, 4, 2)], "agents, nodes, completions"
    answer, groups = credit(step, remade, 2, print), []
    for of_agents, advantages in zip(values, stored, strict=True):
        for agent, own in enumerate(of_agents):
            groups += [pair for pair in zip(own[..., agent], advantages[agent], strict=True) if all(map(np.ptp, pair))]
    expected = rank_correlation(groups, step.run.cfg.run.seed)
    assert answer[:3] == pytest.approx(expected, nan_ok=True) and (answer.messages, answer.compared) == (24, 2 * len(groups))
    assert answer.low <= answer.correlation <= answer.high
    for agent, row in enumerate(answer.influence):
        sizes = np.concatenate([np.abs(of_agents[agent]).reshape(-1, 2) for of_agents in values])
        assert row == pytest.approx(sizes.mean(0).tolist())
    masked = [turn | {"advantages": [[[None] * 2] * 2] + turn["advantages"][1:]} for turn in remade.stored.record["turns"][:1]]
    record = {"turns": masked + remade.stored.record["turns"][1:]}
    fewer = credit(step, remade._replace(stored=remade.stored._replace(record=record)), 2, print)
    assert (fewer.messages, fewer.influence) == (24, answer.influence) and fewer.compared <= answer.compared - 2
    for sign in (1, -1):
        turns = [{"advantages": [(sign * own[..., agent]).tolist() for agent, own in enumerate(turn)]} for turn in values]
        answer = credit(step, remade._replace(stored=remade.stored._replace(record={"turns": turns})), 2, print)
        assert answer.messages == 24 and answer.compared and answer.correlation == sign
    assert np.shape(answer.influence) == (2, 2)


def test_ties_are_not_ranked():
    assert concordance(np.array([1.0, 1.0, 2.0]), np.array([0.0, 5.0, 5.0])) == (1, 0)
    correlation, low, high = rank_correlation([(np.arange(3.0), np.arange(3.0)), (np.arange(3.0), -np.arange(3.0))], 0)
    assert (correlation, low, high) == (0, -1, 1)


def other_reward(a, b, batch_items, rng):
    return [float(len(x)) for x in a]


def test_a_changed_reward_or_data_is_refused_by_name(directory):
    with pytest.raises(CannotGoOn, match=r"step 4 of .* cannot be made again, because these have changed: reward: "):
        opened(directory, 4, other_reward)
    with pytest.raises(ValueError, match="there is no step 5: .* has steps 1 to 4"):
        opened(directory, 5)


def test_the_first_difference_to_what_is_stored_is_named(last):
    """In the text, in a number, in the tasks, and in a column of metrics.jsonl."""
    step, remade = last
    record = json.loads(json.dumps(remade.stored.record))
    turn = record["turns"][1]
    turn["rewards"][2][0][1] = 7.5
    with pytest.raises(ValueError, match="turn 1, rewards, node 2, joint action 0, agent 1 was 7.5 and is"):
        check_record(remade.stored._replace(record=record), step.run.team, remade.rollout, step.directory)
    turn["completions"][0][3][0] = "no"
    with pytest.raises(ValueError, match="turn 1, completions, agent 0, node 3, completion 0 was 'no' and is .*versions"):
        check_record(remade.stored._replace(record=record), step.run.team, remade.rollout, step.directory)
    row = remade.stored.row | {"reward/mean": 9.0}
    with pytest.raises(ValueError, match="step 4 .*column reward/mean was 9.0"):
        check_row(remade.stored._replace(row=row), {"reward/mean": 1.0}, step.directory)


@pytest.mark.parametrize(
    ("settings", "text"),
    [(dict(async_steps=1, num_turns=1), "async_steps, whose"), (dict(num_updates=4, algorithm="madpo_iter"), "rounds")],
)
def test_what_cannot_be_made_again_is_refused_by_a_sentence(directory, settings, text):
    team, params = tiny_team()
    cfg = TrainConfig.of(**BASE | dict(progress=False) | settings)
    with pytest.raises(ValueError, match=text):
        open_step(directory, cfg, team, Task(make_reward(first_words, num_agents=2), ITEMS), 2, params=params)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((9, 0, 0, 0), "no task 9: the step has tasks 0 to 1"), ((0, 0, 2, 0), "no agent 2"), ((0, 5, 0, 0), "no sample 5"),
     ((0, 0, 0, 2), "no turn 2: this episode of task 0 has turns 0 to 1"), ((0, 0, 0, 0, [9]), "no joint action 9")],
)  # fmt: skip
def test_a_message_that_is_not_there_is_named(last, arguments, text):
    with pytest.raises(ValueError, match=text):
        find_message(last[1].rollout, *arguments)


def test_the_command_prints_both_episodes_where_agents_act_one_after_the_other(hints, replayed, monkeypatch):
    before = files_of(hints)
    code, out, err = replayed(hints, "--task", "1", "--sample", "2", "--say", "six red", "--json")
    assert code == 0 and "step 2 from the checkpoint after update 1" in err
    result = json.loads(out)
    episode, other = result["episode"], result["replaced"]
    assert result["compared"] == 1 and other["turn 0, agent 0 writes"] == "six red" != episode["turn 0, agent 0 writes"]
    assert other["turn 1, agent 1 reads"] == "one six red" and other["turn 0, reward"] == episode["turn 0, reward"]
    assert all(row["is"] - row["was"] == row["difference"] for row in result["returns"])
    for columns, text in (
        ("120", "turn 0, agent 0 writes, as it was | now:"),
        ("80", "turn 0, agent 0 writes, now:\n    six red\n"),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        assert text in replayed(hints, "--task", "1", "--sample", "2", "--say", "six red")[1]
    code, out, err = replayed(hints, "--task", "0", "--alternatives", "--samples", "2")
    assert code == 0 and "the message itself" in out and "episodes: the 6 of step 2" in err
    code, out, err = replayed(hints, "--credit", "--samples", "2", "--json")
    result, names = json.loads(out), ("correlation", "low", "high", "messages", "compared")
    assert code == 0 and result["messages"] == 6 and result["influence"][1] == [None, None], "agent 1 has no alternatives"
    assert result["influence"][0][0] == result["influence"][0][1] >= 0, "they earn the same"
    assert {*names} <= result.keys() and (result["correlation"] is None or -1 <= result["correlation"] <= 1)
    assert files_of(hints) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--say", "a"], "--say and --alternatives need --task"),
        (["--task", "0", "--agent", "1", "--say", "a"], "agent 1 does not act in turn 0, only agent 0"),
        (["--task", "0", "--say", "red one two six red"], "the message has .* tokens, and max_new_tokens=4: say less"),
        (
            ["--task", "0", "--agent", "1", "--turn", "1", "--alternatives"],
            "there are no alternatives: agents write one completion",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_do(hints, replayed, words, text):
    code, _, err = replayed(hints, *words)
    assert code == 2 and re.search(text, err)


def test_a_run_that_was_begun_in_python_says_how_its_steps_are_made_again(directory, replayed):
    code, _, err = replayed(directory)
    assert code == 2 and "was begun in Python; make its steps again there, with jmarl.replay.open_step" in err


def test_the_page_that_is_served_plays_a_step_again_as_the_command_does(hints, replayed):
    """One message at a time: the second one is refused while the first one is played."""
    words = ["--task", "1", "--joint", "2", "0", "--say", "six red", "--json"]
    with watched(hints) as address:
        asked = {"run": 0, "step": 2, "task": 1, "agent": 0, "turn": 0, "joint": [2, 0], "say": "six red"}
        headers = {"Origin": address.rstrip("/"), "Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}what-if", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=100) as first:
            lines = [json.loads(first.readline())]
            with urllib.request.urlopen(request, timeout=100) as second:
                assert "another message is being played" in json.loads(second.read())["error"]
            lines += map(json.loads, first)
    *more, last = lines
    assert any("step 2 from the checkpoint after update 1" in line["progress"] for line in more)
    assert last["result"] == json.loads(replayed(hints, *words)[1])
    assert last["result"]["replaced"]["turn 0, agent 0 writes"] == "six red"
