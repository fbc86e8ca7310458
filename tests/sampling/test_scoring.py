"""Scoring completions: values, entropies and gradients, without ever holding the logits of all tokens."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.models import decoder
from jmarl.models.hub import agents as weights
from jmarl.models.hub.hf_format import tensors_from_params
from jmarl.sampling import scoring

P, G, T, S = 2, 3, 5, 16
LENGTHS = (6, 11)


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return tiny_config()


@pytest.fixture(scope="module")
def params(cfg):
    """One agent whose logits differ enough to matter."""
    agent = decoder.init_params(cfg, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(lambda path, x: x if "norm" in str(path[-1]) else 6 * x, agent)


@pytest.fixture(scope="module")
def batch():
    """Prompts of two lengths, completions, and a random weight for every token's log-probability and entropy. No id is 0:
    transformers gives the row of its padding id no gradient."""
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(1, 320, (P, S)), rng.integers(1, 320, (P, G, T))
    arrays = dict(prompts=prompts, lengths=np.array(LENGTHS), tokens=tokens)
    return jax.tree.map(jnp.asarray, arrays), jnp.asarray(rng.normal(size=(2, P, G, T)), jnp.float32)


def weighted(params, batch, cfg, **options):
    """A scalar of all scores, and the scores."""
    arrays, (of_logp, of_entropy) = batch
    scores = scoring.score(params, cfg, **arrays, **options)
    return jnp.sum(of_logp * scores.logprobs) + jnp.sum(of_entropy * scores.entropy), scores


@functools.cache
def compiled(f, cfg, chunk, options):
    return jax.jit(jax.value_and_grad(functools.partial(f, cfg=cfg, **dict(options)), has_aux=True))


def value_and_grad(params, cfg, batch, f=weighted, **options):
    """((scalar, scores), gradient of the scalar)."""
    return jax.device_get(compiled(f, cfg, scoring.CHUNK, tuple(options.items()))(params, batch))


def assert_close_trees(got, expected, tolerance=1e-5):
    """Every leaf within tolerance of its own norm."""
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-7, jax.tree_util.keystr(path)


def without_sharing(params, batch, cfg):
    """The same scalar from the plain logits of prompt and completion one after the other, row by row."""
    arrays, (of_logp, of_entropy) = batch
    logp, entropy = np.zeros((2, P, G)).tolist()
    for p, n in enumerate(LENGTHS):
        for g in range(G):
            row = jnp.concatenate([arrays["prompts"][p, :n], arrays["tokens"][p, g]])
            logs = jax.nn.log_softmax(decoder.forward(params, cfg, row)[n - 1 : -1])
            logp[p][g] = logs[jnp.arange(T), arrays["tokens"][p, g]]
            entropy[p][g] = -jnp.sum(jnp.exp(logs) * logs, -1)
    logp, entropy = jnp.array(logp), jnp.array(entropy)
    return jnp.sum(of_logp * logp) + jnp.sum(of_entropy * entropy), scoring.Scores(logp, entropy)


@pytest.fixture(scope="module")
def scored(params, cfg, batch):
    return value_and_grad(params, cfg, batch)


def test_sharing_the_prompt_changes_neither_scores_nor_gradients(params, cfg, batch, scored):
    """Against every completion behind its own copy of the prompt, prompts padded by different amounts."""
    (value, scores), grads = scored
    (expected, plain), plain_grads = value_and_grad(params, cfg, batch, f=without_sharing)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(scores.logprobs, plain.logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, plain.entropy, atol=2e-5)
    assert_close_trees(grads, plain_grads)


def test_padding_of_the_prompt_does_not_matter(params, cfg, batch, scored):
    """Other ids behind the prompts' ends give the same scores and gradients, to the bit."""
    arrays, of = batch
    other = jnp.where(jnp.arange(S) < arrays["lengths"][:, None], arrays["prompts"], 7)
    again = value_and_grad(params, cfg, (arrays | {"prompts": other}, of))
    jax.tree.map(np.testing.assert_array_equal, again, scored)


def test_chunking_does_not_change_values(params, cfg, batch, scored, monkeypatch):
    """30 tokens in five chunks of 6, where the default holds them all."""
    monkeypatch.setattr(scoring, "CHUNK", 7)
    (value, scores), grads = value_and_grad(params, cfg, batch)
    (expected, whole), whole_grads = scored
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(scores.logprobs, whole.logprobs, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, whole.entropy, atol=1e-5)
    assert_close_trees(grads, whole_grads)


