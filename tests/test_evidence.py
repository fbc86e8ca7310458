"""The claims of the evidence can be read, their games reward what they say, and tables say what the records have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.evidence import page, record, roles, worlds
from experiments.evidence.__main__ import jobs_of, plan
from experiments.evidence.estimates import stratified_interval, tokens_to
from jmarl.envs.games.grid import distances

CLAIMS = [claim for claim, own in plan().items() if "minutes" in own]


@pytest.mark.long
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_can_be_read_and_its_table_knows_its_conditions(claim, tmp_path, request, monkeypatch):
    if claim == "teams_tldr":
        monkeypatch.setenv("JMARL_DATA", str(request.getfixturevalue("data_dir")))
    jobs, own = jobs_of(claim, tmp_path), plan()[claim]
    assert list(dict.fromkeys(job.name.partition("/")[0] for job in jobs)) == page.conditions(claim)
    assert own["against"] in {name.partition("=")[2] for name in page.conditions(claim)}
    assert {"question", "minutes", "budget", "stop", "columns"} <= own.keys()
    assert len({seed.rpartition("/")[2] for job in jobs for seed in job.seeds}) >= 5
    assert set(roles.ALONE) <= set(CLAIMS)


def test_own_rewards_of_the_grid_are_half_of_the_share_of_the_way_that_own_moves_shorten():
    game, rng = worlds.OwnGrid(2, brief=True, stop=False), np.random.default_rng(0)
    for task in game.tasks("train", 50):
        state, _ = game.reset(task, rng)
        step = game.step(state, [" ".join(rng.choice(["up", "down", "left", "right"], 3)) for _ in range(2)], rng)
        to_goal = distances(state.goal, state.size, state.walls)
        before, after = to_goal[state.path[-1]], to_goal[step.state.path[-1]]
        assert sum(step.reward) == pytest.approx(0.5 * (before - after) / before)
        idle = game.step(state, ["stay stay stay", "left up left"], rng)
        assert idle.reward[0] == 0 and idle.reward[1] == pytest.approx(0.5 * (before - to_goal[idle.state.path[-1]]) / before)


def test_a_lone_checker_reads_a_wrong_digit_half_of_the_time_and_earns_its_right_verdicts():
    game, rng = worlds.LoneChecker(blanks=(1, 1), brief=True), np.random.default_rng(0)
    (task,) = game.tasks("train", 1)
    wrong = []
    for _ in range(400):
        state, _ = game.reset(task, rng)
        wrong.append(not state.right[0])
        assert game.step(state, ["A" if wrong[-1] else "ok"], rng).reward == 1
        assert game.step(state, ["ok" if wrong[-1] else "A"], rng).reward == 0
    assert abs(np.mean(wrong) - 0.5) < 0.1


def test_the_interquartile_mean_is_of_the_middle_half_of_all_runs_and_tasks():
    scores = np.array([[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])
    found = stratified_interval(scores, samples=500)
    assert found.mean == 3.5 and found.low < 3.5 < found.high
    assert stratified_interval(np.ones((5, 3)), samples=50) == (1, 1, 1)
    assert tokens_to(0.5, [10, 20, 30], [0.1, 0.5, 0.9]) == 20 and np.isnan(tokens_to(1, [10], [0.1]))


def test_a_table_has_means_intervals_and_differences_of_its_records(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    values = {"by_blocks": [0.6, 0.7, 0.9], "by_cumulative_sum": [0.5, 0.5, 0.8], "by_categorical": []}
    for name, rewards in values.items():
        for seed, reward in enumerate(rewards):
            file = tmp_path / "draws" / f"draw={name}" / f"seed_{seed}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            curve = {"tokens": list(range(20)), "reward/mean": [0.0] * 10 + [reward] * 10}
            numbers = {"updates": 20, "tokens": 5000, "reward_calls": 2000, "cpu_seconds": 90, "evaluations": []}
            file.write_text(json.dumps(numbers | {"curve": curve}))
    lines = page.claim_table("draws", plan()["draws"]).splitlines()
    p = stats.ttest_ind(values["by_blocks"], values["by_cumulative_sum"], equal_var=False).pvalue
    assert lines[2] == "| by_blocks | 3 | 0.7333 ± 0.38 | 5k | 2k | 1.5 |"
    assert lines[3] == f"| by_cumulative_sum | 3 | 0.6 ± 0.43 (p {p:.2g}) | 5k | 2k | 1.5 |"
    assert len(lines) == 4, "conditions that have not run are left out"


def test_a_record_has_the_tokens_so_far_and_equal_digests_for_equal_settings(tmp_path):
    settings = {"config": {"train": {"run": {"seed": 1, "output_dir": "a"}, "optimizer": {"learning_rate": 1e-3}}}}
    other = json.loads(json.dumps(settings).replace('"a"', '"b"').replace('"seed": 1', '"seed": 2'))
    assert record.settings_hash(settings) == record.settings_hash(other)
    assert record.settings_hash(settings) != record.settings_hash(json.loads(json.dumps(settings).replace("0.001", "0.01")))
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    start = {"settings": settings, "versions": {"jax": "1"}, "platform": "Linux"}
    (attempt / "start.json").write_text(json.dumps(start))
    rows = [
        {"eval/updates": 0, "eval/reward": 0.1, "step": 0},
        *({"step": i, "tokens": 10 * i, "reward/mean": i} for i in (1, 2, 3)),
    ]
    rows.append({"eval/updates": 3, "eval/reward": 0.5, "step": 3})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"env_steps": 4}) + "\n" for row in rows))
    summary = record.summary(tmp_path)
    assert summary["curve"] == {"tokens": [10, 30, 60], "reward/mean": [1, 2, 3]} and summary["tokens"] == 60
    assert [(row["tokens"], row["updates"], row["reward"]) for row in summary["evaluations"]] == [(0, 0, 0.1), (60, 3, 0.5)]
    assert summary["reward_calls"] == 12 and Path(record.RESULTS).name == "results"
