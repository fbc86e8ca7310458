"""YAML files: both spellings, errors with lines, and that every key of MRLM acts or is refused."""

from __future__ import annotations

import contextlib
import re

import pytest

from jmarl import ExperimentConfig
from jmarl.cli.configuration import kind_of, own_settings
from jmarl.config import flat
from jmarl.config.layers import Layers, experiment_config, flag_source
from jmarl.config.yaml_file import Given, YamlFile, dump_yaml, parse_value, parse_yaml
from jmarl.mrlm.convert import is_foreign
from jmarl.mrlm.environment_keys import ENVIRONMENT_KEYS
from jmarl.mrlm.keys import AGENT_KEYS, KEYS, RefusedKey

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
    pairs = [flag.partition("=") for flag in flags]
    sources = [parse_yaml(text, "a.yaml"), *(flag_source(name, parse_value(value)) for name, _, value in pairs)]
    return experiment_config(settings_of(*sources))


def settings_of(*sources: YamlFile) -> dict[str, Given]:
    own, finish = own_settings(sources)
    return finish(own, kind_of(own.get("algorithm")))


def test_the_layers_of_config_know_the_own_names_alone():
    layers = Layers()
    layers.add(1, parse_yaml("models: [a]\nenvironment: math\noptimizer: {lr: 1e-3}\noptions: {max_turns: 2}", "a.yaml"))
    layers.add(2, flag_source("options.difficulty_range", [1, 2]))
    options = {"max_turns": 2, "difficulty_range": [1, 2]}
    expected = ExperimentConfig.of(models=["a"], environment="math", options=options, learning_rate=1e-3)
    assert experiment_config(layers.own) == expected
    with pytest.raises(ValueError, match="a.yaml, line 1: training: unknown key"):
        layers.add(3, parse_yaml("training: {learning_rate: 1e-3}", "a.yaml"))


def test_the_example_of_mrlm_is_read():
    cfg = read(EXAMPLE)
    assert cfg == ExperimentConfig.of(
        models=["Qwen/Qwen2.5-1.5B-Instruct"], eval_envs=[{"name": "code", "options": {"max_turns": 3}}], algorithm="ppo",
        num_updates=100, num_prompts=16, learning_rate=5e-6, clip_eps_low=0.2, clip_eps_high=0.2, gamma=0.99,
        gae_lambda=0.95, num_generations=1, compute_dtype="bfloat16", mesh="data=all", experiment_name="code_generation_ppo",
    )  # fmt: skip
    dump = dump_yaml(cfg.as_dict())
    assert read(dump) == cfg and not is_foreign(parse_yaml(dump, "a")) and is_foreign(parse_yaml(EXAMPLE, "a"))


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "1.e-5", ".1e-4", "0.00001", "+1e-5"])
def test_numbers_with_exponents_are_numbers(text):
    assert parse_value(text) == 1e-5 == parse_yaml(f"a: {text}", "a").tree["a"]


@pytest.mark.parametrize("text", ["2026-01-02", "2026-01-02 10:00:00"])
def test_dates_are_texts(text):
    assert parse_value(text) == text == parse_yaml(f"a: {text}", "a").tree["a"]


@pytest.mark.parametrize("text", ["2026-01-02", "1e5", "1E-5", "1.5", "true", "null", "x", "+1e-5", ""])
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


