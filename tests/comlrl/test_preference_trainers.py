"""Trainers that learn from preferences and texts."""

from __future__ import annotations

import importlib
import json

import pytest

from jmarl import (  # fmt: skip
    DPOConfig,
    DPOTrainer,
    MADPOConfig,
    MADPOIterConfig,
    MARLHFConfig,
    MARLHFIterConfig,
    SFTConfig,
    SFTTrainer,
    load_agent,
)
from tests.comlrl.trainer_parts import FEW as FEW_COMPLETIONS
from tests.comlrl.trainer_parts import classes, lengths
from tests.house import ITEMS

TRAINERS = classes("MADPO", "MADPOIter", "MARLHF", "MARLHFIter")
FEW = FEW_COMPLETIONS | dict(preference_num_candidates=3, max_steps=2, batch_size=2)
PAIRS = [{"prompt": f"{n} and", "chosen": "seven apples", "rejected": "the market"} for n in range(8)]


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_a_trainer_is_at_its_module_path(algorithm):
    module = importlib.import_module(f"jmarl.comlrl.trainers.{algorithm.removesuffix('_iter')}")
    assert all(getattr(module, cls.__name__) is cls for cls in TRAINERS[algorithm])


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["madpo", "madpo_iter", "marlhf", pytest.param("marlhf_iter", marks=pytest.mark.nightly)])
def test_a_team_is_trained_evaluated_and_saved(algorithm, model, tiny_dir, tmp_path):
    """Two updates with settings under CoMLRL's names; iterative trainers in rounds, MARLHF with another algorithm and with
    another model that learns the reward."""
    trainer, config = TRAINERS[algorithm]
    settings = FEW | dict(output_dir=str(tmp_path / "run"))
    settings |= dict(reward_updates=2, rl_algorithm="marloo") if "marlhf" in algorithm else dict(dpo_beta=0.2)
    if "iter" in algorithm:  # without num_prompts, a round has the pairs of all items
        settings |= dict(num_prompts=None, round_updates=1, comparator_policy="history", comparator_history_k=1)
    models = dict(reward_model=str(tiny_dir("qwen2", seed=2))) if algorithm == "marlhf" else {}
    data = dict(train_dataset=ITEMS, eval_dataset=ITEMS)
    trained = trainer(model, reward_func=lengths, args=config(**settings), **data, **models)
    assert algorithm != "marlhf" or trained.team.reward_model.config.family == "qwen2"
    result = trained.train()
    assert int(result.state.step) == 2 and trained.config.algorithm == algorithm
    names = {"reward", "reward_ci95", "reward/lengths", "reward/invalid", "episodes", "turn_1/reward_mean"}
    assert set(trained.evaluate()) == {f"eval/{name}" for name in names | {"turn_1/expected_return"}}
    trained.save_model(tmp_path / "saved")
    assert load_agent(tmp_path / "saved" / "agent_1").config == load_agent(model).config
    rounds = list((tmp_path / "run" / "pairs").glob("*.jsonl"))
    assert len(rounds) == (2 if "iter" in algorithm else 1)
    prompts = {json.loads(line)["prompt"][0] for path in rounds for line in path.read_text().splitlines()}
    assert prompts == {item["prompt"] for item in ITEMS}


@pytest.mark.parametrize(
    ("config", "items", "updates"),
    [
        (MADPOConfig(), 20, 3200),  # 20 passes over 16 pairs of each of 20 items in batches of 2
        (MADPOConfig(num_train_epochs=3, preference_pairs_per_sample=8, batch_size=16), 20, 30),
        (MADPOConfig(num_train_epochs=1, pairs_per_prompt=0, preference_num_candidates=8, batch_size=8), 4, 4),
        (MADPOIterConfig(), 20, 240),  # 6 rounds of 4 pairs of each of 20 items in batches of 2
        (MADPOIterConfig(num_prompts=4, batch_size=8), 20, 12),  # of 4 items
        (MADPOIterConfig(num_iterations=3, round_updates=5), 20, 15),
        (MARLHFIterConfig(), 20, 120),  # 6 rounds of 2 passes over 20 prompts, 2 at a time
        (MARLHFConfig(num_train_epochs=2, num_prompts=4), 20, 10),
        (MARLHFConfig(num_updates=7), 20, 7),
        (DPOConfig(num_train_epochs=3), 20, 6),
        (SFTConfig(batch_size=5), 20, 4),
    ],
)
def test_number_of_updates(config, items, updates):
    assert config.train_config(items).run.num_updates == updates


