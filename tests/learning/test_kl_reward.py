"""The KL penalty as a reward of each token, in rows whose critics give a value for each token (ppo, ippo)."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.learning.setup import critic_algorithm
from jmarl.learning.team_update import update_team
from jmarl.models.heads import values_of
from jmarl.models.stack import unstack
from jmarl.runs.kinds.rollouts import play_step, rollout_batches, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.sampling.scoring import hidden_states, score
from jmarl.team import Team, make_team
from jmarl.types import TRACES
from tests.batches import assert_equal, loss_inputs
from tests.house import HOUSE, ITEMS
from tests.matrix import product

BASE = TrainConfig.of(
    **HOUSE, algorithm="ippo", adam_eps=1e-4, advantage_scale="none", gae_lambda=0.9, kl_coef=0.3, kl_in="reward"
)
ESTIMATES = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(d) - d - 1}


def lengths(a, b):
    """NaN for one joint action of the six."""
    return [float("nan") if i == 4 else float(len(x) - 0.5 * len(y)) for i, (x, y) in enumerate(zip(a, b, strict=True))]


def environment(reward=lengths):
    return RewardEnvironment(make_reward(reward, num_agents=2), [lambda item: item["prompt"]] * 2)


def moved_away(state, head, coef):
    """Critics with a random head; a reference that is not the agents; another coefficient than at the start."""

    def with_head(stack):
        params = stack.params
        return stack._replace(params=params | {"value": params["value"] + head}) if "value" in params else stack

    stack = state.stacks[0]
    reference = jax.tree.map(lambda x: 0.9 * x, stack.params)
    running = stack.running._replace(kl_coef=coef * np.ones_like(stack.running.kl_coef))
    stack = with_head(stack._replace(reference=reference, running=running))
    return state._replace(stacks=(stack,), critics=tuple(map(with_head, state.critics)))


@functools.partial(jax.jit, static_argnums=1)
def values_by_hand(params, model, *rows):
    """Values of all tokens, in one pass."""
    return values_of(params, hidden_states(params, model, *rows, "full")[0])


def gae_by_hand(rewards, values, lam):
    """A_t = sum_k lam^(k - t) delta_k, in float64."""
    after = [*values[1:], 0.0]
    delta = [r + v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum(lam ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.long
@pytest.mark.parametrize("separate, kind", product([True, False], [*ESTIMATES]))
def test_advantages_and_targets_are_of_the_same_penalised_rewards(agents, separate, kind):
    """By numpy: r_t = -coef * estimate_t, and the return on the last token; A by its sum over delta; targets = V + A, of
    critics beside the agents and of value heads. The invalid row counts nowhere."""
    cfg = BASE.replace(separate_critic=separate, kl_estimator=kind, micro_batches=2)  # values before the update
    head, coef = np.random.default_rng(0).normal(size=agents[0].config.hidden_size), 0.7
    team, params = make_team(agents)
    setup, state = start(team, params, cfg)
    state = moved_away(state, head, coef)
    rollout = play_step(sampler_of(setup, state), setup, ITEMS, environment(), 0)
    batches, critic_batches = jax.device_get(rollout_batches(setup, state, rollout))
    model, rate = agents[0].config, jax.jit(score, static_argnums=1)
    state = jax.device_get(state)
    for a in range(2):
        mine, stack = unstack(batches[0], a), state.stacks[0]
        reference, running = unstack(stack.reference, a), unstack(stack.running, a)
        rows = mine.prompts, mine.prompt_lengths, mine.tokens
        ref = np.float64(rate(reference, model, *rows).logprobs)
        critic = unstack((state.critics[0] if separate else stack).params, a)
        values = np.float64(values_by_hand(critic, model, *rows)).reshape(mine.tokens.shape)
        inputs, _ = loss_inputs(mine, running, model, setup.algorithm, reference=reference)
        if separate:
            policy, algorithm = inputs.targets, critic_algorithm(setup.algorithm)
            targets = loss_inputs(unstack(critic_batches[0], a), running, model, algorithm, critic=True)[0].targets
        else:
            policy, targets = inputs.targets
        assert np.asarray(policy.mask).any(-1).sum() == np.asarray(targets.mask).any(-1).sum() == 5
        for p, g in np.ndindex(2, 3):
            n = mine.action_mask[p, g].sum()
            if (p, g) == (1, 1):
                assert np.isnan(mine.rewards[p, g]) and not mine.penalty[p, g].any()
                continue
            rewards = -coef * ESTIMATES[kind](ref[p, g, :n] - mine.old_logprobs[p, g, :n])
            assert np.abs(rewards).max() > 1e-3
            rewards[-1] += rollout.returns[0][a, p, g]
            expected = gae_by_hand(rewards, values[p, g, :n], 0.9)
            np.testing.assert_allclose(policy.advantages[p, g, :n], expected, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(targets.targets[p, g, :n], values[p, g, :n] + expected, rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_first_update_is_that_without_a_penalty(agents, separate):
    """Agents that are their reference pay nothing for k3: the same advantages, targets and update as with no KL term; and the
    reference's log-probabilities in the update are those made before it (a KL of 0)."""
    results = []
    for changes in (dict(kl_estimator="k3"), dict(kl_coef=0.0)):
        cfg = BASE.replace(separate_critic=separate, **changes)
        team, params = make_team(agents)
        setup, state = start(team, params, cfg)
        rollout = play_step(sampler_of(setup, state), setup, ITEMS, environment(), 0)
        results.append(jax.device_get(update_team(setup, state, rollout_batches(setup, state, rollout))))
    (with_it, metrics), (without, _) = results
    for got, expected in zip(with_it.stacks + with_it.critics, without.stacks + without.critics, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got.params, expected.params)
    np.testing.assert_allclose(metrics[0]["kl"], 0, atol=1e-5)


@pytest.mark.long
def test_a_run_of_it_compiles_before_its_first_step_and_resumes(agents, tmp_path):
    """Its update is the program that was compiled for it; the coefficient follows its target; 4 updates = 2 + 2."""
    states = []
    for name, stops in (("whole", [4]), ("parts", [2, 4])):
        for i, stop in enumerate(stops):
            changes = dict(num_updates=stop, output_dir=str(tmp_path / name), resume=i > 0, save_every=2, kl_target=1e-4)
            traced, fixed = TRACES["update"], dict(min_new_tokens=4, kl_estimator="k3")
            cfg = BASE.replace(**changes, **fixed)
            result = train(Team.of(agents), environment(lambda a, b: [float(len(x)) for x in a]), ITEMS, cfg)
            assert TRACES["update"] - traced <= 2, "one of the agents, one of their critics"
        states.append(jax.device_get(result.state))
    assert_equal(*states)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    coefs = [row["agent_0/kl_coef"] for row in rows]
    assert coefs[0] == pytest.approx(0.3) and coefs[1] == pytest.approx(0.3 * 0.98) and coefs[-1] > coefs[1]
