"""The experiments as commands: flags, errors, printed results and written files."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import time
from typing import get_type_hints

import jax
import pytest

from experiments import report
from experiments.bench import scaling, stacking
from experiments.bench.faults import counted, touch
from experiments.bench.first_minutes import part_of, stack_of
from experiments.debate import DebateConfig
from experiments.environments import ListConfig, row
from experiments.offline import OfflineConfig
from experiments.plot_runs import Plot, draw_panels, draw_together
from experiments.story_length import StoryConfig
from jmarl import load_reward_model
from jmarl.algorithms import ALGORITHMS
from jmarl.config import Optimizer, TrainConfig
from jmarl.envs import ENVIRONMENTS
from jmarl.learning.per_agent import PER_AGENT
from jmarl.plan.devices import GPUS
from tests.running import ROOT, Done, call, tiny_model
from tests.running import start as in_own_process


def start(module: str, flags: str = "") -> Done:
    return call(["python", "-m", f"experiments.{module}", *shlex.split(flags)])


def run(module: str, flags: str = "") -> str:
    """Return what a command prints that must succeed."""
    done = start(module, flags)
    assert done.code == 0, done.text
    return done.text


@pytest.mark.long
def test_bench_step_prints_consistent_times_and_shares_as_json():
    """In its own process, because it counts the programs of the process."""
    size = "--agents 2 --prompts 2 --group 4 --max-new-tokens 8 --repeats 1"
    done = in_own_process(f"python -m experiments.bench.step --model tiny-random {size} --dtype float32 --json".split())
    out = json.loads(done.text)
    names = ("generate_s", "update_s", "first_step_s", "peak_rss_gib", "decode_share_of_bandwidth", "update_share_of_flops")
    assert all(out[name] > 0 for name in names), out
    assert out["compiles"] == 2  # one sampler, one update
    assert abs(out["step_s"] - 2 * out["step_per_prompt_s"]) < 2e-4
    assert abs(out["step_s"] - out["generate_s"] - out["update_s"]) < 2e-4
    assert abs(out["tokens_per_s"] * out["generate_s"] / (2 * 2 * 4 * 8) - 1) < 0.05


def test_bench_scaling_fits_exponents_and_draws_what_was_measured(tmp_path):
    """Of a power its exponent; of a cost that begins to grow late, also the exponent at the end."""
    points = [{"x": float(n), "square": 3.0 * n**2, "late": 1.0 + (n == 8) * 1.0} for n in (1, 2, 4, 8)]
    fitted = scaling.exponents(points)
    assert fitted["square"] == pytest.approx((2, 2)) and fitted["late"] == pytest.approx((0.3, 1))
    scaling.draw({"agents": points}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_bench_scaling_measures_anew_the_panels_that_are_named(tmp_path):
    out, agents = tmp_path / "scaling.png", [{"x": float(n), "step (s)": float(n)} for n in (1, 2)]
    out.with_suffix(".json").write_text(json.dumps({"agents": agents}))
    run("bench.scaling", f"--panels report --quick --out {out}")
    measured = json.loads(out.with_suffix(".json").read_text())
    assert measured["agents"] == agents and [point["x"] for point in measured["report"]] == [1e3, 1e4]
    assert all(point["jmarl report (s)"] > 0 and point["peak (GiB)"] > 0.05 for point in measured["report"])
    done = start("bench.scaling", "--panels agents,years")
    assert done.code != 0 and "panels" in done.text and "years" in done.text


def test_a_stack_counts_for_the_innermost_part_of_the_first_minutes():
    parts = []
    jax.jit(lambda x: parts.append(part_of([*stack_of(sys._getframe())])) or x)(1.0)
    parts.append(part_of([*stack_of(sys._getframe())]))
    assert parts == ["trace", "other"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
@pytest.mark.parametrize("huge", [False, True])
def test_memory_that_is_touched_counts_a_fault_for_each_page(huge):
    """8 MiB in pages of 4 KiB. The system may refuse huge pages, so these have at most as many."""
    faults = counted(lambda: touch(8, huge))["faults"]
    assert faults < 2048 + 500 and (huge or faults >= 2048)


def test_the_bound_of_stacking_falls_from_the_number_of_agents_to_one():
    """Of products of one base that all agents read; a program that only launches kernels gains their number."""
    gpu, weights, agents = GPUS["h100"], 10**12, 4  # so many that two launches take no time
    reach = stacking.break_even(gpu.bfloat16, gpu.bandwidth, 2)
    assert 290 < reach < 300

    def ratio(rows: float, size: int = weights) -> float:
        points = [
            dict(kind="sampling", rows=rows, agents=n, bytes=2 * size, operations=2 * size * rows * n, kernels=1)
            for n in (1, agents)
        ]
        return stacking.with_ratio(points, gpu)[0]["ratio"]

    ratios = [ratio(reach * share) for share in (1 / 100, 1 / agents, 1 / 2, 1, 2)]
    assert ratios == pytest.approx([4, 4, 2, 1, 1], rel=1e-3)
    assert ratio(2 * reach, size=0) == 4


@pytest.mark.long
def test_bench_stacking_compares_equal_tokens_and_parameters():
    """It ends with an error where they are not."""
    lines = run("bench.stacking", "--quick").splitlines()
    assert lines[0] == "tiny:full" and [line.split()[1] for line in lines[3:]] == ["sampling", "update"]
    assert all(float(line.split()[-2]) > 0.05 for line in lines[3:])


def test_the_readme_lists_all_algorithms_with_their_papers():
    """The module prints the full table."""
    printed = run("algorithms").strip()
    assert [line.split("`")[1] for line in printed.splitlines()[2:]] == list(ALGORITHMS)
    table = (ROOT / "README.md").read_text().split("<!-- algorithms -->")[1].split("<!-- end of algorithms -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    rows = [row for part in (slice(3), slice(3, 6)) for line in lines if any(row := line[part])]  # two rows stand in a line
    assert [name.strip("`") for name, *_ in rows] == list(ALGORITHMS)
    assert all(len(idea.split()) >= 3 for _, idea, _ in rows)
    assert [paper for *_, paper in rows] == [row.paper for row in ALGORITHMS.values()]


def test_wrong_flags_are_refused():
    done = start("algorithms", "--bogus")
    assert done.code == 2 and "--bogus" in done.text and "| `" not in done.text
    done = start("bench.step", "--model tiny-random --dtype float16")
    assert done.code != 0 and "invalid choice 'float16'" in done.text


def test_the_joint_mode_of_the_story_follows_from_the_algorithm():
    """Unless it is set."""
    modes = {
        name: StoryConfig.of(algorithm=name, output_dir="").episodes.joint_mode
        for name in ("magrpo", "maac", "c3", "madpo_iter", "marlhf")
    }
    assert modes == {
        "magrpo": "cross", "maac": "cross", "c3": "counterfactual", "madpo_iter": "aligned", "marlhf": "aligned",
    }  # fmt: skip
    aligned = StoryConfig.of(algorithm="grpo", joint_mode="aligned", output_dir="")
    assert aligned.episodes.joint_mode == "aligned"


@pytest.mark.parametrize(
    "module", ["story_length", "code_team", "debate", "mathematics", "tools", "building", "writing", "offline"]
)
def test_experiments_take_one_learning_rate_per_agent(module):
    """No experiment declares the optimizer settings again with narrower types."""
    members = vars(importlib.import_module(f"experiments.{module}"))
    configs = [member for member in members.values() if isinstance(member, type) and issubclass(member, TrainConfig)]
    assert configs
    for cfg in configs:
        hints = get_type_hints(cfg)
        assert hints["optimizer"] is Optimizer and not set(PER_AGENT) & hints.keys(), cfg


def test_settings_that_follow_from_others_follow_from_those_given_and_not_from_defaults():
    """The turns of a debate follow from its opponent."""
    cfg = DebateConfig.of(opponent="scripted", speeches=3, output_dir="")
    assert cfg.episodes.num_turns == 3 and cfg.num_agents == 1
    assert OfflineConfig.of(data="pairs.json").data == "pairs.json"  # the default, no file, is refused


@pytest.mark.long
def test_offline_trains_a_reward_model_of_a_team(tiny_dir, tmp_path):
    """The saved model scores joint actions in the order of the data."""
    rows = [{"prompt": f"{n} and", "chosen": ["seven", "apples"], "rejected": ["the", "market"]} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--data {tmp_path}/pairs.jsonl --model {tiny_model(tiny_dir)} --output-dir {tmp_path}/run --agents 2"
    out = run("offline", f"{flags} --algorithm reward_model --num-updates 3 --learning-rate 1e-2")
    before, after = (line for line in out.splitlines() if line.startswith("held out"))
    assert "loss 0.693, accuracy 0.500" in before and "accuracy 1.000" in after
    model = load_reward_model(tmp_path / "run" / "reward_model")
    first, second = model.score([["3 and"] * 2] * 2, [["seven", "the"], ["apples", "market"]])
    assert first > second


def test_the_list_of_environments_is_written_as_printed():
    """Except for data sets that are on this machine. The README names all of them."""
    printed = run("environments").strip()
    assert [line.split("`")[1] for line in printed.splitlines()[2:]] == list(ENVIRONMENTS)
    assert printed.replace("(here)", "(not downloaded)") in (ROOT / "experiments" / "README.md").read_text()
    section = (ROOT / "README.md").read_text().split("## Environments")[1].split("\n## ")[0]
    assert {f"`{name}`" for name in ENVIRONMENTS} <= set(re.findall(r"`[^`]+`", section))


def test_listing_environments_does_not_time_them():
    """Timing would take a second for each environment."""
    began = time.process_time()
    rows = [row(name, ListConfig()) for name in ENVIRONMENTS]
    assert time.process_time() - began < len(ENVIRONMENTS)
    assert len(row("grid", ListConfig(speed=True))) == len(rows[0]) + 1


@pytest.mark.parametrize(
    "module, config, options",
    [
        ("debate", "DebateConfig", {"num_turns": 6}),
        ("debate", "DebateConfig", {"opponent": "frozen", "frozen_agents": (0,)}),
        ("debate", "DebateConfig", {"judge_model": "somebody"}),
        ("mathematics", "MathConfig", {"environment": "math_verifier", "num_turns": 2}),
        ("mathematics", "MathConfig", {"data": "gsm8k", "difficulty": 3}),
        ("mathematics", "MathConfig", {"data_path": "rows.jsonl"}),
        ("mathematics", "MathConfig", {"topics": ("arithmetik",)}),
        ("mathematics", "MathConfig", {"data": "svamp", "topics": ("word",)}),
        ("building", "BuildingConfig", {"environment": "house_build", "max_letters": 9}),
        ("building", "BuildingConfig", {"environment": "function_calling", "calls": (5, 2)}),
        ("tools", "ToolsConfig", {"kinds": ("arithmetik",)}),
        ("tools", "ToolsConfig", {"demonstrations": -1}),
        ("tools", "ToolsConfig", {"lora_rank": 8, "demonstrations": 8}),
        ("tools", "ToolsConfig", {"imitation_updates": 8}),
        ("tools", "ToolsConfig", {"demonstrations": 8, "imitation_learning_rate": 0.0}),
        ("tools", "ToolsConfig", {"frozen_agents": (0,), "demonstrations": 8}),
        ("building", "BuildingConfig", {"num_turns": 2, "branching": "chain", "history": "append", "demonstrations": 8}),
        ("mathematics", "MathConfig", {"demonstrations": 8, "environment": "math", "imitation_slips": 0.3}),
        ("mathematics", "MathConfig", {"demonstrations": 8, "environment": "math_verifier", "imitation_slips": 1.5}),
        ("mathematics", "MathConfig", {"model": "tiny", "chat": False, "topics": ("arithmetic",), "difficulty": 2}),
        ("mathematics", "MathConfig", {"model": "tiny", "topics": ("arithmetic",), "chat": True}),
        ("mathematics", "MathConfig", {"model": "tiny", "chat": False, "topics": ("arithmetic", "word")}),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(module, config, options):
    config_class = getattr(importlib.import_module(f"experiments.{module}"), config)
    with pytest.raises(ValueError, match=f"{list(options)[-1]}=.* is not allowed"):
        config_class.of(**options, output_dir="")


def test_the_hint_how_to_resume_keeps_all_other_flags(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "2" / "meta.json").touch()
    flags = ["--remat", "auto", "--resume", "auto", "--name", "a --resume b", "--micro-batches", "auto", "--run.resume=True"]
    monkeypatch.setattr(sys, "argv", ["x.py", *flags])
    hint = report.resume_hint(TrainConfig.of(output_dir=str(tmp_path)))
    kept = ["--remat", "auto", "--name", "a --resume b", "--micro-batches", "auto", "--resume"]
    assert shlex.split(hint)[-len(kept) :] == kept and hint.count("--resume") == 2


def test_plots_show_what_a_run_has(tmp_path):
    """Rewards of rollouts, losses and accuracies of given data. What cannot be compared or is missing is said in a sentence."""
    pytest.importorskip("matplotlib", reason="pip install 'jmarl[plot]'")
    columns = {"rollouts": "reward/mean", "dpo": "loss", "empty": "tokens"}
    for name, column in columns.items():
        (tmp_path / name).mkdir()
        rows = [{"step": i, column: 1.0 - i, "agent_0/accuracy": 0.5, "agent_0/length": 3.0} for i in range(2)]
        rows.append({"step": 1, "eval/updates": 2, f"eval/{column}": 0.5, "eval/accuracy": 0.7})
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rollouts, dpo, empty = (tmp_path / name for name in columns)
    drawn = {}
    for name, rows in {"rollouts": (rollouts, rollouts), "dpo": (dpo,)}.items():
        left, right = draw_together(Plot(rows)).axes
        drawn[name] = [(axes.get_ylabel(), [line.get_ydata().tolist() for line in axes.lines]) for axes in (left, right)]
    assert drawn["dpo"] == [("loss", [[1, 0], [0.5], [0.5]]), ("accuracy", [[0.5, 0.5], [0.7]])]
    assert drawn["rollouts"][0][0] == "reward" and drawn["rollouts"][1][1][0] == [3, 3]
    assert [axes.get_ylabel() for axes in draw_panels(Plot((dpo, rollouts))).axes] == ["loss", "reward"]
    for runs, message in (((dpo, rollouts), "dpo learned from given data .*--each"), ((empty,), "empty has no column loss")):
        with pytest.raises(SystemExit, match=message):
            draw_together(Plot(runs))
