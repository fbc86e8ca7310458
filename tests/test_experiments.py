"""The experiments as commands: flags, errors, printed results and written files."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jmarl
from experiments import report
from jmarl import algorithms
from jmarl.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)


def run(*command: str) -> str:
    """Return the standard output of a command that must succeed."""
    done = start(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_bench_step_prints_consistent_times_and_shares_as_json():
    size = ("--agents", "2", "--prompts", "2", "--group", "4", "--max-new-tokens", "8", "--repeats", "1")
    out = json.loads(run("experiments.bench.step", "--model", "tiny-random", *size, "--dtype", "float32", "--json"))
    names = ("generate_s", "update_s", "first_step_s", "peak_rss_gib", "decode_share_of_bandwidth", "update_share_of_flops")
    assert all(out[name] > 0 for name in names), out
    assert out["compiles"] == 2  # one sampler, one update
    assert abs(out["step_s"] - 2 * out["step_per_prompt_s"]) < 2e-4
    assert abs(out["step_s"] - out["generate_s"] - out["update_s"]) < 2e-4
    assert abs(out["tokens_per_s"] * out["generate_s"] / (2 * 2 * 4 * 8) - 1) < 0.05


def test_the_readme_lists_all_algorithms_with_their_papers():
    """The module prints the full table."""
    from jmarl.algorithms import ALGORITHMS

    printed = run("experiments.algorithms").strip()
    assert [line.split("`")[1] for line in printed.splitlines()[2:]] == list(ALGORITHMS)
    table = (ROOT / "README.md").read_text().split("<!-- algorithms -->")[1].split("<!-- end of algorithms -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    rows = [line[:3] for line in lines] + [line[3:] for line in lines]  # two rows stand in a line
    assert [name.strip("`") for name, *_ in rows] == list(ALGORITHMS)
    assert all(len(idea.split()) >= 3 for _, idea, _ in rows)
    assert [paper for *_, paper in rows] == [row.paper for row in ALGORITHMS.values()]


def test_the_table_of_algorithms_takes_no_flags():
    done = start("experiments.algorithms", "--bogus")
    assert done.returncode == 2 and "--bogus" in done.stderr and not done.stdout


def test_bench_step_refuses_an_unknown_dtype():
    done = start("experiments.bench.step", "--model", "tiny-random", "--dtype", "float16")
    assert done.returncode != 0
    assert "invalid choice 'float16'" in done.stderr


def test_the_joint_mode_of_the_story_follows_from_the_algorithm():
    """Unless it is set."""
    from experiments.story_length import StoryConfig

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
    "module", ["story_length", "code_team", "debate", "games", "mathematics", "tools", "building", "writing", "offline"]
)
def test_experiments_take_one_learning_rate_per_agent(module):
    """No experiment declares the optimizer settings again with narrower types."""
    from typing import get_type_hints

    from jmarl.config import Optimizer, TrainConfig
    from jmarl.learning.per_agent import PER_AGENT

    members = vars(importlib.import_module(f"experiments.{module}"))
    configs = [member for member in members.values() if isinstance(member, type) and issubclass(member, TrainConfig)]
    assert configs
    for cfg in configs:
        hints = get_type_hints(cfg)
        assert hints["optimizer"] is Optimizer and not set(PER_AGENT) & hints.keys(), cfg


def test_settings_that_follow_from_others_follow_from_those_given_and_not_from_defaults():
    """The turns of a debate follow from its opponent."""
    from experiments.debate import DebateConfig
    from experiments.offline import OfflineConfig

    cfg = DebateConfig.of(opponent="scripted", speeches=3, output_dir="")
    assert cfg.episodes.num_turns == 3 and cfg.num_agents == 1
    assert OfflineConfig.of(data="pairs.json").data == "pairs.json"  # the default, no file, is refused


@pytest.mark.long
def test_a_run_in_the_default_directory_can_be_resumed(tiny_dir, tmp_path, monkeypatch):
    """A checkpoint is compared with the settings of the flags."""
    from experiments import story_length

    monkeypatch.chdir(tmp_path)
    few = dict(model=str(tiny_dir("llama")), num_prompts=1, num_generations=2, max_new_tokens=4, held_out=0, save_every=1)
    few |= dict(progress=False, save_models=False)
    story_length.run(story_length.StoryConfig.of(num_updates=1, **few))
    (result,) = story_length.run(story_length.StoryConfig.of(num_updates=2, resume=True, **few))
    assert len(result.rewards) == 1


@pytest.mark.long
def test_offline_trains_on_a_file_of_preferences(tiny_dir, tmp_path):
    """Before training, the policy equals its reference, so accuracy is one half. Metrics and a model are written."""
    rows = [{"prompt": f"{n} and", "chosen": "seven apples", "rejected": "the market"} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--num-updates", "3", "--learning-rate", "1e-2", "--batch-size", "8", "--output-dir", str(tmp_path / "run"))
    out = run("experiments.offline", "--data", str(tmp_path / "pairs.jsonl"), "--model", str(tiny_dir("llama")), *flags)
    before, after = (line for line in out.splitlines() if line.startswith("held out"))
    assert "before: loss 0.693, accuracy 0.500" in before and "accuracy 1.000" in after
    assert (tmp_path / "run" / "models" / "agent_0" / "model.safetensors").exists()


@pytest.mark.long
def test_offline_trains_a_reward_model_of_a_team(tiny_dir, tmp_path):
    """The saved model scores joint actions in the order of the data."""
    from jmarl import load_reward_model

    rows = [{"prompt": f"{n} and", "chosen": ["seven", "apples"], "rejected": ["the", "market"]} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--num-updates", "3", "--learning-rate", "1e-2", "--output-dir", str(tmp_path / "run"), "--agents", "2")
    model = ("--model", str(tiny_dir("llama")), "--algorithm", "reward_model")
    out = run("experiments.offline", "--data", str(tmp_path / "pairs.jsonl"), *model, *flags)
    before, after = (line for line in out.splitlines() if line.startswith("held out"))
    assert "loss 0.693, accuracy 0.500" in before and "accuracy 1.000" in after
    model = load_reward_model(tmp_path / "run" / "reward_model")
    first, second = model.score([["3 and"] * 2] * 2, [["seven", "the"], ["apples", "market"]])
    assert first > second


@pytest.mark.long
def test_the_scripts_of_the_readme_run(tmp_path, monkeypatch, random_agent, tiny_config, tiny_tokenizer):
    """The first script and the example of an own algorithm run unchanged, except for the model and sizes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(algorithms.ALGORITHMS, "mine", None)  # removed after the test
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    jmarl.save_pretrained("tiny", agent.config, agent.params, agent.tokenizer)
    first = blocks[0]
    for name, small in {"smollm2-135m-instruct": "tiny", "num_updates=30": "num_updates=1", "_tokens=24": "_tokens=4"}.items():
        assert name in first
        first = first.replace(name, small)
    names: dict = {}
    exec(first, names)
    assert (tmp_path / "runs" / "first" / "models" / "agent_1" / "model.safetensors").exists()
    (own,) = (block for block in blocks if "def median_baseline" in block)
    exec(own, names)
    settings = 'num_updates=1, max_new_tokens=4, num_generations=3, progress=False, algorithm="mine", output_dir="own"'
    exec(f"result = jmarl.train(team, reward, items, jmarl.TrainConfig.of({settings}))", names)
    assert len(names["result"].rewards) == 1


