"""Losses of pairs and texts: closed forms, torch, and the gradient of a whole team; encoding; training on given data."""

from __future__ import annotations

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.learning.optimizer import init_stack
from jmarl.models import decoder
from jmarl.models.heads import values_of, with_value_head
from jmarl.models.stack import unstack
from jmarl.objectives.pairs import PairTargets, loss_of_numbers
from jmarl.objectives.texts import TextTargets, token_loss
from jmarl.preferences.data_source import data_batches, encode, evaluate_on_data, examples_at
from jmarl.preferences.encoding import (
    Examples,
    encode_pairs,
    encode_trajectories,
    pair_batches,
    pair_scores,
    text_batches,
    with_reference,
    with_team_margin,
)
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.rl import losses
from jmarl.runs.fit import fit
from jmarl.sampling.scoring import hidden_states
from jmarl.team import make_team
from tests.batches import agent_gradients, update_stack


def resolved(**settings):
    return resolve(TrainConfig.of(**settings))


PAIRS = [
    Pair(("the answer", "a basket"), ("is 42", "of fruit"), ("seven", "of apples and pears")),
    Pair(("def add", "seven"), ("(first, second)", "apples"), ("question", "and ten pieces")),
    Pair(("walked to", "the agents"), ("the market", "talk"), ("walked", "of the children")),
]


@pytest.fixture(scope="module")
def team(tiny_config, tiny_tokenizer, random_agent):
    return make_team([random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)])


@pytest.fixture(scope="module")
def old(tiny_config, tiny_tokenizer, random_agent):
    """Parameters of another team, the reference."""
    return make_team([random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (2, 3)])[1]


@functools.partial(jax.jit, static_argnames="cfg")
def plain_logprobs(params, cfg, ids):
    """Return the log-probabilities [T - 1] of ids [T] after the first, from a forward pass of one sequence."""
    logp = jax.nn.log_softmax(decoder.forward(params, cfg, ids)[:-1])
    return jnp.take_along_axis(logp, ids[1:, None], -1)[:, 0]


def row_logprobs(params, cfg, coded, which):
    """Return the log-probabilities of one completion's tokens. Padding after them gives all completions one shape."""
    ids = [*coded.prompt, *coded.rows[which]]
    return plain_logprobs(params, cfg, jnp.array(ids + [0] * (48 - len(ids))))[len(coded.prompt) - 1 : len(ids) - 1]


def coded_logprob(params, cfg, coded, which):
    return row_logprobs(params, cfg, coded, which).sum()


def margin_of(params, reference, cfg, coded):
    """Return the log-ratio of the chosen completion minus that of the rejected one."""
    ratios = [coded_logprob(params, cfg, coded, k) - coded_logprob(reference, cfg, coded, k) for k in (0, 1)]
    return ratios[0] - ratios[1]


# --- losses ------------------------------------------------------------------------------------------------------------


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
    loss_fn = functools.partial(losses.preference, kind=kind, beta=beta, smoothing=smoothing)
    (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(jnp.asarray(margins, jnp.float32), weights)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], margins > 0)


def test_a_tie_counts_half_in_the_accuracy():
    _, metrics = losses.preference(jnp.zeros(3), jnp.ones(3) / 3)
    assert metrics["accuracy"].tolist() == [0.5] * 3


