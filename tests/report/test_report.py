"""`jmarl report`: what the page has in it, opened in Chromium where it is installed, and that it needs no network."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import os
import random
import re
import time
from pathlib import Path

import pytest
from browser import dom, needs_chromium
from run_directories import turn, write_run

import jmarl
from jmarl.cli.main import main
from jmarl.files.trusted import record_trust
from jmarl.logs import completions_file
from jmarl.logs.completions_file import CompletionsFile
from jmarl.report.completions import chosen
from jmarl.report.load import Group, groupings_of, load_runs
from jmarl.report.page import is_trained_on, summarize, write_report
from jmarl.report.summary import curves, goodput, held_out, settings_table, thin


def load_groups(paths: list[Path]) -> list[Group]:
    """Return the runs of equal settings together."""
    return groupings_of(load_runs(paths))[0].groups


def content(page: Path) -> dict:
    """Return the data in a page."""
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page.read_text())
    assert packed
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def records(page: Path) -> list[dict]:
    """Return the completions in a page."""
    packed = re.findall(r'<script class="part" type="text/plain">([^<]*)</script>', page.read_text())
    return [record for part in packed for record in json.loads(gzip.decompress(base64.b64decode(part)))]


@needs_chromium
def test_the_lineage_of_a_population_is_drawn(tmp_path):
    """Two exploits of three members: 0 copies 2, and then 1 copies 0, whose weights are those of 2."""
    run = write_run(tmp_path / "run")
    parents = {2: (2, 1, 2), 4: (0, 0, 2)}
    exploits = [{"step": n} | {f"population/member_{k}/parent": x for k, x in enumerate(row)} for n, row in parents.items()]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in exploits))
    write_report([run], tmp_path / "r.html")
    page = dom(tmp_path / "r.html", tmp_path / "profile").split('class="chart lineage"')[1].split("</svg>")[0]
    assert page.count('class="copy"') == 2 and page.count("<circle") == 2
    drawn = re.findall(r"stroke: var\(--c(\d)\);?\" (?:class=\"copy\"|stroke-width)", page)
    assert drawn == [*"012", "2", *"212", "2", *"222"], "lanes and copies in the colors of the members that they come from"


@needs_chromium
def test_curves_completions_rewards_and_settings_are_on_the_page(tmp_path, capsys):
    run = write_run(tmp_path / "run", turns=2)
    assert main(["report", str(run), "-o", str(tmp_path / "out" / "r.html")]) == 0
    assert "1 run, completions of 4 steps" in capsys.readouterr().out
    page = dom(tmp_path / "out" / "r.html", tmp_path / "profile")
    assert "agent 1" in page and "agent 1 (" not in page
    assert page.count('class="curve"') == 3, "the reward, and the lengths of two agents"
    assert page.count('class="point"') == 2 and "0.25 ± 0.125" in page and "0.75 ± 0.0625" in page
    episode = page.split('class="lanes"')[1].split('class="who-reads"')[0]  # the best one of the first task of the last step
    for agent in (0, 1):
        assert f"&lt;i&gt;step 3 turn 0 agent {agent} prompt 0 completion {2 * agent}&lt;/i&gt; &amp;" in episode
        assert f"&lt;i&gt;step 3 turn 1 agent {agent} prompt 0 completion {2 * agent}&lt;/i&gt; &amp;" in episode
    assert (
        "&lt;b&gt;fruit&lt;/b&gt;" in episode
        and "step 4 (4 recorded), mean return" in page
        and "episode 1 of 3 from the best: return 0.75" in page
    )
    assert "<span>ratio</span>2.5" in episode and "<span>solved</span>1" in episode and episode.count('role="button"') == 4
    labels = re.findall(r'<text x="([^"]*)"[^>]* text-anchor="middle">', page)
    assert labels and max(map(float, labels)) <= 420 - 18, "half of the last label fits beside the curve"
    assert "75.0 %" in page and "learning_rate" in page and "python mine.py" in page and "step 4/4  reward 0.4" in page


def with_roles(run: Path, roles: object) -> Path:
    """The run, whose environment has roles."""
    start = run / "attempts" / "1" / "start.json"
    content = json.loads(start.read_text())
    content["settings"]["environment"] = {"roles": roles}
    start.write_text(json.dumps(content))
    return run


@needs_chromium
def test_agents_have_the_names_of_their_roles(tmp_path):
    run = with_roles(write_run(tmp_path / "run"), ["solver", "<i>judge</i>"])
    write_report([run], tmp_path / "r.html")
    page = dom(tmp_path / "r.html", tmp_path / "profile")
    assert ">solver<" in page and ">&lt;i&gt;judge&lt;/i&gt;<" in page and ">agent 0<" not in page


def test_metrics_are_a_table_with_the_names_of_roles_also_with_attempts_on_scratch(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    table = jmarl.metrics(run)
    assert table["step"].tolist() == [0, 1, 2, 3, 4, 4] and table["eval/reward"].dropna().tolist() == [0.25, 0.75]
    assert table["agent_1/length"].dropna().tolist() == [5, 6, 7, 8]
    assert jmarl.metrics(with_roles(run, ["solver", "judge"]))["judge/length"].dropna().tolist() == [5, 6, 7, 8]
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + '{"step": 4, "agent_0/mean": 1.0}\n')
    for roles in (["same"] * 2, ["one"], ["agent_1", "agent_0"], ["x", "agent_7"], ["reward", "x"], "text", 3, None):
        table = jmarl.metrics(with_roles(run, roles))
        assert "agent_1/length" in table and table.columns.is_unique, roles
    start = run / "attempts" / "1" / "start.json"
    for text in ("", '{"settings": {"environment": "text"}}'):  # the first of a killed run
        start.write_text(text)
        assert "agent_1/length" in jmarl.metrics(run)
    (run / "attempts").rename(tmp_path / "scratch")
    (run / "attempts").symlink_to(tmp_path / "scratch")
    assert "agent_1/length" in jmarl.metrics(run)
    with pytest.raises(ValueError, match=r"attempts/1 is a link to .*scratch/1, out of"):
        write_report([run], tmp_path / "r.html")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    record_trust(with_roles(run, ["solver", "judge"]), {})
    write_report([run], tmp_path / "r.html")
    assert "judge/length" in jmarl.metrics(run)
    with pytest.raises(FileNotFoundError, match=r"give the output_dir of a run; did you mean '.*/run'\?$"):
        jmarl.metrics(tmp_path / "runn")


def test_the_best_evaluation_is_named_with_what_it_was_chosen_on(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "checkpoints").mkdir()
    best = {"column": "eval/reward", "smallest": False, "history": [[0, 0.25], [4, 0.75]]}
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    write_report([run], tmp_path / "r.html")
    assert content(tmp_path / "r.html")["groups"][0]["best"] == ["run: eval/reward 0.75 after update 4"]
    assert "It was chosen on these held-out tasks" in (tmp_path / "r.html").read_text()


def test_held_out_tasks_that_are_those_of_training_are_named(tmp_path):
    [run] = load_runs([write_run(tmp_path / "run")])
    own, other = ({"items": 8, "sha256": digest} for digest in ("a", "b"))
    for trained, evaluated, known in ((own, own, True), (own, other, False), (own, None, False), (None, None, False)):
        identity = {"identity/data": trained, "identity/held_out": evaluated}
        assert is_trained_on(run._replace(settings={name: x for name, x in identity.items() if x})) == known


@needs_chromium
def test_ten_runs_with_long_names_fit_a_narrow_window(tmp_path):
    """Nothing but tables that scroll by themselves is wider than the page: each run alone, and log axes, chosen in the page."""
    for n in range(10):
        write_run(tmp_path / f"run_{n}_{'with_a_name_that_is_long' * 8}", n % 2, learning_rate=1e-3 * (n // 2 + 1))
    write_report([tmp_path], tmp_path / "r.html")
    script = """
      const timer = setInterval(() => {
        if (!document.body.dataset.ready) return;
        clearInterval(timer);
        const groupings = document.querySelector("select");
        groupings.value = "1";
        groupings.dispatchEvent(new Event("change"));
        document.querySelectorAll("#curves .controls input").forEach((box) => box.click());
        const isWider = (element) => !element.closest(".wide") && element.getBoundingClientRect().right > innerWidth;
        document.body.dataset.wider = [...document.querySelectorAll("main *")].filter(isWider).length;
        const heldOut = document.querySelector("#held-out .wide");
        document.body.dataset.scrolled = heldOut.scrollWidth - heldOut.clientWidth;
      }, 100);"""
    html = (tmp_path / "r.html").read_text().replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "r.html").write_text(html)
    page = dom(tmp_path / "r.html", tmp_path / "profile", "--window-size=600,900")
    assert re.findall(r'data-wider="(\d+)"', page) == ["0"]
    assert re.findall(r'data-scrolled="(\d+)"', page) == ["0"], "held-out results fit without scrolling"
    last = page.split("Last values")[1].split("</table>")[0]
    assert last.count("<tr>") == 1 + 10 and "…" not in last and "stands at 1" in page
    assert page.split('id="held-out"')[1].split("</table>")[0].count("0.25 ± 0.125") == 10
    assert page.split('id="goodput"')[1].split("</table>")[0].count('class="bar"') == 10
    assert page.count('class="band"') == 0 and page.count('class="curve"') == 10 + 2 * 10


@needs_chromium
def test_what_the_page_says_of_updates_turns_and_settings(tmp_path):
    """The value of a held-out curve is that of its own update; with several turns rewards and returns differ; what auto chose
    is not called another value than the default."""
    run, start = write_run(tmp_path / "run", turns=2), tmp_path / "run/attempts/1/start.json"
    content = json.loads(start.read_text())
    content["settings"]["config"] |= {"compute_dtype": "float32", "remat": "auto", "max_error_share": 0.5}
    start.write_text(json.dumps(content))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [
        row | {"step": 12345 * row["step"]} | ({} if "eval/updates" in row else {"turn_0/reward/mean": 1.0}) for row in rows
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([run], tmp_path / "r.html")
    script = """
      const timer = setInterval(() => {
        if (!document.body.dataset.ready) return;
        clearInterval(timer);
        const svg = document.querySelector("#curves svg[aria-label='reward/mean']"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new MouseEvent("mousemove", { clientX: box.left + box.width * 0.6 }));
        document.body.dataset.values = document.querySelector("#curves .values").textContent;
      }, 100);"""
    html = (tmp_path / "r.html").read_text().replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "r.html").write_text(html)
    page = dom(tmp_path / "r.html", tmp_path / "profile")
    assert re.findall(r'data-values="([^"]*)"', page) == ["update 246900.75 held-out after update 493800.125 "]
    last = page.split("Last values")[1].split("</table>")[0]
    assert ">return<" in last and ">held-out return<" in last and ">turn_0/reward/mean<" in last
    assert "(4 recorded), mean return " in page
    settings = page.split('id="settings"')[1].split('id="attempts"')[0]
    changed, chosen = settings.split("the default is auto</h3>")
    assert "compute_dtype" in chosen.split("<details")[0] and "remat" in chosen.split("<details")[1]
    assert "compute_dtype" not in changed and "max_error_share" not in changed


@needs_chromium
def test_a_page_without_evaluations_says_whether_held_out_tasks_were_given(tmp_path):
    run, start = write_run(tmp_path / "run"), tmp_path / "run/attempts/1/start.json"
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(row for row in rows if "eval/" not in row))
    content = json.loads(start.read_text())
    for items, text in ((2, "No evaluation was made yet."), (0, "No held-out tasks were given.")):
        content["settings"]["held_out"] = {"items": items}
        start.write_text(json.dumps(content))
        write_report([run], tmp_path / "r.html")
        assert text in dom(tmp_path / "r.html", tmp_path / "profile").split('id="held-out"')[1].split("</section>")[0]


@needs_chromium
def test_a_constant_column_is_drawn_although_its_mean_is_rounded(tmp_path):
    rows = [{"step": step, "loss": 0.1} for step in range(4)]  # the mean of three is 0.10000000000000002
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([tmp_path], tmp_path / "r.html")
    page = dom(tmp_path / "r.html", tmp_path / "profile")
    assert page.count('class="curve"') == 1 and 1 < page.count('text-anchor="end"') <= 10, "a few labels"


@needs_chromium
def test_the_page_of_a_few_seeds_has_a_line_of_each_and_names_the_differences(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a" / f"seed_{seed}", seed)
    write_run(tmp_path / "b", learning_rate=2e-3)
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "r.html")
    page = dom(tmp_path / "r.html", tmp_path / "profile")
    assert page.count('class="seed"') == 2 * 3 and page.count('class="band"') == 0, "reward and two lengths of the two seeds"
    assert "a (2 seeds)" in page
    differences = page.split("Differences between the runs")[1].split("</table>")[0]
    assert [row.count("</td>") for row in differences.split("</tr>")] == [0, 3, 3, 0]
    assert "learning_rate</th>" in differences and "0, 1" in differences, "and the seeds"


@needs_chromium
def test_dragging_over_a_chart_shows_this_part_of_all_and_lines_stay_where_they_were(tmp_path):
    """Updates 0 to 4 are drawn from 46 to 402 of 420; behind six tenths of the picture there are 3 and 4."""
    write_report([write_run(tmp_path / "run")], tmp_path / "r.html")
    script = """
      const after = () => {
        if (!document.body.dataset.ready) { setTimeout(after, 20); return; }
        const svg = document.querySelector("#curves .chart svg"), box = svg.getBoundingClientRect();
        const fire = (name, at, on) => on.dispatchEvent(new MouseEvent(name, { clientX: box.left + box.width * at }));
        const before = smoothed(inPart({ curve: { x: [1, 2, 3, 4], mean: [0, 1, 2, 3], interval: [0, 0, 0, 0] } }).curve).mean;
        fire("mousedown", 0.6, svg);
        fire("mouseup", 1.1, window);
        const part = inPart({ curve: { x: [1, 2, 3, 4], mean: [0, 1, 2, 3], interval: [0, 0, 0, 0] } }).curve;
        const points = [...document.querySelectorAll("#curves .curve")]
          .map((line) => line.getAttribute("d").split(/[ML]/).length - 1);
        document.body.dataset.seen = JSON.stringify([before, part.x, smoothed(part).mean, points, view.to]);
      };
      after();"""
    with (tmp_path / "r.html").open("a", encoding="utf-8") as file:
        file.write(f"<script>{script}</script>")
    seen = re.findall(r'data-seen="(.*?)"', dom(tmp_path / "r.html", tmp_path / "profile"))[0]
    means, updates, last_means, points, end = json.loads(html.unescape(seen))
    assert updates == [3, 4] and last_means == means[2:] == [1, 1.5] and end is None and len(points) > 2 and {*points} == {2}


def test_curves_of_seeds_are_their_mean_and_interval(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path / f"seed_{seed}", seed)
    (group,) = load_groups([tmp_path])
    reward = curves(group)["reward/mean"]
    assert reward["x"] == [1, 2, 3, 4] and reward["mean"] == [1, 1.125, 1.25, 1.375]
    assert reward["interval"][0] == pytest.approx(4.302653 / 3**0.5, rel=1e-5)  # t(2) times the std of 0, 1, 2 over sqrt(3)
    assert held_out(curves(group))["reward"][1][:2] == [4, 1.75]
    assert goodput(group) == {"sampling": 36.0, "update": 12.0}


def test_means_say_of_how_many_runs_they_are(tmp_path):
    """One of three seeds ended after two updates, so it has no number in the others."""
    for seed in (0, 1, 2):
        write_run(tmp_path / f"seed_{seed}", seed, steps=4 - 2 * (seed == 2))
    (group,) = load_groups([tmp_path])
    columns = curves(group)
    assert columns["reward/mean"]["runs"] == [3, 3, 2, 2] and columns["reward/mean"]["mean"][-1] == 0.875
    first, last = held_out(columns)["reward"]
    assert (first[3], last) == (3, [4, 1.25, pytest.approx(12.7062 / 2, rel=1e-4), 2])


def test_runs_of_equal_settings_are_a_group_and_others_differ(tmp_path):
    paths = [write_run(tmp_path / "x-0", 0), write_run(tmp_path / "x-1", 1), write_run(tmp_path / "y", 0, 5e-4)]
    groups = load_groups(paths)
    assert [group.name for group in groups] == ["x (2 seeds)", "y"]
    table = {row["name"]: row for row in settings_table(groups)}
    assert table["learning_rate"]["differs"] and table["learning_rate"]["values"] == ["0.001", "0.0005"]
    assert not table["algorithm"]["differs"] and table["seed"]["values"] == ["0, 1", "0"]
    assert table.keys() == {"learning_rate", "algorithm", "seed"}, "equal data are no setting"


def test_runs_can_be_grouped_by_a_setting_or_not_at_all(tmp_path):
    paths = [write_run(tmp_path / name, seed, rate) for name, seed, rate in (("x", 0, 2e-3), ("y", 1, 2e-3), ("z", 0, 1e-4))]
    settings = paths[2] / "attempts" / "1" / "start.json"
    settings.write_text(settings.read_text().replace("magrpo", "ippo"))
    found = {by: [group.name for group in groups] for by, groups in groupings_of(load_runs(paths))}
    assert found == {
        "combination of settings": [f"{tmp_path.name} (2 seeds)", "z"],
        "run": ["x", "y", "z"],
        "value of learning_rate": ["learning_rate = 0.0001", "learning_rate = 0.002 (2 runs)"],
        "value of algorithm": ["algorithm = ippo", "algorithm = magrpo (2 runs)"],
    }
    shown = summarize(load_runs(paths))
    numbers = [[member["group"] for member in grouping["members"]] for grouping in shown["groupings"]]
    assert numbers == [[0, 1], [2, 3, 1], [1, 0], [1, 0]] and len(shown["groups"]) == 4, "equal groups are there once"
    assert shown["groups"][0]["curves"]["reward/mean"]["mean"][0] == 0.5 and shown["groups"][3]["num_runs"] == 1
    assert [grouping.by for grouping in groupings_of(load_runs(paths[:1]))] == ["combination of settings"]


def test_other_data_of_equal_settings_are_a_difference(tmp_path):
    paths = [write_run(tmp_path / name) for name in ("x", "y")]
    start = paths[1] / "attempts" / "1" / "start.json"
    start.write_text(start.read_text().replace('"items": 2', '"items": 3'))
    (row,) = [row for row in settings_table(load_groups(paths)) if row["differs"]]
    assert (row["name"], row["values"]) == ("contents of the data", ["{'items': 2}", "{'items': 3}"])


def test_a_directory_stands_for_all_runs_in_it(tmp_path):
    for name in ("sweep/lr=1/seed_0", "sweep/lr=1/seed_1", "sweep/lr=2", "sweep/lr=2/earlier_1"):
        write_run(tmp_path / name, seed=int(name[-1]), learning_rate=float("lr=2" in name))
    (tmp_path / "sweep/lr=1/metrics.jsonl").write_text('{"step": 0, "reward/mean": 1.0}\n')  # over the seeds
    assert [group.name for group in load_groups([tmp_path / "sweep"])] == ["lr=1 (2 seeds)", "lr=2"]


def test_a_directory_without_runs_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"there is no run in {tmp_path}" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_a_run_without_completions_and_attempts_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5, "agent_0/loss": "NaN"}\n')
    write_report([tmp_path], tmp_path / "r.html")
    shown = content(tmp_path / "r.html")
    assert records(tmp_path / "r.html") == shown["steps"]["step"] == [] and shown["groups"][0]["curves"]["loss"]["mean"] == [
        1.5
    ]
    assert shown["groups"][0]["curves"]["agent_0/loss"]["mean"] == [None]


def test_the_page_asks_nothing_of_the_network(tmp_path):
    write_run(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "default-src 'none'" in text
    addresses = set(re.findall(r"""(?:src|href)\s*=\s*["']([^"'#][^"']*)|(https?://[^"'\s<]+)""", text))
    assert addresses == {("data:,", ""), ("", "http://www.w3.org/2000/svg")}


def test_a_small_file_has_fewer_steps_but_the_first_the_last_and_held_out_ones(tmp_path):
    run = write_run(tmp_path / "run", steps=32, words=400)
    whole = write_report([run], tmp_path / "whole.html")
    assert "completions of 32 steps, " in whole
    (pairs := write_run(tmp_path / "pairs")).joinpath("completions.jsonl.gz").unlink()
    assert "completions" not in write_report([pairs], tmp_path / "pairs.html"), "of given pairs nothing is sampled"
    small = write_report([run], tmp_path / "small.html", max_mb=0.2)
    scripts = write_report([pairs], tmp_path / "pairs.html") and (tmp_path / "pairs.html").stat().st_size
    assert (tmp_path / "small.html").stat().st_size < 200_000 + scripts, "the scripts are not counted"
    shown = content(tmp_path / "small.html")
    embedded = records(tmp_path / "small.html")
    steps = [record["step"] for record in embedded if record["kind"] == "train"]
    assert shown["steps"]["step"] == [*range(1, 33), 32], "all recorded steps are named"
    assert steps[0] == 1 and steps[-1] == 32 and shown["every"] > 1 and f"of every {shown['every']} steps" in small
    assert [record["kind"] for record in embedded].count("eval") == 1
    places = zip(shown["steps"]["step"], shown["steps"]["part"], strict=True)
    assert [step for step, part in places if part >= 0] == [record["step"] for record in embedded]
    away = next(step for step in range(2, 32) if step not in steps)
    write_report([run], tmp_path / "asked.html", max_mb=0.2, steps=[away])
    assert {record["step"] for record in records(tmp_path / "asked.html")} == {*steps, away}
    with pytest.raises(ValueError, match="no run has completions of step 77: leave it out of --steps"):
        write_report([run], tmp_path / "none.html", steps=[3, 77])
    assert chosen([(s, "train", 1, 1) for s in range(5)], 2) == [0, 2, 4]


def test_a_long_curve_is_thinned_to_means(tmp_path):
    import numpy as np

    assert len(thin(np.arange(10_000.0))) <= 400
    assert thin(np.arange(801.0))[0] == 1.0  # of 0, 1, 2
    assert thin(np.array([])).size == 0, "of a run that has made no update yet"


@needs_chromium
@pytest.mark.slow
def test_the_report_of_a_long_run_is_small_and_opens_in_three_seconds(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 10))) for _ in range(3000)]
    run = write_run(tmp_path / "run", steps=1)
    file = CompletionsFile(run / "completions.jsonl.gz", 0, 10**8)
    for step in range(1, 201):  # 64 completions of 2 agents, about 90 words each
        record = turn(step, 0, rng, 0) | {"joint": [[g, g] for g in range(32)]}
        record["completions"] = [[[" ".join(rng.choices(words, k=90)) for _ in range(32)] for _ in range(2)] for _ in range(2)]
        record["rewards"], record["parts"] = [[[rng.random()] * 2 for _ in range(32)] for _ in range(2)], {}
        file.write(step, "train", {"tasks": [], "turns": [record]})
    file.close()
    write_report([run], tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 30e6
    (tmp_path / "empty.html").write_text("<p>")
    seconds = {"empty": [], "r": []}
    for n in range(2):
        for name in seconds:
            start = time.monotonic()
            page = dom(tmp_path / f"{name}.html", tmp_path / f"{name}{n}")
            seconds[name].append(time.monotonic() - start)
    assert "step 200 (200 recorded)" in page
    assert min(seconds["r"]) < 3 + 3 * min(seconds["empty"]), "an empty page is as slow as the machine is busy"


def hostile_record(text: str) -> bytes:
    return gzip.compress(f'{{"step": 1, "kind": "train", {text}}}\n'.encode(), mtime=0)


MAKE_HOSTILE = {
    "metrics.jsonl is a pipe": lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")),
    "log.txt is a link to": lambda run: (
        (run / "attempts/1/log.txt").unlink(),
        (run / "attempts/1/log.txt").symlink_to(run.parent / "secret"),
    ),
    "attempts/2 is a link to": lambda run: (run / "attempts/2").symlink_to(run.parent),
    "completions.jsonl.gz is a link to": lambda run: (
        (run / "completions.jsonl.gz").rename(run.parent / "c"),
        (run / "completions.jsonl.gz").symlink_to(run.parent / "c"),
    ),
    "start.json is no record of an attempt": lambda run: (run / "attempts/1/start.json").write_text('{"command": 5}'),
    "start.json has settings that are no mapping": lambda run: (run / "attempts/1/start.json").write_text(
        '{"settings": {"config": 5}}'
    ),
    "config.yaml has more than 1000000 values": lambda run: (run / "config.yaml").write_text(
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    ),
    "config.yaml is a pipe": lambda run: os.mkfifo(run / "config.yaml"),
    "best.json is damaged": lambda run: ((run / "checkpoints").mkdir(), (run / "checkpoints/best.json").write_text("[]")),
}


@pytest.mark.parametrize("sentence", MAKE_HOSTILE)
def test_a_hostile_directory_is_refused_in_a_sentence(sentence, tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    MAKE_HOSTILE[sentence](run)
    with pytest.raises(ValueError, match=sentence):
        write_report([run], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


@needs_chromium
def test_hostile_numbers_and_texts_are_left_out_or_shown_as_text(tmp_path, caplog, monkeypatch):
    run, html = write_run(tmp_path / "run"), "<img src=x onerror=document.body.dataset.ran=1></script><script>alert(1)</script>"
    rows = [
        {"step": 1e400}, {"step": -1}, {"step": math.nan}, {"step": 2**60}, {"step": 5, "eval/updates": math.nan}, [1],
        {"step": 5, "agent_99999999999/loss": 1.0, "huge": 1e400, html: 1, "__proto__": 1},
    ]  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write('{"step": 1, "a": ' + "[" * 10**5 + "\n" + '{"step": 5, "a": ' + "9" * 4000 + "}\n")
    settings = {"config": {html: {"x": [math.inf, {"y": None}]}, "a": html}}
    start = {"host": html, "command": [1, None, html], "devices": [{}], "versions": {html: 1}, "settings": settings}
    (run / "attempts/1/start.json").write_text(json.dumps(start))
    (run / "attempts/1/log.txt").write_bytes(html.encode() + b"\xff\x00")
    (run / "attempts/\u00b2").mkdir()
    (run / "config.yaml").write_text("1: 2\nx: {3: .nan, b: 0x" + "f" * 99 + "}\nd: 2020-01-01\ne: !!binary aGVsbG8=\n")
    monkeypatch.setattr(completions_file, "MAX_MEMORY", 10**6)
    with (run / "completions.jsonl.gz").open("ab") as file:
        file.write(hostile_record(f'"x": {"[" * 200}{"]" * 200}') + hostile_record(f'"turns": "{html}", "x": [NaN, 1e999]'))
        file.write(hostile_record(f'"x": "{"a" * 10**7}"') * 2)
    write_report([run], tmp_path / "r.html")
    script = """
      const timer = setInterval(() => {
        if (!document.body.dataset.ready) return;
        clearInterval(timer);
        const slider = document.querySelector("#episodes input[type=range]");
        slider.value = 1; // after the record of step 1 there is a damaged one
        slider.dispatchEvent(new Event("input"));
      }, 100);"""
    html_page = (tmp_path / "r.html").read_text().replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "r.html").write_text(html_page)
    for sentence in ("line 7 is damaged", "line 15 is damaged", "nested deeper than 100", "record 8 is too large"):
        assert sentence in caplog.text
    page = dom(tmp_path / "r.html", tmp_path / "profile")
    assert "data-ready" in page and "data-ran" not in page and "<img" not in page
    assert page.count("&lt;img src=x") >= 6 and "agent 99999999999" in page
    assert "This step cannot be drawn: its record is damaged" in page
