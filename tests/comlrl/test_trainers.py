"""CoMLRL's trainer classes: their settings and arguments reach the run. Its scripts run in `tests/test_documents.py`.

What a second device may change is marked slow: CI runs slow tests with two.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

import jmarl
from jmarl import IACConfig, IPPOConfig, MAACConfig, MADPOIterConfig, MAGRPOConfig, MAGRPOTrainer, MARLOOConfig, load_agent
from jmarl.comlrl.settings.base import OTHER_NAMES, TrainerConfig
from jmarl.comlrl.utils.reward_processor import RewardProcessors
from jmarl.config import SECTION_OF, TrainConfig, flat
from jmarl.envs.rewards import RewardError
from tests.comlrl.trainer_parts import FEW, classes, lengths, rows
from tests.house import ITEMS

TRAINERS = classes("MAGRPO", "MAREINFORCE", "MARLOO", "MAReMax", "IAC", "MAAC", "IPPO", "MAPPO")


def tiny_config(cls=MAGRPOConfig, **settings) -> TrainerConfig:
    return cls(**FEW | {"max_steps": 2} | settings)


def tiny_trainer(model, cls=MAGRPOTrainer, /, **arguments) -> MAGRPOTrainer:
    defaults = dict(model=model, reward_func=lengths, train_dataset=ITEMS, args=tiny_config(cls.config_class))
    return cls(**defaults | arguments)


@pytest.mark.long
def test_on_error_mask_masks_a_reward_that_raises(model):
    """The error advises to set it."""

    def fails_on_e(a, b):
        if "e" in a[0]:
            raise OSError("no service")
        return [1.0]

    with pytest.raises(RewardError, match="on_error='mask'"):
        tiny_trainer(model, reward_func=lambda a, b: 1 / 0).train()
    with pytest.warns(UserWarning, match="have no valid reward.*no service"):
        tiny_trainer(model, reward_func=fails_on_e, on_error="mask").train()


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("batched", [False, True])
def test_rewards_are_called_per_joint_action_unless_batched(model, batched):
    sizes = []

    def reward(a, b, batch_items, prompts):
        sizes.append({len(a), len(b), len(batch_items), len(prompts)})
        return [0.0] * len(a)

    tiny_trainer(model, reward_func=reward, args=tiny_config(max_steps=1), batched_reward=batched).train()
    assert sizes == ([{6}] if batched else [{1}] * 6)


@pytest.mark.long
def test_several_rewards_weights_and_processors(model):
    def one(a, b):
        return [1.0] * len(a)

    def two(a, b):
        return [2.0] * len(a)

    scale = RewardProcessors.scale
    functions = dict(reward_func=[one, two], args=tiny_config(output_dir="out", max_steps=1))
    cases = [
        (dict(), 1.5),
        (dict(reward_weights=[0.7, 0.3]), 0.7 + 0.6),
        (dict(reward_weights=[1, 1], reward_processors=[scale(10), None]), 12.0),
        (dict(reward_weights=[1, 1], reward_processor=scale(10)), 30.0),
    ]
    for options, expected in cases:
        tiny_trainer(model, **functions, **options).train()
        (row,) = rows("out")
        assert row["reward/mean"] == pytest.approx(expected)
        raw = {name: row.get(f"measures/{name}", row.get(f"reward/{name}")) for name in ("one", "two")}
        assert raw == {"one": 1.0, "two": 2.0}


# --- settings ---------------------------------------------------------------------------------------------------------


def test_older_and_newer_names_give_the_same_run():
    older = MAGRPOConfig(
        learning_rate=1e-4, per_device_train_batch_size=3, logging_steps=7, save_steps=5, eval_steps=9,
        warmup_steps=2, max_steps=40, lr_scheduler_type="linear", adam_beta1=0.8, output_dir="out", top_k=None,
    )  # fmt: skip
    newer = MAGRPOConfig(
        agent_learning_rate=1e-4, rollout_buffer_size=3, log_every=7, save_every=5, eval_interval=27,
        warmup_updates=2, num_updates=40, lr_schedule="linear", adam_b1=0.8, output_dir="out", top_k=0,
    )  # fmt: skip
    assert older.train_config(11) == newer.train_config(11)
    assert older.train_config(11) == TrainConfig.of(
        learning_rate=1e-4, num_prompts=3, log_every=7, save_every=5, eval_every=9, warmup_updates=2, num_updates=40,
        lr_schedule="linear", adam_b1=0.8, output_dir="out", num_generations=4, max_new_tokens=256, temperature=0.6,
        top_p=0.6, top_k=0, advantage_scale="std", eval_generations=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "items", "updates"),
    [
        (dict(num_train_epochs=3), 10, 15),  # CoMLRL's buffer holds 2 prompts
        (dict(num_train_epochs=3, num_prompts=1), 10, 30),
        (dict(num_train_epochs=3, num_prompts=4), 10, 9),  # the last update of an epoch takes from the next one
        (dict(num_train_epochs=0.5, num_prompts=1), 10, 5),
        (dict(), 2, 20),
        (dict(num_updates=7), 10, 7),
        (dict(max_steps=-1, num_train_epochs=1), 10, 5),
    ],
)
def test_number_of_updates(settings, items, updates):
    assert MAGRPOConfig(**settings).train_config(items).run.num_updates == updates


def test_other_names_can_be_set_and_read():
    fields = {field.name: field for field in dataclasses.fields(MAGRPOConfig)}
    assert set(OTHER_NAMES.values()) <= set(fields)
    assert not set(OTHER_NAMES) & set(fields)
    assert {"algorithm", *SECTION_OF} <= set(fields)
    for name, field in OTHER_NAMES.items():
        assert name in fields or getattr(MAGRPOConfig(), name) == getattr(MAGRPOConfig(), field)


def test_the_signature_lists_fields_and_other_names():
    """Editors and notebooks complete them."""
    parameters = inspect.signature(MAGRPOConfig).parameters
    assert set(parameters) == {field.name for field in dataclasses.fields(MAGRPOConfig)} | set(OTHER_NAMES)
    assert parameters["logging_steps"].default == parameters["log_every"].default == 50
    assert inspect.signature(MADPOIterConfig).parameters["num_iterations"].default == 6
    assert {*jmarl._MODULE_OF} <= {*dir(jmarl)}
    for trainer, _ in TRAINERS.values():
        assert not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(trainer).parameters.values())


def test_pyright_accepts_the_documents_and_refuses_a_wrong_name(tmp_path):
    lines = [
        "from jmarl.comlrl.trainers.actor_critic import IPPOConfig",
        "from jmarl.comlrl.trainers.magrpo import MAGRPOConfig",
        "MAGRPOConfig(output_dir='o', num_train_epochs=3, per_device_train_batch_size=1, learning_rate=5e-5, logging_steps=10,",
        "    save_steps=100, num_generations=8, max_new_tokens=128, num_turns=2, joint_mode='align', discount=0.9)",
        "IPPOConfig(use_separate_critic=True)",
        "MAGRPOConfig(logging_stepz=10)",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(root)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    errors = [message["message"] for message in json.loads(output)["generalDiagnostics"]]
    assert errors == ['No parameter named "logging_stepz"']


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_a_trainer_has_its_algorithm_and_is_at_its_module_path(algorithm, model):
    trainer, config = TRAINERS[algorithm]
    other = MAGRPOConfig if config is not MAGRPOConfig else MARLOOConfig
    assert config().train_config(1).algorithm == algorithm == tiny_trainer(model, trainer).config.algorithm
    with pytest.raises(TypeError, match=f"takes args={config.__name__}"):
        tiny_trainer(model, trainer, args=tiny_config(other))
    module = importlib.import_module(f"jmarl.comlrl.trainers.{algorithm}")
    assert getattr(module, trainer.__name__) is trainer and getattr(module, config.__name__) is config


@pytest.mark.long
@pytest.mark.nightly  # the other tests train magrpo and ippo, and those of the loop all algorithms
@pytest.mark.parametrize("algorithm", TRAINERS)
def test_a_trainer_runs_its_algorithm(algorithm, model):
    assert len(tiny_trainer(model, TRAINERS[algorithm][0]).train().rewards) == 2


@pytest.mark.slow
def test_critics_of_the_trainers(model, tiny_dir):
    """Separate by default, a head of the agent with use_separate_critic=False, of another model with critic_model=.

    `test_scripts.py` and `tests/learning/test_critics.py` train separate ones.
    """
    other = str(tiny_dir("qwen3", hidden_size=48))
    args = tiny_config(IPPOConfig, use_separate_critic=True, value_clip_range=0.2, num_epochs=2, critic_learning_rate=1e-3)
    separate = tiny_trainer(model, TRAINERS["ippo"][0], args=args, critics=[other, other])
    assert separate.team.critic.config.hidden_size == 48 and flat(separate.config)["separate_critic"]
    args = tiny_config(IPPOConfig, use_separate_critic=False, value_loss_coef=0.6)
    trainer = tiny_trainer(model, TRAINERS["ippo"][0], args=args)
    result = trainer.train()
    assert not result.state.critics and "value" in result.state.stacks[0].params
    assert "value" not in trainer.agents[0].params and trainer.train().state.stacks
    central = tiny_trainer(model, TRAINERS["maac"][0], args=tiny_config(MAACConfig), critic_model=other)
    assert central.team.critic.config.hidden_size == 48
    with pytest.raises(ValueError, match="critics= names 2 different models: all critics start from one"):
        tiny_trainer(model, TRAINERS["iac"][0], critics=[other, model])
    with pytest.raises(TypeError, match="critics= is a list of models or names; one is critic_model="):
        tiny_trainer(model, TRAINERS["iac"][0], critics=other)
    with pytest.raises(TypeError, match="critic_model= has no effect for MAGRPOTrainer, which has no critic"):
        tiny_trainer(model, critic_model=other)
    with pytest.raises(ValueError, match="critic_value_head_hidden_dim=8 is not allowed: a value head is one linear layer"):
        IACConfig(critic_value_head_hidden_dim=8)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(lerning_rate=1), TypeError, "no setting 'lerning_rate'; did you mean 'learning_rate'"),
        (dict(logging_step=1), TypeError, "did you mean 'logging_steps'"),
        (dict(learning_rate=1, agent_learning_rate=1), TypeError, "learning_rate and agent_learning_rate are the same"),
        (dict(critic_devices="cpu"), TypeError, "critic_devices is not a setting here; critics are on the devices"),
        (dict(num_turns=0), ValueError, "num_turns=0 is not allowed"),
        (dict(branching="bush"), ValueError, r"branching='bush'.*one of \('tree', 'chain'\)"),
        (dict(history="all"), ValueError, r"history='all'.*one of \('none', 'append'\)"),
        (dict(discount=1.5), ValueError, "gamma=1.5"),
        (dict(joint_mode="all"), ValueError, "joint_mode='all'"),
        (dict(top_p=1.5), ValueError, "top_p=1.5"),
        (dict(num_train_epochs=0), ValueError, "num_train_epochs=0"),
        (dict(per_device_train_batch_size=0), ValueError, "num_prompts=0"),
        (dict(num_agents=0), ValueError, "num_agents=0"),
    ],
)
def test_a_wrong_setting_raises(settings, error, message):
    with pytest.raises(error, match=message):
        MAGRPOConfig(**settings)


def test_settings_are_frozen_and_can_be_replaced():
    config = MAGRPOConfig(joint_mode="align", seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4
    assert dataclasses.replace(config, seed=4) == MAGRPOConfig(joint_mode="align", seed=4)
    with pytest.raises(AttributeError, match="no setting 'sead'"):
        _ = config.sead


# --- agents, data, formatters -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_agents_are_names_or_loaded_and_of_one_or_several_models(model, tiny_dir):
    other = str(tiny_dir("qwen2"))
    three = dict(reward_func=lambda a, b, c: [float(len(a[0]) - len(b[0]) + len(c[0]))])
    trainer = tiny_trainer(None, agents=[model, load_agent(other), Path(model)], **three)
    assert [stack.order for stack in trainer.team.stacks] == [[0, 2], [1]]
    trainer.train()
    assert [agent.config.family for agent in trainer.agents] == ["llama", "qwen2", "llama"]
    start = load_agent(model).params
    assert any((np.asarray(new) != old).any() for new, old in zip(leaves(trainer.agents[2].params), leaves(start), strict=True))


def leaves(tree) -> list:
    import jax

    return jax.tree.leaves(tree)


def test_default_team_has_two_agents_and_counts_must_agree(model):
    assert tiny_trainer(model).num_agents == 2
    assert tiny_trainer(None, agent_model=load_agent(model)).num_agents == 2
    for arguments in (dict(num_agents=3), dict(args=tiny_config(num_agents=3))):
        with pytest.raises(ValueError, match="number of agents is not clear: agents= 2, num_agents.* 3"):
            tiny_trainer(None, agents=[model, model], **arguments)


@pytest.mark.slow
def test_the_metrics_of_an_eval_logger_are_logged_with_the_held_out_results(model, tmp_path):
    """As CoMLRL calls it: completions [agent][sample][turn], the samples' tests, entry points and prompts; then the number of
    turns for the aggregator."""
    held_out = [{"prompt": "one", "test": "assert f()", "entry_point": "f"}, {"prompt": "two"}, {"prompt": "three"}]
    calls = []

    def eval_logger(agent_completions_turns, test_cases, entry_points, prompts):
        calls.append((agent_completions_turns, test_cases, entry_points, prompts))
        return [{"turns": len(a), "characters": sum(map(len, a + b))} for a, b in zip(*agent_completions_turns, strict=True)]

    def eval_aggregator(metrics, num_turns):
        return {f"turn_{num_turns}/characters": sum(row["characters"] for row in metrics), "samples": len(metrics)}

    def transition(prompt, agent_completions, num_agents, **histories):
        return [f"{prompt} {text}!" for text in agent_completions]

    args = tiny_config(num_turns=2, num_generations=2, max_steps=1, eval_generations=2, output_dir=str(tmp_path / "run"))
    run = dict(args=args, external_transition=transition, eval_dataset=held_out, eval_logger=eval_logger)
    trainer = tiny_trainer(model, **run, eval_aggregator=eval_aggregator)
    result = trainer.train()
    (completions, *about_items), after = calls[-1], result.after
    assert about_items == [
        ["assert f()"] * 2 + [""] * 4,
        ["f"] * 2 + [""] * 4,
        ["one"] * 2 + ["two"] * 2 + ["three"] * 2,
    ]
    turns = after.rollout.turns
    expected = [
        [[turns[0].texts[n][p][g], turns[1].texts[n][2 * p + g][0]] for p in range(3) for g in range(2)] for n in range(2)
    ]
    assert completions == expected
    characters = sum(len(text) for agent in expected for sample in agent for text in sample)
    logged = [row for row in rows(tmp_path / "run") if "eval/reward" in row]
    assert [row["eval/samples"] for row in logged] == [6, 6] and len(calls) == 2  # before and after the update
    assert logged[-1]["eval/turn_2/characters"] == characters
    assert trainer.evaluate()["eval/turn_2/characters"] == characters
    assert tiny_trainer(model, **run).evaluate()["eval/turns"] == 2  # without an aggregator: the mean over samples


@pytest.mark.long
def test_a_metric_that_is_no_number_raises(model):
    arguments = dict(eval_dataset=ITEMS, eval_logger=lambda prompts: [{"verdict": "good"} for _ in prompts])
    with pytest.raises(TypeError, match="the metric 'verdict' of an evaluation is 'good'"):
        tiny_trainer(model, **arguments).evaluate()
    arguments["eval_logger"] = lambda agent_completions_turns: 0.5
    with pytest.raises(TypeError, match="eval_logger= returned 0.5: return a list"):
        tiny_trainer(model, **arguments).evaluate()


@pytest.mark.long
def test_formatters_give_each_agent_its_prompt(model):
    data = [{"topic": "apples"}, {"topic": "seven apples and three pears"}]
    formatters = [
        lambda x: f"Say {x['topic']}",
        lambda x, external_prompts: f"Sing {x['topic']}{external_prompts or '!'}",
    ]
    trainer = tiny_trainer(model, train_dataset=data, eval_dataset=data, formatters=formatters)
    prompts = trainer.train().before.rollout.turns[0].prompts
    assert prompts == [[f"{begin} {x['topic']}{end}" for x in data] for begin, end in (("Say", ""), ("Sing", "!"))]
    one = tiny_trainer(model, train_dataset=data, formatters=lambda x: x["topic"])
    assert [formatter(data[0]) for formatter in one.env.formatters] == ["apples", "apples"]


class Numbered:
    """A data set with a length and an index, and nothing else."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return ITEMS[i]