def test_metrics_of_pairs_by_hand():
    """Means over two valid pairs; the third is padding. Values after the end of a completion are ignored, also NaN."""
    token_numbers = jnp.array([[[-1.0, -2.0], [-4.0, jnp.nan]], [[-2.0, -jnp.inf], [-1.0, -1.0]], [[-9.0, -9.0], [-8.0, -7.0]]])
    take = jnp.array([[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
    reference = jnp.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    targets = PairTargets(take, reference, team_margin=jnp.array([0.5, 1.0, 0.0]), share=jnp.array([0.5, 0.5, 0.0]))
    loss, metrics = loss_of_numbers(token_numbers, targets, resolved(algorithm="madpo", beta=0.2))
    expected = {"chosen": (-4 - 2) / 2, "rejected": (-4 - 4) / 2, "margin": (0.5 + 3) / 2, "accuracy": 1.0}
    expected["loss"] = np.log1p(np.exp(-0.2 * np.array([0.5, 3.0]))).mean()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    assert loss == metrics["loss"]


def test_metrics_of_texts_by_hand():
    logp, entropy = -jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1.0, 3.0, 5.0, 7.0])
    targets = TextTargets(jnp.array([0.5, 0.5, 0.0, 0.0]), jnp.array([0.0, 0.0, 1.0, 0.0]))
    for weight, more in ((0.0, {}), (0.3, {"nll_world": 4.0})):
        loss, metrics = token_loss(logp, entropy, targets, resolved(algorithm="sft", bc_weight=0.7, world_model_weight=weight))
        expected = {"nll": 1.5, "entropy": 2.0, "loss": 0.7 * 1.5 + weight * 4} | more
        assert metrics == pytest.approx(expected) and loss == metrics["loss"]


# --- one agent and teams -----------------------------------------------------------------------------------------------


def learned(team_and_params, reference, pairs, algorithm, count=4):
    """Return the gradients and metrics of one update on pairs."""
    team, params = team_and_params
    encoded = encode_pairs(team, pairs, False)
    examples = with_reference(team, [reference], encoded, count, algorithm)
    batches = pair_batches(team, examples, count, algorithm)
    if algorithm.row.margin == "joint":
        batches = with_team_margin(team, params, batches, algorithm)
    state = init_stack(jax.tree.map(jnp.copy, params[0]), algorithm)
    state, metrics = update_stack(state, batches[0], model=team.stacks[0].config, algorithm=algorithm)
    return jax.device_get(state.grads), jax.device_get(metrics)


def assert_close(got, expected, rtol=2e-3, atol=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["dpo", "madpo"])
def test_gradients_equal_those_of_the_loss_of_single_forward_passes(team, old, algorithm):
    """dpo: -log sigma(beta own margin) of each agent; madpo: -log sigma(beta (own + others')), the others' constant. Compared
    with forward passes of single completions: padding, the shared prompt and the batch change nothing. End tokens count."""
    spec, beta = team[0].stacks[0], 0.5
    cfg, coded = spec.config, encode_pairs(team[0], PAIRS, False)
    margins = np.array([[margin_of(unstack(team[1][0], n), unstack(old[0], n), cfg, c[n]) for n in (0, 1)] for c in coded])
    assert coded[0][0].rows[0][-1] == spec.stop[0]

    def loss(params, n):
        own = jnp.stack([margin_of(params, unstack(old[0], n), cfg, c[n]) for c in coded])
        others = margins.sum(1) - margins[:, n] if algorithm == "madpo" else 0
        return -jax.nn.log_sigmoid(beta * (own + others)).mean()

    grads, metrics = learned(team, old[0], PAIRS, resolved(algorithm=algorithm, beta=beta))
    for n in (0, 1):
        value, expected = jax.value_and_grad(loss)(unstack(team[1][0], n), n)
        np.testing.assert_allclose(metrics["loss"][n], value, rtol=1e-4)
        assert_close(unstack(grads, n), expected)
    shown = margins.sum(1, keepdims=True) if algorithm == "madpo" else margins
    np.testing.assert_allclose(metrics["margin"], np.broadcast_to(shown, margins.shape).mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], np.broadcast_to(shown > 0, margins.shape).mean(0), atol=1e-6)


@pytest.mark.long
def test_agents_of_a_team_get_one_joint_loss(team, old):
    """madpo: all agents have the same loss. dpo: they have different ones."""
    _, joint = learned(team, old[0], PAIRS, resolved(algorithm="madpo"))
    _, alone = learned(team, old[0], PAIRS, resolved(algorithm="dpo"))
    np.testing.assert_allclose(joint["loss"][0], joint["loss"][1], rtol=1e-5)
    assert abs(alone["loss"][0] - alone["loss"][1]) > 1e-3


@pytest.mark.long
def test_at_the_start_the_loss_is_log_2_and_reference_free_is_not(team):
    """The policy is its own reference: every margin is 0, but the gradient is not."""
    grads, metrics = learned(team, team[1][0], PAIRS, resolved(algorithm="madpo"))
    np.testing.assert_allclose(metrics["loss"], math.log(2), rtol=1e-6)
    assert (metrics["grad_norm"] > 1e-2).all()
    _, free = learned(team, team[1][0], PAIRS, resolved(algorithm="madpo", reference_free=True))
    assert (np.abs(free["loss"] - math.log(2)) > 1e-2).all()


