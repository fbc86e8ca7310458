"""Encoding of pairs and texts, the gradient of a whole team that learns from them, and training on given data."""

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
from jmarl.models.heads import with_value_head
from jmarl.objectives.pairs import loss_of_numbers, prepare
from jmarl.preferences.encoding import (
    Examples,
    encode_pairs,
    encode_trajectories,
    pair_batches,
    pair_scores,
    text_batches,
    token_numbers,
    with_reference,
    with_team_margin,
)
from jmarl.preferences.long_rows import long_rows
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.runs.kinds.given import encode, evaluate_on_data, examples_at
from jmarl.runs.train import fit
from jmarl.team import make_team
from jmarl.types import TRACES
from tests.batches import update_stack

RUN = TrainConfig.of(num_updates=12, learning_rate=1e-2, per_agent="vmap", progress=False, batch_size=8)
SFT = dict(bc_weight=0.7, world_model_weight=0.3, micro_batches=2)
BETA, COUNT = 0.1, 8  # the default, and the pairs of a batch
PAIRS = [
    Pair(("the answer", "a basket"), ("is 42", "of fruit"), ("seven", "of apples and pears")),
    Pair(("def add", "seven"), ("(first, second)", "apples"), ("question", "and ten pieces")),
    Pair(("walked to", "the agents"), ("the market", "talk"), ("walked", "of the children")),
]
WORDS = ["apples", "pears", "the farmer", "ten pieces", "basket", "children", "market", "question"]
TASTES = [
    Pair((f"{word} and", f"the {word}"), (f"seven {end}", "aeiou"), (f"{end} walked", "xyz")) for word in WORDS for end in WORDS
]
TALK = Trajectory(("2 + 2?", "Wrong, again.", "Right."), ("5", "4"))


def algorithm_of(name, **settings):
    """Return the algorithm of `RUN` by another row: tests that compare updates then share the programs of those that train."""
    return resolve(RUN.replace(algorithm=name, **settings))


def of_agent(pairs, *agents):
    """Return pairs with the parts of these agents only."""
    return [Pair(*(tuple(part[n] for n in agents) for part in pair[:3])) for pair in pairs]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    """Two agents of one architecture."""
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def team(agents):
    return make_team(agents)


@pytest.fixture(scope="module")
def one(agents):
    return make_team(agents[:1])


@pytest.fixture(scope="module")
def old(tiny_config, tiny_tokenizer, random_agent):
    """Parameters of another team, the reference."""
    return make_team([random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (2, 3)])[1][0]


# --- forward passes of single sequences ----------------------------------------------------------------------------------

ROWS, LENGTH = 6, 128  # padding gives all of them one program


@functools.partial(jax.jit, static_argnames="cfg")
def plain_pass(params, cfg, ids, weights):
    """Return the log-probabilities [R, T - 1] of ids [R, T] after the first, each row in a forward pass of its own, and the
    gradient of their weighted sum."""

    def of_row(params, ids):
        logp = jax.nn.log_softmax(decoder.forward(params, cfg, ids)[:-1])
        return jnp.take_along_axis(logp, ids[1:, None], -1)[:, 0]

    def weighted(params):
        logp = jax.lax.map(functools.partial(of_row, params), ids)
        return (weights * logp).sum(), logp

    grads, logp = jax.grad(weighted, has_aux=True)(params)
    return logp, grads


def own(tree, agent):
    """Return one agent's arrays of those of a stack."""
    return jax.tree.map(lambda x: np.asarray(x)[agent], tree)


def padded(coded):
    """Return the ids [R, T] of prompts with each of their completions, and the mask [R, T - 1] of what completions add."""
    ids, mask = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH - 1))
    for i, (prompt, row) in enumerate((c.prompt, row) for c in coded for row in c.rows):
        both = [*prompt, *row]
        ids[i, : len(both)], mask[i, len(prompt) - 1 : len(both) - 1] = both, 1
    return ids, mask


