"""The constructor and method arguments of CoMLRL's trainers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from jmarl import IACTrainer, MAGRPOConfig, MAGRPOTrainer, MARLHFConfig, load_agent
from jmarl.comlrl import utils
from jmarl.comlrl.arguments import is_verbose, read_items, read_wandb
from jmarl.comlrl.checkpoints import find_checkpoint, with_checkpoints
from jmarl.comlrl.models import CausalLMWithValueHead
from jmarl.comlrl.schedulers import DeviceScheduler
from jmarl.comlrl.trainers.reinforce import CentralizedMAGRPOConfig, CentralizedMAGRPOTrainer
from jmarl.config import TrainConfig
from tests.comlrl.trainer_parts import FEW, lengths
from tests.house import ITEMS


def make(model, cls=MAGRPOTrainer, settings=None, **arguments):
    args = cls.config_class(**FEW | {"num_train_epochs": 1} | (settings or {}))
    given = dict(agent_model=model, reward_func=lengths, train_dataset=ITEMS, args=args) | arguments
    return cls(**{name: value for name, value in given.items() if name != "agent_model" or value is not None})


def test_agents_and_their_model_may_both_be_given(model, tiny_dir):
    """The application scripts give both. They must name one model."""
    import transformers

    from jmarl.comlrl.arguments import same_source

    assert make(model, agents=[model, model], num_agents=2).num_agents == 2
    assert make(model, agents=[Path(model), load_agent(model)]).num_agents == 2
    with pytest.raises(TypeError, match="either agents= .* or model=.* is another than one of"):
        make(model, agents=[model, str(tiny_dir("qwen2"))])
    torch_models = [transformers.AutoModelForCausalLM.from_pretrained(model) for _ in range(2)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert make(model, agents=torch_models, tokenizer=tokenizer).num_agents == 2
    assert not same_source(*torch_models)  # they may have other weights
    assert make(model, IACTrainer, critic_model=model, critics=[model, model]).team.critic.name == load_agent(model).name


def test_one_warning_lists_all_that_has_no_effect(model):
    settings = dict(agent_devices=["cuda:0"], eval_batch_size=2)
    extra = dict(dataset_type="tldr", model_config={"attn_implementation": "sdpa", "torch_dtype": "float32"})
    with pytest.warns(UserWarning) as caught:
        trainer = make(model, settings=settings, **extra)
    (text,) = [str(warning.message) for warning in caught]
    assert all(
        name in text for name in ("agent_devices=('cuda:0',)", "eval_batch_size=2", "dataset_type", "attn_implementation")
    )
    assert trainer.config.sampling.compute_dtype == "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model, metrics_callback=None, model_config={}, wandb_config=None, external_transition=None)


def test_special_tokens_must_be_in_the_vocabulary(model):
    make(model, model_config={"special_tokens": {"pad_token": load_agent(model).tokenizer.eos_token}})
    with pytest.raises(ValueError, match="adds tokens that the model has no embeddings of"):
        make(model, model_config={"special_tokens": {"additional_special_tokens": ["<new>"]}})


def test_wandb_settings_of_comlrl_become_arguments_of_wandb_init(tmp_path):
    sections = {"dataset": {"name": "tldr"}, "output": {"verbose": False}}
    config = dict(project="p", entity=None, run_name="r", dir=str(tmp_path / "w"), tags=["a"], config_sections=sections)
    expected = dict(project="p", name="r", dir=str(tmp_path / "w"), tags=["a"], config=sections)
    assert read_wandb(config) == expected and (tmp_path / "w").is_dir() and read_wandb(None) is None
    assert not is_verbose(config) and is_verbose({}) and is_verbose(None) and is_verbose({"config_sections": {"output": {}}})


def test_names_that_are_parts_of_torch_say_what_to_use():
    uses = [lambda: CausalLMWithValueHead(None), lambda: DeviceScheduler.resolve_devices("cuda:0", 2, kind="agents")]
    for use in [*uses, lambda: utils.clone_reference_models([], devices=[])]:
        with pytest.raises(NotImplementedError, match="is not part of jmarl.comlrl: "):
            use()
    assert not isinstance(1, CausalLMWithValueHead)


def test_helper_functions_do_what_their_names_say():
    assert utils.infer_model_name("m") == "m" and utils.unwrap_model(3) == 3 and utils.local_context("cpu").is_main
    sources = dict(kind="agents", expected_count=2)
    assert utils.resolve_model_sources(model="m", models=None, **sources) == (["m", "m"], "m")
    assert utils.resolve_model_sources(model="m", models=["m", "m"], **sources) == (["m", "m"], "m")
    for model, models in ((None, None), ("m", ["m", "n"]), (None, ["m"]), (None, "mm"), (None, ["m", None])):
        with pytest.raises(ValueError, match="agents="):
            utils.resolve_model_sources(model=model, models=models, **sources)
    formatters = utils.build_formatters(None, 2)
    assert formatters[1]({"prompt": "p"}) == "p" and formatters[0]({"prompt": "p"}, external_prompts="q") == "q"
    (one,) = utils.build_formatters([lambda x, external_prompts=None: f"{x['prompt']}{external_prompts}"], 1)
    assert one({"prompt": "p"}) == "pNone" and one({"prompt": "p"}, "q") == "pq"
    given = dict(num_agents=2, batch_items=[{"k": 3}])
    assert utils.call_reward_function(lambda a, b, batch_items: [batch_items[0]["k"]], ["p"], [["x"], ["y"]], **given) == [3.0]
    assert utils.call_reward_function(lambda p, a, b: [len(p[0] + a[0] + b[0])], ["p"], [["x"], ["y"]], **given) == [3.0]
    assert utils.normalize_reward_lengths([1], num_agents=2, num_generations=4, algorithm="IAC") == [1.0, 1.0]
    with pytest.raises(ValueError, match="IAC returned 3 numbers for 2 agents"):
        utils.normalize_reward_lengths([1, 2, 3], num_agents=2, num_generations=4, algorithm="IAC")
    assert utils.resolve_reward_range(utils.set_reward_range(lambda a: a, 0, 2)) == (0.0, 2.0)
    assert utils.resolve_reward_range(lambda a: a) is None
    args = MAGRPOConfig(reference_kl_enabled=True, reference_kl_coef=0.3)
    assert utils.reference_kl_enabled(args) and utils.reference_kl_coef(args) == 0.3
    assert not utils.reference_kl_enabled(MAGRPOConfig())


def test_checkpoint_arguments_are_settings_of_the_run():
    config, default = TrainConfig.of(output_dir="run", num_updates=40), (None, None, 1, None)
    assert with_checkpoints(config, 8, *default) == config
    run = with_checkpoints(config, 8, None, "there", 2, 3).run
    assert (run.output_dir, run.save_every, run.save_total_limit, run.resume) == ("there", 16, 3, False)
    Path("run/checkpoints/8").mkdir(parents=True)
    Path("run/checkpoints/8/meta.json").write_text("{}")
    for where, step in (("run", None), ("run/checkpoints", None), ("run/checkpoints/8", 8)):
        assert find_checkpoint(where) == (Path("run"), step)
        run = with_checkpoints(config, 8, where, "run", 1, None).run
        assert (run.output_dir, run.resume, run.resume_step) == ("run", True, step)
    for arguments, message in [
        (("run", "other", 1, None), "a run continues in its own directory"),
        (("nothing", None, 1, None), "nothing has no checkpoint"),
        (("x/training_state.pt", None, 1, None), "a checkpoint of CoMLRL, with arrays of torch"),
        ((None, None, 0, None), "checkpoint_interval=0"),
        ((None, None, True, None), "checkpoint_interval=True"),
        ((None, "there", 1, 0), "checkpoint_total_limit=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            with_checkpoints(config, 8, *arguments)


@pytest.mark.long
def test_training_continues_from_a_copy_of_its_run(model):
    """The weights are those of a run without a break."""
    whole = make(model, settings=dict(num_train_epochs=4, output_dir="whole"))
    whole.train()
    first = make(model, settings=dict(num_train_epochs=2))
    with pytest.raises(RuntimeError, match="there is no checkpoint to copy"):
        first.save_checkpoint("copy")
    first.train(checkpoint_dir="first", checkpoint_interval=1)
    assert first.save_checkpoint("copy") == str(Path("copy").absolute())
    assert utils.read_checkpoint_metadata("copy")["sequence"] == 2
    assert utils.read_checkpoint_metadata("copy/checkpoints/2")["trainer_class"] == "MAGRPOTrainer"
    for _ in range(2):  # a copy in the run itself, which leaves out earlier copies
        first.save_checkpoint("first/saved/step_2")
    assert not [*Path("first").glob("saved/*/saved/*")]
    assert utils.read_checkpoint_metadata("first/saved/step_2")["sequence"] == 2
    second = make(model, settings=dict(num_train_epochs=4))
    second.train(resume_from_checkpoint="copy", checkpoint_dir="copy")
    for a, b in zip(whole.agents, second.agents, strict=True):
        assert all(np.array_equal(a.params[name], b.params[name]) for name in ("embed", "final_norm") if name in a.params)
    with pytest.raises(NotImplementedError, match="train\\(resume_from_checkpoint='copy'\\)"):
        second.load_checkpoint("copy")


class Halves:
    """An adapter: the first half of a completion is of role 0, the second of role 1."""

    def build_prompt(self, batch_item, agent_prompts):
        return " | ".join(agent_prompts)

    def parse_completion(self, completion, batch_item, num_agents):
        middle = len(completion) // 2
        return [completion[:middle], completion[middle:]]


@pytest.mark.long
def test_one_model_writes_for_all_roles(model):
    seen, turns, called = [], [], []

    def reward(a, b, batch_items):
        seen.append((a[0], b[0], batch_items[0]["prompt"]))
        return [float(len(a[0]) - len(b[0]))]

    def eval_logger(agent_completions_turns, prompts):
        turns.append(agent_completions_turns)
        return [{"first": len(agent_completions_turns[0][0][0])} for _ in prompts]

    def callback(samples):
        called.append([(sample.agent_idx, sample.completion) for sample in samples])
        return {"agents": len(samples)}

    args = dict(centralized_adapter=Halves(), formatters=[lambda x: "A" + x["prompt"], lambda x: "B" + x["prompt"]])
    hooks = dict(eval_dataset=ITEMS[:1], eval_logger=eval_logger, metrics_callback=callback)
    with pytest.warns(UserWarning, match="metrics_callback= in training steps"):
        trainer = make(model, CentralizedMAGRPOTrainer, num_agents=2, reward_func=reward, **args, **hooks)
    assert trainer.num_agents == 1
    metrics = trainer.evaluate()
    assert metrics["eval/agents"] == 2 and [agent for agent, _ in called[0]] == [0, 1]
    assert [role[0][0] for role in turns[0]] == [text for _, text in called[0]] == list(seen[0][:2])
    assert trainer.train().before.rollout.turns[0].prompts == [["AThe answer | BThe answer"]]
    assert len(seen) > 4 and all(len(b) - len(a) in (0, 1) for a, b, _ in seen)


def test_wrong_arguments_of_centralized_trainers_raise(model):
    with pytest.raises(TypeError, match="centralized_adapter= is a object without the method build_prompt"):
        make(model, CentralizedMAGRPOTrainer, centralized_adapter=object())
    with pytest.raises(TypeError, match="centralized_adapter= has no effect for MAGRPOTrainer of several agents"):
        make(model, centralized_adapter=Halves())
    assert CentralizedMAGRPOConfig().centralized and MARLHFConfig(collaboration_mode="centralized").centralized


def test_a_team_of_three_is_counted_for_the_size_of_the_buffer(model):
    settings = dict(joint_mode="cross", num_turns=2, num_prompts=None, num_generations=2, rollout_buffer_size=9)
    trainer = make(
        model,
        settings=settings,
        num_agents=3,
        reward_func=lambda a, b, c: [1.0] * len(a),
        external_transition=lambda *_, **__: ["a", "b", "c"],
    )
    assert trainer.config.episodes.num_prompts == 1  # 1 node in the first turn and 2 ** 3 in the second


@pytest.mark.parametrize("func", [lambda prompts=None, a=None, b=None: [1.0], lambda a, prompts=None, b=None: [1.0]])
def test_rewards_may_have_their_parameters_in_any_order(model, func):
    trainer = make(model, reward_func=func)
    assert trainer.reward([["x"], ["y"]], ["p"], [{}], np.random.default_rng(0)).total.tolist() == [1.0]


def test_a_data_set_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match="train_dataset= cannot be read: .*double quotes"):
        read_items("train_dataset", (json.loads(line) for line in ["{}", "{bad"]))
