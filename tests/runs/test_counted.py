"""Rows of runs: names of users and of the library side by side, and how many episodes a held-out figure is of."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jmarl.algorithms import ALGORITHMS
from jmarl.config import TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.evaluation.evaluate import Evaluation, choices_of, numbers, summarize
from jmarl.rl.losses import policy_gradient, preference
from jmarl.rollout.turns import Rollout, Turn
from jmarl.runs.checks import check_fit, check_settings
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.house import HOUSE, ITEMS

GROUP = HOUSE["num_generations"]


@pytest.fixture(scope="module")
def pair(random_agent, tiny_config, tiny_tokenizer):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


def run(pair, reward, eval_items=(), eval_metrics=None, **changes):
    team, params = make_team(pair)
    cfg = TrainConfig.of(**HOUSE | dict(eval_generations=GROUP) | changes)
    return train(team, reward, ITEMS, cfg, params=params, eval_items=eval_items, eval_metrics=eval_metrics)


def rows_of(directory: Path) -> tuple[list[dict], list[dict]]:
    """Return the rows of updates and of evaluations."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/updates" not in row], [row for row in rows if "eval/updates" in row]


class Game(TextEnvironment):
    """From its `late`-th step on it returns names that the library writes."""

    roles, reward_range, max_turns = ("a", "b"), (-5.0, 5.0), 1

    def __init__(self, late: int):
        self.late, self.steps = late, 0

    def reset(self, task, rng):
        return {}, [task["prompt"]] * 2

    def step(self, state, messages, rng):
        self.steps += 1
        parts = {"win": len(messages[0]) / 100} | ({"invalid": -1.0} if self.steps > self.late else {})
        return Step(state, [None] * 2, sum(parts.values()), True, {"moves_skipped": 1.0}, parts=parts)


# --- names -----------------------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_is_refused_before_the_first_update(pair):
    def mean(a, b):
        return [1.0] * len(a)

    with pytest.raises(ValueError, match="'mean' is not allowed as the name of a reward function.* such as 'mean_own'"):
        run(pair, mean)
    with pytest.raises(ValueError, match="'invalid' is not allowed as the name of a part of the reward"):
        run(pair, Game(0))
    with pytest.raises(ValueError, match="'invalid' is not allowed as the name of a part of the reward"):
        run(pair, Game(0), eval_items=ITEMS)
    with pytest.raises(ValueError, match="'reward' is not allowed as the name of a metric of an evaluation"):
        run(pair, lambda a, b: [1.0] * len(a), eval_items=ITEMS, eval_metrics=lambda items, rollout: {"reward": 1.0})


def test_a_name_that_comes_later_gets_a_suffix(pair, tmp_path):
    """And a measure called skipped is no optimizer step that was left out."""
    with pytest.warns(UserWarning, match="the name reward/invalid is taken .* so your number is reward/invalid_own"):
        run(pair, Game(late=6), output_dir=str(tmp_path), stop_after_nonfinite=1, save_every=0)
    updates, _ = rows_of(tmp_path)
    assert [row["reward/invalid"] for row in updates] == [0, 0]
    assert "reward/invalid_own" not in updates[0] and np.isfinite(updates[1]["reward/invalid_own"])
    assert [row["measures/moves_skipped"] for row in updates] == [1, 1]


@pytest.mark.parametrize(("data", "taken"), [("rollouts", "grad_norm"), ("rollouts", "length"), ("pairs", "chosen")])
def test_a_metric_of_an_own_loss_must_not_have_the_name_of_a_column(monkeypatch, data, taken):
    base, loss = ("magrpo", policy_gradient) if data == "rollouts" else ("dpo", preference)

    def own(name, *arrays, **options):
        value, metrics = loss(*arrays, **options)
        return value, metrics | {name: arrays[0]}

    check = check_settings if data == "rollouts" else partial(check_fit, wandb_config=None)
    for name in ("mine", taken):
        monkeypatch.setitem(ALGORITHMS, "mine", dataclasses.replace(ALGORITHMS[base], loss=partial(own, name)))
        if name == "mine":
            check(TrainConfig.of(algorithm="mine"))
            continue
        with pytest.raises(ValueError, match=f"'{taken}' is not allowed as the name of a metric of the loss of 'mine'"):
            check(TrainConfig.of(algorithm="mine"))