@pytest.mark.parametrize("data", [ITEMS, Dataset.from_list(ITEMS), Numbered()], ids=["list", "dataset", "numbered"])
def test_any_series_of_dicts_is_a_data_set(model, data):
    """`tests/envs/test_rows.py` has more."""
    trainer = tiny_trainer(model, train_dataset=data, eval_dataset=data)
    assert trainer.items == trainer.eval_items == ITEMS


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(formatters=[lambda x: x["prompt"]] * 3), ValueError, "3 formatters for 2 agents"),
        (dict(formatters=lambda x: 5), TypeError, "formatter 0 returned a int"),
        (dict(train_dataset=[{"text": "x"}]), ValueError, r"items need a 'prompt'.*\['text'\]"),
        (dict(train_dataset=[]), ValueError, "train_dataset= has no items"),
        (dict(train_dataset=["x"]), TypeError, "train_dataset= cannot be read: row 0 is a str"),
        (dict(train_dataset={"prompt": ["x"]}), TypeError, "Dataset.from_dict"),
        (dict(train_dataset=None), TypeError, "train_dataset= is needed: give a file"),
        (dict(reward_func=None), TypeError, "a reward is needed"),
        (dict(reward_funcs=lengths), TypeError, "reward_func= and reward_funcs= mean the same"),
        (dict(reward_func=lambda: [0.0]), TypeError, "takes 0 completion lists"),
        (dict(agents=["x", "y"]), TypeError, "either agents= .* or model="),
        (dict(model=None), TypeError, "either agents= .* or model="),
        (dict(model=None, agents="x"), TypeError, "agents= is a list"),
        (
            dict(model=None, agents=[object(), object()]),
            TypeError,
            "agent 0 is a object: load it with jmarl.load_agent",
        ),
        (dict(args=MAGRPOConfig(num_turns=2)), ValueError, "num_turns=2 needs external_transition"),
        (dict(model_config={"dtype": "fp16"}), ValueError, "dtype='fp16' in model_config= is not allowed"),
        (dict(eval_logger="accuracy"), TypeError, "eval_logger= is a function, got str"),
        (dict(eval_aggregator=print), TypeError, "eval_aggregator= has no effect without eval_logger="),
        (dict(reward_model="x"), TypeError, "reward_model= has no effect for MAGRPOTrainer, which learns none"),
        (dict(args=TrainConfig()), TypeError, "takes args=MAGRPOConfig"),
        (dict(args=tiny_config(num_generations=1)), ValueError, "num_generations=1 is too small"),
    ],
)
def test_a_wrong_argument_raises(model, arguments, error, message):
    with pytest.raises(error, match=message):
        tiny_trainer(model, **arguments)


