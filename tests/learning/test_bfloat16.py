"""In bfloat16 the sampler and the learner give a token nearly the same probability: bounds that follow from rounding."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import TrainConfig, train
from jmarl.models import decoder
from jmarl.models.hub.agents import Agent
from jmarl.randomness import TRAIN, Randomness, tasks_of
from jmarl.sampling import scoring
from jmarl.sampling.generate import SampleRequest, pad, sample_team, tokenize
from jmarl.team import make_team

pytestmark = pytest.mark.long  # one team for all of them

ITEMS = ["apples and pears", "write a line about", "the", "one two three four five"]
PROMPTS = [ITEMS[i] for i in tasks_of(0, len(ITEMS), len(ITEMS), 0)]  # as a run draws them in its first step
SETTINGS = dict(
    num_prompts=4, num_generations=8, max_new_tokens=32, compute_dtype="bfloat16", num_updates=1, progress=False,
    learning_rate=1e-6,
)  # fmt: skip


@pytest.fixture(scope="module")
def agent(tiny_config, tiny_tokenizer):
    """Weights larger than at initialization, so that logits have the size of a trained model's."""
    model = tiny_config(hidden_size=64, intermediate_size=128, num_layers=4, head_dim=16)
    scales = {"embed": 10, "norm": 1}  # of other weights 4
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * next((scale for name, scale in scales.items() if name in str(path[-1])), 4),
        jax.jit(decoder.init_params, static_argnums=0)(model, jax.random.key(0)),
    )
    return Agent("random", model, params, tiny_tokenizer)


@pytest.fixture(scope="module")
def sampled(agent):
    """The prompts of an agent and what it wrote in bfloat16."""
    team, params = make_team([agent])
    cfg = TrainConfig.of(**SETTINGS)
    encoded = pad(team, tokenize(team, [PROMPTS], cfg.sampling, chat=False))
    request = SampleRequest(encoded, cfg.sampling, Randomness(0, 0, TRAIN), 8, np.arange(len(PROMPTS), dtype=np.uint32))
    (completions,) = sample_team(team, params, request)
    return (
        encoded[0][0][0],
        encoded[0][1][0],
        jax.tree.map(lambda x: np.asarray(x)[0], completions._replace(cache=None, steps=None)),
    )


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def score_in(params, *rows, model, dtype):
    return scoring.score(decoder.cast(params, jnp.dtype(dtype)), model, *rows)


def differences(agent, sampled, dtype: str = "bfloat16", **changes) -> np.ndarray:
    """Log-probability of the learner less that of the sampler, of the sampled tokens. changes: of the learner's model."""
    prompts, lengths, completions = sampled
    model = dataclasses.replace(agent.config, **changes)
    scores = score_in(agent.params, prompts, lengths, completions.tokens, model=model, dtype=dtype)
    return (np.asarray(scores.logprobs) - completions.logprobs)[completions.action_mask]


def spacing(agent, sampled) -> float:
    """The distance of neighbors in bfloat16, which has 8 bits, at the size of the largest logit."""
    prompts, lengths, completions = sampled
    row = np.concatenate([prompts[0, : lengths[0]], completions.tokens[0, 0]])
    logits = jax.jit(decoder.forward, static_argnums=1)(agent.params, agent.config, row)
    return 2.0 ** (math.floor(math.log2(float(np.abs(logits).max()))) - 7)


def bounds(agent, sampled) -> tuple[float, float]:
    """Of the mean and of the largest difference.

    Logits are sums in float32 over hidden states in bfloat16. Each layer rounds the residual twice, by at most half a spacing
    of its own size, and the sum over the hidden size spreads that over all logits: a whole spacing of the largest logit at
    each rounding is the most, and on the mean they cancel to one.
    """
    u = spacing(agent, sampled)
    return u, 2 * agent.config.num_layers * u


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_learner_scores_what_was_sampled_within_rounding(agent, sampled, dtype: str) -> None:
    """In bfloat16 both programs round nearly alike on CPUs. A learner in float32 rounds nothing, so the bounds also hold where
    no rounding is the same, as in the kernels of GPUs."""
    found, (mean, largest) = np.abs(differences(agent, sampled, dtype)), bounds(agent, sampled)
    assert found.size > 300 and 0 < found.mean() < mean and found.max() < largest
    assert dtype == "float32" or found.mean() < mean / 10


@pytest.mark.parametrize("changes", [dict(rope_theta=1000.0), dict(rms_eps=1e-2)], ids=str)
def test_another_model_is_outside_of_the_bounds(agent, sampled, changes: dict) -> None:
    found, (mean, largest) = np.abs(differences(agent, sampled, **changes)), bounds(agent, sampled)
    assert found.mean() > mean and found.max() > largest


@pytest.fixture(scope="module")
def row(agent, tmp_path_factory) -> dict:
    """The log of an update of a run on the same prompts; tokens are weighted by importance, at most 1."""
    directory = tmp_path_factory.mktemp("run")
    team, params = make_team([agent])
    cfg = TrainConfig.of(**SETTINGS, importance_cap=1.0, output_dir=str(directory), save_every=0, save_models=False)
    train(team, lambda texts: [float(len(x)) for x in texts], [{"prompt": x} for x in ITEMS], cfg, params=params)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return next(row for row in rows if any("mismatch" in name for name in row))


def metric(row: dict, name: str) -> float:
    (value,) = [value for key, value in row.items() if key.split("/")[-1] == name]
    return value


def test_the_metric_mismatch_of_a_run_is_this_mean(agent, sampled, row) -> None:
    """The run samples the same completions."""
    assert metric(row, "mismatch") == pytest.approx(np.abs(differences(agent, sampled)).mean(), rel=1e-2)


def test_truncated_importance_sampling_weights_what_rounding_leaves(agent, sampled, row) -> None:
    """A token counts by the learner's probability of it, where that is lower than the sampler's."""
    weights = np.minimum(np.exp(differences(agent, sampled)), 1)
    assert weights.min() < 1 and 1 - metric(row, "importance") == pytest.approx(1 - weights.mean(), rel=0.05)