@pytest.mark.parametrize(("old", "new", "message"), [
    ("batch_size", "bach_size", "a.yaml, line 6: training.bach_size: unknown key in training; did you mean 'batch_size'"),
    ("num_epochs: 100", "num_epochs: x", "a.yaml, line 5: training.num_epochs: num_updates='x' is not allowed"),
    ("max_turns", "max_trns", "a.yaml, line 15: eval_envs: code has no option 'max_trns'; did you mean 'max_turns'"),
    ("mode: client", "mode: server", "an environment is never trained"),
    ("mode: client", "remote: true", "line 15: eval_envs: remote: true needs server_address: HOST:PORT"),
    ("distributed:\n", "top_p: 2.0\ndistributed:\n", "a.yaml, line 19: top_p: top_p=2.0 is not allowed"),
    ("distributed:\n", "learning_rate: 1.0\ndistributed:\n", "line 7: .* and a.yaml, line 19: .* both set learning_rate"),
    ("distributed:\n", "lerning_rate: 1.0\ndistributed:\n",
     "line 19: lerning_rate: unknown key; did you mean '.*learning_rate'"),
    ("distributed:\n", "ppo: {}\ndistributed:\n", "line 19: ppo is set twice, before in line 8"),
    ("enabled: true", "enabled: true\n  world_size: 0", "world_size=0 is not allowed: give a number of at least 1"),
    ("distributed:\n", "x: [\ndistributed:\n", "a.yaml, line 21, column 10 is not YAML"),
    ("batch_size: 16", "mini_batch_size: 3\n  batch_size: 16", "3 episodes does not divide the 16"),
    ('torch_dtype: "bfloat16"', "load_in_4bit: true", "load_in_4bit can only be False: weights are not quantized"),
])  # fmt: skip
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


@pytest.mark.parametrize(("text", "flags", "expected"), [
    ("training: {eval_every: 5, eval_episodes: 10}", ["held_out=50", "training.eval_every=2"], dict(held_out=50, eval_every=2)),
    ("training: {eval_every: 5, eval_episodes: 10}", ["held_out=50", "training.eval_episodes=10"], dict(held_out=10)),
    ("model: {use_lora: true, lora_r: 8, lora_alpha: 16}", ["lora_alpha=32", "model.lora_r=16"],
     dict(lora_alpha=32, lora_rank=16)),
    ("model: {use_lora: true}", ["lora_rank=4", "model.lora_r=16"], dict(lora_rank=16)),
    ("training: {mini_batch_size: 4}", ["training.batch_size=8"], dict(num_prompts=8, num_minibatches=2)),
])  # fmt: skip
def test_a_flag_is_not_overridden_by_what_a_rule_takes_from_a_file(text, flags, expected):
    cfg = flat(read(OWN + text, *flags))
    assert {name: cfg[name] for name in expected} == expected


@pytest.mark.parametrize(("text", "flags", "expected"), [
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
    ("training: {batch_size: 2, num_rollouts_per_iteration: 8}", ["training.episodes_per_iteration=4"],
     dict(num_prompts=4, num_minibatches=2)),
    ("grpo: {normalize_rewards: false}", ["grpo.normalize_advantages=true"], dict(advantage_scale="std")),
    ("grpo: {reward_normalization: batch, normalize_rewards: false}", [], dict(advantage_scale="none")),
])  # fmt: skip
def test_of_several_keys_for_one_thing_the_newest_counts(text, flags, expected):
    tree = parse_yaml(text, "a.yaml").tree | parse_yaml(OWN, "a.yaml").tree
    cfg = flat(read(dump_yaml(tree), *flags))
    assert {name: cfg[name] for name in expected} == expected


@pytest.mark.parametrize("section", ["training: {num_epochs: 2, num_iterations: 2}", "model: {dtype: bf16, torch_dtype: fp32}"])
def test_two_keys_for_one_thing_in_one_file_are_an_error(section):
    with pytest.raises(ValueError, match="a.yaml, line 3: .*: .* and .* are the same setting: give one of them"):
        read(OWN + section)


@pytest.mark.parametrize(("text", "flags", "expected"), [
    ("environment: {env_type: math, max_turns: 2}", ["options.difficulty_range=[1,2]"],
     dict(environment="math", options={"max_turns": 2, "difficulty_range": [1, 2]})),
    ("environment: {env_type: math, max_turns: 2}", ["options.max_turns=3"], dict(options={"max_turns": 3})),
    ("environment: {env_type: math, max_turns: 2}", ["options={}"], dict(options={})),
    ("training: {wandb_project: a, wandb_mode: offline}", ["wandb.project=b"], dict(wandb={"project": "b", "mode": "offline"})),
    ("wandb: {project: a, tags: [x]}", ["training.wandb_project=b", "training.wandb_mode=offline"],
     dict(wandb={"project": "b", "tags": ["x"], "mode": "offline"})),
    ("wandb: {project: a}", ["training.use_wandb=true"], dict(wandb={"project": "a"})),
    ("wandb: {project: a}", ["training.use_wandb=false"], dict(wandb={})),
    ("training: {wandb_project: a, wandb_mode: offline}", ["wandb={project: b}"], dict(wandb={"project": "b"})),
])  # fmt: skip
def test_a_flag_for_a_part_keeps_the_other_parts(text, flags, expected):
    tree = parse_yaml(OWN, "a.yaml").tree | parse_yaml(text, "a.yaml").tree
    cfg = flat(read(dump_yaml(tree), *flags))
    assert {name: cfg[name] for name in expected} == expected


