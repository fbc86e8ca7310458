"""A name of TRL or transformers means what it means there, or is refused with what to write instead."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.algorithms.table import ALGORITHMS, CLIPPING, DEFAULTS
from jmarl.comlrl.trainers.magrpo import MAGRPOConfig
from jmarl.config import OTHER_NAMES, ExperimentConfig, Optimizer, TrainConfig, flat
from jmarl.config.aliases import CONVERSIONS, HIGHEST_CLIP, REFUSED, WEIGHT_BOUNDS
from jmarl.config.flags import parse_flags
from jmarl.config.layers import Layers, experiment_config, flag_source
from jmarl.config.yaml_file import YamlFile
from jmarl.rl.losses import cispo, clipped_surrogate

MARLHF = dict(algorithm="marlhf", rl_algorithm="cispo")
FOUR_STEPS = dict(num_iterations=2, num_minibatches=2)

# Settings by names of TRL, and the settings here that mean the same.
CONVERTED = [
    # the bound of the ratio itself, where others have 1 + epsilon_high
    (dict(algorithm="cispo", epsilon_high=5.0), dict(algorithm="cispo", clip_eps_high=4.0)),
    (MARLHF | dict(epsilon_high=5), MARLHF | dict(clip_eps_high=4)),
    (dict(algorithm="grpo", epsilon_high=0.28), dict(algorithm="grpo", clip_eps_high=0.28)),
    # one epsilon clips on both sides
    (dict(algorithm="dapo", epsilon=0.2), dict(algorithm="dapo", clip_eps_low=0.2, clip_eps_high=0.2)),
    (dict(algorithm="dapo", epsilon=0.2, epsilon_high=0.3), dict(algorithm="dapo", clip_eps_low=0.2, clip_eps_high=0.3)),
    (dict(algorithm="dapo", epsilon=0.2, clip_eps_high=0.3), dict(algorithm="dapo", clip_eps_low=0.2, clip_eps_high=0.3)),
    (dict(epsilon=0.2, delta=4.0), dict(clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=4.0)),
    (dict(algorithm="grpo", epsilon=None, epsilon_high=None, delta=None), dict(algorithm="grpo")),
    # optimizer steps, of which an update has num_epochs * num_minibatches
    (dict(max_steps=100, logging_steps=5, warmup_steps=3), dict(num_updates=100, log_every=5, warmup_updates=3)),
    (FOUR_STEPS | dict(max_steps=100), dict(num_epochs=2, num_minibatches=2, num_updates=25)),
    (FOUR_STEPS | dict(warmup_steps=8, logging_steps=4), dict(num_epochs=2, num_minibatches=2, warmup_updates=2, log_every=1)),
    (FOUR_STEPS | dict(eval_steps=12), dict(num_epochs=2, num_minibatches=2, eval_every=3)),
    (FOUR_STEPS | dict(save_steps=12, output_dir="o"), dict(num_epochs=2, num_minibatches=2, save_every=3, output_dir="o")),
    (dict(optimizer=Optimizer(num_epochs=4), max_steps=100), dict(num_epochs=4, num_updates=25)),
    (dict(optimizer={"num_epochs": 4}, run={"max_steps": 100}), dict(num_epochs=4, num_updates=25)),
    # constant has no warm-up there
    (dict(lr_scheduler_type="constant_with_warmup", warmup_steps=3), dict(lr_schedule="constant", warmup_updates=3)),
    (dict(lr_scheduler_type="constant"), dict(lr_schedule="constant")),
    (dict(lr_scheduler_type="cosine", warmup_steps=3), dict(lr_schedule="cosine", warmup_updates=3)),
    # names of values
    (dict(scale_rewards=True), dict(advantage_scale="std")), (dict(scale_rewards="group"), dict(advantage_scale="std")),
    (dict(scale_rewards="batch"), dict(advantage_scale="batch_std")),
    (dict(scale_rewards=False), dict(advantage_scale="none")), (dict(scale_rewards="none"), dict(advantage_scale="none")),
    (dict(loss_type="dr_grpo"), dict(loss_aggregation="constant")), (dict(loss_type=["ipo"]), dict(preference_loss="ipo")),
    (dict(importance_sampling_level="sequence"), dict(ratio_level="sequence")),
    (dict(num_generations_eval=2), dict(eval_generations=2)),
    (dict(algorithm="madpo", preference_num_candidates=6), dict(algorithm="madpo", num_candidates=6)),  # of CoMLRL
]  # fmt: skip

# Settings with another meaning there that nothing here expresses, and what the message says.
WITHOUT_MEANING = [
    (dict(algorithm="cispo", epsilon_high=0.28), "epsilon_high=0.28 is not allowed.*set clip_eps_high"),
    (dict(algorithm="cispo", epsilon=0.2), "epsilon=0.2 is not allowed.*set epsilon_high"),
    (dict(algorithm="grpo", epsilon=0.2, delta=1.1), r"delta=1.1 is not allowed.*at least 1 \+ clip_eps_high = 1.2"),
    (dict(algorithm="grpo", delta=1.2), "delta=1.2 is not allowed.* = 1.28"),
    (FOUR_STEPS | dict(max_steps=10), "max_steps=10 is not allowed.*num_minibatches = 4.*multiple of 4, or set num_updates"),
    (FOUR_STEPS | dict(warmup_steps=6), "warmup_steps=6 is not allowed.*warmup_updates"),
    (FOUR_STEPS | dict(save_steps=6, output_dir="o"), "save_steps=6 is not allowed.*save_every"),
    (FOUR_STEPS | dict(eval_steps=6), "eval_steps=6 is not allowed.*eval_every"),
    (FOUR_STEPS | dict(logging_steps=10), "logging_steps=10 is not allowed.*log_every"),
    (dict(warmup_steps=0.1), "warmup_steps=0.1 is not allowed.*warmup_updates"),
    (dict(lr_scheduler_type="constant", warmup_steps=3), "lr_scheduler_type='constant' is not allowed.*constant_with_warmup"),
    (dict(loss_type="cispo"), "loss_type='cispo' is not allowed: set algorithm='cispo'"),
    *[(dict(loss_type=name), f"loss_type='{name}' is not allowed: this loss is no") for name in ("sapo", "luspo", "vespo")],
    (dict(max_steps=-1), "num_updates=-1"), (dict(save_steps=-5, output_dir="o"), "save_every=-5"),
    (dict(top_k=-1), "top_k=-1"), (dict(lr_scheduler_type="polynomial"), "lr_schedule='polynomial'"),
    (dict(loss_type="robust"), "preference_loss='robust'"), (dict(scale_rewards="token"), "advantage_scale='token'"),
]  # fmt: skip


def without_sections(settings):
    """Return settings as a file or flags spell them."""
    flattened = {}
    for name, value in settings.items():
        flattened |= value if isinstance(value, dict) else flat(value) if dataclasses.is_dataclass(value) else {name: value}
    return flattened


def by_layers(settings):
    """Return the configuration of a file with half of the settings, and of --set with the others."""
    settings = without_sections(settings)
    layers, names = Layers(), sorted(settings, reverse=True)
    in_file = {name: settings[name] for name in names[: len(names) // 2]}
    layers.add(1, YamlFile("file.yaml", {"models": ["m"], "environment": "math"} | in_file, {}))
    for rank, name in enumerate(names[len(names) // 2 :], 2):
        layers.add(rank, flag_source(name, settings[name]))
    return experiment_config(layers.own).train


@pytest.mark.parametrize(("there", "here"), CONVERTED)
def test_a_name_of_trl_means_what_it_means_there(there, here):
    expected = TrainConfig.of(**here)
    assert TrainConfig.of(**there) == expected
    assert ExperimentConfig.of(models="m", environment="math", **there).train == expected
    assert by_layers(there) == expected
    context = {name: value for name, value in there.items() if name not in CONVERSIONS and name != "run"}
    if "run" not in there:
        names = {name: value for name, value in there.items() if name not in context}
        assert TrainConfig.of(**context).replace(**names) == expected


@pytest.mark.parametrize(("settings", "message"), WITHOUT_MEANING)
def test_a_name_of_trl_that_cannot_mean_the_same_is_refused(settings, message):
    for read in (lambda **settings: by_layers(settings), TrainConfig.of):
        with pytest.raises(ValueError, match=message):
            read(**settings)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_counts_something_else_is_refused_with_what_to_write(name):
    assert name not in OTHER_NAMES
    with pytest.raises(TypeError, match=f"TrainConfig has no setting '{name}'; {REFUSED[name][:40]}"):
        TrainConfig.of(**{name: 4})
    with pytest.raises(ValueError, match="unknown key"):
        by_layers({name: 4})
    with pytest.raises(TypeError, match=f"has no setting '{name}'; "):
        parse_flags(TrainConfig, [f"--{name.replace('_', '-')}", "4"])


def test_flags_are_converted_with_the_other_flags():
    config = parse_flags(
        TrainConfig, ["--loss.epsilon-high=5.0", "--algorithm", "cispo", "--max-steps", "8", "--num-iterations", "4"]
    )
    assert config == TrainConfig.of(algorithm="cispo", clip_eps_high=4.0, num_updates=2, num_epochs=4)
    experiment = parse_flags(
        ExperimentConfig, ["--team.models", "m", "--environment", "code", "--epsilon", "0.1", "--algorithm", "dapo"]
    )
    assert experiment.train == TrainConfig.of(algorithm="dapo", clip_eps_low=0.1, clip_eps_high=0.1)
    with pytest.raises(ValueError, match="max_steps=9 is not allowed"):
        parse_flags(TrainConfig, ["--max-steps=9", "--num-epochs=2"])


def test_a_later_source_overrides_a_name_of_trl_in_another_spelling():
    for first, second in (("max_steps", "num_updates"), ("num_updates", "max_steps")):
        layers = Layers()
        layers.add(1, YamlFile("file.yaml", {"models": ["m"], "environment": "math", first: 8, "num_epochs": 4}, {}))
        layers.add(2, flag_source(second, 4))
        assert experiment_config(layers.own).train.run.num_updates == (4 if second == "num_updates" else 1)
    with pytest.raises(ValueError, match="both set num_updates"):
        Layers().add(1, YamlFile("file.yaml", {"max_steps": 8, "num_updates": 8}, {}))


def test_comlrl_reads_prompts_and_converts_as_the_others():
    config = MAGRPOConfig(per_device_train_batch_size=1, logging_steps=10, save_steps=100, output_dir="o")
    assert (config.num_prompts, config.log_every, config.save_every) == (1, 10, 100)
    assert MAGRPOConfig(algorithm="cispo", epsilon_high=5.0).clip_eps_high == 4.0
    assert MAGRPOConfig(num_iterations=4, max_steps=8).num_updates == 2
    with pytest.raises(ValueError, match="max_steps=9 is not allowed"):
        MAGRPOConfig(num_iterations=4, max_steps=9)


def test_the_tables_of_algorithms_agree():
    """The configuration knows no algorithms: it names those that bound weights, and the largest clip that delta may meet."""
    assert {name for name, row in ALGORITHMS.items() if row.loss is cispo} == WEIGHT_BOUNDS
    clips = [{**DEFAULTS, **row.defaults}["clip_eps_high"] for row in ALGORITHMS.values() if row.options == CLIPPING]
    assert max(clips) == HIGHEST_CLIP


RATIOS, ADVANTAGES = (x.ravel() for x in np.meshgrid(np.linspace(0.1, 8, 80), [-1.5, 1.5]))


@pytest.mark.parametrize("settings", [
    dict(epsilon=0.2), dict(epsilon=0.2, epsilon_high=0.4), dict(epsilon=0.3, delta=4.0),
    dict(epsilon=0.2, epsilon_high=0.5, delta=1.5),
])  # fmt: skip
def test_clipped_losses_are_those_of_trl(settings):
    algorithm = resolve(TrainConfig.of(algorithm="grpo", **settings))
    low, high = settings["epsilon"], settings.get("epsilon_high", settings["epsilon"])
    bounded = np.minimum(RATIOS, settings.get("delta", np.inf))
    expected = -np.minimum(bounded * ADVANTAGES, np.clip(RATIOS, 1 - low, 1 + high) * ADVANTAGES)
    rows = [jnp.asarray(x)[:, None] for x in (np.log(RATIOS), 0 * RATIOS, ADVANTAGES, 0 * RATIOS + 1)]
    losses = jax.vmap(lambda *row: clipped_surrogate(*row, **algorithm.options)[0])(*rows)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_the_weight_of_cispo_is_bounded_by_epsilon_high():
    algorithm = resolve(TrainConfig.of(algorithm="cispo", epsilon_high=5.0))
    for ratio in (0.01, 0.5, 4.9, 5.5, 8.0):
        loss, _ = cispo(*[jnp.array([x]) for x in (np.log(ratio), 0.0, 1.0, 1.0)], **algorithm.options)
        assert float(loss) == pytest.approx(-min(ratio, 5.0) * np.log(ratio), rel=1e-4)
