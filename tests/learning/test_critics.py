"""Critics: values, targets, what they learn from, and the rows that need them; baselines that come from elsewhere."""

from __future__ import annotations

import dataclasses
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
from jmarl.objectives.policy import POLICY, initial_running, penalizes_tokens
from jmarl.objectives.values import ACTOR_CRITIC, OWN_CRITIC, explained_variance
from jmarl.randomness import Randomness
from jmarl.rl.returns import discounted, joint_actions
from jmarl.rollout import critic_values
from jmarl.rollout.play import play
from jmarl.runs.prepare import start
from jmarl.runs.rollouts import play_step, rollout_batches, sampler_of
from jmarl.runs.train import train
from jmarl.sampling import scoring
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team, without_gradients
from jmarl.types import Batches
from tests.batches import loss_inputs, loss_of_inputs

BASE = TrainConfig.of(
    algorithm="iac", num_updates=2, num_prompts=2, num_generations=3, max_new_tokens=4, learning_rate=1e-2, adam_eps=1e-4,
    progress=False, mesh="agent=1",
)  # fmt: skip
ITEMS = [{"prompt": "The answer"}, {"prompt": "seven apples and three pears"}]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(2)]


def answer(agent_completions, **_):
    return [f"and {text}" for text in agent_completions[::-1]]


def lengths(*completions):
    """Each joint action: characters of the first agent's text, less half of what the others wrote."""
    return [float(len(first) - 0.5 * sum(map(len, others))) for first, *others in zip(*completions, strict=True)]


def environment(n, turns=1):
    formatters = [lambda item: item["prompt"], lambda item: item["prompt"] + " or"][:n]
    return RewardEnvironment(make_reward(lengths, num_agents=n), formatters, answer if turns > 1 else None)


def one_step(agents, cfg, critic=None, change=lambda state: state, shared_weights=False):
    """A step of training in its parts: what was rollout, the batches, and the state before and after."""
    team, params = make_team(agents, shared_weights)
    setup, state = start(dataclasses.replace(team, critic=critic), params, cfg)
    state = change(state)
    rollout = play_step(sampler_of(setup, state), setup, ITEMS, environment(len(agents), cfg.episodes.num_turns), 0)
    batches = jax.device_get(critic_values.batches_with_values(setup, state, rollout))
    before = jax.device_get(without_gradients(state))
    after, metrics = update_team(setup, state, rollout_batches(setup, state, rollout))
    return rollout, batches, before, jax.device_get(after), jax.device_get(metrics)


def targets_of(running, batch, model, cfg, critic=False):
    """Return the targets of the loss of one agent's batch, or of one critic's. Statistics are only read by policies."""
    return inputs_of(running, batch, model, cfg, critic).targets


def inputs_of(running, batch, model, cfg, critic=False):
    """Return the inputs of that loss."""
    running = initial_running(1, 1, 0.0) if running is None else running
    running, batch = jax.tree.map(jnp.asarray, (running, batch))
    return loss_inputs(batch, running, model, resolve(cfg), critic=critic)[0]


def believe(value):
    """Every critic (or value head) gives this value to everything."""

    def change(state):
        def shifted(stack):
            if "value_bias" not in stack.params:
                return stack
            return stack._replace(params=stack.params | {"value_bias": stack.params["value_bias"] + value})

        return state._replace(stacks=tuple(map(shifted, state.stacks)), critics=tuple(map(shifted, state.critics)))

    return change


def shaped(state):
    """Critics, or value heads, which are not 0, so that the layers under them have a gradient."""
    field = "critics" if state.critics else "stacks"
    first, *others = getattr(state, field)
    params = first.params | {"value": first.params["value"] + 0.1}
    return state._replace(**{field: (first._replace(params=params), *others)})


def moved(before, after):
    """The largest change in each array."""
    return jax.tree.map(lambda x, y: float(np.abs(x - y).max()), before, after)