@pytest.mark.long
def test_ipo_compares_means_of_tokens(team, old):
    spec, coded = team[0].stacks[0], encode_pairs(team[0], PAIRS, False)
    expected = []
    for c in coded:
        means = [
            (
                coded_logprob(unstack(team[1][0], 0), spec.config, c[0], k)
                - coded_logprob(unstack(old[0], 0), spec.config, c[0], k)
            )
            / len(c[0].rows[k])
            for k in (0, 1)
        ]
        expected.append((means[0] - means[1] - 1 / 0.4) ** 2)
    _, metrics = learned(team, old[0], PAIRS, resolved(algorithm="dpo", preference_loss="ipo", beta=0.2))
    np.testing.assert_allclose(metrics["loss"][0], np.mean(expected), rtol=1e-4)


@pytest.mark.long
def test_micro_batches_padding_and_vmap_change_nothing(team, old):
    """Three pairs as one batch, in two micro-batches, with five rows of padding, and with vmap."""
    whole, metrics = learned(team, old[0], PAIRS, resolved(algorithm="madpo"), count=3)
    for settings, count in ((dict(micro_batches=2), 3), ({}, 8), (dict(per_agent="vmap"), 4)):
        grads, others = learned(team, old[0], PAIRS, resolved(algorithm="madpo", **settings), count)
        assert_close(grads, whole)
        for name in ("loss", "accuracy", "margin"):
            np.testing.assert_allclose(others[name], metrics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_gradient_of_shared_weights_is_the_mean_over_their_roles(team, old, tiny_config, tiny_tokenizer, random_agent):
    """One parameter set in two roles, compared with two parameter sets of equal weights."""
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    shared = make_team([agent, agent], shared_weights=True)
    apart = make_team([agent, agent])
    reference = jax.tree.map(lambda x: x[:1], old[0])
    both = jax.tree.map(lambda x: jnp.concatenate([x, x]), reference)
    grads, _ = learned(shared, reference, PAIRS, resolved(algorithm="madpo"))
    separate, _ = learned(apart, both, PAIRS, resolved(algorithm="madpo"))
    assert_close(unstack(grads, 0), jax.tree.map(lambda x: x.mean(0), separate))


def test_sampled_pairs_have_their_sampled_tokens(team):
    """Their texts are not encoded again, and no end token is appended."""
    tokens = tuple(([5, 6, 7], [9, 9], [8]) for _ in range(2))
    (coded,) = encode_pairs(team[0], [PAIRS[0]._replace(tokens=tokens)], False)
    assert [(c.prompt, *c.rows) for c in coded] == [([5, 6, 7], [9, 9], [8])] * 2


def test_a_text_with_chat_is_a_message_of_a_user(team, tiny_tokenizer):
    """It is encoded as the list of that message."""
    text = Pair(("How many?",) * 2, ("Two.",) * 2, ("Ten.",) * 2)
    chat = text._replace(prompts=(({"role": "user", "content": "How many?"},),) * 2)
    as_text, as_chat = encode_pairs(team[0], [text], True), encode_pairs(team[0], [chat], False)
    assert as_text == as_chat
    prompt = tiny_tokenizer.decode(as_text[0][0].prompt)
    assert prompt == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(as_text[0][0].rows[0]) == "Two.<|im_end|>"


def test_a_chat_ends_as_its_template_does_and_a_text_as_the_tokenizer_does(tiny_config, make_tokenizer, random_agent):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    team, _ = make_team([random_agent(tiny_config(), tokenizer, 0)])
    text = Pair(("How many?",), ("Two.",), ("Ten.",))
    chat = text._replace(prompts=(({"role": "user", "content": "How many?"},),))
    for pairs, as_chat, expected in (([text, chat], False, ["<|endoftext|>", "<|im_end|>"]), ([text], True, ["<|im_end|>"])):
        encoded = encode_pairs(team, pairs, as_chat)
        assert [tokenizer.decode(row[-1:]) for (coded,) in encoded for row in coded.rows] == np.repeat(expected, 2).tolist()


def test_agents_of_several_stacks_have_their_own_reference_and_margins(agents, two_models):
    """Three agents, the second of another architecture: references equal those of teams of one, others' margins are summed."""
    three, algorithm = [*two_models, agents[1]], resolved(algorithm="madpo", per_agent="vmap")
    pairs = [Pair(*((*texts, "of the farmer") for texts in pair[:3])) for pair in PAIRS]
    team, params = make_team(three)
    coded = encode_pairs(team, pairs, False)
    reference = with_reference(team, params, coded, 4, algorithm).reference
    for n, agent in enumerate(three):
        alone, own = make_team([agent])
        expected = with_reference(alone, own, [[example[n]] for example in coded], 4, algorithm).reference
        np.testing.assert_allclose(reference[:, n], expected[:, 0], rtol=1e-4)
    batches = with_team_margin(team, params, pair_batches(team, Examples(coded, 0.5 * reference), 4, algorithm), algorithm)
    margins = 0.5 * (reference[..., 0] - reference[..., 1])
    others = margins.sum(1, keepdims=True) - margins
    for spec, batch in zip(team.stacks, batches, strict=True):
        got = batch.team_margin.reshape(len(spec.order), -1)[:, : len(pairs)]
        np.testing.assert_allclose(got, others[:, spec.order].T, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_long_prompts_and_long_completions_fit_in_one_batch(team):
    """One pair fills the context of 128 with its prompt, another with a completion, both to the last token."""
    tokens = [(([5] * 112, [6] * 16, [7]),) * 2, (([5], [6] * 127, [7]),) * 2]
    pairs = [Pair(("a", "b"), ("c", "d"), ("e", "f"), tokens=t) for t in tokens]
    coded = encode_pairs(team[0], pairs, False)
    for name in ("dpo", "reward_model"):
        algorithm = resolved(algorithm=name)
        params = team[1] if name == "dpo" else [with_value_head(team[1][0]) | {"value": jnp.ones((2, 32))}]
        together = pair_scores(team[0], params, pair_batches(team[0], Examples(coded), 2, algorithm), algorithm)
        for i, one in enumerate(coded):
            alone = pair_scores(team[0], params, pair_batches(team[0], Examples([one]), 1, algorithm), algorithm)
            np.testing.assert_allclose(together[i], alone[0], rtol=1e-4, atol=1e-4)
    for rows in (([6] * 16, [7]), ([7], [6] * 16)):
        with pytest.raises(ValueError, match="has 129 tokens, the context 128"):
            encode_pairs(team[0], [pairs[0]._replace(tokens=(([5] * 113, *rows),) * 2)], False)


def test_a_pair_that_does_not_fit_is_an_error_that_names_it(team):
    long = Pair(("xyz " * 60, "b"), ("c", "d"), ("e", "f"))
    with pytest.raises(ValueError, match=r"pair 0 of agent 0 .* tokens, the context 128"):
        encode_pairs(team[0], [long], False)
    for n in (1, 3):
        with pytest.raises(ValueError, match=f"pair 0 is of {n} agents, the team has 2"):
            encode_pairs(team[0], [Pair(("a",) * n, ("b",) * n, ("c",) * n)], False)


def test_a_trajectory_that_does_not_fit_is_an_error_that_names_it(team, one):
    with pytest.raises(ValueError, match=r"trajectory 1 \('the'...\) has \d+ tokens, the context 128"):
        encode_trajectories(one[0], [TALK, Trajectory(("the",), ("xyz " * 60,))], False)
    with pytest.raises(ValueError, match="trajectory 0 has 1 observations and 2 actions: give one observation before each"):
        encode_trajectories(one[0], [Trajectory(("the",), ("a", "b"))], False)
    with pytest.raises(ValueError, match="trajectories are of one agent, the team has 2"):
        encode_trajectories(team[0], [TALK], False)


# --- reward model ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_reward_model_reads_its_score_after_the_last_token(team):
    """The loss is -log sigma(s_w - s_l), where s is the value of the hidden state after a completion's last token. The head
    starts at 0 and has a gradient."""
    algorithm, (one, params) = resolved(algorithm="reward_model"), (team[0], team[1][0])
    spec = one.stacks[0]
    with_head = with_value_head(params) | {"value": 0.3 * jax.random.normal(jax.random.key(0), params["final_norm"].shape)}
    coded = encode_pairs(one, PAIRS, False)
    (batch,) = pair_batches(one, Examples(coded), 4, algorithm)
    scores = pair_scores(one, [with_head], (batch,), algorithm)

    def by_itself(n, c, k):
        params = unstack(with_head, n)
        ids = jnp.array([[*c.prompt, *c.rows[k]]])
        behind = hidden_states(params, spec.config, ids, jnp.array([ids.shape[1]]), jnp.zeros((1, 1, 1), jnp.int32), "full")[0]
        return values_of(params, behind)[0]

    for i, c in enumerate(coded):
        for n in (0, 1):
            np.testing.assert_allclose(scores[i, n], [by_itself(n, c[n], k) for k in (0, 1)], rtol=1e-4, atol=1e-5)
    agent = functools.partial(unstack, agent=0)
    running = agent(init_stack(with_head, algorithm).running)
    of_agent = jax.jit(functools.partial(agent_gradients, running=running, model=spec.config, algorithm=algorithm))
    _, metrics = of_agent(agent(with_head), agent(batch))
    margins = scores[:3, 0, 0] - scores[:3, 0, 1]
    np.testing.assert_allclose(metrics["loss"], np.log1p(np.exp(-margins)).mean(), rtol=1e-4)
    grads, fresh = of_agent(agent(with_value_head(params)), agent(batch))
    np.testing.assert_allclose(fresh["loss"], math.log(2), rtol=1e-6)
    assert np.abs(grads["value"]).max() > 1e-3


# --- texts -------------------------------------------------------------------------------------------------------------

TALK = Trajectory(("2 + 2?", "Wrong, again.", "Right."), ("5", "4"))


@pytest.fixture(scope="module")
def one(tiny_config, tiny_tokenizer, random_agent):
    return make_team([random_agent(tiny_config(), tiny_tokenizer, 0)])


@pytest.mark.parametrize("chat", [False, True])
def test_a_trajectory_is_one_row_of_actions_and_observations(one, tiny_tokenizer, chat):
    ((coded,),) = encode_trajectories(one[0], [TALK], chat)
    said = [t for t, kind in zip(coded.rows[0], coded.kinds, strict=True) if kind == 1]
    assert tiny_tokenizer.decode(said) == "5<|im_end|>4<|im_end|>"
    observed = tiny_tokenizer.decode([t for t, kind in zip(coded.rows[0], coded.kinds, strict=True) if kind == 2])
    ends = "\n<|im_start|>assistant\n"
    chatted = f"\n<|im_start|>user\nWrong, again.<|im_end|>{ends}\n<|im_start|>user\nRight.<|im_end|>{ends}"
    assert observed == (chatted if chat else "Wrong, again.Right.")


def test_observations_of_messages_are_a_chat(one):
    messages = TALK._replace(observations=tuple(({"role": "user", "content": text},) for text in TALK.observations))
    assert encode_trajectories(one[0], [messages], False) == encode_trajectories(one[0], [TALK], True)


def test_a_chat_template_without_an_end_token_loses_no_text(tiny_config, make_tokenizer, random_agent):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    team, _ = make_team([random_agent(tiny_config(), tokenizer, 0)])
    ((coded,),) = encode_trajectories(team, [TALK._replace(observations=TALK.observations[:2])], True)
    said = "5<|im_end|>;user: Wrong, again.;assistant: 4<|im_end|>"
    assert tokenizer.decode([*coded.prompt, *coded.rows[0]]) == f"user: 2 + 2?;assistant: {said}"


@pytest.mark.long
@pytest.mark.parametrize(("cloning", "predicting"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_the_loss_of_texts_is_the_weighted_mean_of_each_kind_of_token(one, cloning, predicting):
    """Behavior cloning, a world model, and both, compared with forward passes of single rows. End tokens count."""
    team, params = one
    cfg, coded = team.stacks[0].config, encode_trajectories(team, [TALK, Trajectory(("the",), ("market",))], False)

    def loss(params):
        nll, kinds = [], []
        for (c,) in coded:
            nll.append(-row_logprobs(params, cfg, c, 0))
            kinds += c.kinds
        nll, kinds = jnp.concatenate(nll), np.array(kinds)
        return cloning * nll[kinds == 1].mean() + predicting * nll[kinds == 2].mean()

    algorithm = resolved(algorithm="sft", bc_weight=cloning, world_model_weight=predicting, micro_batches=2)
    (batch,) = text_batches(team, Examples(coded), 4)
    state = init_stack(jax.tree.map(jnp.copy, params[0]), algorithm)
    state, metrics = update_stack(state, batch, model=cfg, algorithm=algorithm)
    value, expected = jax.value_and_grad(loss)(unstack(params[0], 0))
    np.testing.assert_allclose(metrics["loss"][0], value, rtol=1e-4)
    assert_close(jax.device_get(unstack(state.grads, 0)), jax.device_get(expected))


# --- training ----------------------------------------------------------------------------------------------------------

WORDS = ["apples", "pears", "the farmer", "ten pieces", "basket", "children", "market", "question"]
TASTES = [
    Pair((f"{word} and", f"the {word}"), (f"seven {end}", "aeiou"), (f"{end} walked", "xyz")) for word in WORDS for end in WORDS
]
RUN = TrainConfig.of(num_updates=12, learning_rate=1e-2, per_agent="vmap", progress=False, batch_size=8)


def fitted(agents, algorithm, data, **changes):
    team, params = make_team(agents)
    cfg = RUN.replace(algorithm=algorithm, **changes)
    held = data[::4]
    return fit(team, [d for i, d in enumerate(data) if i % 4], cfg, params=params, eval_data=held)


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    """Two agents of one architecture."""
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def two_models(agents, tiny_config, tiny_tokenizer, random_agent):
    return [agents[0], random_agent(tiny_config("qwen3", hidden_size=48), tiny_tokenizer, 1)]


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["dpo", "madpo"])
def test_held_out_preferences_are_learned(agents, algorithm):
    result = fitted(agents, algorithm, TASTES)
    assert result.before["accuracy"] == 0.5 and result.before["margin"] == 0, "the policy is the reference"
    np.testing.assert_allclose(result.before["loss"], math.log(2), rtol=1e-5)
    assert result.after["accuracy"] > 0.95 and result.after["loss"] < 0.3, result.after
    assert len(result.losses) == 12 and result.losses[-1] < result.losses[0]


@pytest.mark.long
def test_two_architectures_learn_joint_preferences(two_models):
    assert fitted(two_models, "madpo", TASTES).after["accuracy"] > 0.95


@pytest.mark.long
def test_a_reward_model_ranks_held_out_pairs(agents):
    alone = [Pair(p.prompts[:1], p.chosen[:1], p.rejected[:1]) for p in TASTES]
    result = fitted(agents[:1], "reward_model", alone, num_updates=20, learning_rate=3e-3)
    assert result.before["accuracy"] == 0.5 and result.after["accuracy"] > 0.9, result.after


def test_texts_are_learned(agents):
    words = WORDS[:7] * 4  # each is among those held out, which is every fourth, and among the others
    data = [Trajectory((f"{word} and", "the question is"), (f"seven {word}",)) for word in words]
    result = fitted(agents[:1], "sft", data, world_model_weight=0.5, num_updates=24)
    assert result.after["nll"] < 0.5 * result.before["nll"] and result.after["nll_world"] < 0.5 * result.before["nll_world"]
    both = result.after["nll"] + 0.5 * result.after["nll_world"]
    np.testing.assert_allclose(result.after["loss"], both, rtol=1e-5)


@pytest.mark.long
def test_a_resumed_run_is_bit_equal(agents, tmp_path):
    """Six updates, and three updates resumed for three more, have equal parameters and rows of the log."""

    def run(where, **changes):
        return fitted(agents, "madpo", TASTES, output_dir=str(tmp_path / where), save_every=3, **changes)

    whole = run("whole", num_updates=6)
    run("parts", num_updates=3)
    rest = run("parts", num_updates=6, resume=True)
    assert rest.before is None
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)

    def rows(where):
        lines = (tmp_path / where / "metrics.jsonl").read_text().splitlines()
        all_rows = [{k: v for k, v in json.loads(line).items() if "time" not in k and "per_s" not in k} for line in lines]
        return [{k: v for k, v in row.items() if k != "compiles"} for row in all_rows if "loss" in row]

    assert rows("parts") == rows("whole") and len(rows("whole")) == 6
    for row in map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()):
        if "time/step_s" in row:  # seconds of a step are those of its phases; an evaluation is no part of it
            seconds = sum(x for name, x in row.items() if name.startswith("time/")) - row["time/step_s"]
            assert row["time/step_s"] == pytest.approx(seconds - row["time/evaluation"], abs=0.1 if row["step"] else 1.0)
    assert (tmp_path / "whole" / "models" / "agent_1" / "model.safetensors").exists()


def test_every_pair_is_drawn_at_most_once_per_epoch():
    """The order follows from seed and epoch alone."""
    seen = [examples_at(step, 10, 3, seed=0) for step in range(6)]
    assert len(set(sum(seen[:3], []))) == 9 and len(set(sum(seen[3:], []))) == 9 and seen[:3] != seen[3:]
    assert examples_at(4, 10, 3, seed=0) == seen[4] and examples_at(0, 10, 3, seed=1) != seen[0]
    assert sorted(examples_at(0, 2, 8, seed=0)) == [0, 1]


def test_held_out_accuracy_of_a_team_is_of_the_joint_margin(agents):
    team, params = make_team(agents)
    cfg, other = RUN.replace(algorithm="madpo", batch_size=9), jax.tree.map(lambda x: 0.9 * x, params)
    algorithm = resolve(cfg)
    held_out = encode(team, params, TASTES[:9], algorithm, cfg)
    result = evaluate_on_data(team, other, held_out, algorithm)
    scores = pair_scores(team, other, data_batches(team, held_out, algorithm), algorithm)[:9]
    margins = (scores[..., 0] - scores[..., 1]).sum(1)
    assert (
        (margins > 0).sum() == 8
        and result["margin"] == pytest.approx(margins.mean(), rel=1e-4)
        and result["accuracy"] == pytest.approx(8 / 9)
    )


@pytest.mark.long
def test_evaluation_does_not_depend_on_the_batch_size(agents):
    """Nine pairs in batches of four and of nine, and texts, whose mean is over tokens and not over batches."""
    texts = [Trajectory(("the",), (word * n,)) for n, word in enumerate(WORDS, 1)]
    for name, data in (("madpo", TASTES[:9]), ("sft", texts)):
        team, params = make_team(agents[: 1 if name == "sft" else 2])
        other = jax.tree.map(lambda x: 0.9 * x, params)
        results = []
        for size in (4, 9):
            cfg = RUN.replace(algorithm=name, batch_size=size)
            algorithm = resolve(cfg)
            results.append(evaluate_on_data(team, other, encode(team, params, data, algorithm, cfg), algorithm))
        for column in results[0]:
            np.testing.assert_allclose(results[0][column], results[1][column], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "data", "message"),
    [
        (dict(algorithm="magrpo"), TASTES, r"learns from completions that the team samples: use jmarl\.train$"),
        (dict(algorithm="marlhf"), TASTES, r"learns from completions that the team samples: use jmarl\.train$"),
        (dict(algorithm="dpo"), [TALK], "learns from a list of Pair, got Trajectory.*load_pairs"),
        (dict(algorithm="sft"), TASTES, "learns from a list of Trajectory, got Pair.*load_trajectories"),
        (dict(algorithm="sft"), [TALK, TASTES[0]], "learns from a list of Trajectory, got Pair"),
        (
            dict(algorithm="sft"),
            [{"text": "a"}],
            "got dict: read files, data sets, .* with jmarl.load_t",
        ),
        (dict(algorithm="dpo"), iter(TASTES), "learns from a list of Pair, got list_iterator"),
        (dict(algorithm="dpo"), "pairs.jsonl", "learns from a list of Pair, got str"),
        (dict(algorithm="dpo"), [], "there is no data"),
        (
            dict(algorithm="dpo", per_device_train_batch_size=2),
            TASTES,
            r"num_prompts=2 \(per_device_train_batch_size in TRL\) has no effect for algorithm='dpo'.* batch_size",
        ),
        (dict(algorithm="dpo", bc_weight=0.5), TASTES, "bc_weight=0.5 has no effect for algorithm='dpo'; it is for sft"),
        (dict(algorithm="sft", beta=0.5), [TALK], "beta=0.5 has no effect for algorithm='sft'"),
        (dict(algorithm="dpo", kl_coef=0.1), TASTES, "kl_coef=0.1 has no effect for algorithm='dpo'"),
        (dict(algorithm="dpo", num_epochs=2), TASTES, "num_epochs=2 has no effect for algorithm='dpo'"),
        (dict(algorithm="dpo", num_turns=3), TASTES, "num_turns=3 has no effect for algorithm='dpo', which trains on given"),
        (dict(algorithm="dpo", num_generations=4), TASTES, "num_generations=4 has no effect .* given data; leave it at 8$"),
        (dict(algorithm="sft", top_p=0.9), [TALK], "top_p=0.9 has no effect for algorithm='sft', which trains on given"),
        (dict(algorithm="sft", eval_temperature=0.0), [TALK], "eval_temperature=0.0 has no effect"),
        (dict(algorithm="dpo", pairs_per_prompt=3), TASTES, "pairs_per_prompt=3 has no effect for algorithm='dpo'"),
        (dict(algorithm="dpo", micro_batches=16), TASTES, "micro_batches=16 is more than batch_size=8"),
    ],
)
def test_bad_settings_are_refused(agents, settings, data, message):
    team, params = make_team(agents)
    with pytest.raises((ValueError, TypeError), match=message):
        fit(team, data, RUN.replace(**settings), params=params)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([PAIRS[0], PAIRS[0]._replace(prompts=("the", ""))], "the prompt of pair 1 of agent 1 is empty"),
        ([PAIRS[0], PAIRS[0]._replace(chosen=("x", "xyz " * 99))], "pair 1 of agent 1 .* tokens, the context"),
    ],
)
def test_an_empty_or_long_part_of_a_pair_is_an_error_that_names_it(agents, data, message):
    with pytest.raises(ValueError, match=message):
        encode_pairs(make_team(agents)[0], data, False)


