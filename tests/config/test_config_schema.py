"""Every setting and every key of MRLM: a file overrides the default, a flag overrides the file, and something reads it."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import jmarl
from jmarl.cli.configuration import kind_of, own_settings
from jmarl.config import SECTION_OF
from jmarl.config.aliases import OTHER_NAMES
from jmarl.config.experiment import PART_OF, TOP_SETTINGS, EnvironmentConfig, TaskConfig, TeamConfig
from jmarl.config.layers import flag_source
from jmarl.config.yaml_file import parse_yaml
from jmarl.mrlm.environment_keys import ENVIRONMENT_KEYS, environment
from jmarl.mrlm.keys import AGENT_KEYS, KEYS, IgnoredKey, RefusedKey

ROOT = Path(jmarl.__file__).parent
OWN = {field.name: part for part, cls in (("team", TeamConfig), ("task", TaskConfig)) for field in dataclasses.fields(cls)}


def settings(tree: dict[str, Any], flags: dict[str, Any] | None = None) -> dict[str, Any]:
    flag_sources = [flag_source(name, value) for name, value in (flags or {}).items()]
    own, finish = own_settings([parse_yaml(json.dumps(tree), "a.yaml"), *flag_sources])
    given = finish(own, kind_of(own.get("algorithm")))
    result = {name: x.value for name, x in given.items()}
    assert set(result) <= {
        *OWN,
        "algorithm",
        *SECTION_OF,
        *TOP_SETTINGS,
        "device",
        "processes",
    }  # no key sets what does not exist
    return result


def spellings(name: str) -> list[list[str]]:
    """All paths by which a file or a flag can set a setting."""
    if name in TOP_SETTINGS:
        return [[name]]
    if name in OWN:
        return [[name], [OWN[name], name]]
    if name == "algorithm":
        return [[name], ["train", name], ["training", name]]
    section = SECTION_OF[name]
    aliases = [[alias] for alias, field in OTHER_NAMES.items() if field == name and alias != "loss_type"]
    short = [] if name == "optimizer" else [[name]]  # at the top this is the section
    return [*short, [section, name], ["train", section, name], *aliases]


def nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


@pytest.mark.parametrize("name", [*OWN, "algorithm", *SECTION_OF, *TOP_SETTINGS])
def test_a_flag_overrides_a_file_in_every_spelling_of_a_setting(name):
    lists = ("train_envs", "eval_envs")
    first, second = ("math", "story") if name == "environment" else ("ppo", "grpo") if name == "algorithm" else (1, 2)
    if name == "advantage_scale":  # an alias has other names for its values
        first, second = "std", "none"
    if name in lists:
        first, second = [{"name": "math", "options": {}}], [{"name": "story", "options": {}}]
    for in_file in spellings(name):
        assert settings(nested(in_file, first))[name] == first
        for in_flag in spellings(name):
            assert settings(nested(in_file, first), {".".join(in_flag): second})[name] == second


def names_read() -> set[str]:
    """Names that code outside of the configuration reads: as an attribute, or in a list of names."""
    names = set()
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in ("config", "comlrl", "mrlm"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def test_every_setting_is_read_by_something():
    unread = {*OWN, "algorithm", *SECTION_OF, *TOP_SETTINGS} - names_read()
    in_config = {"adam_b1", "num_agents"}  # read by name or by a property of the configuration
    assert unread <= in_config
    assert {field.name for field in dataclasses.fields(EnvironmentConfig)} == {"name", "options"}


# Keys that a rule reads: other keys that they need, and two values. Of keys with one allowed value: that one and another.
ONE_VALUE = {
    "model_type": "seq2seq", "load_in_8bit": True, "load_in_4bit": True, "num_beams": 2, "num_return_sequences": 2,
    "fsdp_cpu_offload": True, "tokenizer_name_or_path": "other",
}  # fmt: skip
VALUES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "mini_batch_size": ({"batch_size": 8}, 4, 2),
    "num_rollouts_per_iteration": ({"batch_size": 2}, 4, 8),
    "episodes_per_iteration": ({"batch_size": 2}, 4, 8),
    "gradient_accumulation_steps": ({"batch_size": 8}, 2, 4),
    "optimizer": ({}, "lion", "adam"),
    "lr_scheduler": ({}, "cosine", "linear"),
    "max_episode_length": ({}, 2, 3),
    "use_wandb": ({"wandb_project": "p"}, True, False),
    "use_bf16": ({}, False, True),
    "use_fp16": ({}, False, True),
    "torch_dtype": ({}, "float32", "bfloat16"),
    "dtype": ({}, "float32", "bfloat16"),
    "normalize_advantages": ({}, True, False),
    "normalize_rewards": ({}, True, False),
    "reward_normalization": ({}, "batch", "running"),
    "mode": ({}, "behavioral_cloning", "world_model"),
    "bc_weight": ({}, 0.5, 0.25),
    "world_model_weight": ({}, 0.5, 0.25),
    "filter_low_reward": ({"min_reward_threshold": 0.5}, True, False),
    "min_reward_threshold": ({}, 0.5, 0.25),
    "use_lora": ({}, True, False),
    "lora_r": ({"use_lora": True}, 4, 16),
    "lora_alpha": ({"use_lora": True}, 8, 16),
    "lora_dropout": ({"use_lora": True}, 0.1, 0.2),
    "lora_target_modules": ({"use_lora": True}, ["q_proj"], ["v_proj", "k_proj"]),
    "gradient_checkpointing": ({}, True, False),
    "do_sample": ({"temperature": 0.5}, True, False),
    "enabled": ({}, True, False),
    "strategy": ({"enabled": True}, "ddp", "zero"),
    "num_gpus": ({"enabled": True}, 1, 2),
    **dict.fromkeys(("num_nodes", "nnodes", "nproc_per_node", "world_size"), ({"enabled": True}, 2, 3)),
    "type": ({"path": "a.json"}, "json", "parquet"),
    "name": ({"path": "a/b"}, "c", "d"),
    "device": ({}, "cpu", "gpu"),
}
SWITCHES = {"enabled", "use_wandb", "filter_low_reward", "do_sample", "use_lora"}  # one of their values is the default
ALGORITHM = {"ppo": "ppo", "grpo": "grpo", "dpo": "dpo", "sft": "sft"}
SAME = {("distributed", "strategy")}  # both values do the same; a third one is refused


@pytest.mark.filterwarnings("ignore:float16")
@pytest.mark.parametrize(("section", "key"), [(section, key) for section in KEYS for key in KEYS[section]])
def test_every_key_of_mrlm_acts_or_is_refused_and_a_flag_overrides_it(section, key):
    head = {"algorithm": ALGORITHM[section]} if section in ALGORITHM else {}
    if isinstance(KEYS[section][key], RefusedKey):
        with pytest.raises(ValueError, match=f"{section}.{key}: .{{15}}"):
            settings(head | {section: {key: 1}})
        return
    if isinstance(KEYS[section][key], IgnoredKey):
        with pytest.warns(UserWarning, match=rf"^keys that change nothing here: {section}.{key} \(.{{15,}}\)$"):
            assert settings(head | {section: {key: 1}}) == settings(head | {section: {}})
        return
    if key in ONE_VALUE:
        with pytest.raises(ValueError, match=f"{section}.{key}: .{{15}}"):
            settings(head | {section: {key: ONE_VALUE[key]}})
        return
    others, first, second = VALUES.get(key, ({}, "a", "b") if key == "algorithm" else ({}, 2, 3))
    if key == "algorithm":
        first, second = "ppo", "grpo"
    in_file = head | {section: others | {key: first}}
    if (section, key) in SAME or (section, key) == ("dataset", "type"):
        with pytest.raises(ValueError, match=f"{section}.{key}"):
            settings(in_file, {f"{section}.{key}": second})
        return
    without, with_first, with_second = (
        settings(head | {section: x}) for x in (others, others | {key: first}, others | {key: second})
    )
    assert with_first != with_second, f"{section}.{key} sets nothing"
    assert without not in (with_first, with_second) or key in SWITCHES
    assert settings(in_file, {f"{section}.{key}": second}) == with_second


@pytest.mark.parametrize("key", AGENT_KEYS)
def test_every_key_of_an_agent_acts(key):
    values = {
        "model_name_or_path": ("b", "c"),
        "mode": ("server", "client"),
        "system_prompt": ("x", "y"),
        "learning_rate": (1, 2),
    }
    first, second = values.get(key, (1, 2))
    entries = [{"model_name_or_path": "a"} | {key: first}]
    changed = settings({"agents": entries}, {f"agents.0.{key}": second})
    assert changed == settings({"agents": [entries[0] | {key: second}]}) != settings({"agents": entries})


@pytest.mark.parametrize("key", ENVIRONMENT_KEYS)
def test_every_key_of_an_environment_acts_or_is_refused(key):
    base = {"custom_class": "pkg.mod.Class"} if key.startswith("custom") else {"env_type": "code"}
    values = {
        "env_type": ("math", "tool"), "custom_class": ("a.b.C", "a.b:D"), "custom_kwargs": ({"x": 1}, {"x": 2}),
        "difficulty_range": ([1, 2], [1, 1]), "dataset": ("mbpp", "humaneval"),
    }  # fmt: skip
    if key == "server_address":
        with pytest.warns(UserWarning, match=r"change nothing here: server_address \(the environment is not remote\)"):
            assert settings({"eval_envs": [base | {key: "x"}]}) == settings({"eval_envs": [base]})
        remote = base | {"remote": True, "difficulty_range": [1, 2]}
        assert environment(remote | {key: "a:1"}, {})["options"] == {"servers": "a:1", "difficulty_range": [1, 2]}
        secret = {"token_file": "token", "tls_ca": "ca.pem"}
        assert environment(remote | {key: "a:1"} | secret, {})["options"]["servers"] == {"address": "a:1"} | secret
        in_file = {"eval_envs": [remote | {key: "a:1"}]}
        changed = settings(in_file, {"eval_envs.0.server_address": ["a:1", "b:2=3"]})
        assert changed == settings({"eval_envs": [remote | {key: ["a:1", "b:2=3"]}]}) != settings(in_file)
        return
    if key in ("remote", "mode"):
        with pytest.raises(ValueError, match="needs server_address: HOST:PORT|never trained"):
            environment(base | {key: "server"}, {})
        return
    first, second = values.get(key, (2, 4))
    for name in ("eval_envs", "train_envs"):
        in_file = {name: [base | {key: first}]}
        changed = settings(in_file, {f"{name}.0.{key}": second})
        assert changed == settings({name: [base | {key: second}]}) != settings(in_file) != settings({name: [base]})


def test_parts_have_no_name_of_a_section_of_mrlm():
    assert not set(KEYS) & {*PART_OF, *TOP_SETTINGS}
