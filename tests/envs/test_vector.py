"""Environments of one episode: in lock-step, in processes, in mixtures, with MRLM's classes."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from functools import partial

import numpy as np
import pytest

from jmarl.config import Episodes, TrainConfig
from jmarl.envs import base, make
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.messages import Message, Observation, Reward, SimulatedAdapter, SimulatedEnvironment
from jmarl.envs.mixture import Mixture
from jmarl.envs.pool import Pool
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import RewardProcessors, make_reward
from jmarl.envs.vector import Fault, LockStep, vectorize
from jmarl.randomness import Randomness
from jmarl.rl.returns import discounted
from jmarl.rollout.play import play
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import Team, make_team
from tests.envs.in_turns import Relay
from tests.envs.troubled import Count, Troubled, Unpicklable
from tests.house import HOUSE

ERRORS = (("bug", KeyError, "a mistake"), ("timeout", TimeoutError, "of its own"),
 ("unpicklable error", RuntimeError, "Unpicklable: 1 and 2"), ("exit", RuntimeError, r"exit\(0\) was called in Troubled.step"),
 ("unpicklable state", Exception, "[Pp]ickle"))  # fmt: skip


@pytest.fixture(scope="module")
def agent(tiny_config, tiny_tokenizer, random_agent):
    return random_agent(tiny_config(), tiny_tokenizer, 0)


def played(agent, env, tasks, **episodes):
    """Return the rollout of one agent, of three completions for each task."""
    team, params = make_team([agent])
    settings = TrainConfig.of(**HOUSE, compute_dtype="float32").sampling  # what runs make of "auto", so their programs
    randomness = Randomness(seed=0, step=0)
    return play(partial(sample_team, team, params), team, tasks, env, settings, Episodes(**episodes), 3, randomness)


def trained(agent, env, tasks, **changes):
    return train(Team.of([agent]), env, tasks, TrainConfig.of(**HOUSE | dict(num_updates=1) | changes))


def first_answer(env, messages, tasks=None, seed=0):
    """Return the answer to the first messages [B] of one agent."""
    lock, rng = LockStep(env), np.random.default_rng(seed)
    states, _ = lock.reset(tasks or [{}] * len(messages), rng)
    return lock.step(states, [messages], rng)


# --- faults, in process and in the pool ----------------------------------------------------------------------------------


def test_an_unanswered_joint_action_is_masked_and_counted():
    answer = first_answer(Troubled(), ["fine", "unanswered", "fine"])
    assert answer.result.invalid.tolist() == [False, True, False] and answer.done.all()
    assert np.isnan(answer.result.total[1]) and answer.result.num_raised == 1
    assert answer.result.faults == {1: "the judge does not answer"}
    assert np.isnan(answer.result.measures["more"][1]) and np.isfinite(answer.result.measures["more"][[0, 2]]).all()


class Sums(TextEnvironment):
    """Earns its parts, less what `lost` says."""

    def reset(self, task, rng):
        return task, ["text"]

    def step(self, state, messages, rng):
        parts = {"vowels": 0.5, "length": float(len(messages[0]))}
        reward = sum(parts.values()) - state.get("lost", 0.0)
        return Step(state, [None], reward, True, {"ratio": 9.0}, parts=parts)


def test_parts_add_up_to_the_reward_and_other_numbers_are_measures():
    result = first_answer(Sums(), ["ab", "abc"]).result
    assert result.total.tolist() == [2.5, 3.5] == sum(result.parts.values()).tolist()
    assert {name: x.tolist() for name, x in result.measures.items()} == {"ratio": [9.0, 9.0]}
    message = r"Sums returned the reward 1.5 and parts that add up to 2.5 \(vowels 0.5, length 2\): .* into info"
    with pytest.raises(ValueError, match=message):
        first_answer(Sums(), ["abc", "ab"], tasks=[{}, {"lost": 1.0}])
    scaled = LockStep(Sums(), processor=RewardProcessors.scale(10.0))
    states, _ = scaled.reset([{}], np.random.default_rng(0))
    result = scaled.step(states, [["ab"]], np.random.default_rng(0)).result
    assert result.total.tolist() == [25.0] and not result.parts
    assert {name: x.tolist() for name, x in result.measures.items()} == {
        "Sums": [2.5], "vowels": [0.5], "length": [2.0], "ratio": [9.0],
    }  # fmt: skip


def test_invalid_results_of_an_environment_are_errors():
    for message, error, match in ERRORS[:4]:
        in_process = Unpicklable if message == "unpicklable error" else error
        with pytest.raises(in_process, match="1 and 2" if in_process is Unpicklable else match):
            first_answer(Troubled(), [message])
    for message, match in (
        ("three", r"Troubled.step returned .*: return Step\(state"),
        ("gymnasium", "Troubled returned the observations 0.5: return a list with a text"),
        ("numbers", r"Troubled returned the observations \[1\]"),
        ("nobody", "in Troubled no agent acts in the next step"),
    ):
        with pytest.raises((TypeError, ValueError), match=match) as caught:
            first_answer(Troubled(), [message])
        call, definition = caught.value.__notes__
        assert call.startswith(f"Troubled.step, messages [{message!r}], state ")
        assert re.fullmatch(r"defined in .*troubled\.py, line \d+", definition)
    with pytest.raises(ValueError, match="Troubled returned the reward None: return a number, or one for each agent"):
        first_answer(Troubled(), ["no reward"])
    with pytest.raises(ValueError, match=r"Troubled returned info\['n'\] = None: return a number"):
        first_answer(Troubled(), ["no number"])
    with pytest.raises(ValueError, match=r"Troubled returned the reward 7.0, and its reward_range is \(0.0, 1.0\)"):
        first_answer(Troubled(), ["large"])
    with pytest.raises(RuntimeError, match="no episode could begin; that of task {'lost': 1}: no judge"):
        first_answer(Troubled(), ["fine"], [{"lost": 1}])
    with pytest.raises(TypeError, match="object is no TextEnvironment, so its number of agents is unknown: set num_agents"):
        LockStep(object())


@pytest.mark.slow
def test_the_pool_kills_calls_that_hang_and_repeats_lost_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUBLED_FILE", str(tmp_path / "file"))
    messages = ["fine", "sleep", "die", "once", "unanswered", "fine"]
    with Pool(Troubled(), workers=2, timeout=1.5, retries=1) as pool:
        began = time.monotonic()
        answer = first_answer(pool, messages)
        assert time.monotonic() - began < 300
        faults = answer.result.faults
        assert answer.result.invalid.tolist() == [False, True, True, False, True, False]
        assert "did not answer within 1.5 s, 2 times" in faults[1] and "lost its process (code 3), 2 times" in faults[2]
        assert faults[4] == "the judge does not answer"
        for message, error, match in ERRORS:
            with pytest.raises(error, match=match) as raised:
                first_answer(pool, ["fine", message])
            if message in ("bug", "unpicklable error"):
                assert re.match(r"in .*troubled\.py, line \d+, in step", raised.value.__notes__[0])
        local = first_answer(Troubled(), ["fine"] * 6)
        assert answer.result.measures["more"][[0, 3, 5]].tolist() == local.result.measures["more"][[0, 3, 5]].tolist()


@pytest.mark.slow
def test_equal_trajectories_in_the_pool_and_in_process():
    """Also for a `SimulatedEnvironment`, whose states are objects."""
    for env, words in ((make("sudoku"), "1 2 3 4 A B"), (Count(), "1")):
        records = []
        with Pool(env, workers=2, timeout=60) as pool:
            for engine in (env, pool):
                lock, rng = LockStep(engine), np.random.default_rng(5)
                states, prompts = lock.reset(lock.env.tasks("train", 7), rng)
                record = [prompts]
                for _ in range(lock.env.max_turns):
                    answer = lock.step(states, [[words] * len(states)] * lock.num_agents, rng)
                    record += [answer.result.total.tolist(), {k: str(v.tolist()) for k, v in answer.result.measures.items()}]
                    active = np.flatnonzero(~answer.done)
                    if not active.size:
                        break
                    states, prompts = lock.observe([answer.after[i] for i in active])
                    record.append(prompts)
                records.append(record)
        assert records[0] == records[1]


@pytest.mark.long
def test_an_episode_that_cannot_begin_is_masked_and_an_empty_prompt_is_played(agent, tmp_path):
    """The other episodes are played, trained on and logged. A chat template turns the empty prompt into tokens."""
    tasks = [{"prompt": ""}, {"lost": 1}]
    turn = played(agent, LockStep(Troubled()), tasks, chat=True).turns[0]
    assert np.isnan(turn.rewards).any(-1).tolist() == [[False] * 3, [True] * 3]
    assert turn.invalid == 3 and turn.acts.tolist() == [[True, False]] and turn.fault.endswith("no judge")
    with pytest.warns(UserWarning, match="3 of 6 joint actions have no valid reward; no judge"):
        result = trained(agent, Troubled(), tasks, chat=True, log_every=1, output_dir=str(tmp_path))
    assert result.rewards == [0.5]


@pytest.mark.slow
def test_processes_that_die_or_stop_between_two_calls_are_restarted():
    """One of two processes or both; the pool may or may not have noticed."""
    with Pool(Troubled(), workers=2, timeout=2, retries=1, start_timeout=40) as pool:
        workers = pool._pool._pool_manager.worker_manager.workers
        states = [state for state, _ in pool.reset([{}] * 4, range(4))]
        for number, count, noticed in ((signal.SIGKILL, 1, True), (signal.SIGKILL, 2, False), (signal.SIGSTOP, 2, False)):
            ended = list(workers)[:count]
            for worker in ended:
                os.kill(worker, number)
            began = time.monotonic()
            while noticed and set(ended) & set(workers) and time.monotonic() - began < 30:
                time.sleep(0.01)
            steps = pool.step(states, [["fine"]] * 4, range(4))
            assert [type(step).__name__ for step in steps] == ["Step"] * 4, (number, count)
        left = list(workers)
    assert not [pid for pid in left if os.path.exists(f"/proc/{pid}")]


@pytest.mark.slow
def test_too_many_batches_without_any_answer_raise():
    """The first such batches are masked, so that a run survives the restart of a server."""
    with Pool(Troubled(), workers=1, timeout=30, retries=0) as pool:

        def step(*texts):
            count = len(texts)
            results = pool.step([{"drawn": 0.5}] * count, [[text] for text in texts], range(count))
            return ["Fault" if isinstance(result, Fault) else "Step" for result in results]

        for texts in (("fine",), ("die",), ("die",), ("fine", "die"), ("die",), ("die",)):
            assert step(*texts) == ["Fault" if text == "die" else "Step" for text in texts]
        with pytest.raises(RuntimeError, match=r"3 batches in a row had no answer from any of 1 processes: Troubled lost its"):
            step("die")


def test_invalid_arguments_of_a_pool_are_refused():
    with pytest.raises(ValueError, match="needs workers >= 1"):
        Pool(Troubled(), workers=0)


# --- mixtures and MRLM's classes -----------------------------------------------------------------------------------------


def test_a_mixture_shares_tasks_by_weight_and_names_metrics():
    both = Mixture({"easy": make("grid", walls=0), "hard": make("grid", size=5, walls=4)}, {"easy": 1, "hard": 3})
    tasks = both.tasks("train", 30)
    assert [sum(t["environment"] == name for t in tasks) for name in ("easy", "hard")] in ([8, 22], [7, 23])
    other = Mixture(both.environments, {"hard": 3, "easy": 1})
    assert tasks == both.tasks("train", 30) == other.tasks("train", 30) and tasks != both.tasks("train", 30, seed=1)
    rng = np.random.default_rng(0)
    states, _ = both.reset(tasks, rng)
    answer = both.step(states, [["up"] * 30] * 2, rng)
    result = answer.result
    easy = np.array([t["environment"] == "easy" for t in tasks])
    assert (np.isfinite(result.measures["easy/solved"]) == easy).all()
    assert (np.isfinite(result.measures["hard/reward"]) == ~easy).all()
    np.testing.assert_array_equal(result.measures["easy/reward"][easy], result.total[easy])


def test_an_environment_in_a_mixture_plays_as_it_does_alone():
    """Prompts, rewards and later turns are the same. In the other environment only one agent acts in each turn."""
    long = make("grid", moves=1, max_turns=2, walls=0)
    both, alone = Mixture({"long": long, "sudoku": make("sudoku")}), LockStep(long)
    tasks = both.tasks("train", 8)
    long_tasks = [i for i, task in enumerate(tasks) if task["environment"] == "long"]
    states, prompts = both.reset(tasks, np.random.default_rng(0))
    own, own_prompts = alone.reset([tasks[i]["task"] for i in long_tasks], np.random.default_rng(0))
    assert [[texts[i] for i in long_tasks] for texts in prompts] == own_prompts
    assert all((prompts[1][i] is None) == (i not in long_tasks) for i in range(8))
    messages = [["right" if n == 0 else "down"] * 8 for n in range(2)]
    for _ in range(2):
        answer = both.step(states, [texts[: len(states)] for texts in messages], np.random.default_rng(1))
        own_answer = alone.step(own, [texts[: len(own)] for texts in messages], np.random.default_rng(1))
        mine = [i for i, (name, _) in enumerate(states) if name == "long"]
        np.testing.assert_array_equal(answer.result.total[mine], own_answer.result.total)
        np.testing.assert_array_equal(answer.result.measures["long/closeness"][mine], own_answer.result.measures["closeness"])
        active, own_active = np.flatnonzero(~answer.done), np.flatnonzero(~own_answer.done)
        assert [i for i in active if states[i][0] == "long"] == [mine[i] for i in own_active]
        if not own_active.size:
            break
        states, _ = both.observe([answer.after[i] for i in active])
        own, _ = alone.observe([own_answer.after[i] for i in own_active])


def test_invalid_mixtures_and_tasks_are_refused():
    with pytest.raises(ValueError, match="teams of one size"):
        Mixture({"a": make("grid"), "b": make("grid", num_agents=3)})
    with pytest.raises(ValueError, match="give a number above 0 for each of a"):
        Mixture({"a": make("grid")}, {"a": 0})
    with pytest.raises(ValueError, match=r"belongs to no environment of this mixture: give environment \(a\)"):
        Mixture({"a": make("grid")}).reset([{"environment": "b", "task": {}}], np.random.default_rng(0))


def test_a_text_in_place_of_a_list_is_not_read_as_letters():
    class Poet(TextEnvironment):
        roles = "poet"  # type: ignore[assignment]

    class Simulated(SimulatedEnvironment):
        roles = "poet"  # type: ignore[assignment]

    for make_env in (Poet, Simulated):
        with pytest.raises(ValueError, match="roles='poet' is not allowed: roles must be a list with a name for each agent"):
            LockStep(make_env())
    with pytest.raises(ValueError, match="formatters='poet' is not allowed: formatters must be a function, or a list with one"):
        RewardEnvironment(make_reward(lambda a: [1.0], num_agents=1), "poet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kinds='lookup' is not allowed: kinds must be a list"):
        make("tools", kinds="lookup")


def test_invalid_results_of_a_simulated_environment_are_named():
    class Pair(SimulatedEnvironment):
        roles = ("a", "b")

        def reset(self):
            return [Observation([Message("user", "go")]), None]

        def step(self, actions):
            return self.answer

    for Pair.answer, match in (
        ((Observation([]), Reward(0.0)), "Pair returned Observation.*: return a list of 2 observations"),
        ((["x", "y"], Reward(0.0)), r"Pair returned \['x', 'y'\]"),
        (([None, None], 0.5), "Pair.step returned .*: return observation"),
        (([None, None], Reward(0.5)), "in Pair no agent acts in the next step"),
    ):
        lock = LockStep(Pair())
        states, _ = lock.reset([{}], np.random.default_rng(0))
        with pytest.raises((TypeError, ValueError), match=match):
            lock.step(states, [["x"], [""]], np.random.default_rng(0))


class Undeclared(Count):
    """Is done after 3 steps but does not declare max_turns."""

    max_turns = None


@pytest.mark.long
def test_a_simulated_environment_is_trained_on_copies_for_its_turns(agent):
    """The states of episodes are copies of the object. What `reset` draws depends on the task alone.

    Without max_turns it is played for num_turns, or until it is done. A truncation is a warning.
    """
    env = Count()
    lock = LockStep(env)
    tasks = lock.env.tasks("train", 2)
    assert not {t["seed"] for t in lock.env.tasks("train", 50)} & {t["seed"] for t in lock.env.tasks("eval", 50)}
    _, first = lock.reset(tasks, np.random.default_rng(0))
    _, second = lock.reset(tasks, np.random.default_rng(1))
    assert first == second and first[0][0].startswith("Count the apples.\n\nFrom ")
    rollout = played(agent, lock, tasks, num_turns=3, branching="chain")
    assert [len(turn.items) for turn in rollout.turns] == [2, 6, 6] and rollout.turns[1].prompts == [["1"] * 6]
    assert rollout.turns[2].measures["n"].tolist() == [3.0] * 6 and not hasattr(env, "texts")
    assert trained(agent, env, tasks, num_turns=3, branching="chain").rewards == [1.5]
    with pytest.raises(ValueError, match="num_turns=1, and an episode of this environment has up to 3: set num_turns=3"):
        trained(agent, env, tasks)
    assert LockStep(Undeclared()).max_turns == 16
    rollout = played(agent, vectorize(Undeclared(), 5), tasks, num_turns=5, branching="chain")
    assert len(rollout.turns) == 3 and (rollout.joint_returns[0] == 1.5).all()
    with pytest.warns(UserWarning, match="Undeclared: 6 episodes were not done after 2 turns and were truncated"):
        rollout = played(agent, vectorize(Undeclared(), 2), tasks, num_turns=2, branching="chain")
    assert len(rollout.turns) == 2 and (rollout.joint_returns[0] == 1.0).all()


def test_a_truncated_episode_is_done():
    env = SimulatedAdapter(Undeclared(), max_turns=2)
    state, _ = env.reset({}, np.random.default_rng(0))
    steps = [env.step(state, ["x"], np.random.default_rng(0)) for _ in range(2)]
    assert [(step.done, step.truncated) for step in steps] == [(False, False), (True, True)]
    env = SimulatedAdapter(Count())
    state, _ = env.reset({}, np.random.default_rng(0))
    steps = [env.step(state, ["x"], np.random.default_rng(0)) for _ in range(3)]
    assert [(step.done, step.truncated) for step in steps] == [(False, False), (False, False), (True, False)]
    Undeclared.max_turns = 0
    try:
        with pytest.raises(ValueError, match="Undeclared has max_turns=0: set at least 1, or None"):
            LockStep(Undeclared())
    finally:
        Undeclared.max_turns = None


def test_unknown_environments_are_refused():
    for name, message in (
        ("sudoko", "unknown environment 'sudoko': did you mean 'sudoku'"),
        ("nowhere.at_all:Class", "'nowhere.at_all:Class' cannot be imported: there is no module 'nowhere' in "),
        ("jmarl.envs.games.grid:No", "'jmarl.envs.games.grid:No' cannot be imported: module '.*grid' has no 'No'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(name)
    assert type(make("tests.envs.in_turns:Relay")).__name__ == "Relay"


def test_an_attribute_env_is_no_engine_and_team_sizes_are_checked(agent):
    """An attribute `env` does not make an engine, `reset` may change its task, and the team must have the right size."""

    class Bonus(Relay):
        env = make("grid")

        def reset(self, task, rng):
            del task["id"]
            return super().reset(task, rng)

    lock, tasks = LockStep(Bonus()), Relay().tasks(count=2)
    lock.reset(tasks, np.random.default_rng(0))
    assert lock.reset(tasks, np.random.default_rng(0))[1][0] == ["you first"] * 2
    with pytest.raises(ValueError, match="prompts for 2 agents and the team has 1"):
        played(agent, lock, tasks, num_turns=3)


def test_describe_depends_on_the_options():
    for name, options in (
        ("grid", {"moves": 2}), ("grid", {"stop": False}), ("grid", {"brief": True}),
        ("sudoku", {"blanks": (1, 2)}), ("sudoku", {"max_turns": 5}),
    ):  # fmt: skip
        assert LockStep(make(name)).describe() != LockStep(make(name, **options)).describe(), options


def test_lambda_returns_ignore_values_of_idle_agents():
    """By hand: with lam = 0 the value of the child counts, and where it is NaN, the reward that followed."""
    rewards = [np.array([[[1.0, 1.0]]]), np.array([[[4.0, 4.0]]])]
    rollout = discounted(rewards, [np.array([0])] * 2, 1.0, [np.zeros((1, 2)), np.array([[10.0, np.nan]])], lam=0.0)
    assert rollout[0].tolist() == [[[11.0, 5.0]]]


# --- examples ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_example_of_the_base_module_runs(agent):
    """A tiny agent trains on it; and by hand: wrong twice, then right in the last of its three turns."""
    (example,) = re.findall(r"\n(    import numpy as np\n.*?)\n\nWith two", base.__doc__, re.DOTALL)
    example = textwrap.dedent(example).replace('Team.load(["a Hub id or a directory"])', "Team.of([agent])")
    example = example.replace("TrainConfig.of(num_turns", "TrainConfig.of(**HOUSE | dict(num_updates=1), num_turns")
    names: dict = {"agent": agent, "HOUSE": HOUSE, "__name__": __name__}
    exec(example, names)
    env = names["env"]
    assert not {task["number"] for task in env.tasks("train", 500)} & {task["number"] for task in env.tasks("eval", 500)}
    lock, rng, rewards = LockStep(env), np.random.default_rng(0), []
    states, prompts = lock.reset([{"number": 7}], rng)
    assert prompts == [["Guess a number below 1000."]]
    for text in ("1", "seven", " 7\n"):
        answer = lock.step(states, [[text]], rng)
        rewards.append([answer.result.total[0], answer.result.measures["solved"][0], answer.done[0]])
        if not answer.done.all():
            states, prompts = lock.observe(answer.after)
            assert prompts == [["Wrong. Guess again."]]
    assert rewards == [[0, 0, False], [0, 0, False], [1, 1, True]]
