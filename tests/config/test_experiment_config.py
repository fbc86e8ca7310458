"""`ExperimentConfig`: short names, parts and sections, plain values, errors and flags."""

from __future__ import annotations

import dataclasses
import json
import pydoc

import numpy as np
import pytest

from jmarl import ExperimentConfig, TaskConfig, TeamConfig, TrainConfig
from jmarl.config import OTHER_NAMES, SECTION_OF, SECTIONS, EnvironmentConfig, Optimizer, flat
from jmarl.config.experiment import TOP_SETTINGS, plain_values
from jmarl.config.flags import parse_flags
from jmarl.config.validation import explain
from jmarl.config.yaml_file import dump_yaml

PLAIN = dict(models=["a", "b"], environment="math_verifier", options={"max_turns": 3}, algorithm="ippo", learning_rate=1e-3)
WHOLE = ExperimentConfig(
    TeamConfig(("a", "b")), TaskConfig("math_verifier", {"max_turns": 3}), TrainConfig.of(algorithm="ippo", learning_rate=1e-3)
)


def test_one_model_may_be_a_plain_text():
    assert ExperimentConfig.of(models="a", num_agents=2, environment="math").team.models == ("a",)


def test_short_names_parts_and_dicts_give_the_same_configuration():
    assert ExperimentConfig.of(**PLAIN) == WHOLE and hash(ExperimentConfig.of(**PLAIN)) == hash(WHOLE)
    tree = {
        "team": {"models": ["a", "b"]},
        "task": {"environment": "math_verifier", "options": {"max_turns": 3}},
        "train": {"algorithm": "ippo", "optimizer": {"learning_rate": 1e-3}},
    }
    assert ExperimentConfig.of(**tree) == WHOLE
    assert ExperimentConfig.of(**tree | {"train": {"algorithm": "ippo", "agent_learning_rate": 1e-3}}) == WHOLE
    assert ExperimentConfig.of(**tree | {"train": WHOLE.train}) == WHOLE
    assert (
        ExperimentConfig.of(team=WHOLE.team, task=WHOLE.task, algorithm="ippo", optimizer=Optimizer(learning_rate=1e-3))
        == WHOLE
    )


@pytest.mark.parametrize(
    "config",
    [
        WHOLE,
        WHOLE.replace(
            learning_rate=(1e-3, 2e-3), seeds=(1, 2), held_out=1, eval_envs=["math", {"name": "debate", "options": {"n": [1]}}]
        ),
        ExperimentConfig.of(models=["a"], num_agents=2, roles=["x", "y"], data="d.json", reward="m:f", held_out="e.json"),
        ExperimentConfig.of(models=["a"], data="d.json", algorithm="c3", optimizer="sgd", momentum=0.5, num_turns=2),
    ],
)
def test_a_configuration_is_a_tree_of_plain_values(config):
    tree = json.loads(json.dumps(config.as_dict()))
    assert ExperimentConfig.of(**tree) == config
    assert set(tree) == {"team", "task", "train", *TOP_SETTINGS} and set(tree["train"]) == {"algorithm", *SECTIONS}


def test_replace_changes_some_settings():
    changed = WHOLE.replace(models=["c"], num_agents=2, temperature=0.5, task={"held_out": 3})
    assert (changed.team, changed.task.held_out) == (TeamConfig(("c",), 2), 3)
    assert changed.train == WHOLE.train.replace(temperature=0.5)
    assert changed.team.size == WHOLE.team.size == 2
    assert WHOLE.replace(environment="math", options={}).task.environment == "math"


def test_short_names_are_unique_in_the_whole_tree():
    team, task = ({field.name for field in dataclasses.fields(cls)} for cls in (TeamConfig, TaskConfig))
    assert not team & task and not (team | task | {*TOP_SETTINGS}) & {"algorithm", *SECTION_OF, *OTHER_NAMES, *SECTIONS}
    assert set(flat(WHOLE)) == team | task | {*TOP_SETTINGS, "algorithm", *SECTION_OF}
    assert flat(WHOLE)["learning_rate"] == 1e-3 and flat(WHOLE)["models"] == ("a", "b")


@pytest.mark.parametrize(("settings", "message"), [
    (dict(model=["a"]), "ExperimentConfig has no setting 'model'; did you mean 'models'"),
    (dict(enviroment="math"), "did you mean 'environment'"),
    (dict(lerning_rate=1.0), "did you mean 'learning_rate'"),
    (dict(max_prompt_length=512), "prompts are not cut to a length"),
    (dict(zebra=1), r"help\(jmarl.ExperimentConfig\) lists"),
    (dict(team={"model": ["a"]}), "TeamConfig has no setting 'model'; did you mean 'models'"),
    (dict(task={"environment": "math", "optoins": {}}), "TaskConfig has no setting 'optoins'; did you mean 'options'"),
    (dict(train={"lerning_rate": 1.0}), "TrainConfig has no setting 'lerning_rate'; did you mean 'learning_rate'"),
    (dict(train={"sampling": {"temprature": 1.0}}), "Sampling has no setting 'temprature'; did you mean 'temperature'"),
    (dict(sampling={"learning_rate": 1.0}), "Sampling has no setting 'learning_rate'"),
    (dict(eval_envs=[{"nam": "math"}]), "EnvironmentConfig has no setting 'nam'; did you mean 'name'"),
    (dict(train={"sampling": {"top_k": 1}, "top_k": 2}), "top_k is set twice, in sampling and outside"),
    (dict(train={"top_k": 1}, top_k=2), "top_k is set twice, in train and outside"),
    (dict(team=3), r"team must be a TeamConfig\(...\)"),
    (dict(options=[1]), "options must be a dict whose keys are names"),
    (dict(eval_envs=[3]), "eval_envs must be of type EnvironmentConfig"),
])  # fmt: skip
def test_an_unknown_name_or_a_wrong_type_is_a_type_error_that_says_what_to_do(settings, message):
    with pytest.raises(TypeError, match=message):
        ExperimentConfig.of(**dict(models=["a"], environment="math") | settings)


