"""`jmarl doctor`: each rule fires at its threshold on made numbers and is silent below, and what the sentences are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_directories import write_run

from jmarl.cli.main import main
from jmarl.config.experiment import PART_OF
from jmarl.report.diagnosis import CHECKS, MAX_SENTENCES, judge, rules, top_findings
from jmarl.report.evidence import evidence_of
from jmarl.report.load import RecordedRun
from jmarl.report.page import write_report

UPDATES = 30


def run_of(evaluations=(), roles=(), **columns) -> RecordedRun:
    """A run whose columns are numbers, or one number per update. `__` stands for a slash."""
    columns = {"reward__mean": 0.2, "reward__max": 1.0} | columns
    lists = {name.replace("__", "/"): x if isinstance(x, list) else [x] * UPDATES for name, x in columns.items()}
    rows = [{"step": n + 1} | {name: values[n] for name, values in lists.items()} for n in range(UPDATES)]
    attempts = [{"settings": {"environment": {"roles": [*roles]}}}] if roles else []
    return RecordedRun("made", Path("made"), rows, [*evaluations], {"max_new_tokens": 7}, attempts)


def record(step: int, texts: list[list[str]], rewards: list[list[float | None]], parts=None) -> dict:
    """The completions of one agent. texts, rewards: of each prompt."""
    tasks = range(len(texts))
    turn = {
        "prompts": [[f"task {n}" for n in tasks]], "acts": [[True for _ in tasks]], "completions": [texts], "items": [*tasks],
        "joint": [[g] for g in range(len(texts[0]))], "rewards": [[[x] for x in row] for row in rewards], "parts": parts or {},
    }  # fmt: skip
    return {"step": step, "kind": "train", "turns": [turn]}


def records(texts=("a", "b"), rewards=((0.0, 1.0),) * 3, parts=None) -> list[dict]:
    return [record(step, [[*texts]] * len(rewards), [[*row] for row in rewards], parts) for step in range(1, UPDATES + 1)]


def fallen(end: float) -> list[float]:
    return [2.0] + [2.0 * end] * (UPDATES - 1)


def learned(end: float) -> list[float]:
    return [0.0] * 10 + [end] * 20


def correlated(r: float) -> list[dict]:
    """Completions whose lengths and rewards correlate by r."""
    other = (1 - r * r) ** 0.5
    rewards = [r * z + other * w for z, w in ((-1, -1), (1, -1), (-1, 1), (1, 1))]
    return records(("a", "aa", "a", "aa"), (rewards,) * 3)


def opposed(k: float) -> list[dict]:
    return records(parts={"good": [[0.0, 1.0]] * 3, "bad": [[0.0, -k]] * 3})


def pair(x: int) -> list[dict]:
    """Three joint actions of two agents for three prompts. The second agent changes the reward in x of all records."""
    made = records(("a", "b", "c"), ((0.0, 0.0, 1.0),) * 3)
    for n, one in enumerate(made):
        [turn] = one["turns"]
        turn |= {"completions": [[["a", "a", "b"]] * 3, [["x", "y", "x"]] * 3], "acts": [[True] * 3] * 2}
        turn["prompts"] *= 2
        turn |= {
            "joint": [[g, g] for g in range(3)],
            "rewards": [[[r, r] for r in (0.0, 0.5 * (n < x), 1.0)]] + [[[0.0] * 2] * 2 + [[1.0] * 2]] * 2,
        }
    return made


NO_EVALUATIONS = [{"eval/updates": n, "eval/reward": 0.0, "eval/reward_ci95": 0.05} for n in (0, UPDATES)]
# rule -> what makes a run and records of a number; a number at which the rule fires, and one at which it is silent
CASES = {
    "no_progress": (lambda x: (run_of(reward__mean=[0.2] * 10 + [0.2 + x] * 20), []), 0.039, 0.041),
    "entropy_collapsed": (lambda x: (run_of(agent_0__entropy=fallen(x)), []), 0.099, 0.101),
    "tasks_settled": (lambda x: (run_of(), records(rewards=((0.0, 0.0),) * x + ((0.0, 1.0),) * (8 - x))), 2, 1),
    "no_variance": (lambda x: (run_of(agent_0__zero_variance_share=x), []), 0.5, 0.49),
    "held_out_behind": (lambda x: (run_of(NO_EVALUATIONS, reward__mean=learned(x)), []), 0.25, 0.24),
    "length_learned": (lambda x: (run_of(agent_0__length=[4.0] * 3 + [5.0] * 27, reward__mean=0.5), correlated(x)), 0.51, 0.49),
    "same_text": (lambda x: (run_of(), records(("a",) * x + tuple("bcdefghijk"[x:]), ((0.0,) * 9 + (1.0,),) * 3)), 9, 8),
    "cut": (lambda x: (run_of(agent_0__ended=1 - x), []), 0.5, 0.49),
    "idle_agent": (lambda x: (run_of(agent_0__entropy=fallen(0.4), agent_1__entropy=fallen(1 - x)), []), 0.099, 0.101),
    "no_influence": (lambda x: (run_of(), pair(x)), 0, 1),
    "parts_opposed": (lambda x: (run_of(), opposed(x)), 0.27, 0.26),
    "clipped": (lambda x: (run_of(agent_0__clip_share=x), []), 0.301, 0.299),
    "time_lost": (lambda x: (run_of(time__step_s=1.0, time__rewards=x, time__update=1 - x), []), 0.4, 0.39),
}  # fmt: skip


def fired(run: RecordedRun, of: list[dict] = []) -> list[str]:  # noqa: B006
    return [finding.rule for finding in judge(evidence_of(run, of))]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_at_its_threshold_alone_and_is_silent_below(rule):
    made, ill, healthy = CASES[rule]
    assert fired(*made(ill)) == [rule]
    assert fired(*made(healthy)) == ["healthy"]
    [finding] = judge(evidence_of(*made(ill)))
    assert 0 < finding.severity <= 1 and re.search(r"\(.*updates \d+ to 30\)", finding.text), "the steps that show it"
    assert not re.search(r"[{}]", finding.text) and re.search(r"\d", finding.text)


def test_the_table_names_each_rule_with_its_source_and_settings_that_exist():
    assert {check.__name__ for check in CHECKS} == rules().keys() == CASES.keys()
    for name, rule in rules().items():
        assert rule["source"] and 0 < rule["weight"] <= 1, name
        text = re.sub(r"\{.*?\}", "", " ".join([rule["says"], *rule.get("remedies", {}).values()]))
        assert {*re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)} <= PART_OF.keys()


@pytest.mark.parametrize("rule", [name for name, rule in rules().items() if not rule["at_top"]])
def test_a_team_that_has_learned_its_tasks_may_write_as_it_does(rule):
    """The reward is near its best: low entropy, equal texts and cut ones are no sign of failure."""
    made, ill, _ = CASES[rule]
    run, of = made(ill)
    rows = [row | {"reward/mean": 0.0 if row["step"] < 5 else 0.95} for row in run.rows]
    assert fired(run._replace(rows=rows), of) == ["healthy"]


def test_entropy_that_falls_while_the_reward_rises_is_learning():
    rising = [0.1 + 0.02 * n for n in range(UPDATES)]
    assert fired(run_of(agent_0__entropy=fallen(0.05), reward__mean=rising)) == ["healthy"]
    assert fired(run_of(agent_0__entropy=fallen(0.05), reward__mean=rising[::-1])) == ["entropy_collapsed", "no_progress"]


def test_groups_of_equal_returns_count_only_before_the_team_has_learned():
    """At first half of the groups vary; they all end with the best reward."""
    share = [0.4] * 10 + [1.0] * 20
    assert fired(run_of(agent_0__zero_variance_share=share, reward__mean=learned(1.0))) == ["healthy"]
    assert fired(run_of(agent_0__zero_variance_share=share)) == ["no_variance"]


def test_completions_that_are_cut_are_right_where_returns_rise_also_of_one_player_of_a_game():
    won = [-0.5 + 0.03 * n for n in range(UPDATES)]
    game = dict(reward__mean=0.0, reward__max=0.0, agent_0__ended=0.0, agent_1__ended=0.0)
    assert fired(run_of(**game, agent_0__return=won, agent_1__return=[-x for x in won])) == ["healthy"]
    assert fired(run_of(**game, agent_0__return=0.0, agent_1__return=0.0)) == ["cut"]


def test_answers_of_a_word_that_never_had_an_end_are_whole():
    """As the moves of a game. Long ones, and those that once had an end, are cut."""
    always = dict(agent_0__ended=0.0, agent_0__length=7.0)  # max_new_tokens is 7
    assert fired(run_of(**always)) == ["healthy"]
    assert fired(run_of(**always | dict(agent_0__ended=[0.1] + [0.0] * 29))) == ["cut"]
    assert fired(run_of(**always | dict(agent_0__length=[6.9] + [7.0] * 29))) == ["cut"]
    run = run_of(**always | dict(agent_0__length=70.0))
    assert fired(run._replace(settings={"max_new_tokens": 70})) == ["cut"]
    assert fired(run._replace(settings={"max_new_tokens": 70, "min_new_tokens": 70})) == ["healthy"]


def test_lengths_are_tokens_and_returns_those_of_the_episode_where_they_are_stored():
    """The same texts and rewards, with which length and return do not correlate in characters."""
    run = run_of(agent_0__length=[4.0] * 3 + [5.0] * 27, reward__mean=0.5)
    made = correlated(0.0)
    assert fired(run, made) == ["healthy"]
    for one in made:
        one["turns"][0] |= {"lengths": [[[1, 9, 1, 9]] * 3], "returns": [[[0.0, 1.0, 0.0, 1.0]] * 3]}
    assert fired(run, made) == ["length_learned"]


def test_tasks_solved_only_later_are_no_waste():
    """Always solved means from the first record on."""
    late = [record(step, [["a", "b"]] * 4, [[float(step > 5)] * 2] * 4) for step in range(1, UPDATES + 1)]
    assert fired(run_of(), late) == ["healthy"]
    mixed = [record(step, [["a", "b"]] * 4, [[1.0] * 2] * 2 + [[0.0] * 2] * 2) for step in range(1, UPDATES + 1)]
    assert fired(run_of(), mixed) == ["tasks_settled"]


def test_a_gap_within_two_intervals_of_the_evaluation_is_noise():
    wide = [row | {"eval/reward_ci95": 0.2} for row in NO_EVALUATIONS]
    assert fired(run_of(wide, reward__mean=learned(0.39))) == ["healthy"]
    assert fired(run_of(wide, reward__mean=learned(0.41))) == ["held_out_behind"]


def test_tiny_runs_lose_no_time():
    assert fired(run_of(time__step_s=0.1, time__rewards=0.09, time__update=0.01)) == ["healthy"]


def test_columns_of_several_turns_and_rewards_that_are_missing_are_read():
    run = run_of(turn_0__agent_0__ended=0.2, turn_1__agent_0__ended=0.4)
    missing = records(rewards=((None, None),) * 3)
    [finding] = judge(evidence_of(run, missing))
    assert finding.rule == "cut" and "70 % of what agent 0 wrote was cut at max_new_tokens=7 (updates 21 to 30)" in finding.text
    assert fired(RecordedRun("pairs", Path("pairs"), [{"step": n + 1, "loss": 0.5} for n in range(20)], [], {}, [])) == [
        "healthy"
    ]


def test_records_of_another_form_are_left_out_with_a_warning(caplog):
    run, good = run_of(), records(("a",) * 2, ((0.0,) * 2,) * 3)
    turn = good[0]["turns"][0]
    bad = [{"turns": [turn | change]} for change in ({"joint": [[7]]}, {"acts": 3}, {"rewards": "x"}, {"items": [0]})]
    assert fired(run, [*good, *(good[0] | {"step": 40} | record for record in [*bad, {"turns": [{}]}])]) == ["same_text"]
    assert caplog.text.count("of update 40 are not judged") == 5


def test_findings_are_ranked_and_at_most_eight_and_a_short_run_is_not_judged():
    numbers = dict(agent_0__entropy=fallen(0.01), agent_0__clip_share=0.9, agent_0__ended=0.0, agent_0__zero_variance_share=0.9)
    findings = judge(evidence_of(run_of(**numbers), records(("a", "a"), ((0.0, 0.0),) * 3)))
    assert [finding.rule for finding in findings][:2] == ["entropy_collapsed", "same_text"]
    assert [finding.severity for finding in findings] == sorted((x.severity for x in findings), reverse=True)
    run = run_of(**numbers)
    assert len(top_findings([run] * 3 + [run_of()], [])) == MAX_SENTENCES
    assert top_findings([run] * 3 + [run_of()], [])[-1] == (f"No rule fires in {run_of().name}.", {})
    assert top_findings([run] * 3, [])[0][0].endswith(judge(evidence_of(run, []))[0].text), "the most severe one is first"
    [_, links], *_ = top_findings([run_of(), run], [x | {"run": 1} for x in records(("a", "b"))])
    steps = {f"episodes of update {update}": f"#e=1,train,{update}" for update in findings[0].updates}
    assert links == {"chart": "#column=agent_N/entropy"} | steps, "steps of the second run show it"
    [finding] = judge(evidence_of(run._replace(rows=run.rows[:9]), []))
    assert finding.text == "Too early to say: the run has 9 updates, and the rules need 10."


def test_texts_of_runs_reach_neither_the_terminal_nor_the_page_as_they_are(tmp_path, capsys):
    """A role and a text with an escape sequence and HTML."""
    hostile = "\x1b[2J<script>{share}"
    finding = judge(evidence_of(run_of(roles=[hostile], agent_0__clip_share=0.9), records((hostile,) * 2)))[0]
    assert "\x1b" not in finding.text and r"wrote '\x1b[2J<script>{share}' in" in finding.text
    run = write_run(tmp_path / "run", steps=12)
    start = json.loads((run / "attempts" / "1" / "start.json").read_text(encoding="utf-8"))
    start["settings"]["environment"] = {"roles": [hostile, "other"]}
    (run / "attempts" / "1" / "start.json").write_text(json.dumps(start), encoding="utf-8")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps(row | {"agent_0/clip_share": 0.9}) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    write_report([run], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    section = page.split('id="findings"')[1].split("</section>")[0]
    assert "&lt;script&gt;{share}" in section and "<script>" not in section and "clip_eps_low" in section
    assert main(["doctor", str(run)]) == 0
    out = capsys.readouterr().out
    assert "1. " in out and "\x1b" not in out and "clip_eps_low" in out
    assert main(["doctor", "--json", str(run)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert {finding["rule"] for finding in line["findings"]} >= {"clipped"}


@pytest.mark.nightly  # two minutes
def test_twelve_ill_runs_are_told_and_five_healthy_ones_are_not(tmp_path):
    """Trained by `jmarl.train`; two minutes on two cores."""
    from experiments.ill_runs import RUNS, make_run
    from jmarl.report import diagnose_runs

    for number, name in enumerate(RUNS):
        make_run(name, tmp_path / str(number))
    told = {name: [x.rule for x in diagnose_runs([tmp_path / str(n)]).popitem()[1]] for n, name in enumerate(RUNS)}
    assert [run.rule for run in RUNS.values()].count("healthy") == 5 and len(RUNS) == 17
    for name, run in RUNS.items():
        assert told[name] == ["healthy"] if run.rule == "healthy" else run.rule in told[name], f"{name}: {told[name]}"
