"""YAML files: both spellings, errors with lines, and that every key of MRLM acts or is refused."""

from __future__ import annotations

import re

import pytest

from jmarl import ExperimentConfig
from jmarl.algorithms import find_row
from jmarl.config import flat
from jmarl.config.layers import Layers, experiment_config
from jmarl.config.mrlm_environments import ENVIRONMENT_KEYS
from jmarl.config.mrlm_keys import AGENT_KEYS, KEYS
from jmarl.config.mrlm_rules import Refused
from jmarl.config.yaml_file import YamlFile, dump_yaml, parse_value, parse_yaml

EXAMPLE = """
experiment_name: code_generation_ppo
training:
  algorithm: ppo
  num_epochs: 100
  batch_size: 16
  learning_rate: 5.0e-6
ppo:
  clip_range: 0.2
  gamma: 0.99
  gae_lambda: 0.95
model:
  model_name_or_path: "Qwen/Qwen2.5-1.5B-Instruct"
  torch_dtype: "bfloat16"
eval_envs:
  - env_type: code
    mode: client
    max_turns: 3
distributed:
  enabled: true
  strategy: "fsdp"
"""


def read(text: str, *flags: str) -> ExperimentConfig:
    layers = Layers()
    layers.add(parse_yaml(text, "a.yaml"))
    for flag in flags:
        name, _, value = flag.partition("=")
        layers.add_flag(name, parse_value(value))
    return experiment_config(layers.settings(lambda name: find_row(name).data))


def test_the_example_of_mrlm_is_read():
    cfg = read(EXAMPLE)
    assert cfg == ExperimentConfig.of(
        models=["Qwen/Qwen2.5-1.5B-Instruct"], eval_envs=[{"name": "code", "options": {"max_turns": 3}}], algorithm="ppo",
        num_updates=100, num_prompts=16, learning_rate=5e-6, clip_eps_low=0.2, clip_eps_high=0.2, gamma=0.99,
        gae_lambda=0.95, num_generations=1, compute_dtype="bfloat16", mesh="data=all", experiment_name="code_generation_ppo",
    )  # fmt: skip
    assert read(dump_yaml(cfg.as_dict())) == cfg


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "1.e-5", ".1e-4", "0.00001", "+1e-5"])
def test_numbers_with_exponents_are_numbers(text):
    assert parse_value(text) == 1e-5 == parse_yaml(f"a: {text}", "a").tree["a"]


@pytest.mark.parametrize("text", ["1e5", "1E-5", "1.5", "true", "null", "x", "+1e-5", ""])
def test_texts_and_numbers_are_written_as_what_they_are(text):
    tree = {"a": text, "b": 1e-5, "c": 1e20}
    assert parse_yaml(dump_yaml(tree), "a").tree == tree


@pytest.mark.parametrize("text", ["[a", "a: b: c", "!!python/object:x {}", "{a"])
def test_a_value_that_is_no_yaml_is_a_value_error(text):
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is not YAML: .{{10}}"):
        parse_value(text)


def test_a_model_is_a_text_a_list_or_a_section():
    assert read("model: [a, b]\nenvironment: math").team.models == ("a", "b")
    assert read("model: {model_name_or_path: [a, b]}\nenvironment: math", "model=c").team.models == ("c",)
    assert read(OWN, "model=[c, d]").team.models == ("c", "d")
    with pytest.raises(ValueError, match="a.yaml, line 1: model: 3 is no model: give a name, a list"):
        read("model: 3\nenvironment: math")


def test_other_texts_stay_texts():
    assert [parse_value(x) for x in ("e5", "1e", "v1e-5", "agent=2", "", " ")] == ["e5", "1e", "v1e-5", "agent=2", "", " "]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size", "bach_size", "a.yaml, line 6: training.bach_size: unknown key in training; did you mean 'batch_size'"),
        ("num_epochs: 100", "num_epochs: x", "a.yaml, line 5: training.num_epochs: num_updates='x' is not allowed"),
        ("ppo:\n", "dpo: {}\nppo:\n", "a.yaml, line 8: dpo: the section dpo has no effect for algorithm='ppo'"),
        ("max_turns", "max_trns", "a.yaml, line 15: eval_envs: code has no option 'max_trns'; did you mean 'max_turns'"),
        ("mode: client", "mode: server", "an environment is never trained"),
        ("mode: client", "remote: true", "everything runs in one process"),
        ("distributed:\n", "top_p: 2.0\ndistributed:\n", "a.yaml, line 19: top_p: top_p=2.0 is not allowed"),
        ("distributed:\n", "learning_rate: 1.0\ndistributed:\n", "line 7: .* and a.yaml, line 19: .* both set learning_rate"),
        (
            "distributed:\n",
            "lerning_rate: 1.0\ndistributed:\n",
            "line 19: lerning_rate: unknown key; did you mean '.*learning_rate'",
        ),
        ("distributed:\n", "ppo: {}\ndistributed:\n", "line 19: ppo is set twice, before in line 8"),
        ("enabled: true", "num_nodes: 2", "num_nodes=2: environments and trainers in other processes"),
        ("distributed:\n", "x: [\ndistributed:\n", "a.yaml, line 21 is not YAML"),
        ("batch_size: 16", "mini_batch_size: 3\n  batch_size: 16", "3 episodes does not divide the 16"),
        ('torch_dtype: "bfloat16"', "load_in_4bit: true", "load_in_4bit can only be False: weights are not quantized"),
    ],
)
def test_errors_name_the_line_and_what_to_do(old, new, message):
    assert old in EXAMPLE
    with pytest.raises((ValueError, TypeError), match=message):
        read(EXAMPLE.replace(old, new, 1))


