"""One update: against torch, over micro-batches, over stacks, and with numbers that are not finite."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import CHOICES, Learning
from jmarl.learning.objective import make_rows, rows_loss, split, token_loss
from jmarl.learning.optimizer import init_stack
from jmarl.learning.update import agent_gradients, update_stack
from jmarl.models import decoder
from jmarl.models.hub import agents as weights
from jmarl.models.hub.hf_format import tensors_from_params
from jmarl.models.stack import stack_params, unstack
from jmarl.rl.advantages import nothing_remembered
from jmarl.sampling import scoring
from jmarl.types import Batch

A, P, G, T, S = 2, 2, 4, 6, 16
LENGTHS = np.array([[5, 9], [12, 7]])
# A large adam_eps: otherwise Adam's first step is the sign of the gradient, also where that is a rounding error.
PLAIN = Learning(algorithm="magrpo", learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.5)
FULL = Learning(
    algorithm="grpo", learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.5, kl_coef=0.2, entropy_coef=0.1, clip_eps_high=0.28,
    weight_decay=0.1, warmup_updates=3, lr_schedule="cosine", num_updates=10, temperature=0.8,
)  # fmt: skip


@pytest.fixture(scope="module")
def directories(tiny_dir):
    return [tiny_dir("llama", seed=seed) for seed in range(A)]


@pytest.fixture(scope="module")
def agents(directories):
    return [weights.load_agent(d) for d in directories]


@pytest.fixture(scope="module")
def cfg(agents):
    return agents[0].config


@pytest.fixture(scope="module")
def params(agents):
    return stack_params([agent.params for agent in agents])


@pytest.fixture(scope="module")
def batch(cfg, params):
    """Completions of lengths 1 to T (no id 0: transformers gives its padding id no gradient), each agent's own rewards,
    and log-probabilities of a behaviour policy near the agents', so that some ratios are clipped."""
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(1, 320, (A, P, S)), rng.integers(1, 320, (A, P, G, T))
    mask = np.arange(T) < rng.integers(1, T + 1, (A, P, G, 1))
    arrays = [jnp.asarray(x) for x in (prompts, LENGTHS, tokens)]
    old = jax.jit(jax.vmap(functools.partial(scoring.score, cfg=cfg, temperature=FULL.temperature)))(
        params, prompts=arrays[0], lengths=arrays[1], tokens=arrays[2]
    )
    noise = 0.2 * rng.normal(size=mask.shape)
    rewards = jnp.asarray(rng.normal(size=(A, P, G)), jnp.float32)
    groups = jnp.broadcast_to(jnp.arange(P)[:, None], (A, P, G))
    old_logprobs = jnp.where(mask, old.logprobs + noise, 0)
    return Batch(*arrays, jnp.asarray(mask), old_logprobs, jnp.ones((A, P, G), bool), rewards, groups)


def fresh(learning):
    """What an agent remembers before its first update."""
    return unstack(nothing_remembered(1, 1, learning.kl_coef), 0)


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def step(state, batch, cfg, learning=PLAIN, mode="map"):
    """`update_stack` that leaves its argument alive, with the result on the host."""
    return jax.device_get(update_stack(copy(state), batch, cfg=cfg, learning=learning, mode=mode))


def assert_close_trees(got, expected, tolerance=1e-5):
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-8, jax.tree_util.keystr(path)