def test_a_tokenizer_must_have_the_vocabulary_of_the_agents(model, make_tokenizer):
    other = make_tokenizer()
    tiny_trainer(model, tokenizer=other)
    tiny_trainer(model, tokenizer=[other, other])
    other.add_tokens(["<tool>"])
    with pytest.raises(ValueError, match=r"another vocabulary \(321 tokens\) than agent 0"):
        tiny_trainer(model, tokenizer=other)


def test_wandb_that_cannot_log_raises_before_a_model_is_loaded(monkeypatch):
    arguments = dict(wandb_config={"project": "p"}, args=tiny_config(output_dir="out"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'jmarl\[wandb\]'"):
        tiny_trainer("no such model", **arguments)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="output_dir is empty"):
        tiny_trainer("no such model", **arguments | dict(args=tiny_config(output_dir="")))
    with pytest.raises(TypeError, match="wandb_config= is a dict"):
        tiny_trainer("no such model", **arguments | dict(wandb_config="p"))


# --- train, evaluate, save --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_raises_a_reward_and_evaluate_shows_it(model):
    """Probe: agents are rewarded for the letter e, which is in many tokens of the tiny tokenizer."""
    settings = tiny_config(max_steps=40, learning_rate=1e-2, eval_generations=16)
    reward = dict(reward_func=lambda a, b: [x.count("e") + y.count("e") for x, y in zip(a, b, strict=True)])
    trainer = tiny_trainer(model, args=settings, eval_dataset=ITEMS, batched_reward=True, **reward)
    before = trainer.evaluate()
    result = trainer.train()
    after = trainer.evaluate()
    best = {name: before.pop(name) for name in [*before] if name.startswith("eval/best@")}
    assert set(best) == {f"eval/best@{k}{end}" for k in (2, 4, 8, 16) for end in ("", "_ci95")}
    assert before == {
        "eval/reward": result.before.mean,
        "eval/reward_ci95": result.before.interval,
        "eval/episodes": 32,
        "eval/reward/invalid": 0,
        "eval/reward/lambda": pytest.approx(result.before.mean),
        "eval/turn_1/reward_mean": pytest.approx(result.before.mean),
        "eval/turn_1/expected_return": pytest.approx(result.before.mean),
    }
    assert after["eval/reward"] == pytest.approx(result.after.mean)
    assert after["eval/reward"] > before["eval/reward"] + before["eval/reward_ci95"]
    assert trainer.evaluate(ITEMS[:1])["eval/reward"] != after["eval/reward"]


@pytest.mark.long
def test_eval_num_samples_takes_the_first_items(model):
    data = dict(eval_dataset=Dataset.from_list(ITEMS))
    first = tiny_trainer(model, args=tiny_config(eval_num_samples=1), **data).evaluate()
    assert first["eval/reward"] == tiny_trainer(model, eval_dataset=ITEMS[:1]).evaluate()["eval/reward"]
    trainer = tiny_trainer(model, **data)
    for result in (trainer.evaluate(num_eval_samples=1), trainer.evaluate(1)):
        assert result["eval/reward"] == first["eval/reward"]
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        tiny_trainer(model).evaluate()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # W&B's own
def test_saved_agents_load_in_transformers_with_the_trained_weights(model, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("wandb", reason="pip install 'jmarl[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = dict(wandb_config={"project": "p", "mode": "offline"})
    trainer = tiny_trainer(model, args=tiny_config(learning_rate=1e-2, output_dir="run"), **wandb)
    trainer.save_model("before")
    trainer.train()
    trainer.save_model("after")
    assert list(Path("run").glob("wandb/offline-run-*/*.wandb"))
    text = ITEMS[0]["prompt"]
    outputs = {}
    for path in [model, *(f"{when}/agent_{i}" for when in ("before", "after") for i in (0, 1))]:
        ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            outputs[path] = AutoModelForCausalLM.from_pretrained(path)(ids).logits.numpy()
    assert np.array_equal(outputs["before/agent_0"], outputs[model])
    assert np.array_equal(outputs["before/agent_1"], outputs[model])
    assert np.abs(outputs["after/agent_0"] - outputs[model]).max() > 0.01
    assert np.abs(outputs["after/agent_1"] - outputs["after/agent_0"]).max() > 0.01
    saved, current = load_agent("after/agent_1"), trainer.agents[1]
    assert all(np.array_equal(x, y) for x, y in zip(leaves(saved.params), leaves(current.params), strict=True))


@pytest.mark.slow
def test_a_second_call_of_train_continues_from_the_trained_weights(model):
    """It gives the weights of a second trainer that starts from the agents of the first."""
    trainer = tiny_trainer(model, args=tiny_config(learning_rate=1e-3))
    trainer.train()
    second = tiny_trainer(None, agents=trainer.agents, args=tiny_config(learning_rate=1e-3))
    trainer.train()
    second.train()
    pairs = zip(leaves(trainer.params), leaves(second.params), strict=True)
    assert all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.slow
def test_weights_lost_in_an_interrupted_update_raise(model):
    calls = []

    def interrupts(a, b):
        calls.append(1)
        if len(calls) in (1, 8):
            raise KeyboardInterrupt
        return [float(len(a[0]))]

    trainer = tiny_trainer(model, reward_func=interrupts, args=tiny_config(max_steps=5))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(trainer.agents) == 2  # nothing was updated yet
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(RuntimeError, match="train.. did not finish"):
        trainer.save_model("models")