@pytest.mark.parametrize(("settings", "updates"), [(dict(), 2), (dict(round_updates=5), 5), (dict(num_updates=12), None)])
def test_a_round_has_the_updates_that_its_pairs_take(settings, updates):
    """4 pairs of each of 4 items in batches of 8; with num_updates, the default of the algorithm."""
    assert MADPOIterConfig(num_prompts=4, batch_size=8, **settings).train_config(20).preference.round_updates == updates


@pytest.mark.long
def test_preferences_of_a_file_are_learned(model, tmp_path):
    """The accuracy on held-out pairs rises from a half to 1, and evaluate reports it."""
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(PAIRS))
    args = DPOConfig(
        num_updates=12, learning_rate=1e-2, output_dir=str(tmp_path / "run"), progress=False, compute_dtype="float32"
    )
    trainer = DPOTrainer(model, args=args, train_dataset=path, eval_dataset=PAIRS[:4])
    assert trainer.evaluate()["accuracy"] == 0.5
    result = trainer.train()
    assert result.after["accuracy"] == 1.0 == trainer.evaluate()["accuracy"]
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "agent_0" / "model.safetensors").exists()


@pytest.mark.long
def test_a_team_learns_from_given_preferences(model, tmp_path):
    rows = [{"prompt": row["prompt"], "chosen": [row["chosen"]] * 2, "rejected": [row["rejected"]] * 2} for row in PAIRS]
    args = DPOConfig(algorithm="madpo", num_updates=12, learning_rate=1e-2, output_dir="", progress=False)
    trainer = DPOTrainer(agents=[model, model], args=args, train_dataset=rows, eval_dataset=rows)
    assert trainer.train().after["accuracy"] == 1.0


@pytest.mark.long
def test_texts_are_learned_and_filtered_by_reward(model):
    rows = [{"prompt": "a", "completion": "seven apples", "reward": r} for r in (0.0, 1.0, 1.0)]
    args = SFTConfig(num_updates=6, learning_rate=1e-2, batch_size=2, output_dir="", min_reward=0.5, progress=False)
    trainer = SFTTrainer(model, args=args, train_dataset=rows, eval_dataset=rows)
    assert len(trainer.data) == 2
    result = trainer.train()
    assert result.after["nll"] < 0.7 * result.before["nll"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOTrainer("x", args=DPOConfig(num_generations=4), train_dataset=PAIRS), "num_generations=4 has no effect"),
        (lambda: DPOTrainer("x", args=DPOConfig(temperature=0.6), train_dataset=PAIRS), "temperature=0.6 .* leave it at 1.0"),
        (lambda: MADPOConfig(reward_num_train_epochs=2), "reward_num_train_epochs is not a setting here; set reward_updates"),
        (lambda: MADPOConfig(comparator_policy="model", comparator_model_name="x", comparator_api_model="y"), "same setting"),
        (lambda: MADPOIterConfig(comparator_policy="model"), "comparator_model=None is not allowed"),
        (lambda: MADPOConfig(dpo_bet=0.1), "did you mean 'dpo_beta'"),
        (lambda: DPOTrainer("x", args=MADPOConfig(), train_dataset=PAIRS), r"takes args=DPOConfig\(\.\.\.\), got MADPOConfig"),
        (lambda: DPOTrainer("x", train_dataset=[{"prompt": "a", "chosen": "b"}]), "row 0 has no rejected"),
        (lambda: DPOTrainer("x", train_dataset=[]), "holds no pairs"),
        (lambda: SFTTrainer("x", train_dataset=[{"words": "a"}]), "row 0 "),
    ],
)
def test_wrong_arguments_raise_before_a_model_is_loaded(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