def assert_equal_trees(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.fixture(scope="module")
def updated(params, batch, cfg):
    """A stack before, and one update of it."""
    state = jax.device_get(init_stack(copy(params), PLAIN))
    return state, *step(state, batch, cfg)


def test_gradients_are_kept_for_their_memory_alone(updated, params, batch, cfg):
    """Without them, as on GPUs, an update is the same and keeps none."""
    state, after, metrics = updated
    alone, same = step(state._replace(grads=None), batch, cfg)
    assert alone.grads is None and after.grads is not None
    assert_equal_trees((alone, same), (after._replace(grads=None), metrics))


# --- the whole step, against torch ---------------------------------------------------------------------------------------


def torch_scores(model, batch, agent, temperature):
    """Log-probabilities and entropies [P, G, T] by transformers, each completion behind its own copy of the prompt."""
    import torch

    tokens, out = np.array(batch.tokens[agent]), []
    for p in range(P):
        prompt = np.array(batch.prompts[agent, p, : LENGTHS[agent, p]])
        rows = torch.tensor(np.stack([np.concatenate([prompt, tokens[p, g]]) for g in range(G)]))
        logs = (model(rows).logits[:, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        picked = logs.gather(-1, torch.tensor(tokens[p])[..., None])[..., 0]
        out.append(torch.stack([picked, -(logs.exp() * logs).sum(-1)]))
    return torch.stack(out, 1)


def torch_loss(model, reference, batch, agent, learning):
    """The loss as the papers have it: MAGRPO, and GRPO with KL (k3) and entropy."""
    import torch

    rewards, mask, old = (torch.tensor(np.array(x[agent])) for x in (batch.rewards, batch.action_mask, batch.old_logprobs))
    advantage = rewards - rewards.mean(-1, keepdim=True)
    logp, entropy = torch_scores(model, batch, agent, learning.temperature)
    if learning.algorithm == "magrpo":
        return -(advantage[..., None] * logp)[mask].mean()
    advantage = (advantage / rewards.std(-1, correction=0, keepdim=True))[..., None]
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + learning.clip_eps_high) * advantage)
    with torch.no_grad():
        d = torch_scores(reference, batch, agent, learning.temperature)[0]
    d = d - logp
    token = -gain + learning.kl_coef * (d.exp() - d - 1) - learning.entropy_coef * entropy
    return ((token * mask).sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize("learning, mode", [(PLAIN, "map"), (FULL, "vmap")], ids=["magrpo-map", "grpo-kl-entropy-vmap"])
def test_three_updates_equal_torch(params, batch, cfg, directories, learning, mode):
    """Loss, gradient norm and every new weight of both agents: transformers, autograd, torch's AdamW and clip."""
    import torch
    from transformers import AutoModelForCausalLM

    state, losses, norms = init_stack(copy(params), learning), [], []
    for _ in range(3):
        state, metrics = step(state, batch, cfg, learning, mode)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    for a, directory in enumerate(directories):
        model, reference = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for _ in range(2))
        before = {name: w.detach().clone() for name, w in model.named_parameters()}
        adam = torch.optim.AdamW(model.parameters(), 1.0, eps=learning.adam_eps, weight_decay=learning.weight_decay)
        for k in range(3):
            adam.param_groups[0]["lr"] = learning.learning_rate * ((k + 1) / 3 if learning.warmup_updates else 1)
            adam.zero_grad()
            loss = torch_loss(model, reference, batch, a, learning)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), learning.max_grad_norm)
            assert losses[k][a] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
            assert norms[k][a] == pytest.approx(norm.item(), rel=1e-3)
            adam.step()
        ours = tensors_from_params(cfg, unstack(state.params, a))
        for name, w in model.named_parameters():
            change = np.linalg.norm((w.detach() - before[name]).numpy())
            assert np.linalg.norm(ours[name] - w.detach().numpy()) <= 1e-3 * change, name


# --- the same step, cut in other ways ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gradients_of(params, batch, cfg):
    """Gradients and metrics of agent 1 under variants of `FULL`, with agent 0 as its reference."""
    one, reference = unstack(params, 1), unstack(params, 0)

    @functools.cache
    def of(**changes):
        learning = FULL.replace(**changes)
        f = jax.jit(lambda p, r, b: agent_gradients(p, r, fresh(learning), b, cfg=cfg, learning=learning))
        return jax.device_get(f(one, reference, unstack(batch, 1)))

    return of


