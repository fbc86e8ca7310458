"""Losses, token weights, clipping and KL estimates against numbers computed by hand, torch and formulas of TRL."""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import Aggregation, TrainConfig
from jmarl.objectives.policy import PolicyTargets, token_loss
from jmarl.rl.losses import cispo, clipped_surrogate, kl_estimate, policy_gradient, preference, token_weights, value_loss

AGGREGATIONS = typing.get_args(Aggregation)
MASK = np.array([[[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]], bool)  # lengths 4, 2 and 0
SEQUENCE = dict(level="sequence")
weigh = jax.jit(token_weights, static_argnums=1)
estimate_kl = jax.jit(kl_estimate, static_argnums=2)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("level", "eps_low", "eps_high", "dual"))
def differentiate(loss, logp, old, advantages, weights, **options):
    """A loss with its metrics, and its gradient."""
    return jax.value_and_grad(lambda x: loss(x, old, advantages, weights, **options), has_aux=True)(logp)


def of_one_token(loss, ratio, advantage, **options):
    """The loss, its slope in log pi and the number of clipped tokens of one token."""
    one = np.ones((1, 1, 1), np.float32)
    arrays = (-one, np.float32(-1 - np.log(ratio)) * one, np.float32(advantage) * one, one)
    (value, metrics), slope = differentiate(loss, *arrays, **options)
    return float(value), float(slope[0, 0, 0]), int(metrics["clip_share"].sum())


@pytest.fixture
def arrays():
    """Random log-probabilities [2, 3, 5] of a policy and a behavior policy near it, advantages, and a mask."""
    rng = np.random.default_rng(0)
    logp = -rng.exponential(size=(2, 3, 5))
    old = logp + 0.3 * rng.normal(size=logp.shape)
    advantages = rng.normal(size=(2, 3, 1))
    mask = np.arange(5) < rng.integers(1, 6, (2, 3))[..., None]
    return *map(np.float32, (logp, old, advantages)), mask


# --- token weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aggregation, long, short",
    [
        ("token_mean", 1 / 6, 1 / 6),
        ("sequence_mean", 1 / 12, 1 / 6),
        ("sequence_sum", 1 / 3, 1 / 3),
        ("constant", 1 / 12, 1 / 12),
    ],
)
def test_token_weights_closed_form(aggregation, long, short):
    """Weights of the tokens of the long and of the short completion, for completions of 4, 2 and 0 tokens and T = 4. Those of
    an empty mask are 0, and only those of `constant` depend on the length of the token axis."""
    expected = np.array([[[long] * 4, [short] * 2 + [0, 0], [0] * 4]])
    np.testing.assert_allclose(weigh(MASK, aggregation), expected, rtol=1e-6)
    assert (np.asarray(weigh(np.zeros_like(MASK), aggregation)) == 0).all()
    longer = np.asarray(weigh(np.pad(MASK, ((0, 0), (0, 0), (0, 4))), aggregation))[..., :4]
    np.testing.assert_allclose(longer, expected / 2 if aggregation == "constant" else expected, rtol=1e-6)


# --- policy gradient -----------------------------------------------------------------------------------------------------