@pytest.mark.parametrize(("text", "flags"), [
    ("environment: math", ["environment.max_turns=3"]),
    ("environment: {env_type: math, max_turns: 2}", ["options.difficulty_range=[1,2]", "environment.max_turns=3"]),
])  # fmt: skip
def test_an_option_that_would_replace_others_is_refused(text, flags):
    with pytest.raises(ValueError, match=r"--set environment.max_turns: .*: set options.max_turns"):
        read("models: [a]\n" + text, *flags)


@pytest.mark.parametrize(("section", "message"), [
    ("model: {lora_alpha: 32}", "a.yaml, line 3: model.lora_alpha: lora_alpha=32 .*lora_rank=0, which has no adapters"),
    ("distributed: {num_gpus: 4}", "a.yaml, line 3: distributed.num_gpus: .* no effect without enabled: set dist"),
    ("distributed: {strategy: fsdp}", "a.yaml, line 3: distributed.strategy: .* no effect without enabled"),
])  # fmt: skip
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
    file = parse_yaml(text, "a.yaml")
    assert settings_of(file)["device"].value == "gpu"
    assert settings_of(file, YamlFile("flags", {"device": "cpu"}, {}))["device"].value == "cpu"


@pytest.mark.parametrize(("given", "expected"), [
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
])  # fmt: skip
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
            if isinstance(entry, RefusedKey):
                assert len(entry.reason) > 15


# What a dump of MRLM's configuration classes has, with the values that they have by default: nothing is left out.
EVERYTHING = """
experiment_name: mrlm_experiment
description: null
tags: []
training:
  {algorithm: ALGORITHM, num_epochs: 100, num_iterations: null, batch_size: 32, mini_batch_size: null, learning_rate: 0.0003,
   max_grad_norm: 0.5, optimizer: adamw, weight_decay: 0.01, adam_beta1: 0.9, adam_beta2: 0.999, adam_epsilon: 1.0e-08,
   lr_scheduler: null, warmup_steps: 0, num_rollouts_per_iteration: 128, max_episode_length: 512, eval_every: 10,
   eval_episodes: 10, save_every: 10, checkpoint_dir: ./checkpoints, save_total_limit: null, log_every: 1, log_dir: ./logs,
   wandb_project: null, wandb_entity: null, wandb_run_name: null, use_tensorboard: false, seed: null, use_fp16: false,
   use_bf16: false, gradient_accumulation_steps: 1}
model:
  {model_name_or_path: gpt2, model_type: causal_lm, tokenizer_name_or_path: null, trust_remote_code: false,
   use_flash_attention: false, gradient_checkpointing: false, load_in_8bit: false, load_in_4bit: false, use_lora: false,
   lora_r: 8, lora_alpha: 16, lora_dropout: 0.05, lora_target_modules: null, max_new_tokens: 256, temperature: 1.0, top_p: 0.9,
   top_k: 50, do_sample: true, num_beams: 1, repetition_penalty: 1.0, length_penalty: 1.0, device: auto, device_map: null}
ppo: {clip_range: 0.2, clip_range_vf: null, gamma: 0.99, gae_lambda: 0.95, num_ppo_epochs: 4, value_loss_coef: 0.5,
  entropy_coef: 0.01, target_kl: null, normalize_advantages: true}
grpo: {group_size: 4, gamma: 0.99, normalize_rewards: true, reward_normalization: group, temperature: 1.0}
dpo: {beta: 0.1, reference_free: false, label_smoothing: 0.0, loss_type: sigmoid}
sft: {mode: combined, bc_weight: 0.5, world_model_weight: 0.5, filter_low_reward: false, min_reward_threshold: 0.0,
  collect_every: 1, max_trajectories: 1000}
policy_env: null
eval_envs:
- {env_type: math, mode: client, remote: false, server_address: null, dataset: null, problems: null, timeout: 5.0,
   max_attempts: 3, custom_class: null, custom_kwargs: {}, reward_scale: 1.0, reward_clip: null, reward_bias: 0.0}
distributed: {enabled: false, backend: nccl, num_gpus: 1, gpu_ids: null, num_nodes: 1, node_rank: 0, master_addr: localhost,
  master_port: 29500, strategy: ddp, fsdp_sharding_strategy: full_shard, fsdp_cpu_offload: false, deepspeed_config: null,
  zero_stage: 2}
output_dir: ./output
"""