def test_more_micro_batches_than_pairs_are_an_error(agents):
    team, params = make_team(agents)
    algorithm = resolved(algorithm="madpo", micro_batches=8)
    (batch,) = pair_batches(team, Examples(encode_pairs(team, TASTES[:4], False)), 4, algorithm)
    state = init_stack(params[0], algorithm)
    with pytest.raises(ValueError, match="micro_batches=8 is more than the 4 pairs or texts of an update: .* batch_size"):
        update_stack(state, batch, model=team.stacks[0].config, algorithm=algorithm)


def test_held_out_data_must_be_of_the_same_kind(agents):
    team, params = make_team(agents)
    with pytest.raises(TypeError, match="learns from a list of Pair, got Trajectory"):
        fit(team, TASTES, RUN.replace(algorithm="madpo"), params=params, eval_data=[TALK])


LORA = dict(lora_rank=4, lora_dropout=0.1, learning_rate=3e-2, lora_targets="q_proj,down_proj")


@pytest.mark.long
def test_adapters_learn_preferences_over_one_base(agents, tmp_path):
    """Two agents of one model learn held-out preferences, the base does not change, and a resumed run is bit-equal."""

    def run(where, **changes):
        team, params = make_team([agents[0]] * 2, lora=True)
        settings = dict(algorithm="madpo", output_dir=str(tmp_path / where), save_every=10)
        return fit(team, TASTES[1::2], RUN.replace(**settings, **LORA, **changes), params=params, eval_data=TASTES[::4])

    whole = run("whole", num_updates=20)
    assert whole.before["margin"] == 0 and whole.after["accuracy"] > 0.9, whole.after
    (stack,) = whole.state.stacks
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(agents[0].params)[0], jax.tree.leaves(agents[0].params), strict=True
    ):
        base = functools.reduce(lambda tree, k: tree[k.key], path, stack.base)
        np.testing.assert_array_equal(base.value, y, err_msg=str(x.shape))
    run("parts", num_updates=10)
    rest = run("parts", num_updates=20, resume=True)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    assert (tmp_path / "whole" / "models" / "agent_1" / "adapter" / "adapter_config.json").exists()


