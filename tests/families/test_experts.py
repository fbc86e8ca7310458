"""Experts: a token is multiplied with the weights of its own experts only, and how evenly they are chosen can be trained."""

from __future__ import annotations

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import train
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.models import lora
from jmarl.models.hub.agents import load_agent
from jmarl.models.layers import experts
from jmarl.sampling import scoring
from jmarl.team import make_team
from tests.families.test_families import CASES, FULL

WIDTH, DIM, NUM, CHOICES = 12, 16, 6, 2
ROUTES = {  # experts of each token
    "even": lambda rng, n: np.stack([rng.permutation(NUM)[:CHOICES] for _ in range(n)]),
    "all to two": lambda rng, n: np.tile([4, 1], (n, 1)),
    "one alone": lambda rng, n: np.stack([np.array([5, 0 if i else 3]) for i in range(n)]),
}


def weights(rng):
    shapes = (NUM, DIM, WIDTH), (NUM, DIM, WIDTH), (NUM, WIDTH, DIM)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def applied(chosen, x, shares, gate, up, down):
    return experts.apply_experts(x, experts.Routes(chosen, shares, jnp.zeros((len(x), NUM))), gate, up, down, jax.nn.silu)


def applied_densely(chosen, x, shares, gate, up, down):
    """Every token times every expert."""
    out = jnp.einsum("nef,efd->ned", jax.nn.silu(jnp.einsum("nd,edf->nef", x, gate)) * jnp.einsum("nd,edf->nef", x, up), down)
    return jnp.einsum("nke,ned,nk->nd", jax.nn.one_hot(chosen, NUM), out, shares)


@pytest.mark.parametrize(("tokens", "size", "dense"), [(1, 1, False), (5, 1, True), (5, 1, False), (160, 4, False)])
def test_blocks_compute_what_all_experts_compute_for_their_tokens(tokens, size, dense, monkeypatch):
    """Also the gradients. Blocks of 1 row and of several, multiplied 3 at a time; and a few tokens with all experts."""
    monkeypatch.setattr(experts, "BLOCKS_AT_ONCE", 3)
    monkeypatch.setattr(experts, "FEW_TOKENS", 100 if dense else 0)
    assert experts.block_rows(tokens * CHOICES, NUM) == size and experts.reads_all(tokens, CHOICES, NUM) == dense

    @jax.jit
    def both(chosen, cotangent, *inputs):
        results = [jax.vjp(functools.partial(f, chosen), *inputs) for f in (applied, applied_densely)]
        return [(out, *vjp(cotangent)) for out, vjp in results]

    rng = np.random.default_rng(0)
    for routes in ROUTES.values():
        x, cotangent = rng.normal(size=(2, tokens, DIM)).astype(np.float32)
        shares = rng.uniform(size=(tokens, CHOICES)).astype(np.float32)
        ours, expected = both(routes(rng, tokens), cotangent, x, shares, *weights(rng))
        np.testing.assert_allclose(ours[0], expected[0], rtol=1e-4, atol=1e-4)
        for grad, other in zip(ours[1:], expected[1:], strict=True):
            np.testing.assert_allclose(grad, other, rtol=1e-4, atol=1e-3)


def test_each_block_has_one_expert():
    make_blocks, rng = jax.jit(experts.make_blocks, static_argnums=1), np.random.default_rng(1)
    for tokens, routes in itertools.product((1, 7, 64, 500), ROUTES.values()):
        chosen = routes(rng, tokens).reshape(-1)
        size, (place, expert) = experts.block_rows(len(chosen), NUM), map(np.asarray, make_blocks(chosen, NUM))
        assert len({*place.tolist()}) == len(chosen) and place.max() < len(expert) * size
        np.testing.assert_array_equal(expert[place // size], chosen)


def test_operations_grow_with_the_experts_of_a_token_and_not_with_all():
    """Rows that are multiplied: those of all blocks."""

    def operations(num, choices, tokens=2048):
        rows = experts.block_rows(tokens * choices, num)
        blocks = jax.eval_shape(lambda: experts.make_blocks(jnp.zeros(tokens * choices, jnp.int32), num))
        return blocks.expert.shape[0] * rows

    assert not experts.reads_all(2048, 8, 128) and experts.reads_all(64, 8, 128) and not experts.reads_all(4, 8, 128)
    assert operations(128, 8) <= 1.15 * operations(16, 8)
    assert operations(128, 8) == pytest.approx(4 * operations(128, 2), rel=0.15)


@pytest.fixture(scope="module")
def directory(tiny_dir):
    return tiny_dir("qwen3_moe", **FULL | CASES["qwen3_moe"] | {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def agent(directory):
    return load_agent(directory)


def test_the_load_balancing_term_equals_that_of_transformers(agent, directory):
    """Prompts and completions of other lengths; padding is not counted."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    rng, lengths, written = np.random.default_rng(2), np.array([7, 4]), np.array([5, 3])
    prompts, tokens = rng.integers(3, 320, (2, 7)), rng.integers(3, 320, (2, 1, 6))
    mask = np.arange(6) < written[:, None, None]

    @jax.jit
    def balance_of(params):
        _, load = scoring.hidden_states(params, agent.config, prompts, lengths, tokens, "full", jnp.asarray(mask))
        return experts.balance(load), load.tokens

    rows = [
        np.concatenate([prompts[i, :n], tokens[i, 0, : t - 1]]) for i, (n, t) in enumerate(zip(lengths, written, strict=True))
    ]
    width = max(map(len, rows))
    ids = torch.as_tensor(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
    seen = torch.as_tensor(np.stack([np.arange(width) < len(row) for row in rows])).long()
    with torch.no_grad():
        expected = model(ids, attention_mask=seen, output_router_logits=True).aux_loss
    balance, counted = balance_of(agent.params)
    assert float(balance) == pytest.approx(float(expected), rel=1e-5)
    assert np.sum(counted) == 2 * sum(map(len, rows))


def test_layers_with_experts_have_no_adapters(agent):
    from jmarl.config import LoRA

    assert lora.targets_in(agent.config, LoRA(lora_rank=2)) == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ValueError, match="up_proj of a model with experts cannot have adapters; set all, or some of q_proj,"):
        lora.targets_in(agent.config, LoRA(lora_rank=2, lora_targets="q_proj,up_proj"))


def trained(agent, **settings):
    """A run in which all rewards are equal."""
    env = RewardEnvironment(make_reward(lambda texts: [0.0] * len(texts), num_agents=1), [lambda item: item["prompt"]])
    items = [{"prompt": "The answer is"}, {"prompt": "def add(first, second):"}]
    settings |= dict(algorithm="magrpo", num_prompts=2, num_generations=2, max_new_tokens=8, learning_rate=1e-2, progress=False)
    team, params = make_team([agent])
    return train(team, env, items, TrainConfig.of(**settings), params=params)


def test_the_balance_of_models_without_experts_cannot_be_trained(tiny_dir):
    with pytest.raises(ValueError, match="router_aux_coef=1.0 is not allowed: router_aux_coef must be 0 without experts"):
        trained(load_agent(tiny_dir("llama")), num_updates=1, router_aux_coef=1.0)


@pytest.mark.long
def test_an_update_reports_the_balance_of_experts_and_improves_it(agent, tmp_path):
    """By the term alone, as equal rewards give no other loss."""
    trained(agent, num_updates=8, router_aux_coef=1.0, micro_batches=2, output_dir=str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    balances = [row["agent_0/router_balance"] for row in rows if "agent_0/router_balance" in row]
    assert CHOICES <= balances[-1] < balances[0] - 0.01
