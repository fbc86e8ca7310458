"""`jmarl report --compare`: statistics in closed form, groups, the files beside the page, and the section of the page."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from browser import dom, needs_chromium
from run_directories import write_run

from jmarl.cli.main import main
from jmarl.report.comparison import Comparison, compare, half_of, holm, markdown, mean_of, over_tokens, tex, tex_number, welch
from jmarl.report.load import common_name, load_runs

SEEDS = {"a": (0, 1, 2), "b": (5, 7, 9, 11)}  # groups of the study; the last evaluation of a run is 0.75 + its seed


@pytest.fixture
def study(tmp_path) -> Path:
    """Two groups of runs; one of the second failed after 2 of 4 updates. Seed s samples 10 (s + 1) tokens in each update."""
    for name, seeds in SEEDS.items():
        for seed in seeds:
            run = write_run(tmp_path / name / f"seed_{seed}", seed, 1e-3 * len(seeds), steps=2 if seed == 11 else 4)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            rows = [row if "eval/updates" in row else {**row, "tokens": 10 * (seed + 1)} for row in rows]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            change(run, num_updates=4)
    return tmp_path


def change(run: Path, **settings: object) -> None:
    """Change recorded settings of a run."""
    start = run / "attempts" / "1" / "start.json"
    content = json.loads(start.read_text())
    content["settings"]["config"] |= settings
    start.write_text(json.dumps(content))


def test_welch_is_that_of_scipy():
    from scipy import stats

    x, y = np.array([0.31, 0.58, 0.44, 0.71, 0.52]), np.array([0.1, 0.4, 0.25])
    expected = stats.ttest_ind(x, y, equal_var=False)
    difference, half, p = welch(x, y)
    interval = expected.confidence_interval()
    assert difference == pytest.approx(x.mean() - y.mean()) and p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (difference - half, difference + half) == pytest.approx((interval.low, interval.high), rel=1e-9)
    constant = welch(x, np.array([0.1, 0.1, 0.1]))  # the test of one sample against 0.1
    assert constant[2] == pytest.approx(stats.ttest_1samp(x, 0.1).pvalue, rel=1e-9)


def test_equal_numbers_have_an_exact_mean_and_no_test():
    x, y, one = np.array([0.1] * 3), np.array([0.1] * 7), np.array([0.3])
    assert (mean_of(x), half_of(x)) == (0.1, 0.0)
    for pair in ((x, y), (x, x + 1), (x, one), (one, np.array([0.1, 0.2])), (x, np.array([]))):
        difference, half, p = welch(*pair)
        assert math.isnan(half) and math.isnan(p)
        assert difference == pytest.approx(mean_of(pair[0]) - mean_of(pair[1]), nan_ok=True)
    assert welch(x, y)[0] == 0 and math.isnan(half_of(one)) and math.isnan(mean_of(np.array([])))
    assert math.isnan(welch(np.array([1e-200, 2e-200]), np.array([1e-200] * 2))[2]), "a variance that is rounded to 0"


def test_holm_by_hand():
    corrected = holm([0.01, 0.04, math.nan, 0.03, 0.9])
    assert corrected[:2] == pytest.approx([0.04, 0.09]) and corrected[3:] == pytest.approx([0.09, 0.9]), "4, 3, 2 and 1 times"
    assert math.isnan(corrected[2]) and holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_groups_are_compared_over_finished_runs(study):
    content = compare(load_runs([study]), Comparison(["eval/reward", "reward/mean"], (), "a"))
    first, second, *_ = content["rows"]
    assert (first["group"], first["runs"], first["left_out"], first["mean"]) == ("a", 3, 0, 1.75)
    assert first["high"] - first["mean"] == pytest.approx(4.302653 / 3**0.5, rel=1e-5)  # t(2) times the std of 0, 1, 2
    assert (second["runs"], second["left_out"], second["mean"], second["difference"]) == (3, 1, 7.75, 6.0)
    assert first["p"] is None and second["p"] == second["p_holm"] == pytest.approx(welch(*np.array([[5, 7, 9], [0, 1, 2]]))[2])
    assert [row["mean"] for row in content["rows"][2:]] == [1 + 0.1875, 7 + 0.1875], "the mean of four updates"
    assert [table["updates"][1]["mean"][-1] for table in content["tables"]] == [7.75, 7.375], "curves are of the same runs"
    assert content["tables"][0]["cells"][0][-2:] == ["–", "–"]


def test_groups_of_a_setting_of_names_and_of_one_run(study):
    runs = load_runs([study])
    change(study / "a/seed_0", clip=0.5)
    by = compare(load_runs([study]), Comparison(["eval/reward"], ["learning_rate", "clip"], "learning_rate=0.003,clip=0.5"))
    names = ["learning_rate=0.003,clip=0.5", "learning_rate=0.003,clip=not recorded", "learning_rate=0.004,clip=not recorded"]
    assert [row["group"] for row in by["rows"]] == names and by["tables"][0]["cells"][1][2:] == ["0", "2.25 ± 6.4", "+1.5", "–"]
    assert by["rows"][0]["low"] is None and by["tables"][0]["cells"][0][1:4] == ["1", "0", "0.75"]
    labels = {study / "a/seed_0": "x", study / "a/seed_1": "x", study / "none": "x", study / "other": "y"}
    rows = compare(runs, Comparison(["eval/reward"], (), "y", labels))["rows"]
    assert [(row["group"], row["runs"], row["left_out"], row["mean"]) for row in rows] == [("x", 2, 1, 1.25), ("y", 0, 1, None)]
    for run in runs[:2]:
        (study / "a" / f"seed_{run.name[-1]}").rename(study / f"seed_1{run.name[-1]}")
    assert common_name(load_runs([study / "seed_10", study / "seed_11"])) == study.name, "seed_1 is no name of both"


def test_a_curve_over_tokens_interpolates_up_to_the_fewest_of_its_runs(study):
    curve = over_tokens(load_runs([study / "a"])[:2], "reward/mean")  # of 10 and 20 tokens an update; 0 to 3/8, and 1 more
    assert curve and curve["x"] == [10, 20, 30, 40]
    assert curve["mean"] == pytest.approx([(0 + 1) / 2, (1 / 8 + 1) / 2, (2 / 8 + 1 + 1 / 16) / 2, (3 / 8 + 1 + 1 / 8) / 2])
    held_out = over_tokens(load_runs([study / "a"])[:1], "eval/reward")
    assert held_out and (held_out["x"], held_out["mean"]) == ([0, 40], [0.25, 0.75])
    assert over_tokens(load_runs([write_run(study / "c")]), "reward/mean") is None and over_tokens([], "loss") is None


def test_the_tables_are_beside_the_page_and_the_files_of_a_user_stay(study, capsys, monkeypatch):
    monkeypatch.chdir(study)
    command = ["report", "a", "b", "-o", "out/r.html", "--compare", "eval/reward", "--against", "a"]
    assert main(command) == 0 and main(command) == 0, "its own files are replaced"
    assert "7 runs" in (line := capsys.readouterr().out.splitlines()[0]) and line.endswith(".md, .tex and .csv beside it")
    assert sorted(path.name for path in Path("out").iterdir()) == ["r.csv", "r.html", "r.md", "r.tex"]
    rows = list(csv.DictReader(Path("out/r.csv").read_text().splitlines()))
    assert float(rows[0]["high"]) == pytest.approx(1.75 + 4.302652729749464 / 3**0.5, rel=1e-14) and rows[0]["p"] == ""
    text = Path("out/r.md").read_text()
    assert "| eval/reward | runs | left out | mean | difference to a | p |\n|---|---:|---:|---:|---:|---:|\n" in text
    assert "| a | 3 | 0 | 1.75 ± 2.5 | – | – |\n| b | 3 | 1 | 7.75 ± 5 | +6 ± 4.2 | 0.02 |\n" in text and "Holm" in text
    text = Path("out/r.tex").read_text()
    assert "b & $3$ & $1$ & $7.75 \\pm 5$ & $+6 \\pm 4.2$ & $0.02$ \\\\\n" in text
    assert r"95 \% interval" in text and "Holm" in text
    assert text.count("{tabular}") == 2 and "rule" not in text
    for name in ("r.md", "r.tex", "r.csv"):
        mine = Path("out", name)
        old = mine.read_text()
        mine.write_text("of the user")
        assert main(command) == 2 and f"{mine} is no file of a report" in capsys.readouterr().err
        assert mine.read_text() == "of the user"
        mine.write_text(old)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--compare eval/rewrd", "no run has the column 'eval/rewrd'; did you mean 'eval/reward'?"),
        ("--compare step", "no run has the column 'step'"),
        ("--compare eval/reward --by lerning_rate", "no run has the setting 'lerning_rate'; did you mean 'learning_rate'?"),
        ("--compare eval/reward --against c", "there is no group 'c' to compare against: choose 'a' or 'b'"),
        ("--by learning_rate", "--by has no effect without --compare COLUMN"),
        ("--against a", "--against has no effect without --compare COLUMN"),
        ("--watch --compare eval/reward", "--compare eval/reward has no effect with --watch"),
        ("--compare eval/reward -o r.md", "--output r.md is the HTML file, beside which the table is r.md"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_a_sentence(flags, sentence, study, capsys, monkeypatch):
    monkeypatch.chdir(study)
    assert main(["report", "a", "b", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"jmarl: {sentence}") and not list(study.glob("r*"))


def test_hostile_names_are_text_in_latex_and_markdown():
    assert tex("a_b%c&d#e$f{g}\\h~i^j\n[k]") == (
        r"a\_b\%c\&d\#e\$f\{g\}\textbackslash{}h\textasciitilde{}i\textasciicircum{}j {[}k{]}"
    )
    assert tex("<x|–") == r"\textless{}x\textbar{}--"
    assert tex_number("-1.2e-05 ± 3e+06") == r"$-1.2 \cdot 10^{-5} \pm 3 \cdot 10^{6}$" and tex_number("–") == "--"
    table = {"column": "a|b", "cells": [["x\\|<b>\n", "1"]]}
    assert r"| a\|b | n |" in (text := markdown({"head": ["group", "n"], "tables": [table], "caption": "c"}))
    assert r"| x\\\|\<b> | 1 |" in text


@needs_chromium
def test_the_comparison_is_at_the_top_of_the_page_with_curves_over_updates_and_tokens(study):
    hostile = "<img src=x onerror=document.body.dataset.ran=1>"
    change(study / "b/seed_5", clip=hostile)
    flags = [
        "--compare",
        "reward/mean",
        "eval/reward",
        "--by",
        "learning_rate",
        "clip",
        "--against",
        f"learning_rate=0.004,clip={hostile}",
    ]
    assert main(["report", str(study), "-o", str(study / "r.html"), *flags]) == 0
    page = dom(study / "r.html", study / "profile")
    section = page.split('id="comparison"')[1].split('id="curves"')[0]
    titles = re.findall(r'<svg viewBox[^>]* aria-label="([^"]*)"', section)
    assert titles == [f"{column} over {unit}" for column in ("reward/mean", "eval/reward") for unit in ("updates", "tokens")]
    assert section.count('class="curve"') == 6 and section.count('class="band"') == 4, "one of three groups is one run"
    assert section.count('class="point"') == 12 and section.count("<tr>") == 8 and "1.75 ± 2.5" in section
    assert "data-ran" not in page and "<img" not in page and "&lt;img src=x" in section