def plain_sums(params, cfg, coded):
    """Return the log-probabilities [M, G] of the completions of one agent."""
    group, sums = len(coded[0].rows), []
    for i in range(0, len(coded), ROWS // group):
        ids, mask = padded(coded[i : i + ROWS // group])
        sums += list((mask * plain_pass(params, cfg, ids, np.zeros_like(mask))[0]).sum(1))
    return np.array(sums[: group * len(coded)]).reshape(-1, group)


def plain_margins(team, params, reference, encoded):
    """Return the log-ratios [M, N] of the chosen completions less those of the rejected ones."""
    coded, cfg = [[c[n] for c in encoded] for n in (0, 1)], team.stacks[0].config
    scores = [plain_sums(own(params, n), cfg, c) - plain_sums(own(reference, n), cfg, c) for n, c in enumerate(coded)]
    return np.stack([x[:, 0] - x[:, 1] for x in scores], 1)


def plain_values(params, cfg, coded):
    """Return the values [M, G] after the last tokens of completions: the value head as an output layer of one token."""
    with_output = params | {"lm_head": params["value"][:, None]}
    values = jax.jit(functools.partial(jax.lax.map, lambda ids: decoder.forward(with_output, cfg, ids)[:, 0]))(padded(coded)[0])
    ends = [len(c.prompt) + len(row) - 1 for c in coded for row in c.rows]
    return np.asarray(values)[range(len(ends)), ends].reshape(len(coded), -1) + params["value_bias"]


# --- one agent and teams -----------------------------------------------------------------------------------------------


def batch_of(team, params, reference, pairs, algorithm):
    """Return the batch of pairs of a team of one stack."""
    examples = with_reference(team, [reference], encode_pairs(team, pairs, False), COUNT, algorithm)
    batches = pair_batches(team, examples, COUNT, algorithm)
    return (with_team_margin(team, params, batches, algorithm) if algorithm.row.margin == "joint" else batches)[0]


def updated(team, params, batch, algorithm):
    """Return the gradients and metrics of one update, and the new parameters."""
    one_rate = algorithm.with_optimizer(learning_rate=1.0)  # nothing of a state depends on it
    state = init_stack(jax.tree.map(jnp.array, jax.device_get(params)), one_rate)
    state, metrics = update_stack(state, batch, model=team.stacks[0].config, algorithm=algorithm)
    return jax.device_get((state.grads, metrics, state.params))


def learned(team_and_params, reference, algorithm, pairs=PAIRS):
    """Return what an update on pairs gives."""
    team, params = team_and_params
    return updated(team, params[0], batch_of(team, params, reference, pairs, algorithm), algorithm)


def assert_close(got, expected, rtol=2e-3, atol=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dpo", "madpo"])
def test_gradients_equal_those_of_the_loss_of_single_forward_passes(team, old, name):
    """dpo: -log sigma(beta own margin) of each agent; madpo: -log sigma(beta (own + others')), the others' constant: all agents
    have one loss. Compared with forward passes of single completions: padding of rows and of the batch, the shared prompt and
    the batch change nothing. End tokens count."""
    spec, params = team[0].stacks[0], team[1][0]
    encoded = encode_pairs(team[0], PAIRS, False)
    assert encoded[0][0].rows[0][-1] == spec.stop[0]
    margins = plain_margins(team[0], params, old, encoded)
    margins = np.repeat(margins.sum(1, keepdims=True), 2, 1) if name == "madpo" else margins
    grads, metrics, _ = learned(team, old, algorithm_of(name))
    np.testing.assert_allclose(metrics["loss"], np.log1p(np.exp(-BETA * margins)).mean(0), rtol=1e-4)
    np.testing.assert_allclose(metrics["margin"], margins.mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], (margins > 0).mean(0), atol=1e-6)
    assert (abs(metrics["loss"][0] - metrics["loss"][1]) < 1e-5 * metrics["loss"][0]) == (name == "madpo")
    slopes = -BETA / (1 + np.exp(BETA * margins)) / len(PAIRS)  # of the loss by the margins
    for n in (0, 1):
        ids, mask = padded([c[n] for c in encoded])
        weights = mask * np.stack([slopes[:, n], -slopes[:, n]], 1).reshape(-1, 1)
        assert_close(own(grads, n), plain_pass(own(params, n), spec.config, ids, weights)[1])


@pytest.mark.long
def test_at_the_start_the_loss_is_log_2_and_reference_free_is_not(team):
    """The policy is its own reference: every margin is 0, but the gradient is not."""
    _, metrics, _ = learned(team, team[1][0], algorithm_of("madpo"))
    np.testing.assert_allclose(metrics["loss"], math.log(2), rtol=1e-6)
    assert (metrics["grad_norm"] > 1e-2).all()
    _, free, _ = learned(team, team[1][0], algorithm_of("madpo", reference_free=True))
    assert (np.abs(free["loss"] - math.log(2)) > 1e-2).all()


@pytest.mark.long
def test_ipo_compares_means_of_tokens(team, old):
    ipo, (spec,) = algorithm_of("dpo", preference_loss="ipo", beta=0.2), team[0].stacks
    coded = [c[0] for c in encode_pairs(team[0], PAIRS, False)]
    sums = [plain_sums(own(params, 0), spec.config, coded) for params in (team[1][0], old)]
    means = (sums[0] - sums[1]) / [[len(row) for row in c.rows] for c in coded]
    batch = batch_of(team[0], team[1], old, PAIRS, ipo)
    of_first = own((token_numbers(team[1][0], spec, batch, ipo), batch), 0)
    loss = jax.jit(lambda numbers, batch: loss_of_numbers(numbers, prepare(batch, ipo)[0], ipo)[0])
    np.testing.assert_allclose(loss(*of_first), ((means[:, 0] - means[:, 1] - 1 / 0.4) ** 2).mean(), rtol=1e-4)


@pytest.mark.long
def test_log_probabilities_are_compiled_once_whatever_the_algorithm_learns_with(team):
    """Learning rates, schedules and losses are no part of their program."""
    algorithms = [algorithm_of("dpo"), algorithm_of("madpo", learning_rate=3e-4, beta=0.3), algorithm_of("dpo", num_updates=99)]
    (batch,) = pair_batches(team[0], Examples(encode_pairs(team[0], PAIRS, False)), COUNT, algorithms[0])
    numbers, traces = [], []
    for algorithm in algorithms:
        numbers.append(np.asarray(token_numbers(team[1][0], team[0].stacks[0], batch, algorithm)))
        traces.append(TRACES["scores"])
    np.testing.assert_array_equal(numbers, [numbers[0]] * 3)
    assert traces == [traces[0]] * 3


@pytest.mark.long
def test_micro_batches_padding_and_vmap_change_nothing(team, old):
    """Three pairs with five rows of padding and vmap, and without, in two micro-batches and one agent after the other."""
    algorithm = algorithm_of("madpo")
    batch = batch_of(*team, old, PAIRS, algorithm)
    whole, metrics, _ = updated(team[0], team[1][0], batch, algorithm)
    three = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:, :3]), batch)
    grads, others, _ = updated(team[0], team[1][0], three, algorithm_of("madpo", micro_batches=2, per_agent="map"))
    assert_close(grads, whole)
    for name in ("loss", "accuracy", "margin"):
        np.testing.assert_allclose(others[name], metrics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_gradient_of_shared_weights_is_the_mean_over_their_roles(agents, old):
    """One parameter set in two roles, compared with two parameter sets of equal weights."""
    shared, apart = (make_team([agents[0]] * 2, shared_weights=share) for share in (True, False))
    reference = own(old, slice(1))
    both = jax.tree.map(lambda x: np.concatenate([x, x]), reference)
    grads, *_ = learned(shared, reference, algorithm_of("madpo"))
    separate, *_ = learned(apart, both, algorithm_of("madpo"))
    assert_close(own(grads, 0), jax.tree.map(lambda x: x.mean(0), separate))


@pytest.mark.long
def test_learning_rates_are_per_agent(team, old):
    start, algorithm = jax.device_get(team[1][0]), algorithm_of("madpo")
    batch = batch_of(*team, old, PAIRS, algorithm)
    both = algorithm_of("madpo", learning_rate=(1e-2, 1e-3))
    once, slower = (updated(team[0], start, batch, of)[2]["embed"] - start["embed"] for of in (algorithm, both))
    np.testing.assert_allclose(slower[0], once[0], atol=1e-6)
    np.testing.assert_allclose(np.abs(slower[1]).max() / np.abs(once[1]).max(), 0.1, rtol=1e-2)


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


@pytest.mark.long
def test_agents_of_several_stacks_have_their_own_reference_and_learn_joint_preferences(
    agents, tiny_config, tiny_tokenizer, random_agent
):
    """Three agents, the second of another architecture: references equal those of teams of one architecture, others' margins
    are summed, and held-out preferences are learned."""
    other, algorithm = random_agent(tiny_config("qwen3", hidden_size=48), tiny_tokenizer, 1), algorithm_of("madpo")
    team, params = make_team([agents[0], other, agents[1]])
    coded = encode_pairs(team, of_agent(PAIRS, 0, 0, 1), False)
    reference = with_reference(team, params, coded, COUNT, algorithm).reference
    for of, numbers in ((agents, [0, 2]), ([other], [1])):
        alone = with_reference(*make_team(of), [[c[n] for n in numbers] for c in coded], COUNT, algorithm).reference
        np.testing.assert_allclose(reference[:, numbers], alone, rtol=1e-4)
    batches = pair_batches(team, Examples(coded, 0.5 * reference), COUNT, algorithm)
    batches = with_team_margin(team, params, batches, algorithm)
    margins = 0.5 * (reference[..., 0] - reference[..., 1])
    others = margins.sum(1, keepdims=True) - margins
    for spec, batch in zip(team.stacks, batches, strict=True):
        got = np.asarray(batch.team_margin).reshape(len(spec.order), -1)[:, : len(PAIRS)]
        np.testing.assert_allclose(got, others[:, spec.order].T, rtol=1e-3, atol=1e-3)
    assert fitted([agents[0], other, agents[1]], "madpo", of_agent(TASTES, 0, 0, 1)).after["accuracy"] > 0.95


@pytest.mark.long
def test_long_prompts_and_long_completions_fit_in_one_batch(one):
    """One pair fills the context of 128 with its prompt, another with a completion, both to the last token."""
    team, cfg = one[0], one[0].stacks[0].config
    tokens = [([5] * 112, [6] * 16, [7]), ([5], [6] * 127, [7])]
    pairs = [Pair(("a",), ("c",), ("e",), tokens=(t,)) for t in tokens]
    coded = encode_pairs(team, pairs, False)
    params = with_value_head(one[1][0]) | {"value": jnp.ones((1, 32))}
    for name, expected in (("dpo", plain_sums), ("reward_model", plain_values)):
        algorithm = algorithm_of(name)
        weights = params if name == "reward_model" else one[1][0]
        together = pair_scores(team, [weights], pair_batches(team, Examples(coded), 2, algorithm), algorithm)
        np.testing.assert_allclose(together[:, 0], expected(own(weights, 0), cfg, [c for (c,) in coded]), rtol=1e-4, atol=1e-4)
    for rows in (([6] * 16, [7]), ([7], [6] * 16)):
        longer = encode_pairs(team, [pairs[0]._replace(tokens=(([5] * 113, *rows),))], False)
        assert [long_rows(team, x) for x in (coded, longer)] == [[], [(129, 0, 0, 128)]]


def test_data_of_another_number_of_agents_or_turns_is_an_error(team, one):
    for n in (1, 3):
        with pytest.raises(ValueError, match=f"pair 0 is of {n} agents, the team has 2"):
            encode_pairs(team[0], [Pair(("a",) * n, ("b",) * n, ("c",) * n)], False)
    with pytest.raises(ValueError, match="trajectory 0 has 1 observations and 2 actions: give one observation before each"):
        encode_trajectories(one[0], [Trajectory(("the",), ("a", "b"))], False)
    with pytest.raises(ValueError, match="trajectories are of one agent, the team has 2"):
        encode_trajectories(team[0], [TALK], False)


# --- reward model ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_reward_model_reads_its_score_after_the_last_token_and_ranks_held_out_pairs(agents, one):
    """The loss is -log sigma(s_w - s_l), where s is the value of the hidden state after a completion's last token. The head
    starts at 0 and has a gradient."""
    algorithm, team = algorithm_of("reward_model"), one[0]
    start = with_value_head(one[1][0])
    with_head = start | {"value": 0.3 * jax.random.normal(jax.random.key(0), start["value"].shape)}
    batch = batch_of(*one, None, of_agent(PAIRS, 0), algorithm)
    scores = pair_scores(team, [with_head], (batch,), algorithm)[: len(PAIRS), 0]
    coded = [c for (c,) in encode_pairs(team, of_agent(PAIRS, 0), False)]
    expected = plain_values(own(with_head, 0), team.stacks[0].config, coded)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    _, metrics, _ = updated(team, with_head, batch, algorithm)
    np.testing.assert_allclose(metrics["loss"][0], np.log1p(np.exp(scores[:, 1] - scores[:, 0])).mean(), rtol=1e-4)
    grads, fresh, _ = updated(team, start, batch, algorithm)
    np.testing.assert_allclose(fresh["loss"], math.log(2), rtol=1e-6)
    assert np.abs(grads["value"]).max() > 1e-3
    result = fitted(agents[:1], "reward_model", of_agent(TASTES, 0), num_updates=20)
    assert result.before["accuracy"] == 0.5 and result.after["accuracy"] > 0.9, result.after


# --- texts -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore:.*begins messages with the plain text")
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
@pytest.mark.parametrize(
    ("cloning", "predicting"), [(0.7, 0.3), *(pytest.param(*x, marks=pytest.mark.nightly) for x in ((1.0, 0.0), (0.0, 1.0)))]
)
def test_the_loss_of_texts_is_the_weighted_mean_of_each_kind_of_token(one, cloning, predicting):
    """Behavior cloning and a world model, compared with forward passes of single rows. End tokens count."""
    team, (params,), cfg = *one, one[0].stacks[0].config
    coded = encode_trajectories(team, [TALK, Trajectory(("the",), ("market",))], False)
    algorithm = algorithm_of("sft", **SFT | dict(bc_weight=cloning, world_model_weight=predicting))
    (batch,) = text_batches(team, Examples(coded), COUNT)
    grads, metrics, _ = updated(team, params, batch, algorithm)
    ids, mask = padded([c for (c,) in coded])
    kinds = mask.astype(int)
    kinds[mask > 0] = np.concatenate([c.kinds for (c,) in coded])
    weights = sum(w * (kinds == kind) / (kinds == kind).sum() for w, kind in ((cloning, 1), (predicting, 2)))
    logp, expected = plain_pass(own(params, 0), cfg, ids, -weights)
    np.testing.assert_allclose(metrics["loss"][0], -(weights * logp).sum(), rtol=1e-4)
    assert_close(own(grads, 0), expected)


# --- training ----------------------------------------------------------------------------------------------------------


def fitted(agents, algorithm, data, **changes):
    team, params = make_team(agents)
    cfg = RUN.replace(algorithm=algorithm, **changes)
    held = data[::4]
    return fit(team, [d for i, d in enumerate(data) if i % 4], cfg, params=params, eval_data=held)


def assert_learned(result):
    """Held-out preferences are learned, from log 2 and ties: the policy is the reference."""
    assert result.before["accuracy"] == 0.5 and result.before["margin"] == 0
    np.testing.assert_allclose(result.before["loss"], math.log(2), rtol=1e-5)
    assert result.after["accuracy"] > 0.95 and result.after["loss"] < 0.3, result.after
    assert len(result.losses) == 12 and result.losses[-1] < result.losses[0]


@pytest.mark.long
def test_held_out_preferences_are_learned(agents):
    assert_learned(fitted(agents, "dpo", TASTES))


def test_texts_are_learned(agents):
    words = WORDS[:7] * 4  # each is among those held out, which is every fourth, and among the others
    data = [Trajectory((f"{word} and", "seven apples and three pears"), (f"seven {word}",)) for word in words]
    result = fitted(agents[:1], "sft", data, **SFT, num_updates=24)
    assert result.after["nll"] < 0.5 * result.before["nll"] and result.after["nll_world"] < 0.5 * result.before["nll_world"]
    both = 0.7 * result.after["nll"] + 0.3 * result.after["nll_world"]
    np.testing.assert_allclose(result.after["loss"], both, rtol=1e-5)


@pytest.mark.long
def test_joint_preferences_are_learned_and_a_resumed_run_is_bit_equal(agents, tmp_path):
    """Twelve updates, and six updates resumed for six more, have equal parameters and rows of the log."""

    def run(where, **changes):
        return fitted(agents, "madpo", TASTES, output_dir=str(tmp_path / where), save_every=6, **changes)

    assert_learned(whole := run("whole"))
    run("parts", num_updates=6)
    rest = run("parts", resume=True)
    assert rest.before is None
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)

    def rows(where):
        lines = (tmp_path / where / "metrics.jsonl").read_text().splitlines()
        all_rows = [{k: v for k, v in json.loads(line).items() if "time" not in k and "per_s" not in k} for line in lines]
        return [{k: v for k, v in row.items() if k != "compiles"} for row in all_rows if "loss" in row]

    assert rows("parts") == rows("whole") and len(rows("whole")) == 12
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