def test_the_list_of_environments_is_written_as_printed():
    """Except for data sets that are on this machine. The README names all of them."""
    from jmarl.envs import ENVIRONMENTS

    printed = run("experiments.environments").strip()
    assert [line.split("`")[1] for line in printed.splitlines()[2:]] == list(ENVIRONMENTS)
    assert printed.replace("(here)", "(not downloaded)") in (ROOT / "experiments" / "README.md").read_text()
    section = (ROOT / "README.md").read_text().split("## Environments")[1].split("\n## ")[0]
    assert {f"`{name}`" for name in ENVIRONMENTS} <= set(re.findall(r"`[^`]+`", section))


def test_listing_environments_does_not_time_them():
    """Timing would take a second for each environment."""
    from experiments.environments import ListConfig, row
    from jmarl.envs import ENVIRONMENTS

    began = time.process_time()
    rows = [row(name, ListConfig()) for name in ENVIRONMENTS]
    assert time.process_time() - began < len(ENVIRONMENTS)
    assert len(row("grid", ListConfig(speed=True))) == len(rows[0]) + 1


@pytest.mark.long
@pytest.mark.parametrize(
    "game, ways, flags", [("grid", 1, ("0", "1", "--ways", "team", "--processes", "2")), ("sudoku", 3, ("0",))]
)
def test_games_print_a_row_per_method_with_possible_returns(game, ways, flags):
    """Two updates of a small model; in the first case, seeds run in two processes."""
    lines = run("experiments.games", game, "--num-updates", "2", "--width", "16", "--seeds", *flags).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 1 + ways and all(0 <= float(line.split("|")[3].split("±")[0]) <= 1 for line in table[1:])


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
    flags = ["--remat", "auto", "--resume", "auto", "--name", "a --resume b", "--micro-batches", "auto", "--run.resume=True"]
    monkeypatch.setattr(sys, "argv", ["x.py", *flags])
    hint = report.resume_hint(TrainConfig.of(output_dir=str(tmp_path)))
    kept = ["--remat", "auto", "--name", "a --resume b", "--micro-batches", "auto", "--resume"]
    assert shlex.split(hint)[-len(kept) :] == kept and hint.count("--resume") == 2
