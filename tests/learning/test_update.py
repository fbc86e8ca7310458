"""One update: against torch, over micro-batches, over stacks, and with numbers that are not finite."""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import ALGORITHMS, resolve
from jmarl.config import Loss, TrainConfig
from jmarl.learning.optimizer import init_stack
from jmarl.models import decoder
from jmarl.models.hub import agents as weights
from jmarl.models.hub.hf_format import tensors_from_params
from jmarl.models.stack import stack_params, unstack
from jmarl.objectives.objective import split_inputs
from jmarl.objectives.policy import POLICY, initial_running, token_loss
from jmarl.sampling import scoring
from jmarl.types import TRACES
from tests.batches import agent_gradients, assert_equal, loss_inputs, loss_of_inputs, put, rollouts, update_stack

pytestmark = pytest.mark.long  # one program of an update for nearly all of them

A, P, G, T, S = 2, 2, 4, 6, 16
LENGTHS = np.array([[5, 9], [12, 7]])
AGGREGATIONS = typing.get_args(typing.get_args(typing.get_type_hints(Loss)["loss_aggregation"])[0])
# A large adam_eps: otherwise Adam's first step is the sign of the gradient, also where that is a rounding error.
PLAIN = TrainConfig.of(algorithm="magrpo", learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.5)
FULL = TrainConfig.of(
    algorithm="grpo", learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.5, kl_coef=0.2, entropy_coef=0.1, clip_eps_high=0.28,
    weight_decay=0.1, warmup_updates=3, lr_schedule="cosine", num_updates=10, temperature=0.8,
)  # fmt: skip
FULL_AT_ONCE = FULL.replace(per_agent="vmap")


@pytest.fixture(scope="module")
def directories(tiny_dir):
    return [tiny_dir("llama", seed=seed) for seed in range(A)]


@pytest.fixture(scope="module")
def agents(directories):
    return [weights.load_agent(d) for d in directories]


@pytest.fixture(scope="module")
def model(agents):
    return agents[0].config


@pytest.fixture(scope="module")
def params(agents):
    return jax.device_get(stack_params([agent.params for agent in agents]))


@pytest.fixture(scope="module")
def batch(model, params):
    """Completions of lengths 1 to T (no id 0: transformers gives its padding id no gradient), each agent's own rewards,
    and log-probabilities of a behaviour policy near the agents', so that some ratios are clipped."""
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(1, 320, (A, P, S)), rng.integers(1, 320, (A, P, G, T))
    mask = np.arange(T) < rng.integers(1, T + 1, (A, P, G, 1))
    old = rate(params, prompts, LENGTHS, tokens, model, FULL.sampling.temperature)
    old_logprobs = np.where(mask, old + 0.2 * rng.normal(size=mask.shape), 0)
    rewards, groups = np.float32(rng.normal(size=(A, P, G))), np.broadcast_to(np.arange(P)[:, None], (A, P, G))
    ended = np.ones((A, P, G), bool)
    return jax.device_get(rollouts(prompts, LENGTHS, tokens, mask, np.float32(old_logprobs), ended, rewards, groups))


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def rate(params, prompts, lengths, tokens, model, temperature=1.0):
    """The log-probabilities of the completions of all agents."""
    one = functools.partial(scoring.score, cfg=model, temperature=temperature)
    return jax.vmap(one)(params, prompts=prompts, lengths=lengths, tokens=tokens).logprobs


def fresh(cfg):
    """Return the statistics of an agent before its first update."""
    return unstack(jax.device_get(initial_running(1, 1, cfg.loss.kl_coef)), 0)


def copy(tree):
    return jax.tree.map(jnp.array, tree)


def step(state, batch, model, cfg=PLAIN, number=0):
    """Return the state and the metrics of `update_stack` on the host; the argument is not donated."""
    return jax.device_get(update_stack(copy(state), batch, number=number, model=model, algorithm=resolve(cfg)))


def assert_close_trees(got, expected, tolerance=1e-5):
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-8, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def updated(params, batch, model):
    """A stack before, and one update of it."""
    state = jax.device_get(init_stack(copy(params), resolve(PLAIN)))
    return state, *step(state, batch, model)


