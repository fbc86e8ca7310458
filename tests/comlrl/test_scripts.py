"""A script written for CoMLRL 1.4.3: its calls as its application repositories make them, with the import prefix replaced.

The settings are filtered by the names in the signature of the configuration, rewards of actor-critics find their item by the
prompts that they are given, and the transition registers the prompts that it writes.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.comlrl.trainer_parts import rows

SETTINGS: dict[str, Any] = dict(
    num_agents=2,
    num_turns=2,
    num_train_epochs=1,
    agent_learning_rate=1e-3,
    logging_steps=1,
    max_new_tokens=4,
    temperature=0.8,
    top_p=0.9,
    top_k=None,
    discount=1.0,
    parallel_training="none",
    agent_devices=["cuda:0"],
    early_termination_threshold=100.0,
    rollout_buffer_size=1,
    train_batch_size=1,
    eval_interval=1,
    eval_num_samples=1,
    eval_batch_size=1,
    external_prompt_passthrough=False,
)
REINFORCE = dict(num_generations=2, joint_mode="aligned", advantage_normalization=True)
ACTOR_CRITIC = dict(num_generations=1, critic_learning_rate=1e-3, value_loss_coef=0.6, use_separate_critic=True)
ROWS = [{"prompt": f"task {i}", "target": i} for i in range(3)]
FORMATTERS = [lambda item, n=n: f"[{n}] {item['prompt']}" for n in range(2)]


def filtered(config_class, settings):
    names = set(inspect.signature(config_class.__init__).parameters) - {"self", "args", "kwargs"}
    return config_class(**{name: value for name, value in settings.items() if name in names})


class Script:
    """What the functions of a script share."""

    def __init__(self):
        self.items = {f"[{n}] {row['prompt']}": row for n in range(2) for row in ROWS}
        self.turns: list[tuple[int, int]] = []  # target and turn of each call of the reward

    def lookup(self, prompts):
        return next(self.items[prompt] for prompt in prompts if prompt in self.items)

    def transition(self, prompt, agent_completions, num_agents=None, **histories):
        row = next(row for row in ROWS if row["prompt"] == prompt)
        turn = len(histories["prompt_history_per_agent"][0]) + 1
        texts = [f"{prompt}, turn {turn}, after {agent_completions[1 - n]}" for n in range(num_agents)]
        for n, text in enumerate(texts):
            self.items |= {text: row | {"turn": turn}, f"[{n}] {text}": row | {"turn": turn}}
        return texts

    def reward(self, prompts, first, second):
        row = self.lookup(prompts)
        self.turns.append((row["target"], row.get("turn", 1)))
        return [len(first[0]) - len(second[0])]

    def reward_of_items(self, *completions, batch_items=None, prompts=None):
        assert self.lookup(prompts) == batch_items[0] | ({"turn": 2} if "turn" in self.lookup(prompts) else {})
        return self.reward(prompts, *completions)


def run(trainer_class, script, model, **arguments):
    from datasets import Dataset
    from transformers import AutoTokenizer

    from jmarl.comlrl.utils.reward_processor import RewardProcessors

    scaled, shifted = RewardProcessors.scale(factor=0.5), RewardProcessors.shift(value=-1.0)
    trainer_arguments = dict(
        agent_model=model,
        agents=None,
        tokenizer=AutoTokenizer.from_pretrained(model),
        formatters=FORMATTERS,
        reward_processor=lambda x: shifted(scaled(x)),
        train_dataset=Dataset.from_list(ROWS[:2]),
        eval_dataset=Dataset.from_list(ROWS[2:]),
        wandb_config=None,
        external_transition=script.transition,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_class(**trainer_arguments | arguments)
    trainer.verbose = False
    trainer.train()
    trainer.save_model("saved/final_model")
    assert {path.parent.name for path in Path("saved/final_model").glob("*/model.safetensors")} == {"agent_0", "agent_1"}
    assert {(target, turn) for target in range(3) for turn in (1, 2)} == set(script.turns)  # of all items in both turns
    return trainer, [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.long
def test_a_script_of_magrpo_trains_evaluates_and_saves(model, capsys):
    from jmarl.comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer

    script, seen = Script(), []

    def eval_logger(*, agent_completions_turns, **_):
        seen.append(agent_completions_turns)
        return [{"turns": len(turns)} for turns in agent_completions_turns[0]]

    trainer, warned = run(
        MAGRPOTrainer,
        script,
        model,
        num_agents=2,
        args=filtered(MAGRPOConfig, SETTINGS | REINFORCE),
        reward_func=script.reward_of_items,
        model_config={"torch_dtype": "float32", "special_tokens": {}},
        eval_logger=eval_logger,
        eval_aggregator=lambda metrics, num_turns: {"turn_2/turns": metrics[0]["turns"]},
        dataset_type="tasks",
    )
    assert len(warned) == 1 and "no effect here: agent_devices=" in warned[0]
    evaluations = [row for row in rows(trainer.args.output_dir) if "eval/reward" in row]
    assert len(evaluations) >= 2 and all(row["eval/turn_2/turns"] == 2 for row in evaluations)
    assert all({"eval/turn_1/expected_return", "eval/turn_2/reward_mean"} <= set(row) for row in evaluations)
    assert "step 1/" not in capsys.readouterr().out  # verbose is False


@pytest.mark.long
@pytest.mark.parametrize("name", ["IAC", pytest.param("MAAC", marks=pytest.mark.nightly)])
def test_a_script_of_actor_critics_finds_its_items_by_the_prompts_of_every_turn(name, model):
    from jmarl.comlrl.trainers import actor_critic

    script = Script()
    run(
        getattr(actor_critic, f"{name}Trainer"),
        script,
        model,
        args=filtered(getattr(actor_critic, f"{name}Config"), SETTINGS | ACTOR_CRITIC | dict(critic_devices=["cuda:0"])),
        reward_func=script.reward,
        model_config={"model_kwargs": {"torch_dtype": "float32"}, "critic_model_kwargs": {"torch_dtype": "float32"}},
        critic_model=model,
        critics=None,
        metrics_callback=None,
    )