@pytest.mark.parametrize(
    ("missing", "message"), [("models", "needs models"), ("environment", "needs environment, eval_envs or data")]
)
def test_a_part_without_its_setting_is_a_type_error(missing, message):
    settings = dict(models=["a"], environment="math")
    del settings[missing]
    with pytest.raises(TypeError, match=message):
        ExperimentConfig.of(**settings)
    with pytest.raises(TypeError, match="needs models"):
        ExperimentConfig.of(num_agents=2, environment="math")


@pytest.mark.parametrize(("settings", "message"), [
    (dict(models=[]), "models must be one name, path or Hub id per agent"),
    (dict(models=["a", "b"], num_agents=3), "num_agents must be None or 2, the number of models"),
    (dict(roles=["x", "y"]), "roles must be one text per agent, 1, or none"),
    (dict(roles=["x"]), "roles must be empty without data and a reward"),
    (dict(data="d.json"), "data must be set, or one of environment and eval_envs, but not both"),
    (dict(environment=None), "data must be set, or one of environment and eval_envs, but not both"),
    (dict(environment=None, eval_envs=["math"], options={"a": 1}), "options must be {} without environment"),
    (dict(reward="m:f"), "reward must be None without data"),
    (dict(subset="s"), "subset must be None without data"),
    (dict(split="s"), "split must be 'train' without data"),
    (dict(environment=None, data="d.json", formatters=["m:f"]), r"formatters must be \(\) without reward"),
    (dict(environment=None, data="d.json", external_transition="m:f"), "external_transition must be None without reward"),
    (dict(in_turns=True), "in_turns must be False without external_transition"),
    (dict(environment=None, data="d.json", reward="m:f", formatters=["m:f"] * 3), "formatters must be one for all agents"),
    (dict(eval_envs=["math"]), r"eval_envs must be \(\) beside other environments where held_out is 0"),
    (dict(held_out=-1), "held_out must be >= 0"),
    (dict(held_out_split="x"), "held_out_split must be 'test' where held_out is a number"),
    (dict(num_tasks=0), "num_tasks must be >= 1"),
])  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_a_value_error(settings, message):
    with pytest.raises(ValueError, match=message):
        ExperimentConfig.of(**dict(models=["a"], environment="math") | settings)


@pytest.mark.parametrize("settings", [
    dict(models="a", environment="math", seed=1, learning_rate=1e-3, wandb={"mode": "offline"}, train_envs=()),
    dict(models=["a"], num_agents=2, train_envs=["math", {"name": "debate", "options": {"swap": True}}], seeds=[1, 2]),
    dict(models=["a"], environment="math", on_error="raise", chat=[True], algorithm="c3", num_turns=2),
])  # fmt: skip
def test_the_settings_that_differ_from_the_defaults_are_the_configuration(settings):
    cfg = ExperimentConfig.of(**settings)
    changed = cfg.changed_dict()
    assert ExperimentConfig.of(**changed) == cfg
    assert "learning_rate" in settings or "optimizer" not in changed.get("train", {})
    assert changed["team"] == {"models": ["a"]} | {name: x for name, x in settings.items() if name == "num_agents"}


def test_flags_give_what_python_gives():
    arguments = ["--models", "a", "--num-agents", "2", "--shared-weights", "--eval-envs", "math", '{"name": "debate"}']
    arguments += ["--environment", "math", "--options", '{"max_turns": 3}', "--task.held-out", "5", "--seeds", "1", "2"]
    arguments += ["--learning-rate", "1e-3", "--sampling.temperature", "0.5", "--no-progress", "--train.run.num-updates", "7"]
    expected = ExperimentConfig.of(
        models=["a"], num_agents=2, shared_weights=True, environment="math", options={"max_turns": 3}, held_out=5,
        eval_envs=[EnvironmentConfig("math"), EnvironmentConfig("debate")], seeds=(1, 2), learning_rate=1e-3,
        temperature=0.5, progress=False, num_updates=7,
    )  # fmt: skip
    assert parse_flags(ExperimentConfig, arguments) == expected
    with pytest.raises(SystemExit):
        parse_flags(ExperimentConfig, [*arguments, "--options", "[1]"])


def test_help_explains_every_setting():
    """With its default, what is allowed and its meaning; a subclass has a docstring of its own."""
    text = " ".join(pydoc.plain(pydoc.render_doc(TrainConfig)).replace("|", " ").split())
    for name in SECTION_OF:
        assert f" {name} = {flat(TrainConfig())[name]!r} " in text, name
    assert "top_p = 1.0 a number in (0, 1] (1 is off) Sample from the smallest set" in text
    assert "branching = 'tree' tree, chain How an episode with several turns" in text


def test_every_setting_has_a_meaning_and_what_is_allowed():
    for cls in (TeamConfig, TaskConfig, *SECTIONS.values()):
        for name, line in explain(cls).items():
            default, allowed, meaning = line.split(" | ")
            assert default and allowed and len(meaning) > 12, name


def test_numbers_of_numpy_are_written_as_numbers():
    cfg = TrainConfig.of(learning_rate=np.float64(1e-5), num_updates=np.int64(3), seed=np.int32(1))
    settings = plain_values(cfg)
    assert settings["run"]["num_updates"] == 3 and "learning_rate: 1.0e-05" in dump_yaml(settings)
