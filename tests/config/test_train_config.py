"""Settings: names, types, ranges, sections, aliases and flags."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from typing import Annotated, Literal

import pytest

from jmarl.config import (
    BY_VALUE,
    OTHER_NAMES,
    SECTION_OF,
    SECTIONS,
    Optimizer,
    Range,
    Sampling,
    TrainConfig,
    check_fields,
    flat,
)
from jmarl.config.flags import flag_paths, long_flag, parse_flags


def test_each_setting_is_in_one_section_so_its_short_name_is_enough():
    names = [field.name for cls in SECTIONS.values() for field in dataclasses.fields(cls)]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(names) == set(SECTION_OF)


def test_short_names_and_sections_give_the_same_configuration():
    short = TrainConfig.of(algorithm="ppo", learning_rate=1e-6, temperature=0.5)
    nested = TrainConfig("ppo", sampling=Sampling(temperature=0.5), optimizer=Optimizer(learning_rate=1e-6))
    assert short == nested and hash(short) == hash(nested)
    assert short.replace(learning_rate=2e-6).optimizer == Optimizer(learning_rate=2e-6)
    assert short.replace(learning_rate=2e-6).sampling == short.sampling


def test_optimizer_is_a_section_and_the_name_of_an_optimizer():
    assert TrainConfig.of(optimizer="sgd", momentum=0.5).optimizer == Optimizer(optimizer="sgd", momentum=0.5)
    assert TrainConfig.of(optimizer=Optimizer(optimizer="lion")).optimizer.optimizer == "lion"


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_another_name_reaches_its_field(name):
    field = OTHER_NAMES[name]
    value = {"comparator_model": "m", "comparator_url": "u"}.get(field)
    needed = {
        "value_clip": dict(value_clip=0.5),
        "comparator_lag": dict(comparator="history", comparator_lag=3),
        "comparator_model": dict(comparator="model", comparator_model="m"),
        "comparator_url": dict(comparator="api", comparator_url="u", comparator_model="m"),
        "comparator": dict(comparator="initial"),
        "replay_k": dict(replay="nearest_k", replay_k=5),
        "replay_lambda": dict(replay="lambda_decay", replay_lambda=0.25),
        "replay": dict(replay="all"),
        "lora_rank": dict(lora_rank=4),
        "lora_targets": dict(lora_rank=4, lora_targets="q_proj"),
        "separate_critic": dict(separate_critic=False),
        "mask_overlong": dict(mask_overlong=True),
        "advantage_scale": dict(advantage_scale="std"),
        "preference_loss": dict(preference_loss="hinge"),
        "lr_schedule": dict(lr_schedule="cosine"),
        "output_dir": dict(output_dir="runs/x"),
        "save_every": dict(save_every=7, output_dir="runs/x"),
        "dual_clip": dict(dual_clip=3.0),
        "gamma": dict(gamma=0.5),
        "stop": dict(stop="</answer>"),
        "adam_b1": dict(adam_b1=0.5),
        "adam_b2": dict(adam_b2=0.5),
        "value_coef": dict(value_coef=0.25),
        "ratio_level": dict(ratio_level="sequence"),
        "clip_eps_low": dict(clip_eps_low=7, clip_eps_high=8),
    }.get(field, {field: 7})
    assert value is None or needed[field] == value
    renamed = {name if setting == field else setting: x for setting, x in needed.items()}
    assert TrainConfig.of(**renamed) == TrainConfig.of(**needed) != TrainConfig()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BY_VALUE.items() for value in values])
def test_a_name_with_two_meanings_reaches_the_field_of_its_value(name, value):
    field, meaning = BY_VALUE[name][value]
    assert flat(TrainConfig.of(**{name: value}))[field] == meaning


@pytest.mark.parametrize(("settings", "message"), [
    (dict(learning_rte=1.0), "did you mean 'learning_rate'"),
    (dict(zebra=1), r"help\(TrainConfig\) lists"),
    (dict(learning_rate=1.0, agent_learning_rate=1.0), "learning_rate and agent_learning_rate are the same setting"),
    (dict(learning_rate="1e-5"), "of type float"),
    (dict(num_updates=True), "of type int"),
    (dict(sampling=Optimizer()), r"sampling must be a Sampling\(\.\.\.\)"),
    (dict(algorithm=3), "algorithm must be of type str"),
])  # fmt: skip
def test_a_wrong_name_or_type_is_a_type_error_that_says_what_to_do(settings, message):
    with pytest.raises(TypeError, match=message):
        TrainConfig.of(**settings)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(top_p=0.0), r"top_p must be in \(0, 1\] \(1 is off\)"),
    (dict(temperature=-1.0), r"temperature must be >= 0 \(0 is greedy\)"),
    (dict(learning_rate=(1.0, -1.0)), "learning_rate must be > 0"),
    (dict(gae_lambda=2.0), r"gae_lambda must be in \[0, 1\], or None"),
    (dict(seed=-1), r"seed must be in \[0, 2147483647\]"),
    (dict(optimizer=("adamw", "adam")), "optimizer must be one of .*'lion'"),
    (dict(joint_mode="both"), "joint_mode must be one of .*'cross'"),
    (dict(min_new_tokens=9, max_new_tokens=8), r"min_new_tokens must be 0..max_new_tokens=8"),
    (dict(kl_target=0.1), "kl_target must be None where kl_coef=0"),
    (dict(target_kl=0.1), "None where a batch is one optimizer step"),
    (dict(momentum=0.5), "0.0 without optimizer=sgd"),
    (dict(lr_schedule="linear", num_updates=3, warmup_updates=3), "num_updates must be > warmup_updates=3"),
    (dict(resume=True), "resume must be off without output_dir"),
    (dict(algorithm="c3", joint_mode="cross"), "counterfactual for algorithm=c3"),
])  # fmt: skip
def test_a_value_out_of_range_is_a_value_error_that_says_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.of(**settings)


def test_lists_become_tuples_so_that_settings_are_hashable():
    config = TrainConfig.of(learning_rate=[1e-5, 2e-5], frozen_agents=[1])
    assert config.optimizer.learning_rate == (1e-5, 2e-5) and config.run.frozen_agents == (1,)
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))


def test_annotations_say_what_is_allowed():
    @dataclasses.dataclass(frozen=True)
    class Fields:
        share: Annotated[float, Range(0, 1, high_open=True)] | None = None
        letters: tuple[Literal["a", "b"], ...] = ()

        def __post_init__(self):
            check_fields(self)

    Fields.__annotations__ = {"share": Fields.__annotations__["share"], "letters": Fields.__annotations__["letters"]}
    globals().update(Annotated=Annotated, Literal=Literal, Range=Range)
    assert Fields(share=0.5, letters=["a"]).letters == ("a",)
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\), or None"):
        Fields(share=1.0)
    with pytest.raises(ValueError, match="letters must be one of"):
        Fields(letters=("a", "c"))
    with pytest.raises(TypeError, match="share must be of type float | None"):
        Fields(share="x")


def test_flags_short_and_long_give_what_python_gives():
    arguments = [
        "--learning-rate", "1e-3", "2e-3", "--algorithm", "ippo", "--no-progress", "--episodes.chat", "--frozen-agents", "1",
        "--max-steps=7",
    ]  # fmt: skip
    expected = TrainConfig.of(
        algorithm="ppo", learning_rate=(1e-3, 2e-3), progress=False, chat=True, frozen_agents=(1,), num_updates=7
    ).replace(algorithm="ippo")
    assert parse_flags(TrainConfig, arguments) == expected


@pytest.mark.parametrize(
    ("flag", "long"),
    [
        ("--temperature", "--sampling.temperature"),
        ("--temperature=0.5", "--sampling.temperature=0.5"),
        ("--no-resume", "--run.no-resume"),
        ("--optimizer.learning-rate", "--optimizer.learning-rate"),
        ("--optimizer", "--optimizer.optimizer"),
        ("--no-run.resume", "--no-run.resume"),
        ("--run.no-resume", "--run.no-resume"),
        ("--logging-steps", "--run.log-every"),
        ("--num-turns", "--num-turns"),  # a field of the subclass
        ("--episodes.num-turns", "--episodes.num-turns"),
        ("--algorithm", "--algorithm"),
        ("--unknown", "--unknown"),
        ("value", "value"),
    ],
)
def test_a_short_flag_gets_the_name_of_its_section(flag, long):
    @dataclasses.dataclass(frozen=True)
    class WithTurns(TrainConfig):
        num_turns: int = 3

    assert long_flag(flag, flag_paths(WithTurns)) == long