def unused_keys(text: str, *flags: str) -> tuple[ExperimentConfig, list[str]]:
    """Return the configuration, and the keys of its one warning."""
    with pytest.warns(UserWarning) as caught:
        cfg = read(text, *flags)
    (warning,) = caught
    _, _, keys = str(warning.message).partition("keys that change nothing here: ")
    return cfg, re.findall(r"([\w. ]+) \(", ", " + keys)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "sft", "PPO"])
def test_a_file_with_every_key_of_mrlm_is_read_with_one_warning(algorithm):
    cfg, keys = unused_keys(EVERYTHING.replace("ALGORITHM", algorithm))
    assert cfg.train.algorithm == algorithm.lower() and cfg.train.run.output_dir == "./checkpoints"
    assert cfg.train.lora.lora_rank == 0 and cfg.task.eval_envs[0].options == {
        "max_turns": 3,
        "reward_scale": 1.0,
        "reward_bias": 0.0,
    }
    others = {"ppo", "grpo", "dpo", "sft"} - {algorithm.lower()}
    assert {key.strip() for key in keys} >= {
        *others,
        "output_dir",
        "training.log_dir",
        "timeout of math",
        "distributed.backend",
    }


def test_an_environment_reads_only_its_own_of_the_keys_that_every_entry_has():
    for kind, options in [
        ("code", {"timeout": 5.0, "max_turns": 3}), ("debate", {}), ("tool", {}), ("pkg.env.Own", {"x": 1}),
    ]:  # fmt: skip
        entry = {"env_type": "custom", "custom_class": kind, "custom_kwargs": {"x": 1}} if "." in kind else {"env_type": kind}
        file = parse_yaml(dump_yaml({"eval_envs": [entry | {"timeout": 5.0, "max_attempts": 3}]}), "a")
        with pytest.warns(UserWarning) if kind != "code" else contextlib.nullcontext():
            (read_entry,) = settings_of(file)["eval_envs"].value
        assert read_entry["options"] == options


def test_the_policy_of_a_file_is_its_model():
    for entry in ("{env_type: llm, mode: server}", "{env_type: llm, mode: client}", "llm"):
        assert unused_keys(f"{OWN}policy_env: {entry}") == (read(OWN), [" policy_env"])
    with pytest.raises(ValueError, match="line 3: policy_env: .*'math'.* is no policy: the policy is the model"):
        read(OWN + "policy_env: {env_type: math}")
    with pytest.raises(ValueError, match="line 3: policy_env: remote: the policy is trained here"):
        read(OWN + "policy_env: {env_type: llm, remote: true}")


def test_one_directory_has_everything():
    both = "output_dir: out\ntraining: {checkpoint_dir: saved}\noutput: {save_dir: other}"
    cfg, keys = unused_keys(OWN + both)
    assert cfg.train.run.output_dir == "saved" and [key.strip() for key in keys] == ["save_dir", "output_dir"]
    assert unused_keys(OWN + both, "output_dir=flag")[0].train.run.output_dir == "flag"
    assert read(OWN + "output: {save_dir: other}\noutput_dir: other").train.run.output_dir == "other"