def test_a_group_has_the_size_of_mrlm_unless_another_is_given():
    assert read(EXAMPLE.replace("ppo", "grpo").replace("  gae_lambda: 0.95\n", "")).train.episodes.num_generations == 4
    assert read(EXAMPLE, "num_generations=3").train.episodes.num_generations == 3
    assert read("algorithm: ppo\nmodels: [a]\nenvironment: math").train.episodes.num_generations == 8


def test_later_sources_override_in_any_spelling():
    cfg = read(
        EXAMPLE, "optimizer.learning_rate=1e-3", "num_prompts=2", "eval_envs.0.max_turns=5", "ppo.clip_range=0.3",
        "model=other", "train.run.seed=4", "wandb.project=x",
    )  # fmt: skip
    assert (cfg.train.optimizer.learning_rate, cfg.train.episodes.num_prompts, cfg.train.run.seed) == (1e-3, 2, 4)
    assert cfg.task.eval_envs[0].options == {"max_turns": 5} and cfg.train.loss.clip_eps_high == 0.3
    assert cfg.team.models == ("other",) and cfg.wandb == {"project": "x"}
    assert read("training: {learning_rate: 1e-3}\n" + "models: [a]\nenvironment: math", "learning_rate=2e-3") == read(
        "learning_rate: 1e-3\nmodels: [a]\nenvironment: math", "training.learning_rate=2e-3"
    )


OWN = "models: [a]\nenvironment: math\n"


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (
            "training: {eval_every: 5, eval_episodes: 10}",
            ["held_out=50", "training.eval_every=2"],
            dict(held_out=50, eval_every=2),
        ),
        ("training: {eval_every: 5, eval_episodes: 10}", ["held_out=50", "training.eval_episodes=10"], dict(held_out=10)),
        (
            "model: {use_lora: true, lora_r: 8, lora_alpha: 16}",
            ["lora_alpha=32", "model.lora_r=16"],
            dict(lora_alpha=32, lora_rank=16),
        ),
        ("model: {use_lora: true}", ["lora_rank=4", "model.lora_r=8"], dict(lora_rank=8)),
        ("training: {mini_batch_size: 4}", ["training.batch_size=8"], dict(num_prompts=8, num_minibatches=2)),
    ],
)
def test_a_flag_is_not_overridden_by_what_a_rule_takes_from_a_file(text, flags, expected):
    cfg = flat(read(OWN + text, *flags))
    assert {name: cfg[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("model: {torch_dtype: bfloat16}", ["model.dtype=float32"], dict(compute_dtype="float32")),
        ("model: {dtype: float32}", ["model.torch_dtype=bfloat16"], dict(compute_dtype="bfloat16")),
        ("training: {use_bf16: true}", ["model.torch_dtype=float32"], dict(compute_dtype="float32")),
        ("model: {torch_dtype: bfloat16}", ["training.use_bf16=false"], dict(compute_dtype="float32")),
        ("model: {torch_dtype: bfloat16}", ["training.use_fp16=false"], dict(compute_dtype="bfloat16")),
        ("model: {torch_dtype: float16}", ["training.use_bf16=true"], dict(compute_dtype="bfloat16")),
        ("training: {use_fp16: true}", ["training.use_bf16=true"], dict(compute_dtype="bfloat16")),
        ("training: {use_bf16: true}", ["training.use_bf16=false"], dict(compute_dtype="float32")),
        ("{training: {use_bf16: false}, model: {dtype: bfloat16}}", [], dict(compute_dtype="bfloat16")),
        ("{model: {dtype: float32}, training: {use_bf16: true}}", [], dict(compute_dtype="bfloat16")),
        ("generation: {do_sample: false}", ["generation.temperature=0.7"], dict(temperature=0.7)),
        ("generation: {temperature: 0.7}", ["generation.do_sample=false"], dict(temperature=0.0)),
        ("generation: {temperature: 0.7, do_sample: false}", [], dict(temperature=0.0)),
        ("generation: {temperature: 0.7, do_sample: false}", ["generation.do_sample=true"], dict(temperature=0.7)),
        ("training: {num_epochs: 100}", ["training.num_iterations=5"], dict(num_updates=5)),
        (
            "training: {batch_size: 2, num_rollouts_per_iteration: 8}",
            ["training.episodes_per_iteration=4"],
            dict(num_prompts=4, num_minibatches=2),
        ),
        ("grpo: {normalize_rewards: false}", ["grpo.normalize_advantages=true"], dict(advantage_scale="std")),
        ("grpo: {reward_normalization: batch, normalize_rewards: false}", [], dict(advantage_scale="none")),
    ],
)
def test_of_several_keys_for_one_thing_the_newest_counts(text, flags, expected):
    tree = parse_yaml(text, "a.yaml").tree | parse_yaml(OWN, "a.yaml").tree
    cfg = flat(read(dump_yaml(tree), *flags))
    assert {name: cfg[name] for name in expected} == expected