def test_gradients_are_kept_for_their_memory_alone(updated, params, batch, model):
    """Without them, as on GPUs, an update is the same but for rounding, and keeps none: agents take their step in turn."""
    state, after, metrics = updated
    alone, same = step(state._replace(grads=None), batch, model)
    assert alone.grads is None and after.grads is not None
    for got, want in zip(jax.tree.leaves((alone, same)), jax.tree.leaves((after._replace(grads=None), metrics)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


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


def torch_loss(model, reference, batch, agent, cfg):
    """The loss as the papers have it: MAGRPO, and GRPO with KL (k3) and entropy."""
    import torch

    rewards, mask, old = (torch.tensor(np.array(x[agent])) for x in (batch.rewards, batch.action_mask, batch.old_logprobs))
    advantage = rewards - rewards.mean(-1, keepdim=True)
    logp, entropy = torch_scores(model, batch, agent, cfg.sampling.temperature)
    if cfg.algorithm == "magrpo":
        return -(advantage[..., None] * logp)[mask].mean()
    advantage = (advantage / rewards.std(-1, correction=0, keepdim=True))[..., None]
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + cfg.loss.clip_eps_high) * advantage)
    with torch.no_grad():
        d = torch_scores(reference, batch, agent, cfg.sampling.temperature)[0]
    d = d - logp
    token = -gain + cfg.loss.kl_coef * (d.exp() - d - 1) - cfg.loss.entropy_coef * entropy
    return ((token * mask).sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize("cfg", [PLAIN, FULL_AT_ONCE], ids=["magrpo-map", "grpo-kl-entropy-vmap"])
def test_three_updates_equal_torch(params, batch, model, directories, cfg):
    """Loss, gradient norm and every new weight of both agents: transformers, autograd, torch's AdamW and clip."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = cfg.optimizer
    state, losses, norms = init_stack(copy(params), resolve(cfg)), [], []
    for number in range(3):
        state, metrics = step(state, batch, model, cfg, number)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    for a, directory in enumerate(directories):
        network, reference = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for _ in range(2))
        before = {name: w.detach().clone() for name, w in network.named_parameters()}
        decay = {2: settings.weight_decay, 1: 0.0}  # norms and biases do not decay
        groups = [{"params": [w], "weight_decay": decay[w.ndim]} for w in network.parameters()]
        adam = torch.optim.AdamW(groups, 1.0, eps=settings.adam_eps)
        for k in range(3):
            for group in adam.param_groups:
                group["lr"] = settings.learning_rate * ((k + 1) / 3 if settings.warmup_updates else 1)
            adam.zero_grad()
            loss = torch_loss(network, reference, batch, a, cfg)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm)
            assert losses[k][a] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
            assert norms[k][a] == pytest.approx(norm.item(), rel=1e-3)
            adam.step()
        ours = tensors_from_params(model, unstack(state.params, a))
        for name, w in network.named_parameters():
            change = np.linalg.norm((w.detach() - before[name]).numpy())
            assert np.linalg.norm(ours[name] - w.detach().numpy()) <= 1e-3 * change, name


# --- the same step, cut in other ways ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gradients_of(params, batch, model):
    """Gradients and metrics of agent 1 under variants of `FULL`, with agent 0 as its reference."""
    one, reference = unstack(params, 1), unstack(params, 0)

    @functools.cache
    def variant(**changes):
        cfg = FULL.replace(**changes)
        gradients = functools.partial(agent_gradients, model=model, algorithm=resolve(cfg))
        f = jax.jit(lambda params, reference, *data: gradients(params, *data, reference=reference))
        return jax.device_get(f(one, reference, unstack(batch, 1), fresh(cfg)))

    return variant


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batches": 4, "remat": "full"},
        pytest.param({"micro_batches": 2, "remat": "none"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_micro_batches_and_remat_change_nothing(gradients_of, changes):
    """The two prompts apart; and each group in two as well; other things kept for the backward pass than in `FULL`."""
    grads, metrics = gradients_of(**changes)
    expected, expected_metrics = gradients_of()
    assert_close_trees(grads, expected)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_split_keeps_every_row_with_its_prompt(batch, model):
    """Parts of 2, 4 and 8: together exactly the rows of the batch, each still beside its own prompt and length."""
    inputs = jax.device_get(loss_inputs(unstack(batch, 0), fresh(PLAIN), model, resolve(PLAIN))[0])
    split = jax.jit(split_inputs, static_argnums=(1, 2))

    def rows(part):  # prompt and its length, tokens, advantage
        return [
            (*part.prompts[p], part.prompt_lengths[p], *part.tokens[p, g], part.targets.advantages[p, g, 0])
            for p, g in np.ndindex(*part.tokens.shape[:2])
        ]

    for n in (2, 4, 8):
        parts = jax.device_get(split(inputs, n, POLICY))
        cut = [rows(unstack(parts, i)) for i in range(n)]
        assert {len(part) for part in cut} == {P * G // n}
        assert sorted(sum(cut, [])) == sorted(rows(inputs))
    with pytest.raises(ValueError, match=r"micro_batches=3 does not divide 2 prompts of 4 completions"):
        split_inputs(inputs, 3, POLICY)


def test_vmap_equals_map(updated, batch, model):
    state, new, metrics = updated
    other, other_metrics = step(state, batch, model, PLAIN.replace(per_agent="vmap"))
    assert_close_trees(other.params, new.params)
    assert_close_trees(other.opt_state, new.opt_state, 1e-4)
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_stack_equals_its_agents_alone(updated, params, batch, model):
    _, new, metrics = updated
    for a in range(A):
        alone = init_stack(jax.tree.map(lambda x, a=a: x[a : a + 1], params), resolve(PLAIN))
        got, metrics_alone = step(alone, jax.tree.map(lambda x, a=a: x[a : a + 1], batch), model)
        assert_close_trees(unstack(got.params, 0), unstack(new.params, a), 1e-6)
        assert metrics_alone["loss"][0] == pytest.approx(metrics["loss"][a], rel=1e-5)


def test_an_agent_learns_from_its_own_batch_alone(updated, batch, model):
    """Other rewards for agent 1 leave agent 0's update bit-equal, in both modes."""
    state, new, _ = updated
    other = batch._replace(rewards=put(batch.rewards, 1, -batch.rewards[1]))
    for mode in ("map", "vmap"):
        same = new if mode == "map" else step(state, batch, model, PLAIN.replace(per_agent=mode))[0]
        got, _ = step(state, other, model, PLAIN.replace(per_agent=mode))
        assert_equal(unstack(got.params, 0), unstack(same.params, 0))
        assert np.abs(got.params["embed"][1] - same.params["embed"][1]).max() > 1e-3


# --- what must not be trained --------------------------------------------------------------------------------------------


def test_padding_is_not_trained_and_the_last_chosen_token_is(updated, batch, model):
    """Other ids behind the mask change no bit of the update; another id at its last token does."""
    state, new, metrics = updated
    padding = batch._replace(tokens=np.where(batch.action_mask, batch.tokens, 3))
    other, same = step(state, padding, model)
    assert_equal((other.params, other.opt_state, same), (new.params, new.opt_state, metrics))
    last = batch.action_mask & ~np.pad(batch.action_mask[..., 1:], ((0, 0),) * 3 + ((0, 1),))
    ending = batch._replace(tokens=np.where(last, 2, batch.tokens))
    assert (np.asarray(step(state, ending, model)[1]["loss"]) != metrics["loss"]).all()


def columns_of(metrics):
    """Return the metrics of an update but the advantages of completions, which are infinite where nothing is learned."""
    return [x for name, x in metrics.items() if name != "advantages"]


@pytest.mark.parametrize("nothing", [0.0, 0.1, 1000.1, np.nan, "masks"])
def test_nothing_to_learn_from_is_finite_and_changes_nothing(updated, batch, model, nothing):
    """Constant rewards, of which each gradient is exactly 0; all rewards invalid, or all completions empty."""
    state, _, _ = updated
    changes = dict(action_mask=batch.action_mask & False) if nothing == "masks" else dict(rewards=0 * batch.rewards + nothing)
    new, metrics = step(state, batch._replace(**changes), model)
    assert_equal(new.params, state.params)
    assert all(np.isfinite(x).all() for x in columns_of(metrics)) and (metrics["skipped"] == 0).all()
    if nothing in (0.0, 0.1, 1000.1):
        assert not metrics["grad_norm"].any() and not metrics["loss"].any() and (metrics["zero_variance_share"] == 1).all()


def test_a_row_with_an_invalid_reward_is_masked(updated, batch, model):
    """NaN: what the row says does not matter, nothing is skipped, and the other rows still teach."""
    state, new, _ = updated
    row = np.s_[:, 0, 1]
    invalid = batch._replace(rewards=put(batch.rewards, row, np.nan))
    got, metrics = step(state, invalid, model)
    other = invalid._replace(tokens=put(batch.tokens, row, 5), old_logprobs=put(batch.old_logprobs, row, np.nan))
    assert_equal((got.params, metrics), ((same := step(state, other, model))[0].params, same[1]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((got, columns_of(metrics)))) and (metrics["skipped"] == 0).all()
    assert (metrics["grad_norm"] > 0).all() and np.abs(got.params["embed"] - new.params["embed"]).max() > 1e-5


# --- numbers that are not finite -----------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_skips_that_agents_step(params, batch, model, updated):
    """One NaN weight of agent 0: its parameters and optimiser state stay bit-equal and the step is counted, again and
    again; agent 1 learns as if nothing had happened."""
    start, healthy, _ = updated
    spoiled = start._replace(params=start.params | {"final_norm": np.array(start.params["final_norm"])})
    spoiled.params["final_norm"][0, 3] = np.nan
    new, metrics = step(spoiled, batch, model)
    assert_equal(unstack((new.params, new.opt_state), 0), unstack((spoiled.params, spoiled.opt_state), 0))
    assert_equal(unstack((new.params, new.opt_state), 1), unstack((healthy.params, healthy.opt_state), 1))
    assert new.skipped.tolist() == metrics["skipped"].tolist() == [1, 0]
    assert step(new, batch, model)[0].skipped.tolist() == [2, 0]


def test_a_loss_that_is_not_finite_skips_the_step(params, batch, model):
    """A NaN among agent 1's behaviour log-probabilities, under the clipped loss, in vmap mode."""
    state = jax.device_get(init_stack(copy(params), resolve(FULL)))
    bad = batch._replace(old_logprobs=put(batch.old_logprobs, (1, 0, 0, 0), np.nan))
    new, metrics = step(state, bad, model, FULL_AT_ONCE)
    assert_equal(unstack((new.params, new.opt_state), 1), unstack((state.params, state.opt_state), 1))
    assert new.skipped.tolist() == [0, 1] and np.isnan(metrics["loss"][1])
    assert np.abs(new.params["embed"][0] - state.params["embed"][0]).max() > 1e-3


# --- precision and KL -------------------------------------------------------------------------------------------------------


def test_bfloat16_compute_keeps_float32_master_weights(updated, params, batch, model):
    """State in float32; the step points where the float32 one does; steps far below bfloat16's resolution add up."""
    state, exact, _ = updated
    cfg = PLAIN.replace(compute_dtype="bfloat16", learning_rate=1e-5)
    new, metrics = step(state, batch, model, cfg)
    assert {x.dtype for x in jax.tree.leaves((new.params, new.opt_state))} == {np.dtype("float32"), np.dtype("int32")}
    moved = new.params["layers"]["qkv"] - state.params["layers"]["qkv"]
    expected = (exact.params["layers"]["qkv"] - state.params["layers"]["qkv"]) * 1e-3
    cosine = (moved * expected).sum() / np.linalg.norm(moved) / np.linalg.norm(expected)
    assert cosine > 0.97 and np.linalg.norm(moved) == pytest.approx(np.linalg.norm(expected), rel=0.1)
    assert np.isfinite(metrics["loss"]).all()


def test_kl_is_zero_at_the_untrained_policy_and_positive_later(params, batch, model):
    assert init_stack(params, resolve(PLAIN)).reference is None
    state, kl = init_stack(copy(params), resolve(FULL)), []
    for _ in range(3):
        state, metrics = step(state, batch, model, FULL_AT_ONCE)
        kl.append(metrics["kl"])
    np.testing.assert_allclose(kl[0], 0, atol=1e-6)
    assert (np.array(kl[1:]) > 1e-2).all()
    assert_equal(state.reference, jax.device_get(params))


# --- the loss over chunks ------------------------------------------------------------------------------------------------


def loss_and_gradients(params, inputs, model, algorithm, f=loss_of_inputs):
    """Compile anew, since `scoring.CHUNK` is no part of jax's cache key."""
    value_and_grad = jax.value_and_grad(functools.partial(f, model=model, algorithm=algorithm), has_aux=True)
    return jax.device_get(jax.jit(lambda params, inputs: value_and_grad(params, inputs))(params, inputs))


def loss_through_scores(params, inputs, model, algorithm):
    """Return the same loss from log-probabilities of all tokens at once."""
    weights = decoder.cast(params, algorithm.compute_dtype)
    arrays = (inputs.prompts, inputs.prompt_lengths, inputs.tokens)
    scores = scoring.score(weights, model, *arrays, temperature=algorithm.temperature)
    return token_loss(*scores, inputs.targets, algorithm)


@pytest.mark.parametrize(
    "changes, tied, tolerance",
    [
        ({}, False, 1e-5),
        ({"ratio_level": "sequence"}, True, 1e-5),
        ({"compute_dtype": "bfloat16"}, True, 2e-2),
        pytest.param({}, True, 1e-5, marks=pytest.mark.nightly),
    ],
)
def test_the_loss_of_chunks_is_the_loss_of_all_tokens(tiny_config, batch, monkeypatch, changes, tied, tolerance):
    """48 tokens in 7 chunks of 7, one of them padding: loss, metrics and gradients equal those of one chunk, and those through
    `score` with autodiff of the loss; thrice the loss has thrice the gradient."""
    cfg, model = FULL.replace(**changes), tiny_config(tie_embeddings=tied)
    algorithm, init = resolve(cfg), jax.jit(functools.partial(decoder.init_params, model))
    params, reference = (init(jax.random.key(seed)) for seed in (1, 2))
    inputs, _ = loss_inputs(unstack(batch, 0), fresh(cfg), model, algorithm, reference=reference)
    (plain, plain_metrics), plain_grads = loss_and_gradients(params, inputs, model, algorithm, loss_through_scores)
    for chunk in (7,) if changes else (512, 7):
        monkeypatch.setattr(scoring, "CHUNK", dict.fromkeys(scoring.CHUNK, chunk))
        (loss, metrics), grads = loss_and_gradients(params, inputs, model, algorithm)
        assert loss == pytest.approx(plain, rel=tolerance)
        assert metrics.keys() == plain_metrics.keys()
        for name, expected in plain_metrics.items():
            assert metrics[name] == pytest.approx(float(expected), rel=tolerance, abs=1e-6), name
        assert_close_trees(grads, plain_grads, tolerance)
    if changes:
        return

    def three_times(params, inputs, model, algorithm):
        loss, metrics = loss_of_inputs(params, inputs, model, algorithm)
        return 3 * loss, metrics

    three_times_grads = loss_and_gradients(params, inputs, model, algorithm, three_times)[1]
    assert_close_trees(three_times_grads, jax.tree.map(lambda g: 3 * g, grads), tolerance)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_subtracted_from_the_return(params, batch, model, kind):
    """Advantage of R - coef * (sum of the estimate over the completion), behaviour policy against the reference; the
    coefficient is that of the moment, which a target moves."""
    cfg = PLAIN.replace(kl_coef=0.3, kl_in="reward", kl_estimator=kind)
    mine, reference = unstack(batch, 0), unstack(params, 1)
    ref = np.asarray(rate(jax.tree.map(lambda x: x[::-1], params), batch.prompts, batch.prompt_lengths, batch.tokens, model)[0])
    d = np.float64(ref - mine.old_logprobs)
    estimate = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[kind]
    for coef in (0.3, 0.6):
        running = fresh(cfg)._replace(kl_coef=np.float32(coef))
        inputs, _ = loss_inputs(mine, running, model, resolve(cfg), reference=reference)
        np.testing.assert_allclose(inputs.targets.ref_logprobs, ref, atol=1e-5)
        returns = mine.rewards - coef * (estimate * mine.action_mask).sum(-1)
        expected = returns - returns.mean(-1, keepdims=True)
        np.testing.assert_allclose(inputs.targets.advantages[..., 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_how_a_batchs_tokens_are_weighed(batch, model, aggregation):
    """By numpy: a row without a valid reward counts nowhere, and `constant` divides by what a completion may have."""
    algorithm = resolve(PLAIN.replace(loss_aggregation=aggregation, max_new_tokens=2 * T))
    mine = unstack(batch._replace(rewards=put(batch.rewards, np.s_[:, 0, 1], np.nan)), 0)
    inputs, _ = loss_inputs(mine, fresh(PLAIN), model, algorithm)
    mask, valid = np.array(mine.action_mask), P * G - 1
    mask[0, 1] = False
    expected = {
        "token_mean": mask / mask.sum(),
        "sequence_mean": mask / np.maximum(mask.sum(-1, keepdims=True), 1) / valid,
        "sequence_sum": mask / valid,
        "constant": mask / (valid * 2 * T),
    }[aggregation]
    np.testing.assert_allclose(inputs.targets.weights, expected, rtol=1e-6)


def test_a_replaced_row_is_used_by_the_next_update(updated, batch, model, monkeypatch):
    """A row is part of the static argument: no program of the row of the same name before is run, and none is compiled again
    for a row that is put back."""
    state, new, metrics = updated
    magrpo = ALGORITHMS["magrpo"]
    monkeypatch.setitem(ALGORITHMS, "magrpo", ALGORITHMS["marloo"])
    other, other_metrics = step(state, batch, model)
    assert_equal((other, other_metrics), step(state, batch, model, PLAIN.replace(algorithm="marloo")))
    assert (np.abs(other_metrics["loss"] - metrics["loss"]) > 1e-4).all()
    monkeypatch.setitem(ALGORITHMS, "magrpo", magrpo)
    traced = TRACES["update"]
    assert_equal(step(state, batch, model), (new, metrics))
    assert TRACES["update"] == traced