def test_episodes_of_grpo_count_each_completion_of_a_group():
    text = OWN + "training: {algorithm: grpo, episodes_per_iteration: 32, batch_size: 8}\ngrpo: {group_size: 4}"
    cfg = read(text)
    assert (cfg.train.episodes.num_prompts, cfg.train.episodes.num_generations, cfg.train.optimizer.num_minibatches) == (
        8,
        4,
        4,
    )
    assert read(text, "grpo.group_size=2").train.episodes.num_prompts == 16
    assert read(text, "num_prompts=5", "num_minibatches=1").train.episodes.num_prompts == 5
    assert read(text.replace("grpo", "ppo").replace("group_size: 4", "")).train.episodes.num_prompts == 32
    with pytest.raises(ValueError, match="line 3: .*32 episodes are not groups of 5: give a multiple of group_size"):
        read(text, "grpo.group_size=5")


def test_warmup_steps_are_steps_of_the_optimizer():
    text = (
        OWN
        + "training: {algorithm: ppo, num_epochs: 100, num_rollouts_per_iteration: 64, mini_batch_size: 8, warmup_steps: 100}"
    )
    assert read(text + "\nppo: {num_ppo_epochs: 4}").train.optimizer.warmup_updates == 4  # of 32 steps each
    assert read(text, "warmup_updates=7").train.optimizer.warmup_updates == 7
    assert read(OWN + "training: {warmup_steps: 9, num_epochs: 10}").train.optimizer.warmup_updates == 9


def test_a_section_of_another_algorithm_is_ignored_where_the_algorithm_is_given():
    text = OWN + "training: {algorithm: ppo}\nppo: {gamma: 0.5}\ngrpo: {gamma: 0.7, group_size: 3}"
    cfg, keys = unused_keys(text)
    assert (cfg.train.episodes.gamma, cfg.train.episodes.num_generations, keys) == (0.5, 1, [" grpo"])
    cfg, keys = unused_keys(text, "training.algorithm=grpo")
    assert (cfg.train.episodes.gamma, cfg.train.episodes.num_generations, keys) == (0.7, 3, [" ppo"])


@pytest.mark.parametrize(("section", "expected"), [
    ("model: {temperature: 0.7}\ngrpo: {temperature: 1.0}", (0.7, "grpo.temperature")),
    ("model: {generation: {temperature: 0.7}}\ngrpo: {temperature: 0.7}", (0.7, None)),
    ("grpo: {temperature: 0.6}", (0.6, None)),
])  # fmt: skip
def test_the_temperature_of_the_model_counts(section, expected):
    text = f"environment: math\ntraining: {{algorithm: grpo}}\n{section}"
    flag = "model.model_name_or_path=a"
    cfg, keys = (read(text, flag), [None]) if expected[1] is None else unused_keys(text, flag)
    assert (cfg.train.sampling.temperature, keys[0] and keys[0].strip()) == expected


def test_the_tokenizer_of_the_model_may_be_named():
    text = "environment: math\nmodel: {model_name_or_path: a, tokenizer_name_or_path: NAME}"
    assert read(text.replace("NAME", "a")).team.models == ("a",) == read(text.replace("NAME", "null")).team.models
    with pytest.raises(ValueError, match="line 2: model.tokenizer_name_or_path: each model brings its own tokenizer"):
        read(text.replace("NAME", "b"))


def test_weights_of_sft_are_for_its_combined_mode():
    text = (
        "environment: math\nmodels: [a]\ntraining: {algorithm: sft}\nsft: {mode: MODE, bc_weight: 0.6, world_model_weight: 0.4}"
    )
    weights = {}
    for mode in ("behavioral_cloning", "world_model", "combined"):
        cfg, keys = (read(text.replace("MODE", mode)), []) if mode == "combined" else unused_keys(text.replace("MODE", mode))
        weights[mode] = cfg.train.loss.bc_weight, cfg.train.loss.world_model_weight, len(keys)
    assert weights == {"behavioral_cloning": (1.0, 0.0, 2), "world_model": (0.0, 1.0, 2), "combined": (0.6, 0.4, 0)}