@pytest.mark.parametrize("section", ["training: {num_epochs: 2, num_iterations: 2}", "model: {dtype: bf16, torch_dtype: fp32}"])
def test_two_keys_for_one_thing_in_one_file_are_an_error(section):
    with pytest.raises(ValueError, match="a.yaml, line 3: .*: .* and .* are the same setting: give one of them"):
        read(OWN + section)


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (
            "environment: {env_type: math, max_turns: 2}",
            ["options.difficulty_range=[1,2]"],
            dict(environment="math", options={"max_turns": 2, "difficulty_range": [1, 2]}),
        ),
        ("environment: {env_type: math, max_turns: 2}", ["options.max_turns=3"], dict(options={"max_turns": 3})),
        ("environment: {env_type: math, max_turns: 2}", ["options={}"], dict(options={})),
        (
            "training: {wandb_project: a, wandb_mode: offline}",
            ["wandb.project=b"],
            dict(wandb={"project": "b", "mode": "offline"}),
        ),
        (
            "wandb: {project: a, tags: [x]}",
            ["training.wandb_project=b", "training.wandb_mode=offline"],
            dict(wandb={"project": "b", "tags": ["x"], "mode": "offline"}),
        ),
        ("wandb: {project: a}", ["training.use_wandb=true"], dict(wandb={"project": "a"})),
        ("wandb: {project: a}", ["training.use_wandb=false"], dict(wandb={})),
        ("training: {wandb_project: a, wandb_mode: offline}", ["wandb={project: b}"], dict(wandb={"project": "b"})),
    ],
)
def test_a_flag_for_a_part_keeps_the_other_parts(text, flags, expected):
    tree = parse_yaml(OWN, "a.yaml").tree | parse_yaml(text, "a.yaml").tree
    cfg = flat(read(dump_yaml(tree), *flags))
    assert {name: cfg[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("environment: math", ["environment.max_turns=3"]),
        ("environment: {env_type: math, max_turns: 2}", ["options.difficulty_range=[1,2]", "environment.max_turns=3"]),
    ],
)
def test_an_option_that_would_replace_others_is_refused(text, flags):
    with pytest.raises(ValueError, match=r"--set environment.max_turns: .*: set options.max_turns"):
        read("models: [a]\n" + text, *flags)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("model: {lora_alpha: 32}", "a.yaml, line 3: model.lora_alpha: lora_alpha=32 .*lora_rank=0, which has no adapters"),
        (
            "distributed: {num_gpus: 4}",
            "a.yaml, line 3: distributed.num_gpus: .* no effect without enabled: set dist",
        ),
        ("distributed: {strategy: fsdp}", "a.yaml, line 3: distributed.strategy: .* no effect without enabled"),
    ],
)
def test_keys_of_a_part_that_is_off_are_refused(section, message):
    with pytest.raises(ValueError, match=message):
        read(OWN + section)


def test_keys_of_a_part_that_is_on_or_switched_off_are_read():
    assert read(OWN + "model: {lora_alpha: 32}", "lora_rank=4").train.lora.lora_alpha == 32
    assert read(OWN + "model: {lora_alpha: 32}", "model.use_lora=true").train.lora.lora_rank == 8
    assert read(OWN + "model: {lora_alpha: 32, use_lora: false}").train.lora.lora_rank == 0
    assert read(OWN + "distributed: {num_gpus: 4}", "distributed.enabled=true").train.run.mesh == "data=4"
    assert read(OWN + "distributed: {num_gpus: 4, enabled: false}").train.run.mesh == "auto"