@pytest.mark.parametrize("changes", [{"micro_batches": 2, "remat": "none"}, {"micro_batches": 4, "remat": "full"}], ids=str)
def test_micro_batches_and_remat_change_nothing(gradients_of, changes):
    """The two prompts apart; and each group in two as well; other things kept for the backward pass than in `FULL`."""
    grads, metrics = gradients_of(**changes)
    expected, expected_metrics = gradients_of()
    assert_close_trees(grads, expected)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_split_keeps_every_row_with_its_prompt(params, batch, cfg):
    """Parts of 2, 4 and 8: together exactly the rows of the batch, each still beside its own prompt and length."""
    rows, _ = make_rows(None, fresh(PLAIN), unstack(batch, 0), None, cfg=cfg, learning=PLAIN)

    def pairs(part):  # (prompt and its length, tokens, advantage) of every row
        def ids(x):
            return tuple(map(int, x))

        return [
            (ids(part.prompts[p]), int(part.lengths[p]), ids(part.tokens[p, g]), float(part.policy.advantages[p, g, 0]))
            for p in range(part.tokens.shape[0])
            for g in range(part.tokens.shape[1])
        ]

    for n in (2, 4, 8):
        parts = split(rows, n)
        cut = [pairs(jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(n)]
        assert {len(part) for part in cut} == {P * G // n}
        assert sorted(sum(cut, [])) == sorted(pairs(rows))
    with pytest.raises(ValueError, match=r"micro_batches=3 does not divide 2 prompts of 4 completions"):
        split(rows, 3)


def test_vmap_equals_map(updated, batch, cfg):
    state, new, metrics = updated
    other, other_metrics = step(state, batch, cfg, mode="vmap")
    assert_close_trees(other.params, new.params)
    assert_close_trees(other.opt_state, new.opt_state, 1e-4)
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_stack_equals_its_agents_alone(updated, params, batch, cfg):
    _, new, metrics = updated
    for a in range(A):
        alone = init_stack(jax.tree.map(lambda x, a=a: x[a : a + 1], params), PLAIN)
        got, of_alone = step(alone, jax.tree.map(lambda x, a=a: x[a : a + 1], batch), cfg)
        assert_close_trees(unstack(got.params, 0), unstack(new.params, a), 1e-6)
        assert of_alone["loss"][0] == pytest.approx(metrics["loss"][a], rel=1e-5)


def test_an_agent_learns_from_its_own_batch_alone(updated, batch, cfg):
    """Other rewards for agent 1 leave agent 0's update bit-equal, in both modes."""
    state, new, _ = updated
    other = batch._replace(rewards=batch.rewards.at[1].multiply(-1))
    for mode in ("map", "vmap"):
        same = new if mode == "map" else step(state, batch, cfg, mode=mode)[0]
        got, _ = step(state, other, cfg, mode=mode)
        assert_equal_trees(unstack(got.params, 0), unstack(same.params, 0))
        assert np.abs(got.params["embed"][1] - same.params["embed"][1]).max() > 1e-3


# --- what must not be trained --------------------------------------------------------------------------------------------


def test_padding_is_not_trained_and_the_last_chosen_token_is(updated, batch, cfg):
    """Other ids behind the mask change no bit of the update; another id at its last token does."""
    state, new, metrics = updated
    padding = batch._replace(tokens=jnp.where(batch.action_mask, batch.tokens, 3))
    again, same = step(state, padding, cfg)
    assert_equal_trees((again.params, again.opt_state, same), (new.params, new.opt_state, metrics))
    last = batch.action_mask & ~jnp.pad(batch.action_mask[..., 1:], ((0, 0),) * 3 + ((0, 1),))
    ending = batch._replace(tokens=jnp.where(last, 2, batch.tokens))
    assert (np.asarray(step(state, ending, cfg)[1]["loss"]) != metrics["loss"]).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1000.1])
def test_constant_rewards_give_exactly_zero_gradient(updated, batch, cfg, value):
    state, _, _ = updated
    new, metrics = step(state, batch._replace(rewards=jnp.full((A, P, G), value)), cfg)
    assert (metrics["grad_norm"] == 0).all() and (metrics["loss"] == 0).all() and (metrics["zero_variance_share"] == 1).all()
    assert_equal_trees(new.params, state.params)
    assert (metrics["skipped"] == 0).all()


