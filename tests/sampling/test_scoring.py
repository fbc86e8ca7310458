"""Log-probabilities and entropies of completions, their gradients, and the memory that they need."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.models import decoder
from jmarl.models.hub import agents as weights
from jmarl.models.hub.hf_format import tensors_from_params
from jmarl.plan.hlo import largest
from jmarl.sampling import scoring

P, G, T, S = 2, 3, 5, 16
LENGTHS = (6, 11)
token_scores = jax.jit(scoring.token_scores, static_argnums=3)


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return tiny_config()


@pytest.fixture(scope="module")
def params(cfg, random_agent, tiny_tokenizer):
    return random_agent(cfg, tiny_tokenizer, 0).params


@pytest.fixture(scope="module")
def batch():
    """Prompts of two lengths, completions, and random weights for the log-probability and entropy of each token. No id is 0,
    because transformers gives the embedding of its padding id no gradient."""
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(1, 320, (P, S)), rng.integers(1, 320, (P, G, T))
    arrays = dict(prompts=prompts, lengths=np.array(LENGTHS), tokens=tokens)
    return arrays, rng.normal(size=(2, P, G, T)).astype(np.float32)


def weighted(params, batch, cfg, **options):
    """Return a weighted sum of all scores, and the scores."""
    arrays, (of_logp, of_entropy) = batch
    scores = scoring.score(params, cfg, **arrays, **options)
    return jnp.sum(of_logp * scores.logprobs) + jnp.sum(of_entropy * scores.entropy), scores


@functools.cache
def compiled(f, cfg, chunk, options):
    return jax.jit(jax.value_and_grad(functools.partial(f, cfg=cfg, **dict(options)), has_aux=True))


def value_and_grad(params, cfg, batch, f=weighted, **options):
    """Return ((scalar, scores), gradient of the scalar)."""
    return jax.device_get(compiled(f, cfg, tuple(scoring.CHUNK.items()), tuple(options.items()))(params, batch))


def assert_close_trees(got, expected, tolerance=1e-5):
    """Check that every leaf is within the tolerance, relative to its norm."""
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-7, jax.tree_util.keystr(path)


def without_sharing(params, batch, cfg):
    """Return the same as `weighted`, from the logits of prompt and completion as one sequence per row."""
    arrays, (of_logp, of_entropy) = batch

    def score(tokens, prompt):
        logs = jax.nn.log_softmax(decoder.forward(params, cfg, jnp.concatenate([prompt, tokens]))[len(prompt) - 1 : -1])
        return logs[jnp.arange(T), tokens], -jnp.sum(jnp.exp(logs) * logs, -1)

    prompts = [prompt[:n] for prompt, n in zip(arrays["prompts"], LENGTHS, strict=True)]
    scores = [jax.vmap(score, (0, None))(*rows) for rows in zip(arrays["tokens"], prompts, strict=True)]
    logp, entropy = map(jnp.stack, zip(*scores, strict=True))
    return jnp.sum(of_logp * logp) + jnp.sum(of_entropy * entropy), scoring.Scores(logp, entropy)


@pytest.fixture(scope="module")
def scored(params, cfg, batch):
    return value_and_grad(params, cfg, batch)


@pytest.mark.long
def test_sharing_the_prompt_changes_neither_scores_nor_gradients(params, cfg, batch, scored):
    """Compare with completions that each follow their own copy of the prompt, for prompts of different lengths."""
    (value, scores), grads = scored
    (expected, plain), plain_grads = value_and_grad(params, cfg, batch, f=without_sharing)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(scores.logprobs, plain.logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, plain.entropy, atol=2e-5)
    assert_close_trees(grads, plain_grads)


def test_padding_of_the_prompt_is_ignored(params, cfg, batch, scored):
    """Scores and gradients are bit-equal with other padding ids."""
    arrays, of = batch
    other = np.where(np.arange(S) < arrays["lengths"][:, None], arrays["prompts"], 7)
    again = value_and_grad(params, cfg, (arrays | {"prompts": other}, of))
    jax.tree.map(np.testing.assert_array_equal, again, scored)


def test_chunking_does_not_change_values(params, cfg, batch, scored, monkeypatch):
    """30 tokens in five chunks of 6 give the same scores and gradients as one chunk."""
    monkeypatch.setattr(scoring, "CHUNK", dict.fromkeys(scoring.CHUNK, 7))
    (value, scores), grads = value_and_grad(params, cfg, batch)
    (expected, whole), whole_grads = scored
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(scores.logprobs, whole.logprobs, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, whole.entropy, atol=1e-5)
    assert_close_trees(grads, whole_grads)


def test_any_chunk_size_gives_the_same_scores(monkeypatch):
    """Some sizes divide the 30 tokens and some do not."""
    rng = np.random.default_rng(0)
    args = {"embed": rng.normal(size=(60, 8)).astype(np.float32)}, rng.normal(size=(30, 8)).astype(np.float32), np.arange(30)
    whole = token_scores(*args, 1.0)
    for chunk in (1, 7, 8, 29, 30, 512):
        monkeypatch.setattr(scoring, "CHUNK", dict.fromkeys(scoring.CHUNK, chunk))
        scores = jax.jit(lambda *x: scoring.token_scores(*x, 1.0))(*args)  # another function for each size, so it is traced
        for a, b in zip(scores, whole, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("chunk, holds", [(8, False), (1024, True)])
def test_no_buffer_of_all_logits(tiny_config, monkeypatch, chunk, holds):
    """The compiled forward and backward passes have no buffer as large as [tokens, V], except with one chunk for all tokens."""
    cfg, (p, g, t) = tiny_config(vocab_size=2048), (2, 4, 8)
    monkeypatch.setattr(scoring, "CHUNK", dict.fromkeys(scoring.CHUNK, chunk))
    ones = np.ones((p, 16), np.int32), np.full(p, 9), np.ones((p, g, t), np.int32)

    def sum_of_both(params):
        summed = lambda logp, entropy, data: (jnp.sum(data * (logp + entropy)), {})  # noqa: E731
        hidden, _ = scoring.hidden_states(params, cfg, *ones, "dots")
        of_losses = scoring.score_loss(params, hidden, jnp.asarray(ones[2]), jnp.ones((p, g, t)), summed)[0]
        return of_losses + sum(jnp.sum(x) for x in scoring.score(params, cfg, *ones))

    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    text = jax.jit(jax.grad(sum_of_both)).lower(shapes).compile().as_text()
    assert (largest([text], lambda kind, dims: kind == "f32") >= 4 * p * g * t * cfg.vocab_size) == holds


def test_uniform_and_certain_distributions():
    """Hidden state 0 gives log-probability -log V and entropy log V; a logit far above the others gives 0 for both."""
    embed, hidden = np.zeros((50, 4), np.float32), np.zeros((2, 4), np.float32)
    embed[7, 0], hidden[1, 0] = 1, 1000
    logp, entropy = token_scores({"embed": embed}, hidden, np.array([3, 7]), 1.0)
    np.testing.assert_allclose(logp, [-np.log(50), 0], atol=1e-5)
    np.testing.assert_allclose(entropy, [np.log(50), 0], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_scores_equal_numpy_in_double_precision(temperature):
    """log p_y = z_y/T - log sum e^(z/T) and H = -sum p log p for random logits."""
    rng = np.random.default_rng(0)
    embed, hidden, targets = rng.normal(size=(60, 8)), 2 * rng.normal(size=(9, 8)), rng.integers(0, 60, 9)
    z = hidden @ embed.T / temperature
    logs = z - np.log(np.exp(z).sum(-1, keepdims=True))
    logp, entropy = token_scores({"embed": embed.astype(np.float32)}, hidden.astype(np.float32), targets, temperature)
    np.testing.assert_allclose(logp, logs[np.arange(9), targets], atol=1e-4)
    np.testing.assert_allclose(entropy, -(np.exp(logs) * logs).sum(-1), atol=1e-4)


def test_temperature_zero_is_scored_as_one(params, cfg, batch, scored):
    scores = jax.jit(functools.partial(scoring.score, cfg=cfg, temperature=0.0))(params, **batch[0])
    np.testing.assert_allclose(scores.logprobs, scored[0][1].logprobs, atol=1e-5)


# The gradients of tied heads are those of `test_sharing_the_prompt...` and, of every family, of `test_families`.
@pytest.mark.parametrize(
    "family, temperature, flags",
    [
        ("qwen2", 0.7, {"tie_word_embeddings": False}),
        pytest.param("llama", 1.0, {}, marks=pytest.mark.nightly),
        pytest.param("qwen3", 1.3, {}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_equal_torch(tiny_dir, batch, family, temperature, flags):
    """Compare the weighted sum of scores and the gradient of every tensor with transformers and torch's autograd."""
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
