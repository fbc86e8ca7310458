"""Every shipped configuration is run for two updates by a tiny model, and can be listed, shown and found by name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jmarl.cli.configs import shipped_configs
from jmarl.cli.main import main
from jmarl.config.yaml_file import read_yaml

FILES = {
    "pairs.jsonl": [{"prompt": "What is", "chosen": "the answer", "rejected": "a farmer"}] * 3,
    "team_pairs.jsonl": [{"prompt": "What is", "chosen": ["the", "answer"], "rejected": ["a", "farmer"]}] * 3,
    "data.jsonl": [{"observations": ["What?", "Yes."], "actions": ["The answer"], "rewards": [1.0]}] * 3,
    "prompts.jsonl": [{"prompt": f"Item {i} is"} for i in range(4)],
}
SMALL = ["num_updates=2", "learning_rate=1e-3", "progress=false", "tensorboard=false", "save_models=false", "save_every=0"]
SAMPLED = ["max_new_tokens=4", "num_prompts=2", "num_generations=2", "num_tasks=4"]
MORE = {  # settings that make a run smaller
    "ppo": ["held_out=2"], "mappo": ["num_generations=1"], "debate": ["num_generations=1", "eval_envs.0.max_turns=1"],
    "tools": ["environment.max_turns=1"], "code": ["eval_envs.0.max_turns=1", "compute_dtype=float32"],
    "magrpo": ["held_out=1"], "math": ["held_out=1"], "writing": ["held_out=1"], "games": ["options.max_turns=1"],
    "madpo_iter": ["round_updates=1"], "marlhf": ["reward_updates=2", "batch_size=2"], "lora": ["lora_rank=2"],
    "mixture": ["train_envs.0.max_turns=1", "train_envs.1.max_turns=1", "held_out=2"], "sweep": ["lora_rank=2", "held_out=1"],
}  # fmt: skip
ON_DATA = ("dpo", "madpo", "sft")
# The others train what one of these does, or what tests of `jmarl train`, of trainers and of environments do: they are checked
# up to the first step, and trained by -m nightly.
TRAINED = ("ppo", "iac", "mappo", "c3", "debate", "sft", "data", "sweep")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tiny_dir):
    root = tmp_path_factory.mktemp("configs")
    for name, rows in FILES.items():
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root, str(tiny_dir("llama", max_position_embeddings=2048))


def arguments(name: str, model: str) -> list[str]:
    models = len(read_yaml(shipped_configs()[name]).tree.get("models", [model]))
    small = SMALL + (["batch_size=2"] if name in ON_DATA else SAMPLED) + MORE.get(name, [])
    return ["train", "--config", name, "--output", f"out/{name}", "--set", f"models=[{', '.join([model] * models)}]", *small]


@pytest.fixture
def in_directory(directory, monkeypatch) -> str:
    """The directory with the data as the current one; the tiny model."""
    root, model = directory
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return model


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in TRAINED else pytest.param(n, marks=pytest.mark.nightly) for n in shipped_configs()])
def test_a_shipped_configuration_runs(name, in_directory, capsys):
    assert main(arguments(name, in_directory)) == 0, capsys.readouterr().err
    files = [*Path("out", name).glob("**/metrics.jsonl")]
    assert files and all(sum("eval/updates" not in line for line in file.read_text().splitlines()) == 2 for file in files)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*shipped_configs()} - {*TRAINED}))
def test_a_shipped_configuration_passes_all_checks_of_a_run(name, in_directory, capsys):
    """With its models, its data and one turn of its first task."""
    assert main([*arguments(name, in_directory), "--dry-run"]) == 0, capsys.readouterr().err
    assert f"nothing was trained or written; the run would write to out/{name}\n" in capsys.readouterr().out


def test_configurations_are_listed_and_shown(capsys):
    assert main(["configs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_configs()) and all(len(line.split()) > 4 for line in lines)
    assert main(["configs", "show", "ppo"]) == 0
    assert capsys.readouterr().out == shipped_configs()["ppo"].read_text()
    assert main(["configs", "show", "pppo"]) == 2
    assert "did you mean 'ppo'" in capsys.readouterr().err


def test_settings_are_found_by_name_alias_and_text(capsys):
    def lines(*words: str) -> list[str]:
        assert main(["configs", "settings", *words]) == 0
        return capsys.readouterr().out.splitlines()

    kl = "loss.kl_coef = 0.0 | a number >= 0 | Weight of the KL term"
    only_in_text = [False, False]  # kl_target and perturb
    assert [line.startswith(kl) for line in lines("KL_coef")] == [True, *only_in_text]
    assert "ppo.kl_coef (MRLM): as kl_coef" in lines("kl_coef", "--aliases")
    tokens = "sampling.max_new_tokens = 128 | a whole number >= 1 | Longest completion, in tokens."
    assert lines("max_completion_length") == [f"{tokens} | also max_completion_length"]  # of TRL
    assert lines("longest completion, in") == [tokens]
    assert lines("lerning_rate") == [
        "no setting has the word 'lerning_rate'; did you mean 'learning_rate'? (with --aliases this command looks in the keys "
        "of MRLM too)"
    ]
    turn = lines("turn")
    assert any(line.startswith("episodes.num_turns = ") for line in turn)
    assert all(re.search("(?<![a-z])turn", line) for line in turn), "return has no word that begins so"
    everything = lines()
    assert not any("(MRLM)" in line for line in everything) and all(line.count(" | ") == 2 for line in everything)


def test_shipped_configurations_are_short_and_cover_all_families():
    configs = shipped_configs()
    text = "\n".join(path.read_text() for path in configs.values())
    assert all(len(path.read_text().splitlines()) <= 30 and path.read_text().startswith("# ") for path in configs.values())
    algorithms = ("ppo", "grpo", "ippo", "mappo", "iac", "maac", "c3", "dpo", "madpo", "madpo_iter", "marlhf", "sft", "rae")
    assert all(f"algorithm: {name}\n" in text for name in algorithms)
    assert all(f"env_type: {name}" in text for name in ("code", "math", "debate", "tools")) and "lora_rank: " in text
    assert all(f"environment: {name}\n" in text for name in ("story", "tldr", "sudoku")) and "reward: " in text