def test_a_row_with_an_invalid_reward_is_masked(updated, batch, cfg):
    """NaN: what the row says does not matter, nothing is skipped, and the other rows still teach."""
    state, new, _ = updated
    invalid = batch._replace(rewards=batch.rewards.at[:, 0, 1].set(jnp.nan))
    got, metrics = step(state, invalid, cfg)
    other = invalid._replace(
        tokens=invalid.tokens.at[:, 0, 1].set(5), old_logprobs=invalid.old_logprobs.at[:, 0, 1].set(jnp.nan)
    )
    assert_equal_trees((got.params, metrics), ((same := step(state, other, cfg))[0].params, same[1]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((got, metrics))) and (metrics["skipped"] == 0).all()
    assert (metrics["grad_norm"] > 0).all() and np.abs(got.params["embed"] - new.params["embed"]).max() > 1e-5


@pytest.mark.parametrize("empty", ["masks", "rewards"])
def test_nothing_to_learn_from_is_finite_and_changes_nothing(updated, batch, cfg, empty):
    """All completions empty, or all rewards invalid."""
    state, _, _ = updated
    nothing = {"masks": dict(action_mask=batch.action_mask & False), "rewards": dict(rewards=batch.rewards * jnp.nan)}
    new, metrics = step(state, batch._replace(**nothing[empty]), cfg)
    assert_equal_trees(new.params, state.params)
    assert all(np.isfinite(x).all() for x in metrics.values()) and (metrics["skipped"] == 0).all()


# --- numbers that are not finite -----------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_skips_that_agents_step(params, batch, cfg, updated):
    """One NaN weight of agent 0: its parameters and optimiser state stay bit-equal and the step is counted, again and
    again; agent 1 learns as if nothing had happened."""
    start, healthy, _ = updated
    spoiled = start._replace(params=start.params | {"final_norm": np.array(start.params["final_norm"])})
    spoiled.params["final_norm"][0, 3] = np.nan
    new, metrics = step(spoiled, batch, cfg)
    assert_equal_trees(unstack((new.params, new.opt_state), 0), unstack((spoiled.params, spoiled.opt_state), 0))
    assert_equal_trees(unstack((new.params, new.opt_state), 1), unstack((healthy.params, healthy.opt_state), 1))
    assert new.skipped.tolist() == metrics["skipped"].tolist() == [1, 0]
    assert step(new, batch, cfg)[0].skipped.tolist() == [2, 0]


def test_a_loss_that_is_not_finite_skips_the_step(params, batch, cfg):
    """A NaN among agent 1's behaviour log-probabilities, under the clipped loss, in vmap mode."""
    state = jax.device_get(init_stack(copy(params), FULL))
    bad = batch._replace(old_logprobs=batch.old_logprobs.at[1, 0, 0, 0].set(jnp.nan))
    new, metrics = step(state, bad, cfg, FULL, "vmap")
    assert_equal_trees(unstack((new.params, new.opt_state), 1), unstack((state.params, state.opt_state), 1))
    assert new.skipped.tolist() == [0, 1] and np.isnan(metrics["loss"][1])
    assert np.abs(new.params["embed"][0] - state.params["embed"][0]).max() > 1e-3


# --- precision and KL -------------------------------------------------------------------------------------------------------


def test_bfloat16_compute_keeps_float32_master_weights(updated, params, batch, cfg):
    """State in float32; the step points where the float32 one does; steps far below bfloat16's resolution add up."""
    state, exact, _ = updated
    learning = PLAIN.replace(compute_dtype="bfloat16", learning_rate=1e-5)
    new, metrics = step(state, batch, cfg, learning)
    assert {x.dtype for x in jax.tree.leaves((new.params, new.opt_state))} == {np.dtype("float32"), np.dtype("int32")}
    moved = new.params["layers"]["qkv"] - state.params["layers"]["qkv"]
    expected = (exact.params["layers"]["qkv"] - state.params["layers"]["qkv"]) * 1e-3
    cosine = (moved * expected).sum() / np.linalg.norm(moved) / np.linalg.norm(expected)
    assert cosine > 0.97 and np.linalg.norm(moved) == pytest.approx(np.linalg.norm(expected), rel=0.1)
    assert np.isfinite(metrics["loss"]).all()


def test_kl_is_zero_at_the_untrained_policy_and_positive_later(params, batch, cfg):
    assert init_stack(params, PLAIN).reference is None
    state, kl = init_stack(copy(params), FULL), []
    for _ in range(3):
        state, metrics = step(state, batch, cfg, FULL, "vmap")
        kl.append(metrics["kl"])
    np.testing.assert_allclose(kl[0], 0, atol=1e-6)
    assert (np.array(kl[1:]) > 1e-2).all()
    assert_equal_trees(state.reference, jax.device_get(params))


# --- the loss over chunks ------------------------------------------------------------------------------------------------


def loss_and_gradients(params, rows, cfg, learning, f=rows_loss):
    """Compiled anew, since `scoring.CHUNK` is no part of jax's cache key."""
    return jax.device_get(jax.jit(lambda p, r: jax.value_and_grad(f, has_aux=True)(p, r, cfg, learning))(params, rows))


def through_scores(params, rows, cfg, learning):
    """The same loss from log-probabilities of all tokens at once."""
    inputs = (decoder.cast(params, learning.compute_dtype), cfg, rows.prompts, rows.lengths, rows.tokens)
    return token_loss(*scoring.score(*inputs, temperature=learning.temperature), rows.policy, learning)


@pytest.mark.parametrize(
    "changes, tied, tolerance",
    [
        ({}, True, 1e-5),
        ({}, False, 1e-5),
        ({"compute_dtype": "bfloat16"}, True, 2e-2),
        ({"ratio_level": "sequence"}, True, 1e-5),
    ],
)
def test_the_loss_of_chunks_is_the_loss_of_all_tokens(tiny_config, batch, monkeypatch, changes, tied, tolerance):
    """48 tokens in 7 chunks of 7, one of them padding: loss, metrics and gradients equal those of one chunk, and those through
    `score` with autodiff of the loss; thrice the loss has thrice the gradient."""
    learning, cfg = FULL.replace(**changes), tiny_config(tie_embeddings=tied)
    params, reference = (decoder.init_params(cfg, jax.random.key(seed)) for seed in (1, 2))
    rows, _ = jax.jit(lambda b: make_rows(reference, fresh(learning), b, None, cfg=cfg, learning=learning))(unstack(batch, 0))
    (plain, plain_metrics), plain_grads = loss_and_gradients(params, rows, cfg, learning, through_scores)
    for chunk in (512, 7):
        monkeypatch.setattr(scoring, "CHUNK", chunk)
        (loss, metrics), grads = loss_and_gradients(params, rows, cfg, learning)
        assert loss == pytest.approx(plain, rel=tolerance)
        assert metrics.keys() == plain_metrics.keys()
        for name, expected in plain_metrics.items():
            assert metrics[name] == pytest.approx(float(expected), rel=tolerance, abs=1e-6), name
        assert_close_trees(grads, plain_grads, tolerance)

    def thrice(*arguments):
        loss, metrics = rows_loss(*arguments)
        return 3 * loss, metrics

    of_thrice = loss_and_gradients(params, rows, cfg, learning, thrice)[1]
    assert_close_trees(of_thrice, jax.tree.map(lambda g: 3 * g, grads), tolerance)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_subtracted_from_the_return(params, batch, cfg, kind):
    """Advantage of R - coef * (sum of the estimate over the completion), behaviour policy against the reference."""
    learning = PLAIN.replace(kl_coef=0.3, kl_in="reward", kl_estimator=kind)
    mine, reference = unstack(batch, 0), unstack(params, 1)
    rows, _ = jax.jit(lambda r, b: make_rows(r, fresh(learning), b, None, cfg=cfg, learning=learning))(reference, mine)
    ref = jax.jit(lambda r, b: scoring.score(r, cfg, b.prompts, b.prompt_lengths, b.tokens))(reference, mine).logprobs
    np.testing.assert_allclose(rows.policy.ref_logprobs, ref, atol=1e-5)
    d = np.asarray(ref - mine.old_logprobs, np.float64)
    estimate = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[kind]
    returns = mine.rewards - 0.3 * (estimate * mine.action_mask).sum(-1)
    np.testing.assert_allclose(rows.policy.advantages[..., 0], returns - returns.mean(-1, keepdims=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aggregation", CHOICES["loss_aggregation"][1:])
def test_how_a_batchs_tokens_are_weighed(batch, cfg, aggregation):
    """By numpy: a row without a valid reward counts nowhere, and `constant` divides by what a completion may have."""
    learning = PLAIN.replace(loss_aggregation=aggregation, max_new_tokens=2 * T)
    mine = unstack(batch._replace(rewards=batch.rewards.at[:, 0, 1].set(jnp.nan)), 0)
    rows, _ = make_rows(None, fresh(learning), mine, None, cfg=cfg, learning=learning)
    mask, valid = np.array(mine.action_mask), P * G - 1
    mask[0, 1] = False
    expected = {
        "token_mean": mask / mask.sum(),
        "sequence_mean": mask / np.maximum(mask.sum(-1, keepdims=True), 1) / valid,
        "sequence_sum": mask / valid,
        "constant": mask / (valid * 2 * T),
    }[aggregation]
    np.testing.assert_allclose(rows.policy.weights, expected, rtol=1e-6)


def test_the_penalty_follows_the_coefficient_of_the_moment(params, batch, cfg):
    """Which a target moves: twice the coefficient takes twice as much from the advantages."""
    learning = PLAIN.replace(kl_coef=0.3, kl_in="reward")
    mine, reference = unstack(batch, 0), unstack(params, 1)

    def advantages(coef):
        running = fresh(learning)._replace(kl_coef=jnp.float32(coef))
        return make_rows(reference, running, mine, None, cfg=cfg, learning=learning)[0].policy.advantages

    none, once, twice = map(advantages, (0.0, 0.3, 0.6))
    np.testing.assert_allclose(twice - none, 2 * (once - none), rtol=1e-3, atol=1e-5)
    assert np.abs(once - none).max() > 1e-3