def test_only_a_file_opens_a_section():
    text = "algorithm: mappo\nnum_agents: 2\n" + OWN
    assert read(text, "training.learning_rate=1e-5") == read(text, "learning_rate=1e-5")
    assert read(text + "training: {}").train.episodes.num_generations == 1
    assert read(OWN, "grpo.group_size=2").train.algorithm == "magrpo"
    with pytest.raises(ValueError, match="--set dpo.beta: the section dpo has no effect for algorithm='mappo'"):
        read(text, "dpo.beta=0.1")


def test_the_newest_half_type_counts_and_one_source_gives_one():
    with pytest.warns(UserWarning, match="float16 is computed as bfloat16"):
        read(OWN + "training: {use_bf16: true}", "training.use_fp16=true")
    with pytest.raises(ValueError, match="a.yaml, line 3: training.use_bf16 and a.yaml, line 3: .*: give one of them"):
        read(OWN + "training: {use_bf16: true, use_fp16: true}")


def test_another_environment_does_not_get_the_options_of_the_old_one():
    text = "models: [a]\nenvironment: math\noptions: {difficulty_range: [1, 2]}"
    assert read(text, "environment=tools").task.options == {}
    assert read(text, "environment=tools", "options.max_turns=3").task.options == {"max_turns": 3}
    assert read(text, "environment=math", "options.max_turns=3").task.options == {"difficulty_range": [1, 2], "max_turns": 3}
    assert read(text, "environment={env_type: math, max_turns: 1}").task.options == {"max_turns": 1}
    whole = dump_yaml(read(text).as_dict())  # as in the directory of a run
    assert read(whole, "environment=tools").task.options == {} == read(whole, "task.environment=tools").task.options
    with pytest.raises(ValueError, match="--set environment: .* options of --set options.max_turns: give it before them"):
        read(text, "options.max_turns=3", "environment=tools")


@pytest.mark.parametrize("text", ["model: {device: cuda}", "device: cuda"])
def test_cuda_is_the_platform_gpu(text):
    layers = Layers()
    layers.add(parse_yaml(text, "a.yaml"))
    assert layers.settings(lambda name: "rollouts")["device"].value == "gpu"
    layers.add(YamlFile("flags", {"device": "cpu"}, {}))
    assert layers.settings(lambda name: "rollouts")["device"].value == "cpu"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("batch_size: 8", dict(num_prompts=8)),
        ("batch_size: 8\n  gradient_accumulation_steps: 2", dict(num_prompts=16, micro_batches=2)),
        ("batch_size: 8\n  mini_batch_size: 4", dict(num_prompts=8, num_minibatches=2)),
        ("batch_size: 8\n  num_rollouts_per_iteration: 32", dict(num_prompts=32, num_minibatches=4)),
        ("eval_every: 5", dict(eval_every=5, held_out=20, eval_generations=1)),
        ("eval_every: 5\n  eval_episodes: 3", dict(eval_every=5, held_out=3, eval_generations=1)),
        ("use_bf16: true", dict(compute_dtype="bfloat16")),
        ("max_episode_length: 3", dict(num_turns=3, branching="chain")),
        ("use_tensorboard: false", dict(tensorboard=False)),
        ("wandb_project: p\n  wandb_run_name: n", dict(wandb={"project": "p", "name": "n"})),
        ("lr_scheduler: cosine\n  num_iterations: 7", dict(lr_schedule="cosine", num_updates=7)),
    ],
)
def test_training_keys_that_need_a_rule(given, expected):
    assert read(f"{OWN}training:\n  {given}") == ExperimentConfig.of(models=["a"], environment="math", **expected)


def test_fp16_is_bf16_with_a_warning():
    with pytest.warns(UserWarning, match="float16 is computed as bfloat16"):
        cfg = read("models: [a]\nenvironment: math\ntraining: {use_fp16: true}")
    assert cfg.train.sampling.compute_dtype == "bfloat16"


def test_every_key_of_a_list_entry_or_section_has_a_meaning_or_a_reason():
    for section, keys in (KEYS | {"agents": AGENT_KEYS, "eval_envs": ENVIRONMENT_KEYS}).items():
        for key, entry in keys.items():
            assert callable(entry) or entry, f"{section}.{key}"
            if isinstance(entry, Refused):
                assert len(entry.reason) > 15