@pytest.mark.long
def test_a_reward_model_with_adapters_ranks_held_out_pairs(agents):
    alone = [Pair(p.prompts[:1], p.chosen[:1], p.rejected[:1]) for p in TASTES]
    result = fitted(agents[:1], "reward_model", alone, **LORA | dict(num_updates=20))
    assert result.after["accuracy"] > 0.9, result.after


@pytest.mark.long
def test_frozen_agents_do_not_change_and_learning_rates_are_per_agent(agents):
    """A frozen agent still counts in its partner's margin. Another learning rate changes only its own agent."""
    base = fitted(agents, "madpo", TASTES, num_updates=2)
    frozen = fitted(agents, "madpo", TASTES, num_updates=2, frozen_agents=(1,))
    slower = fitted(agents, "madpo", TASTES, num_updates=1, learning_rate=(1e-2, 1e-3))
    once = fitted(agents, "madpo", TASTES, num_updates=1)
    leaf = lambda result, n: np.asarray(result.state.stacks[0].params["embed"][n])  # noqa: E731
    np.testing.assert_array_equal(leaf(frozen, 1), agents[1].params["embed"])
    assert (leaf(frozen, 0) != leaf(base, 0)).any(), "the second step's margin has a partner that did not move"
    np.testing.assert_allclose(leaf(slower, 0), leaf(once, 0), atol=1e-6)
    moved = np.abs(leaf(once, 1) - agents[1].params["embed"]).max(), np.abs(leaf(slower, 1) - agents[1].params["embed"]).max()
    np.testing.assert_allclose(moved[1] / moved[0], 0.1, rtol=1e-2)