@pytest.mark.parametrize("chunk", [1, 7, 8, 29, 30, 512])
def test_any_chunk_size_gives_the_same_scores(monkeypatch, chunk):
    """30 tokens; sizes that divide it and sizes that do not."""
    rng = np.random.default_rng(0)
    args = {"embed": jnp.asarray(rng.normal(size=(60, 8)))}, jnp.asarray(rng.normal(size=(30, 8))), jnp.arange(30)
    whole = scoring.token_scores(*args, 1.0)
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    for a, b in zip(scoring.token_scores(*args, 1.0), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("chunk, holds", [(8, False), (1024, True)])
def test_no_buffer_of_all_logits(tiny_config, monkeypatch, chunk, holds):
    """The compiled forward and backward pass holds nothing as large as [tokens, V]; with one chunk for all tokens it does,
    so the test would see it."""
    cfg, (p, g, t) = tiny_config(vocab_size=2048), (2, 4, 8)
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    params = decoder.init_params(cfg, jax.random.key(0))
    ones = jnp.ones((p, 16), jnp.int32), jnp.full(p, 9), jnp.ones((p, g, t), jnp.int32)

    def of_scores(params):
        return sum(jnp.sum(x) for x in scoring.score(params, cfg, *ones))

    def of_loss(params):
        summed = lambda logp, entropy, data: (jnp.sum(data * (logp + entropy)), {})  # noqa: E731
        hidden = scoring.hidden_states(params, cfg, *ones, "dots")
        return scoring.score_loss(params, hidden, ones[2], jnp.ones((p, g, t)), summed)[0]

    for loss in (of_scores, of_loss):
        text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
        largest = max(int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"\w\d+\[([\d,]+)\]", text))
        assert (largest >= p * g * t * cfg.vocab_size) == holds


def test_uniform_and_certain_distributions():
    """Hidden 0: log-probability -log V, entropy log V. A logit far above the others: both 0."""
    embed = jnp.zeros((50, 4)).at[7, 0].set(1.0)
    hidden, targets = jnp.array([[0.0] * 4, [1000.0, 0, 0, 0]]), jnp.array([3, 7])
    logp, entropy = scoring.token_scores({"embed": embed}, hidden, targets, 1.0)
    np.testing.assert_allclose(logp, [-np.log(50), 0], atol=1e-5)
    np.testing.assert_allclose(entropy, [np.log(50), 0], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probabilities_and_entropies_in_double_precision(temperature):
    """log p_y = z_y/T - log sum e^(z/T) and H = -sum p log p, for random logits, by numpy in float64."""
    rng = np.random.default_rng(0)
    embed, hidden, targets = rng.normal(size=(60, 8)), 2 * rng.normal(size=(9, 8)), rng.integers(0, 60, 9)
    z = hidden @ embed.T / temperature
    logs = z - np.log(np.exp(z).sum(-1, keepdims=True))
    args = {"embed": jnp.asarray(embed, jnp.float32)}, jnp.asarray(hidden, jnp.float32), jnp.asarray(targets)
    logp, entropy = scoring.token_scores(*args, temperature)
    np.testing.assert_allclose(logp, logs[np.arange(9), targets], atol=1e-4)
    np.testing.assert_allclose(entropy, -(np.exp(logs) * logs).sum(-1), atol=1e-4)


def test_greedy_is_scored_at_temperature_one(params, cfg, batch, scored):
    scores = jax.jit(functools.partial(scoring.score, cfg=cfg, temperature=0.0))(params, **batch[0])
    np.testing.assert_allclose(scores.logprobs, scored[0][1].logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "family, temperature, flags",
    [("llama", 1.0, {}), ("qwen2", 0.7, {"tie_word_embeddings": False}), ("qwen3", 1.3, {})],
)
def test_gradients_equal_torch(tiny_dir, batch, family, temperature, flags):
    """Log-probabilities, entropies and the gradient of every tensor against torch's autograd through transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = tiny_dir(family, **flags)
    agent = weights.load_agent(directory)
    (value, _), grads = value_and_grad(agent.params, agent.config, batch, temperature=temperature)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    arrays, of = batch
    of_logp, of_entropy = torch.tensor(np.asarray(of))
    total = torch.zeros(())
    for p, n in enumerate(LENGTHS):
        for g in range(G):
            new = np.array(arrays["tokens"][p, g])
            row = torch.tensor(np.concatenate([np.asarray(arrays["prompts"][p, :n]), new]))[None]
            logs = (model(row).logits[0, n - 1 : -1] / temperature).log_softmax(-1)
            total = total + (of_logp[p, g] * logs[range(T), new]).sum() - (of_entropy[p, g] * (logs.exp() * logs).sum(-1)).sum()
    total.backward()
    assert value == pytest.approx(total.item(), rel=1e-4)
    ours = tensors_from_params(agent.config, grads)
    theirs = {name: w.grad.numpy() for name, w in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert np.linalg.norm(ours[name] - expected) <= 1e-4 * np.linalg.norm(expected), name