# --- what an advantage is ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("row, separate", [("iac", True), ("iac", False), ("maac", True)])
def test_the_advantage_is_the_return_minus_the_value(agents, row, critic_type, separate):
    """A critic that gives 0.5 to everything: A = R - 0.5, of every kind of critic; its targets are the returns."""
    cfg = BASE.replace(algorithm=row, critic_type=critic_type, separate_critic=None if row == "maac" else separate)
    rollout, (batches, critic_batches), before, _, metrics = one_step(agents, cfg, change=believe(0.5))
    for a in range(2):
        mine = jax.tree.map(lambda x, a=a: x[a], batches[0])
        state = jax.tree.map(lambda x, a=a: x[a], before.stacks[0])
        targets = targets_of(state.running, mine, agents[a].config, cfg)
        policy = targets if separate else targets.policy
        expected = np.broadcast_to(rollout.returns[0][a][..., None] - 0.5, policy.mask.shape)
        np.testing.assert_allclose(policy.advantages, expected, rtol=1e-5, atol=1e-5)
        if not separate:
            values = targets.values
            assert values.mask.sum() == 6 and values.old_values[np.asarray(values.mask)].tolist() == [0.5] * 6
            np.testing.assert_allclose(values.targets[..., 0], rollout.returns[0][a], rtol=1e-6)
    if separate:
        critic = jax.tree.map(lambda x: x[0], critic_batches[0])
        values = targets_of(before.stacks[0].running, critic, agents[0].config, cfg, critic=True)
        target = rollout.joint_returns[0].mean(-1) if row == "maac" else rollout.returns[0][0]
        mask = np.asarray(values.mask)
        assert mask.sum() == 6 and (mask.sum(-1) == 1).all()
        np.testing.assert_allclose(values.targets[mask], target.reshape(-1), rtol=1e-5)
        assert values.old_values[mask].tolist() == [0.5] * 6
        name, stack = ("loss", metrics[-1]) if row == "maac" else ("critic_loss", metrics[0])
        assert stack[name][0] == pytest.approx(np.mean((target - 0.5) ** 2), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("separate", [True, False])
def test_ippo_has_an_advantage_for_each_token(agents, separate):
    """lambda = 1: A_t = R - V(s_t) with the critic's own values; lambda = 0.95 by the sum of (lambda)^k delta, in numpy."""
    rng = np.random.default_rng(0)
    head = rng.normal(size=agents[0].config.hidden_size)

    def change(state):
        stacks = state.critics if separate else state.stacks
        stacks = (stacks[0]._replace(params=stacks[0].params | {"value": stacks[0].params["value"] + head}),)
        return state._replace(critics=stacks) if separate else state._replace(stacks=stacks)

    for lam in (1.0, 0.95):
        cfg = BASE.replace(
            algorithm="ippo", gae_lambda=lam, advantage_scale="none", separate_critic=separate, max_new_tokens=5,
            micro_batches=2,
        )  # fmt: skip
        rollout, (batches, _), before, after, _ = one_step(agents, cfg, change=change)
        stack = (before.critics if separate else before.stacks)[0]
        for a in range(2):
            params, mine = jax.tree.map(jnp.asarray, (unstack(stack.params, a), unstack(batches[0], a)))
            arrays = (mine.prompts, mine.prompt_lengths, mine.tokens)
            hidden, _ = scoring.hidden_states(params, agents[a].config, *arrays, "full")
            values = np.asarray(values_of(params, hidden)).reshape(mine.tokens.shape)
            np.testing.assert_allclose(mine.values, values, rtol=1e-4, atol=1e-5)
            targets = targets_of(unstack(before.stacks[0].running, a), mine, agents[a].config, cfg)
            policy = targets if separate else targets.policy
            expected = np.zeros(values.shape)
            for p, g in np.ndindex(*values.shape[:2]):
                n = mine.action_mask[p, g].sum()
                v, r = [*values[p, g, :n], 0.0], np.zeros(n)
                r[-1] = rollout.returns[0][a, p, g]
                delta = [r[t] + v[t + 1] - v[t] for t in range(n)]
                expected[p, g, :n] = [sum(lam ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
            np.testing.assert_allclose(np.where(policy.mask, policy.advantages, 0), expected, rtol=1e-4, atol=1e-4)
        changed = moved(stack.params, (after.critics if separate else after.stacks)[0].params)
        assert changed["value"] > 0 and changed["layers"]["qkv"] > 0


@pytest.mark.long
@pytest.mark.parametrize("row", ["iac", "maac"])
def test_a_critic_of_type_q_reads_up_to_the_last_token(agents, row):
    """With a random head: its values, and where it is trained, are those behind the last token of prompt and completion, each
    as one plain sequence without shared prefix or padding."""
    head = np.random.default_rng(0).normal(size=agents[0].config.hidden_size)

    def change(state):
        params = state.critics[0].params
        return state._replace(critics=(state.critics[0]._replace(params=params | {"value": params["value"] + head}),))

    cfg = BASE.replace(algorithm=row, critic_type="q")
    _, (_, critic_batches), before, *_ = one_step(agents, cfg, change=change)
    params = jax.tree.map(jnp.asarray, unstack(before.critics[0].params, 0))
    batch, model = unstack(critic_batches[0], 0), agents[0].config
    targets = targets_of(None, batch, model, cfg, critic=True)
    for p, g in np.ndindex(2, 3):
        n = batch.action_mask[p, g].sum()
        assert np.flatnonzero(targets.mask[p, g]).tolist() == [n]
        sequence = np.concatenate([batch.prompts[p, : batch.prompt_lengths[p]], batch.tokens[p, g, :n]])
        plain = attention.causal_attention(len(sequence))
        x, *_ = decoder.run_layers(params, model, params["embed"][sequence], jnp.arange(len(sequence)), plain)
        last = rms_norm(x, params["final_norm"], model.rms_eps)[-1]
        assert batch.values[p, g, 0] == pytest.approx(float(values_of(params, last)), rel=1e-4, abs=1e-4)


def test_td_numbers_of_the_spec():
    """r = [1, 2, 4], V = [.5, .25, -1], gamma .9 over the turns of a chain: TD(0) targets [1.225, 1.1, 4], A [.725, .85, 5]."""
    rewards, values = [np.full((1, 1, 1), r) for r in (1.0, 2.0, 4.0)], [np.full((1, 1), v) for v in (0.5, 0.25, -1.0)]
    parents = [np.zeros(1, int)] * 3
    targets = discounted(rewards, parents, 0.9, values, 0.0)
    np.testing.assert_allclose(np.ravel(targets), [1.225, 1.1, 4.0])
    np.testing.assert_allclose(np.ravel(targets) - np.ravel(values), [0.725, 0.85, 5.0])
    monte_carlo = discounted(rewards, parents, 0.9, values, 1.0)
    np.testing.assert_allclose(np.ravel(monte_carlo), [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4])


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
    [("maac", {}, [1]), ("mappo", {"num_epochs": 2}, [1]), ("iac", {}, [1, 1]), ("ippo", {"num_epochs": 2}, [2, 2])],
)
def test_steps_critic_batches(agents, row, changes, steps):
    """A central critic takes one step a batch (CoMLRL's takes one an agent); critics of the agents' own as many as they do. All
    agents and critics change, in every array but the unused output weight."""
    cfg = BASE.replace(algorithm=row, **changes)
    _, _, before, after, _ = one_step(agents, cfg, change=shaped)
    assert [steps_done(critic).tolist() for critic in after.critics] == [steps]
    assert steps_done(after.stacks[0]).tolist() == [cfg.optimizer.num_epochs] * 2
    for was, now in ((before.stacks[0], after.stacks[0]), (before.critics[0], after.critics[0])):
        changed = moved(was.params, now.params)
        assert all(change > 0 for change in jax.tree.leaves(changed))


@pytest.mark.long
def test_ippo_of_one_agent_is_ppo(agents):
    """The same parameters, bit for bit; and PPO refuses a team."""
    results = [one_step(agents[:1], BASE.replace(algorithm=row))[3] for row in ("ppo", "ippo")]
    jax.tree.map(np.testing.assert_array_equal, *[(r.stacks[0].params, r.critics[0].params) for r in results])
    team, params = make_team(agents)
    with pytest.raises(ValueError, match="'ppo' is for a team of one, this one has 2 agents: choose ippo or mappo"):
        train(team, environment(2), ITEMS, BASE.replace(algorithm="ppo"), params=params)


@pytest.mark.long
def test_a_value_head_shares_the_gradient(agents):
    """The gradient of an agent with a value head is the policy's plus value_coef times the value loss's, each made alone."""
    cfg = BASE.replace(algorithm="ippo", separate_critic=False, value_coef=0.3, entropy_coef=0.01, micro_batches=2)
    _, (batches, _), before, _, _ = one_step(agents, cfg, change=believe(0.5))
    params, mine, running = (unstack(x, 0) for x in (before.stacks[0].params, batches[0], before.stacks[0].running))
    model = agents[0].config
    inputs = inputs_of(running, mine, model, cfg)
    grad = jax.grad(lambda params, inputs, objective=None: loss_of_inputs(params, inputs, model, resolve(cfg), objective)[0])
    policy = grad(params, inputs._replace(targets=inputs.targets.policy), POLICY)
    values = inputs.targets.values

    def value_loss(p):
        hidden, _ = scoring.hidden_states(p, model, mine.prompts, mine.prompt_lengths, mine.tokens, "full")
        error = (values.targets - values_of(p, hidden).reshape(values.mask.shape)) ** 2
        return jnp.sum(jnp.where(values.mask, error, 0)) / values.mask.sum()

    expected = jax.tree.map(lambda a, b: a + 0.3 * b, policy, jax.grad(value_loss)(params))
    for got, want in zip(jax.tree.leaves(grad(params, inputs)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-6)


def without_values_of_pass(setup, separate):
    """Return a setup whose agents and critics learn from the values in their batches."""

    def with_objective(programs, objective):
        return tuple(dataclasses.replace(x, update=x.update._replace(objective=objective)) for x in programs)

    programs = with_objective(setup.programs, POLICY if separate else ACTOR_CRITIC)
    return setup._replace(programs=programs, critic_programs=with_objective(setup.critic_programs, OWN_CRITIC))


@pytest.mark.long
@pytest.mark.parametrize("separate", [True, False])
def test_values_of_the_pass_that_learns(agents, separate):
    """A step with the values that critics give as they learn is the step with values of a pass of their own before it."""
    cfg = BASE.replace(
        algorithm="ippo", separate_critic=separate, gae_lambda=0.9, kl_coef=0.1, kl_in="reward", frozen_agents=(1,),
        num_generations=3,
    )  # fmt: skip
    results = []
    for before in (False, True):
        team, params = make_team(agents)
        setup, state = start(team, params, cfg)
        state = shaped(state)
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
@pytest.mark.parametrize("row", ["iac", "maac", "ippo"])
def test_a_critic_learns_a_constant_reward(agents, row):
    """Probe 1: the same reward for everything. The critic's error falls, and what it gives comes near the reward."""
    cfg = BASE.replace(algorithm=row, num_updates=30, learning_rate=3e-3)
    team, params = make_team(agents)
    reward = make_reward(lambda a, b: [1.0] * len(a), num_agents=2)
    result = train(team, reward, ITEMS, cfg, params=params)
    critic = result.state.critics[0]
    spec = critics.make_critics(team, params_of(agents), resolve(cfg))[0].specs[0]
    prompt = "[Agent 0] The answer\n[Agent 1] The answer" if row == "maac" else "The answer"
    text = spec.tokenizer.encode(prompt)
    num_critics = critic.params["value"].shape[0]
    tokens = jnp.zeros((num_critics, 1, 1, 1), jnp.int32)
    got = critics.value_stack(
        critic.params, spec, np.tile(text, (num_critics, 1, 1)), np.full((num_critics, 1), len(text)), tokens, resolve(cfg)
    )
    np.testing.assert_allclose(got, 1.0, atol=0.3)


def params_of(agents):
    return make_team(agents)[1]


@pytest.mark.long
def test_a_critic_of_another_model(agents, tiny_config, tiny_tokenizer, make_tokenizer, random_agent):
    """Own critics may have another architecture and size, a central one another tokenizer too."""
    other = random_agent(tiny_config("qwen3", hidden_size=48), tiny_tokenizer, 7)
    for row in ("iac", "ippo", "maac"):
        _, _, before, after, _ = one_step(agents, BASE.replace(algorithm=row), critic=other)
        assert before.critics[0].params["value"].shape == (1 if row == "maac" else 2, 48)
        assert moved(before.critics[0].params, after.critics[0].params)["value"] > 0
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    foreign = random_agent(tiny_config("qwen3", vocab_size=321, hidden_size=48), tokenizer, 7)
    one_step(agents, BASE.replace(algorithm="maac"), critic=foreign)
    with pytest.raises(ValueError, match="another vocabulary than agents .* a central one .maac, mappo. may be any model"):
        one_step(agents, BASE, critic=foreign)
    with pytest.raises(ValueError, match="algorithm='magrpo' has no critic besides its agents"):
        one_step(agents, BASE.replace(algorithm="magrpo"), critic=other)


@pytest.mark.long
def test_a_central_critic_reads_the_prompts_of_all(agents):
    """In order, one a line; as type q the completions behind them."""
    cfg = BASE.replace(algorithm="maac", critic_type="q")
    rollout, (_, (batch,)), *_ = one_step(agents, cfg)
    turn, decode = rollout.turns[0], agents[0].tokenizer.decode
    for p, item in enumerate(ITEMS):
        read = decode(batch.prompts[0, p, : batch.prompt_lengths[0, p]])
        assert read == f"[Agent 0] {item['prompt']}\n[Agent 1] {item['prompt']} or"
        for g in range(3):
            said = decode(batch.tokens[0, p, g][batch.action_mask[0, p, g]])
            assert said == f"\n[Agent 0] {turn.texts[0][p][g]}\n[Agent 1] {turn.texts[1][p][g]}"


CHAIN = {"branching": "chain", "history": "append", "gae_lambda": 0.5}


@pytest.mark.long
@pytest.mark.parametrize(
    "row, changes",
    [
        ("iac", {}),
        ("iac", {"critic_type": "q"}),
        ("iac", CHAIN),
        ("maac", {"critic_type": "q"}),
        ("maac", CHAIN),
        ("mappo", {}),
        ("ippo", CHAIN),
    ],
    ids=str,
)
def test_several_turns_and_crossed_actions(agents, row, changes):
    """Trees of two turns and chains that go on: what is expected of a constant critic, V = 0.5, and finite updates. Returns are
    lambda-returns: in the first turn r + gamma (lam R' + (1 - lam) V')."""
    joint_mode = "aligned" if "branching" in changes else "cross"
    cfg = BASE.replace(algorithm=row, num_turns=2, gamma=0.9, joint_mode=joint_mode, num_generations=2, **changes)
    rollout, (batches, critic_batches), before, after, metrics = one_step(agents, cfg, change=believe(0.5))
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
    got = batches[0].rewards[0].reshape(-1)[: expected.shape[0] * 2]
    if joint_mode == "aligned":
        np.testing.assert_allclose(got, expected[..., 0].reshape(-1), rtol=1e-5)
    assert np.asarray(batches[0].values).ravel()[0] == 0.5


@pytest.mark.long
def test_micro_batches_of_a_central_critic(agents):
    """Its batch has as many rows as there are tasks, whatever the agents' parts are: here 4 parts of 2 roles by 2 prompts."""
    cfg = BASE.replace(algorithm="maac", num_generations=4, micro_batches=4)
    _, _, _, after, _ = one_step(agents[:1] * 2, cfg, shared_weights=True)
    assert steps_done(after.critics[0]).tolist() == [1]


def test_a_text_longer_than_the_critics_context_is_an_error(agents, tiny_config, tiny_tokenizer, random_agent):
    short = random_agent(tiny_config(max_positions=32), tiny_tokenizer, 7)
    with pytest.raises(ValueError, match=r"what the central critic reads at prompt 1 .* more than its context of 32"):
        one_step(agents, BASE.replace(algorithm="maac"), critic=short)
    shorter = random_agent(tiny_config(max_positions=8), tiny_tokenizer, 7)
    with pytest.raises(ValueError, match=r"a critic reads up to \d+ tokens, more than its context of 8"):
        one_step(agents, BASE.replace(algorithm="ippo"), critic=shorter)


@pytest.mark.long
def test_rewards_of_each_agent_and_a_central_critic(agents):
    """Bootstrapping from the team's mean would be wrong for the single agents."""
    reward = make_reward(lambda a, b: [(1.0, -1.0)] * len(a), num_agents=2)
    formatters = [lambda item: item["prompt"]] * 2
    for lam in (0.5, 1.0):
        cfg = BASE.replace(algorithm="mappo", num_turns=2, gae_lambda=lam, num_updates=1)
        team, params = make_team(agents)
        if lam == 1:
            train(team, RewardEnvironment(reward, formatters, answer), ITEMS, cfg, params=params)
            continue
        with pytest.raises(ValueError, match="gae_lambda=0.5 with a central critic"):
            train(team, RewardEnvironment(reward, formatters, answer), ITEMS, cfg, params=params)


@pytest.mark.long
def test_gae_is_scaled_by_role(agents):
    """Two roles of shared weights: the tokens' advantages of each have a standard deviation of 1."""
    cfg = BASE.replace(algorithm="ippo", micro_batches=2)
    _, (batches, _), before, *_ = one_step(agents[:1] * 2, cfg, shared_weights=True)
    mine = unstack(batches[0], 0)
    far = mine._replace(rewards=np.where(mine.roles == 1, 100 * mine.rewards, mine.rewards))
    running = unstack(before.stacks[0].running, 0)
    first = np.arange(far.rewards.shape[1]) == 0  # of each prompt, cut off and far from the others
    cut = far._replace(ended=np.broadcast_to(~first, far.rewards.shape), rewards=np.where(first, 1e4, far.rewards))
    for batch, changes in ((far, {}), (cut, {"mask_overlong": True})):
        policy = targets_of(running, batch, agents[0].config, cfg.replace(**changes))
        for role in range(2):
            mask = np.asarray(policy.mask) & (mine.roles == role)[..., None]
            assert np.std(np.asarray(policy.advantages)[mask]) == pytest.approx(1, rel=1e-3)


@pytest.mark.long
def test_shared_weights_have_a_critic_in_two_roles(agents):
    _, (batches, critic_batches), _, after, _ = one_step(agents[:1] * 2, BASE, shared_weights=True)
    assert critic_batches[0].rewards.shape == (1, 4, 3) and batches[0].roles[0, :, 0].tolist() == [0, 0, 1, 1]
    assert steps_done(after.critics[0]).tolist() == [1]


@pytest.mark.long
@pytest.mark.parametrize("row", ["ippo", "maac", "rae"])
def test_a_resumed_run_has_its_critics_again(agents, tmp_path, row):
    """4 updates = 2 + 2: agents, critics and what they remember are bit-equal."""
    states = []
    for name, stops in (("whole", [4]), ("parts", [2, 4])):
        for i, stop in enumerate(stops):
            team, params = make_team(agents)
            directory = str(tmp_path / name)
            cfg = BASE.replace(algorithm=row, num_updates=stop, save_every=2, output_dir=directory, resume=i > 0)
            result = train(team, environment(2), ITEMS, cfg, params=params)
        states.append(jax.device_get(result.state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    with Checkpointer(tmp_path / "parts" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [2, 4]


# --- baselines that are remembered, or played ----------------------------------------------------------------------------


@pytest.mark.long
def test_remax_subtracts_what_the_greedy_completion_got(agents):
    """The greedy joint action's reward, made here by an evaluation at temperature 0, for every completion of the item."""
    cfg = BASE.replace(algorithm="remax")
    rollout, (batches, _), before, *_ = one_step(agents, cfg)
    team, params = make_team(agents)
    settings = dataclasses.replace(cfg.sampling, temperature=0.0)
    sample = partial(sample_team, team, params)
    greedy = play(sample, team, ITEMS, environment(2), settings, cfg.episodes, 1, Randomness(seed=0, step=9))
    rewards = greedy.turns[0].rewards[:, 0, 0]
    np.testing.assert_allclose(batches[0].values[..., 0], np.broadcast_to(rewards[None, :, None], (2, 2, 3)), rtol=1e-6)
    running = unstack(before.stacks[0].running, 0)
    policy = targets_of(running, unstack(batches[0], 0), agents[0].config, cfg)
    np.testing.assert_allclose(policy.advantages[..., 0], rollout.returns[0][0] - rewards[:, None], rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_remax_over_several_turns(agents):
    """A node's baseline is what the greedy episode on its item returns from the same turn on."""
    cfg = BASE.replace(algorithm="remax", num_turns=2, num_generations=2)
    rollout, *_ = one_step(agents, cfg)
    assert [x.shape for x in rollout.expected] == [x.shape for x in rollout.returns] == [(2, 2, 2), (2, 4, 2)]
    assert rollout.expected[1][0, 0, 0] == rollout.expected[1][0, 1, 1], "both children of item 0"
    assert rollout.expected[0][0, 0, 0] != rollout.expected[1][0, 0, 0], "the return of two turns and that of the last"


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
    groups = {}
    for row in ("dr_mas", "at_grpo"):
        cfg = BASE.replace(algorithm=row, num_turns=2, branching="chain")
        _, (batches, _), *_ = one_step(agents[:1] * 2, cfg, shared_weights=True)
        valid = np.isfinite(batches[0].rewards[0].reshape(-1))
        groups[row] = np.asarray(batches[0].groups[0]).reshape(-1)[valid]
    counts = {row: sorted(np.unique(numbers, return_counts=True)[1].tolist()) for row, numbers in groups.items()}
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
def test_value_heads_are_not_saved(agents, tmp_path):
    """The models of a run with value heads are plain ones."""
    from jmarl.models.hub.agents import load_agent

    cfg = BASE.replace(algorithm="ippo", separate_critic=False, output_dir=str(tmp_path))
    team, params = make_team(agents)
    train(team, environment(2), ITEMS, cfg, params=params)
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
@pytest.mark.parametrize(
    "changes", [dict(num_prompts=3), dict(num_prompts=3, num_turns=2, early_termination_threshold=-9.0)], ids=str
)
def test_a_central_critic_of_three_prompts(agents, changes):
    """No number of prompts or of nodes that go on has to be a power of two; in the second run no episode goes on."""
    cfg = BASE.replace(algorithm="maac", num_updates=1, **changes)
    team, params = make_team(agents)
    result = train(team, environment(2, cfg.episodes.num_turns), [*ITEMS, {"prompt": "of fruit"}], cfg, params=params)
    assert np.isfinite(result.rewards).all()
    assert int(result.state.critics[0].skipped[0]) == 0 and int(steps_done(result.state.critics[0])[0]) == 1


def test_explained_variance_does_not_count_a_constant_error():
    """As in Stable-Baselines3 and verl: 1 - var(y - v) / var(y). Masked values do not count."""
    targets, mask = jnp.array([[[1.0, 2.0, 6.0, 99.0]]]), jnp.array([[[True, True, True, False]]])
    shares = {
        "exact": targets,
        "shifted": targets + 5,
        "constant": jnp.full((1, 1, 4), 3.0),
        "half": targets / 2,
        "opposite": -targets,
    }
    found = {name: float(explained_variance(values, targets, mask)) for name, values in shares.items()}
    assert found == pytest.approx({"exact": 1, "shifted": 1, "constant": 0, "half": 0.75, "opposite": -3}, abs=1e-6)
    assert explained_variance(targets, jnp.ones((1, 1, 4)), mask) == 0, "targets that are all equal"
