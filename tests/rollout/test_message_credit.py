"""Credit of single messages: compare alternatives with whole episodes played by hand."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jmarl.config import Episodes, Sampling, TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.randomness import Randomness
from jmarl.rl.returns import credit, joint_actions
from jmarl.rollout.counterfactual import Branches, returns
from jmarl.rollout.message_credit import leave_one_out, message_credit
from jmarl.rollout.play import play
from jmarl.runs.checks import check_settings
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team

SETTINGS = Sampling(max_new_tokens=5)
ITEMS = [{"prompt": "The answer"}, {"prompt": "seven apples and three pears"}]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(2)]


class Story:
    """An episode whose rewards and whose end depend on all that was written."""

    def reset(self, item, rng):
        return [item["prompt"]], [item["prompt"]] * 2

    def step(self, state, texts, rng):
        written = [*state, *texts]
        value = sum((k + 1) * len(text) + text.count("e") for k, text in enumerate(written)) / 10
        return written, [f"{texts[1]} go on", f"{texts[0]} go on"], [value, -0.5 * value], sum(map(len, written)) % 4 == 0


def by_hand(item, base, fork, gamma):
    """Return the return [N] from turn t on of an episode with messages base [T][N] in which fork (t, n, text) replaces one; the
    episode is played from the start."""
    env, (at, agent, text), total, factor = Story(), fork, np.zeros(2), 1.0
    state, _ = env.reset(item, None)
    for t, messages in enumerate(base):
        texts = [text if (t, n) == (at, agent) else s for n, s in enumerate(messages)]
        state, _, rewards, done = env.step(state, texts, None)
        if t >= at:
            total, factor = total + factor * np.array(rewards), factor * gamma
        if done:
            break
    return total


def test_joint_actions_and_credit_by_hand():
    """Two agents, three completions: the first joint action, then the alternatives of each agent."""
    joint = joint_actions("counterfactual", 2, 3)
    assert joint.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [0, 2]]
    returns = np.array([[5.0, 1.0, np.nan, 3.0, 4.0]])[..., None].repeat(2, -1)
    got = credit(returns, joint, 3, "counterfactual")
    np.testing.assert_array_equal(got[:, 0], [[5, 1, np.nan], [5, 3, 4]])


def test_leave_one_out_by_hand():
    np.testing.assert_allclose(leave_one_out(np.array([1.0, 2, 4, 9])), [-4, -8 / 3, 0, 20 / 3], rtol=1e-6)
    np.testing.assert_allclose(leave_one_out(np.array([1.0, np.nan, 3])), [-2, 0, 2])
    np.testing.assert_array_equal(leave_one_out(np.array([[3.0, np.nan], [2.0, 2.0]])), 0)


class Asks:
    """Three turns, rewarded by what is written in each.

    Agent 1 acts after the first turn if agent 0 began with "ask". "bad" is invalid, and after "late" the second turn is.
    """

    def __init__(self):
        self.steps = 0

    def reset(self, item, rng):
        return [], ["", ""]

    def step(self, state, texts, rng):
        self.steps += 1
        written = [*state, *texts]
        wrong = written == ["bad", "x"] or (written[0] == "late" and len(written) == 4)
        value = float("nan") if wrong else len("".join(texts))
        return written, ["on", "on" if written[0] == "ask" else None], value, len(written) == 6


def test_alternatives_continue_until_they_end_or_are_invalid():
    """An agent without a prompt writes nothing, and the environment is not called after an invalid reward."""
    story, rng = Asks(), np.random.default_rng(0)
    env, joint, turns = LockStep(story, 2), joint_actions("counterfactual", 2, 4), []
    states, _ = env.reset(ITEMS[:1], rng)
    for texts in ([["ask", "no", "bad", "late"], ["x", "yy", "yyy", "yyyy"]], [["a"], ["hello"]], [["b"], ["you"]]):
        actions = [[texts[n][g] for g in (joint[:, n] if len(texts[n]) > 1 else [0])] for n in (0, 1)]
        answer = env.step(states * len(actions[0]), actions, rng)
        turns.append(Branches(answer, answer.result.rewards[None], [[row] for row in texts], np.zeros(1, int)))
        states, _ = env.observe(answer.after[:1])
    story.steps = 0
    got = returns(turns, env, 1.0, rng)
    assert [of.shape for of in got] == [(1, 7, 2), (1, 1, 2), (1, 1, 2)]
    np.testing.assert_array_equal(got[0][0, :, 1], [4 + 6 + 4, 3 + 1 + 1, np.nan, np.nan, 15, 16, 17])
    assert story.steps == 2 + 0 + 1 + 3 * 2


@pytest.mark.parametrize(("history", "gamma"), [("none", 1.0), ("append", 0.5)])
def test_the_return_of_an_alternative_is_that_of_the_episode_with_only_this_message_replaced(agents, history, gamma):
    """Three turns, two agents, k = 3, against whole episodes played by hand.

    The advantage leaves the message out of the mean.
    """
    team, params = make_team(agents)
    episodes = Episodes(num_turns=3, history=history, gamma=gamma)
    got = message_credit(team, params, ITEMS, LockStep(Story(), 2), SETTINGS, episodes, k=3, seed=0)
    turns, forks = got.rollout.turns, 0
    for p, item in enumerate(ITEMS):
        node_of = [list(turn.items).index(p) if p in turn.items else None for turn in turns]
        base = [[turn.texts[n][q][0] for n in (0, 1)] for turn, q in zip(turns, node_of, strict=True) if q is not None]
        for t, messages in enumerate(base):
            for n in (0, 1):
                texts = turns[t].texts[n][node_of[t]]
                assert texts[0] == messages[n]
                expected = [by_hand(item, base, (t, n, text), gamma)[n] for text in texts]
                np.testing.assert_allclose(got.rollout.returns[t][n, node_of[t]], expected, rtol=1e-9, atol=1e-12)
                np.testing.assert_allclose(got.advantages[t][n, node_of[t]], leave_one_out(np.array(expected)), atol=1e-12)
                forks += 1
    assert forks > 4, "an episode went on after its first turn"


def test_the_first_messages_are_the_episode_played_without_alternatives(agents):
    """Completion 0 of every message equals the chain of one completion per turn.

    Alternatives cost no prompt: as many tokens are prefilled for k = 3 and k = 5, with a history only the new ones.
    """
    team, params = make_team(agents)
    env = LockStep(Story(), 2)
    prefilled = {}
    for history in ("none", "append"):
        episodes = Episodes(num_turns=3, history=history)
        few, many = (message_credit(team, params, ITEMS, env, SETTINGS, episodes, k=k, seed=0).rollout for k in (3, 5))
        chain = dataclasses.replace(episodes, branching="chain")
        alone = play(partial(sample_team, team, params), team, ITEMS, env, SETTINGS, chain, 1, Randomness(seed=0, step=0))
        for a, b, c in zip(few.turns, many.turns, alone.turns, strict=True):
            for n in (0, 1):
                assert [row[0] for row in a.texts[n]] == [row[0] for row in b.texts[n]] == [row[0] for row in c.texts[n]]
                assert [row[1] for row in a.texts[n]] == [row[1] for row in b.texts[n]]
        assert few.notes == many.notes == alone.notes
        prefilled[history] = few.notes["prefilled_tokens"]
        read = sum(int(lengths.sum()) for turn in few.turns for _, lengths in turn.encoded)
        assert (prefilled[history] < read) == (history == "append")


def reward_of(team):
    def alone(a):
        return [len(x) / 10 for x in a]

    def together(a, b):
        return [(len(x) + len(y)) / 10 + (x[:1] == y[:1]) for x, y in zip(a, b, strict=True)]

    return make_reward(together if team.num_agents == 2 else alone, num_agents=team.num_agents)


CONFIG = TrainConfig.of(num_updates=3, num_prompts=2, num_generations=4, max_new_tokens=5, learning_rate=1e-2, progress=False)


def trained(agents, **changes):
    team, params = make_team(agents)
    return train(team, reward_of(team), ITEMS, CONFIG.replace(**changes), params=params)


def test_an_environment_of_one_episode_is_accepted(agents):
    class Once(TextEnvironment):
        roles, max_turns = ("first", "second"), 1

        def reset(self, task, rng):
            return task, [task["prompt"]] * 2

        def step(self, state, messages, rng):
            return Step(state, [None, None], float(len(messages[0])), done=True)

    team, params = make_team(agents)
    bare, wrapped = (message_credit(team, params, ITEMS, env, SETTINGS, k=2, seed=0) for env in (Once(), LockStep(Once())))
    jax.tree.map(np.testing.assert_array_equal, bare.advantages, wrapped.advantages)
    other = message_credit(team, params, ITEMS, Once(), SETTINGS, k=2, seed=1)
    assert other.rollout.turns[0].texts != bare.rollout.turns[0].texts
    with pytest.raises(ValueError, match="k=1 is not allowed: k must be >= 2: a message is compared with others"):
        message_credit(team, params, ITEMS, Once(), SETTINGS, k=1, seed=0)


def test_with_one_agent_c3_is_leave_one_out(agents):
    c3, marloo = (trained(agents[:1], algorithm=name) for name in ("c3", "marloo"))
    jax.tree.map(np.testing.assert_array_equal, c3.state.stacks[0].params, marloo.state.stacks[0].params)


def test_c3_trains_a_team_of_two_on_the_credit_of_messages(agents):
    """The update differs from that with aligned joint actions. The returns are those of the alternatives."""
    c3, marloo = (trained(agents, algorithm=name) for name in ("c3", "marloo"))
    assert (np.asarray(c3.state.stacks[0].params["embed"]) != np.asarray(marloo.state.stacks[0].params["embed"])).any()
    team, params = make_team(agents)
    env = RewardEnvironment(reward_of(team), [default_formatter] * 2)
    got = message_credit(team, params, ITEMS, env, SETTINGS, k=4, seed=0)
    texts = got.rollout.turns[0].texts
    for n in (0, 1):
        for p in range(2):
            pairs = [[texts[n][p][g] if m == n else texts[m][p][0] for m in (0, 1)] for g in range(4)]
            expected = [(len(x) + len(y)) / 10 + (x[:1] == y[:1]) for x, y in pairs]
            np.testing.assert_allclose(got.rollout.returns[0][n, p], expected)


def test_evaluations_have_no_alternatives():
    cfg = CONFIG.replace(algorithm="c3", num_turns=2)
    assert cfg.episodes.joint_mode == "counterfactual" and cfg.episodes.branching == "chain"
    assert cfg.eval_episodes().joint_mode == "aligned"
    assert CONFIG.replace(algorithm="c3").eval_episodes().joint_mode == "aligned"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(algorithm="maac", joint_mode="counterfactual"), "joint_mode='counterfactual' does not go with algorithm='maac'"),
        (dict(algorithm="c3", dynamic_sampling=1), "does not go with dynamic_sampling=1"),
        (dict(algorithm="c3", num_generations=1), "num_generations=1 is too small"),
        (dict(algorithm="c3", joint_mode="cross"), "joint_mode must be counterfactual for algorithm=c3"),
        (dict(joint_mode="counterfactual", num_turns=2), "joint_mode must be one of .* for branching=tree"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_settings(CONFIG.replace(**changes))


def test_with_gamma_zero_an_invalid_turn_does_not_change_earlier_returns(agents):
    """No reward of the second turn is valid: messages of the first turn have their own reward."""

    class Later(Story):
        def step(self, state, texts, rng):
            written, prompts, rewards, _ = super().step(state, texts, rng)
            return written, prompts, [float("nan")] * 2 if len(written) > 3 else rewards, False

    team, params = make_team(agents)
    episodes, env = Episodes(num_turns=2, gamma=0.0), LockStep(Later(), 2)
    got = message_credit(team, params, ITEMS, env, SETTINGS, episodes, k=3, seed=0).rollout
    assert np.isfinite(got.returns[0]).all() and np.isnan(got.returns[1]).all()
