"""Agents that are trained differently: frozen ones, one after the other, with numbers and optimisers of their own."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.story_length import StoryConfig
from jmarl import MAGRPOConfig, MAGRPOTrainer
from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import RewardError, make_reward
from jmarl.files.checkpoint import Checkpointer
from jmarl.learning.choose import with_settings
from jmarl.learning.optimizer import apply_gradients, init_stack, steps_done
from jmarl.learning.per_agent import active_agents, settings_of_stack, updates_before, updates_per_agent
from jmarl.learning.setup import make_setup
from jmarl.learning.team_update import update_team
from jmarl.models.stack import unstack
from jmarl.randomness import tasks_of
from jmarl.runs.kinds.rollouts import play_step, rollout_batches, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.team import Team, make_team
from jmarl.types import TRACES
from tests.batches import assert_close, assert_equal
from tests.house import HOUSE

# A large adam_eps: otherwise Adam's first step is the sign of the gradient, also where that is a rounding error.
BASE = TrainConfig.of(**HOUSE | dict(num_updates=4, min_new_tokens=4, adam_eps=1e-4))
SCHEDULE = dict(lr_schedule="linear", warmup_updates=1)
ITEMS = [{"prompt": text} for text in ("The answer", "apples", "question")]


@pytest.fixture(scope="module")
def different(agents, tiny_config, tiny_tokenizer, random_agent):
    """Two architectures: two stacks."""
    return [agents[0], random_agent(tiny_config("qwen3", hidden_size=48), tiny_tokenizer, 3)]


def first(text):
    return sum(map(ord, text)) / 1000


def together(a, b):
    return [first(x) - 0.5 * first(y) for x, y in zip(a, b, strict=True)]


def apart(a, b):
    """A reward of each agent, from its own text alone."""
    return [(first(x), -first(y)) for x, y in zip(a, b, strict=True)]


def environment(reward=together):
    return RewardEnvironment(make_reward(reward, num_agents=2), [lambda item: item["prompt"]] * 2)


def run(agents, reward=together, **changes):
    """The state after a run."""
    return jax.device_get(train(Team.of(agents), environment(reward), ITEMS, BASE.replace(**changes)).state)


def params_of(state, agent):
    """Of an agent of a team of one stack, or of stacks of one."""
    return unstack(state.stacks[0].params, agent) if len(state.stacks) == 1 else unstack(state.stacks[agent].params, 0)


def untrained(agents, agent):
    return jax.device_get(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), agents[agent].params))


# --- numbers of each agent -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode, epochs", [("map", 1), pytest.param("vmap", 2, marks=pytest.mark.nightly)])
def test_a_stack_with_numbers_of_its_agents_equals_runs_with_one_each(agents, mode, epochs):
    """Learning rates, clips and decays (x, y): agent 0 ends where the run with x for all has it, agent 1 where that with y has
    it (they do not see each other in one turn); schedules included."""
    numbers = dict(learning_rate=(1e-2, 3e-3), max_grad_norm=(0.3, 1.5), weight_decay=(0.0, 0.1))
    common = dict(per_agent=mode, num_epochs=epochs, **SCHEDULE)
    both = run(agents, apart, **numbers, **common)
    alone = [run(agents, apart, **{name: values[i] for name, values in numbers.items()}, **common) for i in range(2)]
    for agent in range(2):
        assert_close(params_of(both, agent), params_of(alone[agent], agent))
        assert np.abs(params_of(both, agent)["embed"] - params_of(alone[1 - agent], agent)["embed"]).max() > 1e-4


@pytest.mark.long
def test_each_agent_learns_its_own_reward_and_other_numbers_are_no_other_program(agents):
    """[N floats] a joint action: agent 0 ends where the run with its reward for all has it, agent 1 where that with the other
    one does, bit for bit. Numbers are arrays that the program reads, one for all as well as one an agent: a sweep compiles
    once."""
    both = run(agents, apart, **SCHEDULE)
    traced = TRACES["update"]
    assert_equal(params_of(both, 0), params_of(run(agents, lambda a, b: [first(x) for x in a], **SCHEDULE), 0))
    assert_equal(params_of(both, 1), params_of(run(agents, lambda a, b: [-first(y) for y in b], **SCHEDULE), 1))
    assert np.abs(params_of(both, 1)["embed"] - untrained(agents, 1)["embed"]).max() > 1e-4
    run(agents, learning_rate=(5e-4, 2e-2), **SCHEDULE)
    run(agents, learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5, **SCHEDULE)
    assert TRACES["update"] == traced


def test_stacks_and_own_critics_have_the_settings_of_their_agents(agents):
    cfg = BASE.replace(learning_rate=(1e-2, 1e-3), optimizer=("adamw", "lion"))
    for agent in range(2):  # of different stacks: an optimiser each
        algorithm, numbers = settings_of_stack(resolve(cfg), cfg.run, ((agent,),), 2)
        assert numbers["learning_rate"].tolist() == np.float32([cfg.optimizer.learning_rate[agent]]).tolist()
        assert algorithm.optimizer.optimizer == cfg.optimizer.optimizer[agent]
    setup, _ = start(*make_team(agents), BASE.replace(algorithm="iac", learning_rate=(1e-2, 3e-3)))
    setup = with_settings(setup, {"micro_batches": 2})
    assert setup.cfg.optimizer == setup.algorithm.optimizer
    for program in (*setup.programs, *setup.critic_programs):
        assert program.algorithm.micro_batches == 2
        assert program.numbers["learning_rate"].tolist() == pytest.approx([1e-2, 3e-3])


# --- optimisers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [dict(optimizer="lion"), dict(optimizer="sgd"), dict(optimizer="sgd", momentum=0.5)], ids=str
)
def test_optimisers_closed_form(fields):
    """Two steps by their papers: lion moves by the sign of an interpolation, sgd by the sum of decayed gradients; the decay of
    weights is apart from both."""
    algorithm = resolve(TrainConfig.of(learning_rate=0.1, weight_decay=0.5, max_grad_norm=9.0, **fields))
    state, w, memory = init_stack({"w": jnp.full((1, 2), 2.0)}, algorithm), np.full(2, 2.0), np.zeros(2)
    step = jax.jit(jax.vmap(functools.partial(apply_gradients, algorithm=algorithm)))
    for grad in (np.array([0.3, -0.1]), np.array([-0.2, -0.4])):
        state, _ = step(state, {"w": np.float32(grad[None])}, np.zeros(1))
        if fields["optimizer"] == "lion":
            change, memory = np.sign(0.9 * memory + 0.1 * grad), 0.99 * memory + 0.01 * grad
        else:
            change = memory = grad + fields.get("momentum", 0.0) * memory
        w = w - 0.1 * (change + 0.5 * w)
        np.testing.assert_allclose(state.params["w"][0], w, rtol=1e-5)
    assert steps_done(state).tolist() == [2]


@pytest.mark.long
@pytest.mark.parametrize("agent", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_stacks_have_optimisers_of_their_own(different, agent):
    """Each stack ends where it does in the run that gives its optimiser to all."""
    both = run(different, apart, optimizer=("adamw", "sgd"), momentum=0.5)
    settings = dict(optimizer="adamw"), dict(optimizer="sgd", momentum=0.5, adam_eps=1e-8)
    alone = run(different, apart, **settings[agent])
    assert_equal(params_of(both, agent), params_of(alone, agent))
    of_both, of_alone = ([jax.tree.structure(stack.opt_state) for stack in state.stacks] for state in (both, alone))
    assert of_both[agent] == of_alone[agent] and of_both[1 - agent] != of_alone[1 - agent]


# --- inactive agents -------------------------------------------------------------------------------------------------------


def test_an_inactive_agent_changes_in_nothing():
    """Parameters, moments, schedule, skipped steps; its gradient may be broken. The other's step is that of a stack in which
    all agents are active."""
    algorithm = resolve(TrainConfig.of(learning_rate=0.1, adam_eps=1.0))
    grads = np.full((2, 3), 0.125, np.float32)
    broken = np.where(np.arange(2)[:, None] == 0, np.float32(np.nan), grads)
    step = jax.jit(jax.vmap(functools.partial(apply_gradients, algorithm=algorithm)))
    state = init_stack({"w": jnp.ones((2, 3))}, algorithm)
    one, _ = step(state, {"w": broken}, np.zeros(2), np.array([False, True]))
    both, _ = step(state, {"w": grads}, np.zeros(2))
    assert_equal(unstack((one.params, one.opt_state), 0), unstack((state.params, state.opt_state), 0))
    assert_equal(unstack((one.params, one.opt_state), 1), unstack((both.params, both.opt_state), 1))


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{"per_agent": "vmap", "num_epochs": 2}, {"algorithm": "ippo"}, pytest.param({}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_a_frozen_agent_is_played_and_stays_as_it_was(agents, changes):
    """Bit-equal, moments and schedule too, and so is its own critic. Its partner ends where it does in a run in which the
    frozen one has nothing to learn (a reward of its own that is constant)."""
    state = run(agents, frozen_agents=(0,), **changes)
    assert_equal(params_of(state, 0), untrained(agents, 0))
    assert steps_done(state.stacks[0]).tolist() == [0, 4 * changes.get("num_epochs", 1)]
    assert all((moment[0] == 0).all() for moment in jax.tree.leaves(state.stacks[0].opt_state))
    assert (unstack(state.stacks[0].running, 0).num_returns, unstack(state.stacks[0].running, 1).num_returns) == (0, 24)
    for critic in state.critics:
        assert steps_done(critic).tolist() == [0, 4] and (critic.params["value"][0] == 0).all()
    if "algorithm" not in changes:

        def reward_of_partner(a, b):
            return [(1.0, value) for value in together(a, b)]

        assert_close(params_of(state, 1), params_of(run(agents, reward_of_partner, **changes), 1))


@pytest.mark.long
def test_a_frozen_stack_has_no_optimiser_and_no_update(different, tmp_path):
    """Its partner's run is bit-equal to one in which both learn and the partner's reward does not depend on the other."""
    traced = TRACES["update"]
    state = run(different, lambda a, b: [first(y) for y in b], frozen_agents=(0,), output_dir=str(tmp_path), save_every=4)
    assert TRACES["update"] - traced <= 1
    assert state.stacks[0].opt_state == () and state.stacks[0].reference is None
    assert_equal(params_of(state, 0), untrained(different, 0))
    assert_equal(params_of(state, 1), params_of(run(different, lambda a, b: [first(y) for y in b]), 1))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["agent_0/frozen"] == 1 and "agent_0/loss" not in row and "agent_1/loss" in row for row in rows)
    assert (tmp_path / "models" / "agent_0").is_dir()


# --- one after the other ---------------------------------------------------------------------------------------------------


def test_whose_turn_it_is_follows_from_the_step():
    cfg = BASE.replace(update_order="alternating", alternate_every=2, frozen_agents=(1,), num_updates=7)
    active = [active_agents(cfg.run, 3, step).tolist() for step in range(7)]
    assert active[:5] == [[True, False, False]] * 2 + [[False, False, True]] * 2 + [[True, False, False]]
    assert active_agents(BASE.run, 3, 0) is None
    counts = [sum(mask[agent] for mask in active) for agent in range(3)]
    assert counts == [4, 0, 3] and updates_per_agent(cfg.run, 3) == 4
    for step in range(8):  # the clock of a schedule stands while it is the other agent's turn
        before = updates_before(cfg.run, 3, step)
        assert [before[agent] for agent in (0, 2)] == [sum(mask[agent] for mask in active[:step]) for agent in (0, 2)]


@pytest.mark.long
@pytest.mark.parametrize(
    "team, changes",
    [
        ("different", {"alternate_every": 2}),
        ("agents", {"algorithm": "rae"}),
        pytest.param("agents", {}, marks=pytest.mark.nightly),
    ],
)
def test_alternating_is_the_sequence_made_by_hand(request, team, changes):
    """Updates of one team, each with the other agent frozen, step by step on one state: bit-equal, also what is remembered."""
    agents, every = request.getfixturevalue(team), changes.get("alternate_every", 1)
    got = run(agents, update_order="alternating", **changes)
    cfg = BASE.replace(**changes | {"alternate_every": 1})
    setup, state = start(*make_team(agents), cfg)
    for step in range(4):
        frozen = cfg.replace(frozen_agents=(1 - step // every % 2,))
        turn = make_setup(setup.team, setup.critics, setup.algorithm, frozen)
        tasks = [ITEMS[i] for i in tasks_of(step, len(ITEMS), BASE.episodes.num_prompts, BASE.run.seed)]
        rollout = play_step(sampler_of(setup, state), turn, tasks, environment(), step)
        state, _ = update_team(turn, state, rollout_batches(turn, state, rollout))
    for stack, expected in zip(got.stacks, jax.device_get(state).stacks, strict=True):
        assert_equal(stack._replace(grads=None), expected._replace(grads=None))
    assert np.concatenate([steps_done(stack) for stack in got.stacks]).tolist() == [2, 2]


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_agent_whose_turn_it_is(agents, tmp_path):
    """4 updates, and 1 + 3 of a run that dies in between, with numbers of each agent: bit-equal. A schedule is as long as the
    agents' own updates: linear to 0, each sees 1 and 1/2 of its peak."""
    fails = []

    def reward(a, b):
        if fails and fails.pop():
            raise OSError("the second update fails")
        return together(a, b)

    common = dict(
        update_order="alternating", alternate_every=2, learning_rate=(1e-2, 3e-3), lr_schedule="linear", optimizer="lion",
        adam_eps=1e-8, save_every=1,
    )  # fmt: skip
    whole = run(agents, reward, **common, output_dir=str(tmp_path / "whole"))
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    rates = [[row.get(f"agent_{a}/learning_rate") for row in rows] for a in (0, 1)]
    assert rates[0] == [pytest.approx(1e-2), pytest.approx(5e-3), None, None]
    assert rates[1] == [None, None, pytest.approx(3e-3), pytest.approx(1.5e-3)]
    assert [row["agent_0/frozen"] for row in rows] == [0, 0, 1, 1]
    fails[:] = [True, False]
    with pytest.raises(RewardError, match="the second update fails"):
        run(agents, reward, **common, output_dir=str(tmp_path / "parts"))
    with Checkpointer(tmp_path / "parts" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [1]
    assert_equal(run(agents, reward, **common, output_dir=str(tmp_path / "parts"), resume=True), whole)


# --- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(learning_rate=(1e-2,)), r"learning_rate=\(0.01,\) has 1 values for 2 agents: give one for all, or one per agent"),
        (dict(learning_rate=(1e-2, 0.0)), r"learning_rate=\(0.01, 0.0\) is not allowed: learning_rate must be > 0"),
        (dict(optimizer="adam"), "optimizer='adam' is not allowed: optimizer must be one of"),
        (dict(optimizer=("sgd", "lion"), adam_eps=1e-8), r"agents \[0, 1\] have one architecture, .* with one optimizer"),
        (dict(optimizer="sgd"), "adam_eps=0.0001 is not allowed: adam_eps must be 1e-08 without optimizer=adamw"),
        (dict(momentum=0.5), "momentum=0.5 is not allowed: momentum must be 0.0 without optimizer=sgd"),
        (dict(frozen_agents=(2,)), r"frozen_agents=\(2,\) is not allowed: the agents of this team are 0 to 1"),
        (dict(frozen_agents=(1, 1)), r"frozen_agents=\(1, 1\) is not allowed: .* different numbers"),
        (dict(frozen_agents=(0, 1)), r"leaves none of 2 agents to learn"),
        (dict(update_order="alternating", frozen_agents=(0,)), "needs two agents that learn in turn, .* only agent 1 learns"),
        (dict(update_order="random"), "update_order='random' is not allowed"),
        (dict(alternate_every=2), "alternate_every=2 is not allowed: alternate_every must be 1 where update_order is simult"),
        (
            dict(update_order="alternating", lr_schedule="linear", warmup_updates=2),
            "in alternating order each of 2 agents learns in only 2 of num_updates=4 updates",
        ),
        (dict(algorithm="maac", learning_rate=(1e-2, 1e-3)), "the central critic of 'maac' uses: set critic_learning_rate"),
        (dict(algorithm="mappo", max_grad_norm=(1.0, 2.0)), "give one max_grad_norm for all"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(agents, changes, message):
    before = TRACES.copy()
    with pytest.raises(ValueError, match=message):
        run(agents, **changes)
    assert TRACES.copy() == before


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(learning_rate=(1e-2, 1e-3)), r"agents \[0, 1\] share one set of weights, which has one learning_rate"),
        (dict(frozen_agents=(1,)), r"share one set of weights, so they can neither .* nor be frozen apart"),
        (dict(update_order="alternating"), r"share one set of weights, so they can neither learn in turn"),
    ],
)
def test_shared_weights_are_one_agent(agents, changes, message):
    team, params = make_team(agents[:1] * 2, shared_weights=True)
    with pytest.raises(ValueError, match=message):
        train(team, environment(), ITEMS, BASE.replace(**changes), params=params)