def test_held_out_pairs_in_batches_have_the_joint_margins_of_single_forward_passes(team):
    """Nine pairs in batches of eight."""
    other, cfg = jax.tree.map(lambda x: 0.9 * np.asarray(x), team[1]), RUN.replace(algorithm="madpo")
    held_out = encode(*team, TASTES[:9], resolve(cfg), cfg)
    result = evaluate_on_data(team[0], other, held_out, resolve(cfg))
    margins = plain_margins(team[0], other[0], team[1][0], held_out.tokens).sum(1)
    assert (margins > 0).sum() == 8 and result["accuracy"] == pytest.approx(8 / 9)
    assert result["margin"] == pytest.approx(margins.mean(), rel=1e-4)
    assert result["loss"] == pytest.approx(np.log1p(np.exp(-BETA * margins)).mean(), rel=1e-4)


def test_held_out_texts_in_batches_have_the_mean_over_their_tokens(one):
    """Nine texts in batches of eight."""
    texts = [Trajectory(("the",), (word * n,)) for n, word in enumerate(WORDS, 1)] + [Trajectory(("the",), ("market" * 7,))]
    cfg, model = RUN.replace(algorithm="sft", **SFT), one[0].stacks[0].config
    held_out = encode(*one, texts, resolve(cfg), cfg)
    coded = [c for (c,) in held_out.tokens]
    result, count = evaluate_on_data(*one, held_out, resolve(cfg)), sum(len(c.rows[0]) for c in coded)
    assert result["nll"] == pytest.approx(-plain_sums(own(one[1][0], 0), model, coded).sum() / count, rel=1e-4)


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
            dict(algorithm="dpo", num_prompts=2),
            TASTES,
            "num_prompts=2 has no effect for algorithm='dpo'.* batch_size",
        ),
        (dict(algorithm="dpo", bc_weight=0.5), TASTES, "bc_weight=0.5 has no effect for algorithm='dpo'; it is for sft"),
        (dict(algorithm="sft", beta=0.5), [TALK], "beta=0.5 has no effect for algorithm='sft'"),
        (dict(algorithm="dpo", kl_coef=0.1), TASTES, "kl_coef=0.1 has no effect for algorithm='dpo'"),
        (dict(algorithm="dpo", num_epochs=2), TASTES, "num_epochs=2 has no effect for algorithm='dpo'"),
        (dict(algorithm="dpo", num_turns=3), TASTES, "num_turns=3 has no effect for algorithm='dpo', which trains on given"),
        (dict(algorithm="dpo", num_generations=4), TASTES, "num_generations=4 has no effect .* given data; leave it at 8$"),
        (dict(algorithm="sft", top_p=0.9), [TALK], "top_p=0.9 has no effect for algorithm='sft', which trains on given"),
        (dict(algorithm="sft", eval_temperature=0.0), [TALK], "eval_temperature=0.0 has no effect"),
        (dict(algorithm="sft", log_tokens=2, output_dir="runs/none"), [TALK], "log_tokens=2 has no effect"),
        (dict(algorithm="dpo", pairs_per_prompt=3), TASTES, "pairs_per_prompt=3 has no effect for algorithm='dpo'"),
        (dict(algorithm="dpo", micro_batches=16), TASTES, "micro_batches=16 is more than batch_size=8"),
    ],
)
def test_bad_settings_are_refused(agents, settings, data, message):
    team, params = make_team(agents)
    with pytest.raises((ValueError, TypeError), match=message):
        fit(team, data, RUN.replace(**settings), params=params)


