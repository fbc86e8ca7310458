"""Critics: values, targets, what they learn from, and the rows that need them; baselines that come from elsewhere."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.files.checkpoint import Checkpointer
from jmarl.learning import critics
from jmarl.learning.optimizer import steps_done
from jmarl.learning.team_update import update_team
from jmarl.models import decoder
from jmarl.models.heads import values_of
from jmarl.models.layers import attention
from jmarl.models.layers.products import rms_norm
from jmarl.models.stack import unstack
from jmarl.objectives.policy import POLICY, penalizes_tokens
from jmarl.objectives.values import ACTOR_CRITIC, OWN_CRITIC, explained_variance
from jmarl.randomness import Randomness
from jmarl.rl.returns import credit, discounted, joint_actions
from jmarl.rollout import critic_values
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import play
from jmarl.runs.kinds.rollouts import play_step, rollout_batches, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.sampling import scoring
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team, without_gradients
from jmarl.types import Batches
from tests.batches import assert_equal, loss_inputs, loss_of_inputs
from tests.house import HOUSE, ITEMS
from tests.matrix import product

BASE = TrainConfig.of(**HOUSE, algorithm="iac", adam_eps=1e-4)


def answer(agent_completions, **_):
    return [f"and {text}" for text in agent_completions[::-1]]


def lengths(*completions):
    """Each joint action: characters of the first agent's text, less half of what the others wrote."""
    return [float(len(first) - 0.5 * sum(map(len, others))) for first, *others in zip(*completions, strict=True)]


@pytest.fixture
def other(tiny_config, tiny_tokenizer, random_agent):
    """A critic of another architecture and size than the agents."""
    return random_agent(tiny_config("qwen3", hidden_size=48), tiny_tokenizer, 7)