# --- counts ----------------------------------------------------------------------------------------------------------------


def test_an_evaluation_says_how_many_episodes_have_no_reward(pair, tmp_path):
    """Items, rollout and rows are as given for metrics, whatever an earlier call did to them."""
    seen = []

    def reward(a, b, prompts):
        return [None if prompt == "no judge" else 1.0 for prompt in prompts]

    def metrics(items, rollout):
        seen.append((repr(items), rollout.turns[0].rewards.tolist()))
        items[0]["list"].append(1)
        rollout.turns[0].rewards[:] = 7
        return {"longer": 0.5}

    held_out = [{"prompt": "good", "list": []}, {"prompt": "no judge", "list": []}]
    directory = dict(output_dir=str(tmp_path), save_every=0)
    with pytest.warns(UserWarning, match="3 of 6 held-out episodes have no valid reward .*; .* returned None"):
        result = run(pair, make_reward(reward, num_agents=2, on_error="mask"), held_out, metrics, **directory)
    _, evaluations = rows_of(tmp_path)
    assert [row["eval/updates"] for row in evaluations] == [0, 2]
    for row in evaluations:
        assert (row["eval/reward"], row["eval/episodes"], row["eval/reward/invalid"]) == (1, 6, 3)
        assert row["eval/reward/reward"] == 1 and row["eval/longer"] == 0.5
    assert "3 of 6 episodes" in repr(result) and len(seen) == 2 and seen[0][0] == seen[1][0] == repr(held_out)
    np.testing.assert_equal(seen[0][1], seen[1][1])


def test_an_environment_of_many_episodes_gets_copies_of_items(pair):
    seen = []

    class Own(RewardEnvironment):
        def reset(self, items, rng):
            seen.extend(repr(item) for item in items)
            for item in items:
                item["list"].append(1)
            return super().reset(items, rng)

    team, params = make_team(pair)
    items = [item | {"list": []} for item in ITEMS]
    env = Own(make_reward(lambda a, b: [float(len(x)) for x in a], num_agents=2), [default_formatter] * 2)
    cfg = TrainConfig.of(**HOUSE | dict(eval_generations=GROUP))
    train(team, env, items, cfg, params=params, eval_items=items)
    assert {*seen} == {*map(repr, items)} and items[0]["list"] == []


def evaluation(rewards, parts, measures, texts=None, **notes) -> Evaluation:
    """Return the evaluation of episodes of one turn of one agent. rewards: [P, J]; texts: [P][J]."""
    joint = np.array(rewards, float)[..., None]
    tables = ({name: np.array(x, float).ravel() for name, x in table.items()} for table in (parts, measures))
    empty: dict = dict(prompts=[], acts=None, parents=None, items=np.arange(len(joint)), encoded=(), completions=())
    texts = texts or [[""] * joint.shape[1]] * len(joint)
    names = dict(texts=[texts], joint=np.arange(joint.shape[1])[:, None], rewards=joint, invalid=0, fault="", max_nodes=2)
    turn = Turn(**empty, **names, **dict(zip(("parts", "measures"), tables, strict=True)))
    return summarize(Rollout(1, (turn,), (joint,), (joint,), notes=notes))