def test_an_empty_prompt_of_a_pair_is_an_error_that_names_it(agents):
    with pytest.raises(ValueError, match="the prompt of pair 1 of agent 1 is empty"):
        encode_pairs(make_team(agents)[0], [PAIRS[0], PAIRS[0]._replace(prompts=("the", ""))], False)


def test_more_micro_batches_than_pairs_are_an_error(agents):
    team, params = make_team(agents)
    algorithm = algorithm_of("madpo", micro_batches=8)
    (batch,) = pair_batches(team, Examples(encode_pairs(team, TASTES[:4], False)), 4, algorithm)
    with pytest.raises(ValueError, match="micro_batches=8 is more than the 4 pairs or texts of an update: .* batch_size"):
        updated(team, params[0], batch, algorithm)


def test_held_out_data_must_be_of_the_same_kind(agents):
    team, params = make_team(agents)
    with pytest.raises(TypeError, match="learns from a list of Pair, got Trajectory"):
        fit(team, TASTES, RUN.replace(algorithm="madpo"), params=params, eval_data=[TALK])


@pytest.mark.long
def test_adapters_learn_preferences_over_one_base(agents, tmp_path):
    """Two agents of one model learn held-out preferences, the base does not change, and a resumed run is bit-equal."""
    lora = dict(lora_rank=4, lora_dropout=0.1, learning_rate=3e-2, lora_targets="q_proj,down_proj")

    def run(where, **changes):
        team, params = make_team([agents[0]] * 2, lora=True)
        settings = dict(algorithm="madpo", output_dir=str(tmp_path / where), save_every=10)
        return fit(team, TASTES[1::2], RUN.replace(**settings, **lora, **changes), params=params, eval_data=TASTES[::4])

    whole = run("whole", num_updates=20)
    assert whole.before["margin"] == 0 and whole.after["accuracy"] > 0.9, whole.after
    (stack,) = whole.state.stacks
    for path, x in jax.tree_util.tree_flatten_with_path(agents[0].params)[0]:
        base = functools.reduce(lambda tree, k: tree[k.key], path, stack.base)
        np.testing.assert_array_equal(base.value, x)
    run("parts", num_updates=10)
    rest = run("parts", num_updates=20, resume=True)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    assert (tmp_path / "whole" / "models" / "agent_1" / "adapter" / "adapter_config.json").exists()


@pytest.mark.long
def test_frozen_agents_do_not_change_and_count_in_the_margin_of_their_partner(agents):
    base = fitted(agents, "madpo", TASTES, num_updates=2)
    frozen = fitted(agents, "madpo", TASTES, num_updates=2, frozen_agents=(1,))
    first, second = (np.asarray(result.state.stacks[0].params["embed"]) for result in (base, frozen))
    np.testing.assert_array_equal(second[1], agents[1].params["embed"])
    assert (second[0] != first[0]).any(), "the second step's margin has a partner that did not move"