def test_it_is_refused_before_models_are_loaded():
    """By trainers, whose model is not even there, and by experiments, of which one model for all roles is a team of one."""
    args = MAGRPOConfig(learning_rate=(1e-5, 1e-5, 1e-5))
    arguments = dict(reward_func=together, train_dataset=ITEMS, args=args)
    with pytest.raises(ValueError, match="learning_rate=.* has 3 values for 2 agents"):
        MAGRPOTrainer("no such model", num_agents=2, **arguments)
    with pytest.raises(ValueError, match="learning_rate=.* has 3 values for 2 agents"):
        StoryConfig.of(learning_rate=(1e-5, 1e-5, 1e-5))
    StoryConfig.of(frozen_agents=(1,))
    with pytest.raises(ValueError, match="the agents of this team are 0 to 0"):
        StoryConfig.of(frozen_agents=(1,), centralized=True)


def test_a_teams_numbers_are_no_stacks_settings():
    message = r"learning_rate=\(0.1, 0.2\) has a value per agent: make the settings of a stack with per_agent.settings_of_stack"
    with pytest.raises(TypeError, match=message):
        init_stack({"w": jnp.ones((2, 3))}, resolve(TrainConfig.of(learning_rate=(0.1, 0.2))))


def test_the_schedule_of_a_central_critic_is_that_of_the_run():
    """In alternating order the agents learn in half of the updates, it in all."""
    cfg = TrainConfig.of(algorithm="maac", update_order="alternating", num_updates=10, lr_schedule="linear")
    stacks = (((0, 1),), ((0,), (1,)))
    lengths = [settings_of_stack(resolve(cfg), cfg.run, members, 2)[0].num_updates for members in stacks]
    assert lengths == [10, updates_per_agent(cfg.run, 2)] == [10, 5]