@pytest.fixture
def foreign(tiny_config, make_tokenizer, random_agent):
    """One that has another tokenizer, too."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    return random_agent(tiny_config("qwen3", vocab_size=321, hidden_size=48), tokenizer, 7)


def environment(n, turns=1, reward=lengths):
    formatters = [lambda item: item["prompt"], lambda item: item["prompt"] + " or"][:n]
    return RewardEnvironment(make_reward(reward, num_agents=n), formatters, answer if turns > 1 else None)


def play_one(agents, cfg, critic=None, change=lambda state: state, shared_weights=False, reward=lengths):
    """What is there before an update: setup, state, rollout and batches."""
    team, params = make_team(agents, shared_weights)
    setup, state = start(dataclasses.replace(team, critic=critic), params, cfg)
    state, env = change(state), environment(len(agents), cfg.episodes.num_turns, reward)
    rollout = play_step(sampler_of(setup, state), setup, ITEMS, env, 0)
    return setup, state, rollout, jax.device_get(rollout_batches(setup, state, rollout))


def one_step(*arguments, **settings):
    """A step of training in its parts: what was rollout, the batches, and the state before and after."""
    setup, state, rollout, batches = play_one(*arguments, **settings)
    before = jax.device_get(without_gradients(state))
    after, metrics = update_team(setup, state, rollout_batches(setup, state, rollout))
    return rollout, batches, before, jax.device_get(after), jax.device_get(metrics)


def targets_of(running, batch, model, cfg, critic=False):
    """The targets of the loss of one agent's batch, or of one critic's. Statistics are only read by policies."""
    return jax.device_get(loss_inputs(batch, running, model, resolve(cfg), critic=critic)[0].targets)


def with_heads(value=0.0, bias=0.0):
    """A change of a state: what is added to the head and to the bias of every critic, or of agents with value heads."""

    def changed(stack):
        if "value" not in stack.params:
            return stack
        more = {"value": stack.params["value"] + value, "value_bias": stack.params["value_bias"] + bias}
        return stack._replace(params=stack.params | more)

    return lambda state: state._replace(stacks=tuple(map(changed, state.stacks)), critics=tuple(map(changed, state.critics)))


def moved(before, after):
    """The largest change in each array."""
    return jax.tree.map(lambda x, y: float(np.abs(x - y).max()), before, after)


# --- what an advantage is ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("critic_type, kind", product(["v", "q"], [("iac", True), ("iac", False), ("maac", None)]))
def test_the_advantage_is_the_return_minus_the_value(agents, other, foreign, critic_type, kind):
    """A critic that gives 0.5 to everything: A = R - 0.5, of every kind of critic; its targets are the returns. Type v is of
    other models, which learn: own critics have another architecture and size, a central one another tokenizer too."""
    row, separate = kind
    critic = None if critic_type == "q" else {True: other, False: None, None: foreign}[separate]
    cfg = BASE.replace(algorithm=row, critic_type=critic_type, separate_critic=separate)
    rollout, (batches, critic_batches), before, after, metrics = one_step(agents, cfg, critic, with_heads(bias=0.5))
    if critic:
        assert before.critics[0].params["value"].shape == ({"iac": 2, "maac": 1}[row], 48)
        assert moved(before.critics[0].params, after.critics[0].params)["value"] > 0
    running = unstack(before.stacks[0].running, 0)
    for a in range(2):
        targets = targets_of(running, unstack(batches[0], a), agents[a].config, cfg)
        policy = targets.policy if separate is False else targets
        expected = np.broadcast_to(rollout.returns[0][a][..., None] - 0.5, policy.mask.shape)
        np.testing.assert_allclose(policy.advantages, expected, rtol=1e-5, atol=1e-5)
        if separate is False:
            values = targets.values
            assert values.mask.sum() == 6 and values.old_values[values.mask].tolist() == [0.5] * 6
            np.testing.assert_allclose(values.targets[..., 0], rollout.returns[0][a], rtol=1e-6)
    if separate is not False:
        values = targets_of(running, unstack(critic_batches[0], 0), agents[0].config, cfg, critic=True)
        target = rollout.joint_returns[0].mean(-1) if row == "maac" else rollout.returns[0][0]
        mask = values.mask
        assert mask.sum() == 6 and (mask.sum(-1) == 1).all()
        np.testing.assert_allclose(values.targets[mask], target.reshape(-1), rtol=1e-5)
        assert values.old_values[mask].tolist() == [0.5] * 6
        name, stack = ("loss", metrics[-1]) if row == "maac" else ("critic_loss", metrics[0])
        assert stack[name][0] == pytest.approx(np.mean((target - 0.5) ** 2), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("row", ["iac", "maac"])
def test_a_critic_of_type_q_reads_up_to_the_last_token(agents, row):
    """With a random head: its values, and where it is trained, are those behind the last token of prompt and completion, each
    as one plain sequence without shared prefix. (What is behind the token that is read changes nothing.)"""
    cfg = BASE.replace(algorithm=row, critic_type="q")
    head = np.random.default_rng(0).normal(size=agents[0].config.hidden_size)
    _, state, _, (_, critic_batches) = play_one(agents, cfg, change=with_heads(head))
    params, batch, model = unstack(state.critics[0].params, 0), unstack(critic_batches[0], 0), agents[0].config
    mask, ends = targets_of(None, batch, model, cfg, critic=True).mask, batch.action_mask.sum(-1)
    np.testing.assert_array_equal(mask, np.arange(mask.shape[-1]) == ends[..., None])
    sequences = np.zeros((6, batch.prompts.shape[-1] + batch.tokens.shape[-1]), int)
    for i, (p, g) in enumerate(np.ndindex(2, 3)):
        sequence = [*batch.prompts[p, : batch.prompt_lengths[p]], *batch.tokens[p, g, : ends[p, g]]]
        sequences[i, : len(sequence)] = sequence

    def last_value(params, sequence, last):
        positions, plain = jnp.arange(len(sequence)), attention.causal_attention(len(sequence))
        x, *_ = decoder.run_layers(params, model, params["embed"][sequence], positions, plain)
        return values_of(params, rms_norm(x[last], params["final_norm"], model.rms_eps))

    lasts = (batch.prompt_lengths[:, None] + ends - 1).reshape(-1)
    expected = jax.jit(jax.vmap(last_value, (None, 0, 0)))(params, sequences, lasts)
    np.testing.assert_allclose(batch.values[..., 0].reshape(-1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_lambda_returns_of_a_tree_are_gae(lam):
    """T - V = delta + gamma lam (mean A of the child), by recursion; joint actions without a child end there."""
    rng, gamma = np.random.default_rng(0), 0.9
    parents = [np.arange(2), np.array([0, 3, 4]), np.array([1, 7])]
    rewards = [rng.normal(size=(p, 3, 2)) for p in (2, 3, 2)]
    values = [rng.normal(size=(p, 2)) for p in (2, 3, 2)]
    targets = discounted(rewards, parents, gamma, values, lam)

    def advantage(t, node, j):
        child = [c for c, at in enumerate(parents[t + 1]) if at == node * 3 + j] if t + 1 < 3 else []
        if not child:
            return rewards[t][node, j] - values[t][node]
        below = np.mean([advantage(t + 1, child[0], k) for k in range(3)], 0)
        return rewards[t][node, j] + gamma * values[t + 1][child[0]] - values[t][node] + gamma * lam * below

    for t in range(3):
        for node, j in np.ndindex(*rewards[t].shape[:2]):
            np.testing.assert_allclose(targets[t][node, j] - values[t][node], advantage(t, node, j))


# --- what is trained -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "row, changes, steps",
    [
        ("maac", {"num_epochs": 2}, [1]),
        ("ippo", {"num_epochs": 2}, [2, 2]),
        pytest.param("mappo", {"num_epochs": 2}, [1], marks=pytest.mark.nightly),
        pytest.param("iac", {}, [1, 1], marks=pytest.mark.nightly),
    ],
)
def test_steps_critic_batches(agents, row, changes, steps):
    """A central critic takes one step a batch (CoMLRL's takes one an agent); critics of the agents' own as many as they do. All
    agents and critics change, in every array but the unused output weight."""
    cfg = BASE.replace(algorithm=row, **changes)
    _, _, before, after, _ = one_step(agents, cfg, change=with_heads(value=0.1))
    assert [steps_done(critic).tolist() for critic in after.critics] == [steps]
    assert steps_done(after.stacks[0]).tolist() == [cfg.optimizer.num_epochs] * 2
    for was, now in ((before.stacks[0], after.stacks[0]), (before.critics[0], after.critics[0])):
        changed = moved(was.params, now.params)
        assert all(change > 0 for change in jax.tree.leaves(changed))


def test_ippo_of_one_agent_is_ppo(agents):
    """The rows differ in the teams they are for alone, which no update reads; and PPO refuses a team."""
    ppo, ippo = (resolve(BASE.replace(algorithm=row)) for row in ("ppo", "ippo"))
    assert dataclasses.replace(ippo, row=ppo.row) == ppo
    assert {name for name, part in vars(ppo.row).items() if part != vars(ippo.row)[name]} == {"for_teams", "paper"}
    team, params = make_team(agents)
    with pytest.raises(ValueError, match="'ppo' is for a team of one, this one has 2 agents: choose ippo or mappo"):
        train(team, environment(2), ITEMS, BASE.replace(algorithm="ppo"), params=params)


@pytest.mark.long
def test_a_value_head_shares_the_gradient(agents):
    """The gradient of an agent with a value head is the policy's plus value_coef times the value loss's, each made alone."""
    cfg = BASE.replace(algorithm="ippo", separate_critic=False, value_coef=0.3, entropy_coef=0.01, micro_batches=2)
    _, state, _, (batches, _) = play_one(agents, cfg, change=with_heads(bias=0.5))
    params, mine, running = (unstack(x, 0) for x in (state.stacks[0].params, batches[0], state.stacks[0].running))
    model, algorithm = agents[0].config, resolve(cfg)
    inputs, _ = loss_inputs(mine, running, model, algorithm)

    @jax.jit
    def gradients(params, inputs):
        policy, values = inputs.targets

        def loss(params, inputs, objective=None):
            return loss_of_inputs(params, inputs, model, algorithm, objective)[0]

        def value_loss(params):
            hidden, _ = scoring.hidden_states(params, model, inputs.prompts, inputs.prompt_lengths, inputs.tokens, "full")
            error = (values.targets - values_of(params, hidden).reshape(values.mask.shape)) ** 2
            return jnp.sum(jnp.where(values.mask, error, 0)) / values.mask.sum()

        of_policy = jax.grad(loss)(params, inputs._replace(targets=policy), POLICY)
        return jax.grad(loss)(params, inputs), of_policy, jax.grad(value_loss)(params)

    got, policy, values = jax.device_get(gradients(params, inputs))
    expected = jax.tree.map(lambda a, b: a + 0.3 * b, policy, values)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-6), got, expected)


def without_values_of_pass(setup, separate):
    """Return a setup whose agents and critics learn from the values in their batches."""

    def with_objective(programs, objective):
        return tuple(dataclasses.replace(x, objective=objective) for x in programs)

    programs = with_objective(setup.programs, POLICY if separate else ACTOR_CRITIC)
    return setup._replace(programs=programs, critic_programs=with_objective(setup.critic_programs, OWN_CRITIC))


@pytest.mark.long
@pytest.mark.parametrize("separate", [True, False])
def test_values_of_the_pass_that_learns(agents, separate):
    """A step with the values that critics give as they learn is the step with values of a pass of their own before it."""
    cfg = BASE.replace(
        algorithm="ippo", separate_critic=separate, gae_lambda=0.9, kl_coef=0.1, kl_in="reward", frozen_agents=(1,)
    )  # fmt: skip
    results = []
    for before in (False, True):
        team, params = make_team(agents)
        setup, state = start(team, params, cfg)
        state = with_heads(value=0.1)(state)
        rollout = play_step(sampler_of(setup, state), setup, ITEMS, environment(2), 0)
        batches = rollout_batches(setup, state, rollout)
        batch = batches.stacks[0]
        assert batch.values.shape == (*batch.rewards.shape, 1) and not batch.values.any(), "left out"
        if before:
            setup = without_values_of_pass(setup, separate)
            read = batch.prompts, batch.prompt_lengths, batch.tokens
            stack = (state.critics if separate else state.stacks)[0]
            values = critics.value_stack(stack.params, team.stacks[0], *read, setup.algorithm)
            batches = Batches(*([batch._replace(values=values) for batch in parts] for parts in batches))
        results.append(jax.device_get(update_team(setup, state, batches)))
    (after, metrics), (expected, expected_metrics) = results
    assert set(metrics[0]) == set(expected_metrics[0])
    for name, metric in expected_metrics[0].items():
        np.testing.assert_allclose(metrics[0][name], metric, rtol=1e-4, atol=1e-5, err_msg=name)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "row, changes, name",
    [
        pytest.param("iac", {}, "agent_0/critic_loss", marks=pytest.mark.nightly),
        ("maac", {}, "critic/loss"),
        ("ippo", {"num_epochs": 2}, "agent_0/critic_loss"),
    ],
)
def test_a_critic_learns_a_constant_reward(agents, tmp_path, row, changes, name):
    """Probe 1: the same reward for everything. The critic's error falls from 1, and what it gives comes near the reward."""
    cfg = BASE.replace(algorithm=row, num_updates=30, learning_rate=3e-3, **changes)
    team, params = make_team(agents)
    reward = make_reward(lambda a, b: [1.0] * len(a), num_agents=2)
    train(team, reward, ITEMS, cfg.replace(output_dir=str(tmp_path), save_every=0, save_models=False), params=params)
    errors = [json.loads(line)[name] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert errors[0] > 0.5 and errors[-1] < 0.3**2


@pytest.mark.long
def test_critics_that_do_not_fit_are_refused(agents, other, foreign):
    with pytest.raises(ValueError, match="another vocabulary than agents .* a central one .maac, mappo. may be any model"):
        play_one(agents, BASE, critic=foreign)
    with pytest.raises(ValueError, match="algorithm='magrpo' has no critic besides its agents"):
        play_one(agents, BASE.replace(algorithm="magrpo"), critic=other)


@pytest.mark.long
def test_a_central_critic_reads_the_prompts_of_all(agents):
    """In order, one a line; as type q the completions behind them."""
    cfg = BASE.replace(algorithm="maac", critic_type="q")
    *_, rollout, (_, (batch,)) = play_one(agents, cfg)
    turn, decode = rollout.turns[0], agents[0].tokenizer.decode
    for p, item in enumerate(ITEMS):
        read = decode(batch.prompts[0, p, : batch.prompt_lengths[0, p]])
        assert read == f"[Agent 0] {item['prompt']}\n[Agent 1] {item['prompt']} or"
        for g in range(3):
            said = decode(batch.tokens[0, p, g][batch.action_mask[0, p, g]])
            assert said == f"\n[Agent 0] {turn.texts[0][p][g]}\n[Agent 1] {turn.texts[1][p][g]}"


CHAIN = {"branching": "chain", "history": "append", "gae_lambda": 0.5}


NIGHTLY = [("iac", {}), ("iac", {"critic_type": "q"}), ("maac", {"critic_type": "q"}), ("maac", CHAIN), ("mappo", {})]


@pytest.mark.long
@pytest.mark.parametrize(
    "row, changes",
    [
        ("iac", CHAIN),
        ("mappo", {"critic_type": "q"}),
        ("ippo", CHAIN),
        *[pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY],
    ],
    ids=str,
)
def test_several_turns_and_crossed_actions(agents, row, changes):
    """Trees of two turns and chains that go on: what is expected of a constant critic, V = 0.5, and finite updates. Returns are
    lambda-returns: in the first turn r + gamma (lam R' + (1 - lam) V')."""
    joint_mode = "aligned" if "branching" in changes else "cross"
    cfg = BASE.replace(algorithm=row, num_turns=2, gamma=0.9, joint_mode=joint_mode, num_generations=2, **changes)
    if row == "iac":  # the chain's update is ippo's, the tree's is mappo's
        *_, rollout, (batches, critic_batches) = play_one(agents, cfg, change=with_heads(bias=0.5))
        assert critic_batches
    else:
        rollout, (batches, critic_batches), _, after, metrics = one_step(agents, cfg, change=with_heads(bias=0.5))
        assert np.isfinite(metrics[0]["loss"]).all() and after.stacks[0].skipped.tolist() == [0, 0]
        assert all((critic.skipped == 0).all() for critic in after.critics) and critic_batches
    if row == "ippo":
        return
    lam = 1.0 if row in ("iac", "maac") else 0.95
    lam = cfg.critic.gae_lambda if cfg.critic.gae_lambda is not None else lam
    first, second = (turn.rewards for turn in rollout.turns)
    below = np.zeros((*first.shape[:2], 2)).reshape(-1, 2)
    below[rollout.turns[1].parents] = second.mean(1)
    expected = first + 0.9 * (lam * below.reshape(first.shape) + (1 - lam) * 0.5)
    expected = credit(expected, rollout.turns[0].joint, 2)[0]  # of a completion: the mean of its joint actions
    np.testing.assert_allclose(batches[0].rewards[0].reshape(-1)[:4], expected.reshape(-1), rtol=1e-5)
    assert np.asarray(batches[0].values).ravel()[0] == 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    "row, context, message",
    [
        ("maac", 32, r"what the central critic reads at prompt 1 .* more than its context of 32"),
        ("ippo", 8, r"a critic reads up to \d+ tokens, more than its context of 8"),
    ],
)
def test_a_text_longer_than_the_critics_context_is_an_error(agents, tiny_config, row, context, message):
    with pytest.raises(ValueError, match=message):
        play_one(agents, BASE.replace(algorithm=row), critic=agents[1]._replace(config=tiny_config(max_positions=context)))


@pytest.mark.long
def test_rewards_of_each_agent_and_a_central_critic(agents):
    """Bootstrapping from the team's mean would be wrong for the single agents."""
    cfg = BASE.replace(algorithm="mappo", num_turns=2, joint_mode="cross", num_generations=2, critic_type="q")
    play = partial(play_one, agents, reward=lambda a, b: [(1.0, -1.0)] * len(a))
    *_, (batches, _) = play(cfg.replace(gae_lambda=1.0))
    assert np.isfinite(batches[0].rewards).any()
    with pytest.raises(ValueError, match="gae_lambda=0.5 with a central critic"):
        play(cfg.replace(gae_lambda=0.5))


@pytest.mark.long
def test_two_roles_of_shared_weights_have_one_critic_and_a_scale_each(agents):
    """The tokens' advantages of each role have a standard deviation of 1."""
    cfg = BASE.replace(algorithm="ippo", micro_batches=2)
    _, state, _, (batches, critic_batches) = play_one(agents[:1] * 2, cfg, shared_weights=True)
    assert critic_batches[0].rewards.shape == (1, 4, 3) and batches[0].roles[0, :, 0].tolist() == [0, 0, 1, 1]
    assert state.critics[0].skipped.shape == (1,)
    mine = unstack(batches[0], 0)
    far = mine._replace(rewards=np.where(mine.roles == 1, 100 * mine.rewards, mine.rewards))
    running = unstack(state.stacks[0].running, 0)
    first = np.arange(far.rewards.shape[1]) == 0  # of each prompt, cut off and far from the others
    rewards = np.where(first, 1e4, far.rewards).astype(np.float32)
    cut = far._replace(ended=np.broadcast_to(~first, far.rewards.shape), rewards=rewards)
    for batch, changes in ((far, {}), (cut, {"mask_overlong": True})):
        policy = targets_of(running, batch, agents[0].config, cfg.replace(**changes))
        for role in range(2):
            mask = policy.mask & (mine.roles == role)[..., None]
            assert np.std(policy.advantages[mask]) == pytest.approx(1, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("row", ["maac", pytest.param("rae", marks=pytest.mark.nightly)])
def test_a_resumed_run_has_its_critics_again(agents, tmp_path, row):
    """2 updates = 1 + 1: agents, critics and what they remember are bit-equal."""
    states = []
    for name, stops in (("whole", [2]), ("parts", [1, 2])):
        for i, stop in enumerate(stops):
            team, params = make_team(agents)
            directory = str(tmp_path / name)
            cfg = BASE.replace(algorithm=row, num_updates=stop, save_every=1, output_dir=directory, resume=i > 0)
            result = train(team, environment(2), ITEMS, cfg, params=params)
        states.append(jax.device_get(result.state))
    assert_equal(*states)
    with Checkpointer(tmp_path / "parts" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [1, 2]


# --- baselines that are remembered, or played ----------------------------------------------------------------------------


@pytest.mark.long
def test_remax_subtracts_what_the_greedy_episode_got(agents):
    """For every completion of an item what the greedy joint actions, made here by an evaluation at temperature 0, return from
    the same turn on."""
    cfg = BASE.replace(algorithm="remax", num_turns=2, num_generations=2)
    setup, state, rollout, (batches, _) = play_one(agents, cfg)
    settings = dataclasses.replace(cfg.sampling, temperature=0.0)
    sample = partial(sample_team, setup.team, [stack.params for stack in state.stacks])
    randomness = Randomness(seed=0, step=9)
    greedy = play(sample, setup.team, ITEMS, environment(2, turns=2), settings, cfg.episodes, 1, randomness)
    both, last = (returns[:, 0, 0] for returns in greedy.joint_returns)
    assert (both != last).all(), "the return of two turns and that of the last"
    values = [np.repeat(both, 2), np.repeat(last, 4)]  # of the completions of each turn: 2 nodes of 2, and 2 children of each
    for t in range(2):
        np.testing.assert_allclose(rollout.expected[t][0].reshape(-1), values[t], rtol=1e-6)
    mine, running = unstack(batches[0], 0), unstack(state.stacks[0].running, 0)
    baseline, returns = np.concatenate(values), np.concatenate([x[0].reshape(-1) for x in rollout.returns])
    np.testing.assert_allclose(mine.values[..., 0].reshape(-1)[:12], baseline, rtol=1e-6)
    policy = targets_of(running, mine, agents[0].config, cfg)
    np.testing.assert_allclose(policy.advantages[..., 0].reshape(-1)[:12], returns - baseline, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_the_moving_average_of_rae_follows_each_role(agents):
    """b <- 0.9 b + 0.1 mean R of each role, from 0 on; A = R - b. Two roles of shared weights have one each."""
    cfg = BASE.replace(algorithm="rae", ema_decay=0.9)
    rollout, (batches, _), _, after, _ = one_step(agents[:1] * 2, cfg, shared_weights=True)
    means = [rollout.returns[0][n].mean() for n in range(2)]
    np.testing.assert_allclose(after.stacks[0].running.baseline[0], [0.1 * m for m in means], rtol=1e-5)
    running = unstack(after.stacks[0].running, 0)
    policy = targets_of(running, unstack(batches[0], 0), agents[0].config, cfg)
    expected = np.concatenate([rollout.returns[0][n] - 0.1 * means[n] for n in range(2)])
    np.testing.assert_allclose(policy.advantages[..., 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_dr_mas_compares_an_agent_over_all_turns(agents):
    """Rows of one item and agent have one number in both turns; at_grpo's have one a turn."""
    cfg, counts = BASE.replace(algorithm="dr_mas", num_turns=2, branching="chain"), {}
    setup, _, rollout, _ = play_one(agents[:1] * 2, cfg, shared_weights=True)
    for row in ("dr_mas", "at_grpo"):
        grouping = resolve(cfg.replace(algorithm=row)).row.grouping
        (batch,) = jax.device_get(to_batches(setup.team, rollout, grouping))
        valid = np.isfinite(batch.rewards[0].reshape(-1))
        numbers = np.asarray(batch.groups[0]).reshape(-1)[valid]
        counts[row] = sorted(np.unique(numbers, return_counts=True)[1].tolist())
    assert counts == {"dr_mas": [6, 6, 6, 6], "at_grpo": [3] * 8}


# --- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(algorithm="magrpo", gae_lambda=0.5), "gae_lambda=0.5 has no effect for algorithm='magrpo'; it is for iac, maac"),
        (dict(algorithm="maac", separate_critic=False), "separate_critic=False has no effect for algorithm='maac'"),
        (dict(algorithm="ippo", critic_type="q"), "critic_type='q' has no effect for algorithm='ippo'; it is for iac, maac"),
        (
            dict(algorithm="iac", value_coef=0.5),
            "value_coef=0.5 weights a value head on the agent: set separate_critic to false",
        ),
        (dict(algorithm="grpo", ema_decay=0.5), "ema_decay=0.5 has no effect .* it is for rae"),
        (dict(algorithm="maac", cross_credit="sum"), "cross_credit='sum' does not fit algorithm='maac'"),
        (dict(algorithm="ippo", value_clip=0.2), "value_clip=0.2 never clips if a critic makes one step"),
        (dict(algorithm="mappo", value_clip=0.2, num_epochs=2), "a central one never does"),
        (
            dict(algorithm="iac", separate_critic=False, critic_learning_rate=1e-3),
            "critic_learning_rate is for separate critics",
        ),
        (dict(algorithm="iac", critic_type="q", num_generations=1), "its baseline needs at least 2"),
        (dict(algorithm="magrpo", importance_level="sequence"), "importance_level='sequence' needs importance_cap"),
        (dict(algorithm="ippo", advantage_scale="std"), "advantage_scale='std' has no effect on advantages of tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(agents, changes, message):
    team, params = make_team(agents)
    with pytest.raises(ValueError, match=message):
        train(team, environment(2), ITEMS, BASE.replace(**changes), params=params)


@pytest.mark.long
def test_value_heads_learn_and_are_not_saved(agents, tmp_path):
    """The models of a run with value heads are plain ones."""
    from jmarl.models.hub.agents import load_agent

    cfg = BASE.replace(algorithm="ippo", separate_critic=False, output_dir=str(tmp_path))
    team, params = make_team(agents)
    result = train(team, environment(2), ITEMS, cfg, params=params)
    assert np.abs(result.state.stacks[0].params["value"]).max(1).min() > 0
    loaded = load_agent(tmp_path / "models" / "agent_0")
    assert jax.tree.structure(loaded.params) == jax.tree.structure(agents[0].params)


def test_a_central_critic_learns_the_mean_of_the_agents_returns():
    """And its values of joint actions are the mean of a node's, where they differ."""
    ones = np.ones((1, 2, 4), np.int32), np.full((1, 2), 4)
    text = critic_values.JointText(*ones, np.zeros((1, 2, 3, 1), np.int32), np.zeros((1, 2, 3), np.int32), 2)
    target = np.arange(12.0).reshape(2, 3, 2) ** 2
    np.testing.assert_allclose(
        critic_values.central_batch([text], [target], [np.zeros((2, 3))], [2]).rewards[0], target.mean(-1)
    )
    turn = SimpleNamespace(joint=joint_actions("aligned", 2, 3), group_size=3)
    values, nodes = critic_values.values_of_agents(SimpleNamespace(turns=[turn]), [np.array([[1.0, 2.0, 6.0]])])
    assert nodes[0].tolist() == [[3], [3]] and values[0].tolist() == [[[1, 2, 6]]] * 2


def test_a_penalty_is_a_reward_only_where_it_is_to_be():
    for place, in_reward in (("loss", False), ("reward", True)):
        algorithm = resolve(TrainConfig.of(algorithm="ippo", kl_coef=0.1, kl_in=place))
        assert penalizes_tokens(algorithm) is in_reward


@pytest.mark.long
def test_a_central_critic_of_three_prompts_and_micro_batches(agents):
    """Its batch has as many rows as there are tasks, whatever the agents' parts are: here 6 parts of 2 roles by 3 prompts. No
    number of prompts or of nodes that go on has to be a power of two; no episode goes on to its second turn."""
    turns = dict(num_turns=2, early_termination_threshold=-9.0)
    cfg = BASE.replace(algorithm="maac", num_updates=1, num_prompts=3, micro_batches=6, **turns)
    team, params = make_team(agents[:1] * 2, True)
    result = train(team, environment(2, cfg.episodes.num_turns), [*ITEMS, {"prompt": "of fruit"}], cfg, params=params)
    assert np.isfinite(result.rewards).all()
    assert result.state.critics[0].skipped.tolist() == [0] and steps_done(result.state.critics[0]).tolist() == [1]


def test_explained_variance_does_not_count_a_constant_error():
    """As in Stable-Baselines3 and verl: 1 - var(y - v) / var(y). Masked values do not count."""
    targets, mask = np.float32([[[1, 2, 6, 99]]]), np.array([[[True, True, True, False]]])
    shares = {"exact": targets, "shifted": targets + 5, "constant": 0 * targets + 3, "half": targets / 2, "opposite": -targets}
    variance = jax.jit(jax.vmap(explained_variance, (0, None, None)))
    found = dict(zip(shares, variance(np.stack([*shares.values()]), targets, mask).tolist(), strict=True))
    assert found == pytest.approx({"exact": 1, "shifted": 1, "constant": 0, "half": 0.75, "opposite": -3}, abs=1e-6)
    assert variance(targets[None], np.ones_like(targets), mask) == 0, "targets that are all equal"