def test_a_figure_of_other_episodes_has_their_number_beside_it():
    """A part of an invalid episode is in no mean, so the parts add up; pass@2 is of prompts with two known samples."""
    nan = float("nan")
    parts, measures = {"win": [[2, 9], [4, 6]]}, {"solved": [[1, nan], [0, 1]], "x": [[1, 1], [1, 1]], "y": [[3, nan], [3, 3]]}
    with pytest.warns(UserWarning, match="1 of 4 held-out episodes have no valid reward"):
        row = numbers(evaluation([[2, nan], [4, 6]], parts, measures, **{"reward/raised": 1.0, "prefilled_tokens": 9.0}))
    assert (row["eval/reward"], row["eval/episodes"], row["eval/reward/invalid"], row["eval/reward/raised"]) == (3.5, 4, 1, 1)
    assert row["eval/reward/win"] == 4 and "eval/reward/win_episodes" not in row
    assert (row["eval/measures/x"], row["eval/measures/x_episodes"]) == (1, 4)
    assert row["eval/measures/y"] == 3 and "eval/measures/y_episodes" not in row, "of the three that have a reward"
    assert (row["eval/pass@1"], row["eval/pass@2"], row["eval/pass@2_episodes"]) == (0.75, 1, 2)
    assert "eval/pass@1_episodes" not in row and "eval/prefilled_tokens" not in row
    assert (row["eval/best@2"], row["eval/best@2_episodes"]) == (6, 2)
    assert (row["eval/majority@2"], row["eval/majority@2_episodes"]) == (0.5, 2)


def test_figures_of_k_episodes():
    """What most of k wrote counts, whatever blanks are around it; k is 2, 4, ... and all episodes of a prompt."""
    texts = [["7", " 7", "8", "7\n", "9"], ["a", "b", "c", "d", "e"]]
    solved = {"math/solved": [[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]], "solved": [[2, 0, 0, 0, 0]] * 2}
    row = numbers(evaluation([[1, 2, 3, 4, 5], [0, 0, 0, 0, 1]], {}, solved, texts))
    names = {name.removeprefix("eval/") for name in row if "@" in name}
    figures = {"best@2", "best@4", "best@5"} | {f"math/{x}" for x in ("pass@1", "pass@2", "pass@4", "pass@5")}
    figures |= {f"math/majority@{k}" for k in (2, 4, 5)}
    assert names == {x + end for x in figures for end in ("", "_ci95")} | {f"math/majority@{k}_episodes" for k in (2, 4)}
    assert row["eval/best@5"] == 3 and row["eval/best@2"] == pytest.approx((4 + 0.4) / 2)
    assert row["eval/math/majority@5"] == (1 + 0.2) / 2 and row["eval/math/majority@4"] == (1 + 0) / 2
    assert row["eval/math/majority@2"] == pytest.approx(((1 + 0.5) / 2 + 0) / 2) and row["eval/math/majority@2_episodes"] == 8
    assert row["eval/math/majority@5_ci95"] == pytest.approx(12.7062 * 0.4, rel=1e-4), "of two prompts, which differ by 0.8"


def test_figures_of_k_cross_joint_actions_are_of_those_that_share_no_completion():
    result = evaluation([[1, 9, 9, 3]], {}, {"solved": [[1, 0, 0, 0]]})
    turn = result.rollout.turns[0]._replace(
        joint=np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), texts=[[["a", "b"]], [["a", "c"]]]
    )
    row = numbers(result._replace(rollout=result.rollout._replace(turns=(turn,))))
    assert (row["eval/reward"], row["eval/best@2"], row["eval/pass@1"], row["eval/majority@2"]) == (5.5, 3, 0.5, 0.5)
    assert "eval/best@4" not in row


def test_episodes_chose_the_same_if_all_their_turns_are_equal():
    first = evaluation([[0, 0, 0, 0, 0]], {}, {}, [["x", "x ", "y", "y", "x"]]).rollout
    later = dict(texts=[[["a"], ["b"], ["a"], ["a"]]], joint=np.array([[0]]), items=np.zeros(4, int), parents=np.arange(4))
    choices = choices_of(first._replace(turns=(first.turns[0], first.turns[0]._replace(**later)))).ravel().tolist()
    assert [[i for i, y in enumerate(choices) if y == x] for x in choices] == [[0], [1], [2, 3], [2, 3], [4]], "4 has ended"