def test_the_ending_token_is_trained_and_the_padding_is_not():
    """A completion of two words, the end of sequence and three pads, with log-probabilities -0.3, -0.4, -0.56 and -4 per pad,
    has the loss (0.3 + 0.4 + 0.56) / 3 = 0.42. It would be 2.21 with pads and 0.35 without the ending token."""
    logp = np.array([[[-0.3, -0.4, -0.56, -4.0, -4.0, -4.0]]], np.float32)
    advantage = jnp.ones((1, 1, 1))

    @jax.jit
    @jax.value_and_grad
    def loss(logp, trained):
        return policy_gradient(logp, logp, advantage, token_weights(jnp.arange(6)[None, None] < trained, "token_mean"))[0]

    for trained, expected in ((3, 0.42), (6, 13.26 / 6), (2, 0.35)):
        assert float(loss(logp, trained)[0]) == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(loss(logp, 3)[1][0, 0], [-1 / 3, -1 / 3, -1 / 3, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_policy_gradient_is_minus_weight_times_advantage(arrays, aggregation):
    """So is the clipped one at ratio 1, at every token, also with one ratio per sequence."""
    logp, old, advantages, mask = arrays
    weights = np.asarray(weigh(mask, aggregation))
    (loss, _), grad = differentiate(policy_gradient, logp, old, advantages, weights)
    assert float(loss) == pytest.approx(-float((weights * advantages * logp).sum()), rel=1e-6)
    np.testing.assert_allclose(grad, -weights * advantages, rtol=1e-6)
    for level in ("token", "sequence", "turn"):
        clipped = differentiate(clipped_surrogate, logp, logp, advantages, weights, level=level)[1]
        np.testing.assert_allclose(clipped, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss, options", [(policy_gradient, {}), (clipped_surrogate, {}), (clipped_surrogate, SEQUENCE)])
def test_zero_advantage_gives_exactly_zero_gradient(arrays, loss, options):
    logp, old, advantages, mask = arrays
    grad = differentiate(loss, logp, old, 0 * advantages, weigh(mask, "sequence_mean"), **options)[1]
    assert (np.asarray(grad) == 0).all()


# --- clipped surrogate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, gain, slope, clipped",
    [
        (1.0, 2.0, 2.0, 2.0, 0),
        (1.2, 2.0, 2.4, 2.4, 0),
        (1.5, 2.0, 2.56, 0.0, 1),  # above 1 + 0.28 with A > 0: clipped
        (0.5, 2.0, 1.0, 1.0, 0),  # below with A > 0: the minimum is the unclipped one
        (0.5, -2.0, -1.6, 0.0, 1),  # below 1 - 0.2 with A < 0: clipped
        (1.5, -2.0, -3.0, -3.0, 0),  # above with A < 0: the minimum is the unclipped one
        (9.0, -2.0, -18.0, -18.0, 0),  # unbounded without the dual clip
    ],
)
def test_clip_by_hand(ratio, advantage, gain, slope, clipped):
    """Gain, its slope in log pi and share of clipped tokens for eps_low 0.2 and eps_high 0.28."""
    found = of_one_token(clipped_surrogate, ratio, advantage, eps_low=0.2, eps_high=0.28)
    assert found == (pytest.approx(-gain, rel=1e-5), pytest.approx(-slope, rel=1e-5), clipped)


@pytest.mark.parametrize(
    "ratio, advantage, gain, slope", [(9.0, -2.0, -6.0, 0.0), (2.0, -2.0, -4.0, -4.0), (9.0, 2.0, 2.4, 0.0)]
)
def test_dual_clip_by_hand(ratio, advantage, gain, slope):
    """With dual = 3 the gain is at least 3 A for A < 0; positive advantages are not affected."""
    found = of_one_token(clipped_surrogate, ratio, advantage, dual=3.0)
    assert found[:2] == (pytest.approx(-gain, rel=1e-5), pytest.approx(-slope, rel=1e-5, abs=1e-6))


def test_sequence_ratio_is_the_geometric_mean():
    """GSPO: log-ratios 0.3, -0.1, 0.1 of three trained tokens (and 5 of a pad) give s = e^0.1 for every token, and the gradient
    s A / 3 / rows for each token."""
    old = np.full((1, 2, 4), -1, np.float32)
    logp = old + np.array([[[0.3, -0.1, 0.1, 5.0], [0.0, 0.0, 0.0, 0.0]]], np.float32)
    mask = np.array([[[1, 1, 1, 0], [1, 1, 1, 1]]], bool)
    weights, advantages = weigh(mask, "sequence_mean"), np.array([[[2.0], [0.0]]], np.float32)
    (loss, _), grad = differentiate(clipped_surrogate, logp, old, advantages, weights, level="sequence")
    assert float(loss) == pytest.approx(-np.exp(0.1) * 2 / 2, rel=1e-5)
    np.testing.assert_allclose(grad[0, 0], [-np.exp(0.1) * 2 / 3 / 2] * 3 + [0], rtol=1e-5)
    assert (np.asarray(grad[0, 1]) == 0).all()


def test_log_probabilities_of_padding_are_ignored(arrays):
    """Extreme log-probabilities of padding change neither loss nor gradient."""
    logp, old, advantages, mask = arrays
    weights, wild = weigh(mask, "token_mean"), np.where(mask, logp, np.float32(-300))
    for level in ("token", "sequence"):
        ((loss, _), grad), ((other, _), other_grad) = (
            differentiate(clipped_surrogate, x, old, advantages, weights, level=level) for x in (logp, wild)
        )
        assert loss == other
        np.testing.assert_array_equal(grad, other_grad)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio, weight", [(1.0, 1.0), (1.2, 1.2), (1.5, 1.28), (0.5, 0.7)])
def test_cispo_by_hand(ratio, weight, advantage):
    """The gradient is minus the clipped weight times the advantage of either sign, for eps_low 0.3 and eps_high 0.28."""
    value, slope, clipped = of_one_token(cispo, ratio, advantage, eps_low=0.3, eps_high=0.28)
    assert value == pytest.approx(weight * advantage, rel=1e-5)
    assert slope == pytest.approx(-weight * advantage, rel=1e-5)
    assert clipped == (ratio not in (1.0, 1.2))


# --- KL ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, values", [("k1", [-0.5, 0, 2]), ("k2", [0.125, 0, 2]), ("k3", [np.exp(0.5) - 1.5, 0, np.exp(-2) + 1])]
)
def test_kl_estimates_by_hand(kind, values):
    """Of d = 0.5, 0 and -2 from the policy to the reference."""
    estimates = estimate_kl(np.float32([-1.5, -1.5, -1]), np.float32([-1, -1.5, -3]), kind)
    np.testing.assert_allclose(estimates, values, rtol=1e-6)


def test_expected_gradients_of_kl_estimates():
    """Closed forms over all tokens of a distribution. In the reward, k1 has the gradient of KL(policy || ref) and k3 that minus
    the gradient of KL(ref || policy). In the loss, k1 has gradient 0, k2 that of KL(policy || ref) and k3 that of
    KL(ref || policy). The defaults are k1 in the reward and k3 in the loss."""
    logits, ref = np.float32(np.random.default_rng(0).normal(size=(2, 20)))
    ref = logits + 0.5 * ref
    ref = jnp.asarray(ref - np.logaddexp.reduce(ref))

    def divergence(logits, reverse):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(ref) * (ref - logp)) if reverse else jnp.sum(jnp.exp(logp) * (logp - ref))

    def expected(logits, kind, where):
        logp = jax.nn.log_softmax(logits)
        p, k = jax.lax.stop_gradient(jnp.exp(logp)), kl_estimate(logp, ref, kind)
        return jnp.sum(p * (jax.lax.stop_gradient(k) * logp if where == "reward" else k))

    cases = ("k1", "reward"), ("k3", "reward"), ("k1", "loss"), ("k2", "loss"), ("k3", "loss")
    to_ref, from_ref, *found = jax.jit(
        lambda logits: [
            *(jax.grad(divergence)(logits, reverse) for reverse in (False, True)),
            *(jax.grad(expected)(logits, *case) for case in cases),
        ]
    )(logits)
    for got, want in zip(found, (to_ref, to_ref - from_ref, 0 * to_ref, to_ref, from_ref), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    settings: list[dict] = [dict(kl_in="reward"), dict(kl_in="loss"), dict(kl_in="reward", kl_estimator="k2")]
    resolved = [resolve(TrainConfig.of(**changes)).loss.kl_estimator for changes in settings]
    assert resolved == ["k1", "k3", "k2"]


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_value_loss_equals_torch(clip):
    """Value and gradient of the mean of (y - v)², or of max((y - v)², (y - v_clip)²), over a mask, in double precision."""
    import torch

    rng = np.random.default_rng(0)
    values, targets, old = rng.normal(size=(3, 2, 3, 4))
    mask = rng.random((2, 3, 4)) < 0.6
    weights = mask / mask.sum()
    v = torch.tensor(values, requires_grad=True)
    error = (torch.tensor(targets) - v) ** 2
    if clip:
        clipped = torch.tensor(old) + (v - torch.tensor(old)).clamp(-clip, clip)
        error = torch.maximum(error, (torch.tensor(targets) - clipped) ** 2)
    expected = error[torch.tensor(mask)].mean()
    expected.backward()
    f = jax.value_and_grad(functools.partial(value_loss, clip=clip), has_aux=True)
    (got, metrics), grad = jax.jit(f)(*map(np.float32, (values, targets, old, weights)))
    assert got == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(grad, v.grad, rtol=1e-4, atol=1e-6)
    if clip:
        np.testing.assert_array_equal(metrics["value_clip_share"], (np.abs(values - old) > clip) & mask)


def test_padding_far_from_the_reference_is_ignored():
    """exp(200) is infinite, and 0 times infinity would be NaN."""
    one, first = np.ones(2, np.float32), np.float32([1, 0])
    targets = PolicyTargets(first > 0, one, first, -one, -1.5 * first, one, 0.1 * first)
    arrays, algorithm = (0 * one, targets), resolve(TrainConfig.of(kl_coef=0.1, kl_in="loss"))
    loss_and_grad = jax.jit(jax.value_and_grad(lambda *arrays: token_loss(*arrays, algorithm)[0]))
    value, grad = loss_and_grad(np.float32([-1, -200]), *arrays)
    alone, grad_alone = loss_and_grad(np.float32([-1, 0]), *arrays)
    assert np.isfinite(value) and value == alone and grad.tolist() == [grad_alone[0], 0]


# --- preferences ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "smoothing", "formula"),
    [
        ("sigmoid", 0.0, lambda t, m, b, s: -t.nn.functional.logsigmoid(b * m)),
        (
            "sigmoid",
            0.2,
            lambda t, m, b, s: -t.nn.functional.logsigmoid(b * m) * (1 - s) - t.nn.functional.logsigmoid(-b * m) * s,
        ),
        ("hinge", 0.0, lambda t, m, b, s: t.relu(1 - b * m)),
        ("ipo", 0.0, lambda t, m, b, s: (m - 1 / (2 * b)) ** 2),
    ],
)
def test_loss_and_gradient_equal_the_formulas_of_trl(kind, smoothing, formula):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    margins, beta = 8 * rng.normal(size=40), 0.3
    x = torch.tensor(margins, dtype=torch.float64, requires_grad=True)
    expected = formula(torch, x, beta, smoothing).mean()
    expected.backward()
    weights = jnp.full(40, 1 / 40)
    loss_fn = functools.partial(preference, kind=kind, beta=beta, smoothing=smoothing)
    (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(jnp.asarray(margins, jnp.float32), weights)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], margins > 0)


def test_a_tie_counts_half_in_the_accuracy():
    _, metrics = preference(jnp.zeros(3), jnp.ones(3) / 3)
    assert metrics["accuracy"].tolist() == [0.5] * 3
