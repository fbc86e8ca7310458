"""Environments of one episode: in lock-step, in processes, in mixtures, with MRLM's classes, with agents that act in turns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import Episodes, Sampling, TrainConfig
from jmarl.envs import base, make
from jmarl.envs.base import Step, TextEnvironment, Unanswered
from jmarl.envs.messages import Message, Observation, Reward, SimulatedAdapter, SimulatedEnvironment
from jmarl.envs.mixture import Mixture
from jmarl.envs.pool import Pool
from jmarl.envs.rewards import RewardProcessors
from jmarl.envs.vector import LockStep
from jmarl.logs.rollout_log import rollout_metrics
from jmarl.randomness import Randomness
from jmarl.rl import advantages
from jmarl.rl.returns import discounted
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import play
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team

SETTINGS = Sampling(max_new_tokens=4)


class Unpicklable(Exception):
    """Cannot be pickled, because `pickle` passes one argument to its constructor."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


ERRORS = (
    ("bug", KeyError, "a mistake"),
    ("timeout", TimeoutError, "of its own"),
    ("unpicklable error", RuntimeError, "Unpicklable: 1 and 2"),
    ("exit", RuntimeError, r"exit\(0\) was called in Troubled.step"),
    ("unpicklable state", Exception, "[Pp]ickle"),
)


INVALID_STEPS = {
    "three": (None, ["again"], 0.5),
    "gymnasium": ({"a": "again"}, 0.5, False, {}),
    "numbers": Step(None, [1], 0.5, False),
    "nobody": Step(None, [None], 0.5, False),
}


class Troubled(TextEnvironment):
    """Fails in the way that its message says."""

    reward_range = (0.0, 1.0)

    def reset(self, task, rng):
        if task.get("lost"):
            raise Unanswered("no judge")
        return {"drawn": rng.random()}, ["go"]

    def step(self, state, messages, rng):
        message = messages[0]
        if message == "sleep":
            time.sleep(600)  # longer than any bound below
        if message == "die":
            os._exit(3)
        if message == "unanswered":
            raise Unanswered("the judge does not answer")
        if message == "bug":
            raise KeyError("a mistake")
        if message == "timeout":
            raise TimeoutError("of its own")
        if message == "unpicklable error":
            raise Unpicklable(1, 2)
        if message == "exit":
            raise SystemExit(0)
        if message == "unpicklable state":
            return Step(lambda: 0, ["again"], 0.5, False)
        if message in ("no reward", "no number"):
            return Step(
                state, ["again"], None if message == "no reward" else 0.5, True, {} if message == "no reward" else {"n": None}
            )
        if message in INVALID_STEPS:
            return INVALID_STEPS[message]
        if message == "once" and not os.path.exists(os.environ["TROUBLED_FILE"]):
            open(os.environ["TROUBLED_FILE"], "w").close()
            os._exit(4)
        return Step(state, ["again"], 7.0 if message == "large" else 0.5, True, {"drawn": state["drawn"], "more": rng.random()})


class Count(SimulatedEnvironment):
    """Keeps its state in the object, as MRLM's environments do."""

    reward_range = (0.0, 1.0)
    max_turns = 3

    def reset(self):
        self.texts, self.number = [], int(self.rng.integers(1000))
        return Observation([Message("system", "Count."), Message("user", f"From {self.number}.")])

    def step(self, action):
        self.texts.append(action.content)
        return Observation([Message("user", str(len(self.texts)))], done=len(self.texts) == 3), Reward(
            0.5, {"n": len(self.texts)}
        )


class Relay(TextEnvironment):
    """Agents act in turns: the first, the second, then both. Agent a earns a + 1 in every step, whoever acts."""

    roles, reward_range, max_turns = ("a", "b"), (1.0, 2.0), 3

    def tasks(self, split="train", count=100, seed=0):
        return [{"id": i} for i in range(count)]

    def reset(self, task, rng):
        return 0, ["you first", None]

    def step(self, state, messages, rng):
        assert [bool(m) for m in messages] == [[True, False], [False, True], [True, True]][state] or "" in messages
        idle = [1, 0, None][state]
        assert idle is None or messages[idle] == "", "an agent that does not act has no message"
        return Step(state + 1, [[None, "now you"], ["both", "both"], ["", ""]][state], [1.0, 2.0], state == 2)


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
        assert re.fullmatch(r"defined in .*test_vector\.py, line \d+", definition)
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
                assert re.match(r"in .*test_vector\.py, line \d+, in step", raised.value.__notes__[0])
        local = first_answer(Troubled(), ["fine"] * 6)
        assert answer.result.measures["more"][[0, 3, 5]].tolist() == local.result.measures["more"][[0, 3, 5]].tolist()


@pytest.mark.slow
def test_equal_trajectories_in_the_pool_and_in_process():
    """Also for a `SimulatedEnvironment`, whose states are objects."""
    for env, words in ((make("sudoku"), "1 2 3 4 A B"), (make("grid"), "up left down"), (Count(), "1")):
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
def test_an_episode_that_cannot_begin_is_masked_and_counted(tiny_pair):
    """The other episodes are played and trained on. If no episode can begin, that is an error."""
    team, params = make_team(tiny_pair[:1])
    tasks = [{"id": 0}, {"lost": 1}, {"id": 2}]
    rollout = play(
        partial(sample_team, team, params),
        team,
        tasks,
        LockStep(Troubled()),
        SETTINGS,
        Episodes(),
        2,
        Randomness(seed=0, step=0),
    ).turns[0]
    assert np.isnan(rollout.rewards).any(-1).tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert rollout.invalid == 2 and rollout.acts.tolist() == [[True, False, True]] and rollout.fault.endswith("no judge")
    cfg = TrainConfig.of(num_updates=1, num_prompts=3, num_generations=2, max_new_tokens=3, progress=False)
    with pytest.warns(UserWarning, match="2 of 6 joint actions have no valid reward; no judge"):
        assert train(team, Troubled(), tasks, cfg, params=params).rewards == [0.5]


WORKERS = """
import os, signal, sys, time
from jmarl.envs.pool import Pool
from tests.envs.test_vector import Troubled

if __name__ == "__main__":
    with Pool(Troubled(), workers=2, timeout=2, retries=1, start_timeout=40) as pool:
        states = [state for state, _ in pool.reset([{}] * 4, range(4))]
        for name, wait in (("SIGKILL", 0.5), ("SIGKILL", 0.0), ("SIGSTOP", 0.5)):
            for count in (1, 2):
                workers = list(pool._pool._pool_manager.worker_manager.workers)
                for worker in workers[:count]:
                    os.kill(worker, getattr(signal, name))
                time.sleep(wait)
                print(name, count, [type(step).__name__ for step in pool.step(states, [["fine"]] * 4, range(4))])
        left = set(pool._pool._pool_manager.worker_manager.workers)
    print("left", [pid for pid in left if os.path.exists(f"/proc/{pid}")])
"""


@pytest.mark.slow
def test_processes_that_die_or_stop_between_two_calls_are_restarted(tmp_path):
    """One of two processes or both; the pool may or may not have noticed."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    root = Path(__file__).resolve().parents[2]
    command, env = [sys.executable, str(script)], os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200)
    steps = [
        f"{name} {count} ['Step', 'Step', 'Step', 'Step']" for name in ("SIGKILL", "SIGKILL", "SIGSTOP") for count in (1, 2)
    ]
    assert done.stdout.splitlines() == [*steps, "left []"], done.stderr


@pytest.mark.slow
def test_too_many_batches_without_any_answer_raise():
    """The first such batches are masked, so that a run survives the restart of a server."""
    with Pool(Troubled(), workers=2, timeout=30, retries=0) as pool:
        for messages in (["fine", "die"], ["die", "die"], ["die", "die"], ["fine", "die"], ["die", "die"], ["die", "die"]):
            assert first_answer(pool, messages).result.invalid.tolist() == [text == "die" for text in messages]
        states = [{"drawn": 0.5}] * 2
        with pytest.raises(RuntimeError, match=r"3 batches in a row had no answer from any of 2 processes: Troubled lost its"):
            for _ in range(3):
                pool.step(states, [["die"]] * 2, [0, 1])


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


@pytest.mark.long
def test_a_team_trains_on_a_mixture_of_a_mixture(tiny_pair):
    team, params = make_team(tiny_pair)
    inner = Mixture({"grid": make("grid", brief=True), "sudoku": make("sudoku", brief=True)})
    both = Mixture({"games": inner, "relay": Relay()}, {"games": 2, "relay": 1})
    options = dict(num_updates=1, num_prompts=6, num_generations=2, max_new_tokens=3, num_turns=3, branching="chain")
    result = train(team, both, both.tasks("train", 6), TrainConfig.of(**options, progress=False), params=params)
    assert len(result.rewards) == 1 and np.isfinite(result.rewards[0])


def test_invalid_mixtures_and_tasks_are_refused():
    with pytest.raises(ValueError, match="teams of one size"):
        Mixture({"a": make("grid"), "b": make("grid", num_agents=3)})
    with pytest.raises(ValueError, match="give a number above 0 for each of a"):
        Mixture({"a": make("grid")}, {"a": 0})
    with pytest.raises(ValueError, match=r"belongs to no environment of this mixture: give environment \(a\)"):
        Mixture({"a": make("grid")}).reset([{"environment": "b", "task": {}}], np.random.default_rng(0))


@pytest.mark.parametrize(
    "observed, reward, match",
    [
        (Observation([]), Reward(0.0), "Pair returned Observation.*: return a list of 2 observations"),
        (["x", "y"], Reward(0.0), r"Pair returned \['x', 'y'\]"),
        ([None, None], 0.5, "Pair.step returned .*: return observation"),
        ([None, None], Reward(0.5), "in Pair no agent acts in the next step"),
    ],
)
def test_invalid_results_of_a_simulated_environment_are_named(observed, reward, match):
    class Pair(SimulatedEnvironment):
        roles = ("a", "b")

        def reset(self):
            return [Observation([Message("user", "go")]), None]

        def step(self, actions):
            return observed, reward

    lock = LockStep(Pair())
    states, _ = lock.reset([{}], np.random.default_rng(0))
    with pytest.raises((TypeError, ValueError), match=match):
        lock.step(states, [["x"], [""]], np.random.default_rng(0))


@pytest.mark.long
def test_a_simulated_environment_is_trained_on_copies(tiny_pair):
    """The states of episodes are copies of the object. What `reset` draws depends on the task alone."""
    team, params = make_team(tiny_pair[:1])
    env = Count()
    lock = LockStep(env)
    tasks = lock.env.tasks("train", 3)
    assert not {t["seed"] for t in lock.env.tasks("train", 50)} & {t["seed"] for t in lock.env.tasks("eval", 50)}
    _, first = lock.reset(tasks, np.random.default_rng(0))
    _, second = lock.reset(tasks, np.random.default_rng(1))
    assert first == second and first[0][0].startswith("Count.\n\nFrom ")
    rollout = play(
        partial(sample_team, team, params), team, tasks, lock, SETTINGS, Episodes(num_turns=3), 2, Randomness(seed=0, step=0)
    )
    assert [len(turn.items) for turn in rollout.turns] == [3, 6, 12] and rollout.turns[1].prompts == [["1"] * 6]
    assert rollout.turns[2].measures["n"].tolist() == [3.0] * 24 and not hasattr(env, "texts")
    cfg = TrainConfig.of(num_updates=1, num_generations=2, max_new_tokens=2, num_turns=3, branching="chain", progress=False)
    assert train(team, env, tasks, cfg, params=params).rewards == [1.5]
    with pytest.raises(ValueError, match="num_turns=1, and an episode of this environment has up to 3: set num_turns=3"):
        train(team, env, tasks, TrainConfig.of(num_updates=1, max_new_tokens=2, progress=False), params=params)


class Undeclared(Count):
    """Is done after 3 steps but does not declare max_turns."""

    max_turns = None


@pytest.mark.long
def test_a_simulated_environment_without_max_turns_is_played_for_num_turns(tiny_pair):
    """Or until it is done. A truncation is a warning."""
    team, params = make_team(tiny_pair[:1])
    options = dict(num_updates=1, num_generations=2, max_new_tokens=2, branching="chain", progress=False)
    env, tasks = Undeclared(), Undeclared().tasks("train", 1)
    assert LockStep(env).max_turns == 16
    assert train(team, env, tasks, TrainConfig.of(num_turns=5, **options), params=params).rewards == [1.5]
    team, params = make_team(tiny_pair[:1])
    with pytest.warns(UserWarning, match="Undeclared: 2 episodes were not done after 2 turns and were truncated"):
        assert train(team, env, tasks, TrainConfig.of(num_turns=2, **options), params=params).rewards == [1.0]


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


@pytest.mark.parametrize(
    "name, message",
    [
        ("sudoko", "unknown environment 'sudoko': did you mean 'sudoku'"),
        ("nowhere.at_all:Class", "'nowhere.at_all:Class' cannot be imported: there is no module 'nowhere' in "),
        (
            "jmarl.envs.games.grid:Nothing",
            "'jmarl.envs.games.grid:Nothing' cannot be imported: module 'jmarl.envs.games.grid' has no 'Nothing'",
        ),
    ],
)
def test_unknown_environments_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        make(name)
    assert type(make("tests.envs.test_vector:Relay")).__name__ == "Relay"


# --- agents that act in turns --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_pair(tiny_config, tiny_tokenizer, random_agent):
    cfg = tiny_config(tie_embeddings=False)
    return [random_agent(cfg, tiny_tokenizer, seed) for seed in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("branching", ["chain", "tree"])
def test_agents_learn_only_from_turns_in_which_they_act(tiny_pair, branching):
    team, params = make_team(tiny_pair)
    episodes = Episodes(num_turns=3, branching=branching)
    rollout = play(
        partial(sample_team, team, params),
        team,
        Relay().tasks(count=2),
        LockStep(Relay()),
        SETTINGS,
        episodes,
        group=2,
        randomness=Randomness(seed=0, step=0),
    )
    first, second, third = rollout.turns
    assert first.acts.tolist() == [[True] * 2, [False] * 2] and third.acts.all()
    assert set(sum(first.texts[1], [])) == {""} and first.prompts == [["you first"] * 2, [""] * 2]
    assert not second.acts[0].any() and second.acts[1].all()
    # Returns include later steps, for agents that act: 3 steps of 1 for agent 0, then 2 of 2 for agent 1, then the last step.
    assert (rollout.returns[0][0] == 3.0).all() and np.isnan(rollout.returns[0][1]).all()
    assert np.isnan(rollout.returns[1][0]).all() and (rollout.returns[1][1] == 4.0).all()
    assert (rollout.returns[2][0] == 1.0).all() and (rollout.returns[2][1] == 2.0).all()
    row = rollout_metrics(team, rollout)
    assert "turn_0/agent_0/length" in row and "turn_0/agent_1/length" not in row
    batch = to_batches(team, rollout)[0]
    rows = np.isfinite(np.asarray(batch.rewards)).reshape(2, -1).sum(1)
    assert rows.tolist() == ([8, 8] if branching == "chain" else [4 + 16, 8 + 16])


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["magrpo", "grpo", "iac", "maac", "ippo", "remax"])
def test_algorithms_train_agents_that_act_in_turns(tiny_pair, algorithm):
    """No update is skipped, although agents are idle in some turns."""
    team, params = make_team(tiny_pair)
    options = dict(num_updates=1, num_generations=2, max_new_tokens=3, num_turns=3, branching="chain", progress=False)
    cfg = TrainConfig.of(algorithm=algorithm, learning_rate=1e-2, **options)
    result = train(team, Relay(), Relay().tasks(count=2), cfg, params=params)
    assert result.rewards == [4.5] and result.state.stacks[0].skipped.tolist() == [0, 0]


class Silent(Relay):
    """Agent 1 never acts."""

    max_turns = 1

    def step(self, state, messages, rng):
        return Step(1, ["", None], float(len(messages[0])) / 1000 + 1, True)


@pytest.mark.long
def test_an_agent_that_never_acts_does_not_change(tiny_pair):
    team, params = make_team(tiny_pair)
    before = np.array(params[0]["embed"]) if "embed" in params[0] else None
    cfg = TrainConfig.of(num_updates=2, num_generations=4, max_new_tokens=3, learning_rate=1e-2, progress=False)
    result = train(team, Silent(), Silent().tasks(count=2), cfg, params=params)
    after = np.array(result.state.stacks[0].params["embed"])
    assert before is not None and (after[1] == before[1]).all() and (after[0] != before[0]).any()


class EmptyPrompt(TextEnvironment):
    """Has an empty prompt, which a chat template turns into tokens."""

    reward_range = (0.0, 1.0)

    def reset(self, task, rng):
        return None, [""]

    def step(self, state, messages, rng):
        return Step(None, [None], 1.0, True)


@pytest.mark.long
def test_turns_with_empty_prompts_can_be_logged(tiny_pair, tmp_path):
    team, params = make_team(tiny_pair[:1])
    options = dict(num_updates=1, num_generations=2, max_new_tokens=2, chat=True, progress=False, log_every=1)
    assert train(team, EmptyPrompt(), [{}], TrainConfig.of(output_dir=str(tmp_path), **options), params=params).rewards == [1.0]


@pytest.mark.long
def test_options_that_need_all_agents_to_act_are_refused(tiny_pair):
    team, params = make_team(tiny_pair)
    episodes = Episodes(num_turns=3, history="append")
    with pytest.raises(ValueError, match="history='append' needs agents that act in every turn"):
        play(
            partial(sample_team, team, params),
            team,
            Relay().tasks(count=1),
            LockStep(Relay()),
            SETTINGS,
            episodes,
            group=2,
            randomness=Randomness(seed=0, step=0),
        )
    with pytest.raises(ValueError, match="not all agents act in the first turn"):
        train(
            team,
            Silent(),
            Silent().tasks(count=2),
            TrainConfig.of(algorithm="madpo_iter", max_new_tokens=3, num_updates=1, progress=False),
            params=params,
        )


class Pass(TextEnvironment):
    """Which agent acts second depends on the first message."""

    roles, reward_range, max_turns = ("a", "b"), (0.0, 1.0), 2

    def reset(self, task, rng):
        return None, ["begin", None]

    def step(self, state, messages, rng):
        if state is None:
            speaker = len(messages[0]) % 2
            return Step(speaker, ["go" if speaker == n else None for n in range(2)], 0.5, False)
        assert messages[1 - state] == "", "an agent that does not act has no message"
        return Step(state, [None, None], 1.0, True)


@pytest.mark.long
@pytest.mark.parametrize("row, joint", [("c3", "counterfactual"), ("remax", "aligned")])
def test_alternatives_in_which_other_agents_act_are_trained_on(tiny_pair, row, joint):
    """Counterfactual credit continues them without messages of agents that do not act there. The greedy episode is a baseline
    also for agents that do not act in it."""
    team, params = make_team(tiny_pair)
    options = dict(num_updates=1, num_prompts=2, num_generations=4, max_new_tokens=3, num_turns=2, branching="chain")
    cfg = TrainConfig.of(algorithm=row, joint_mode=joint, progress=False, **options)
    assert train(team, Pass(), [{"i": 0}, {"i": 1}], cfg, params=params).rewards == [1.5]


def test_an_attribute_env_is_no_engine_and_team_sizes_are_checked(tiny_pair):
    """An attribute `env` does not make an engine, `reset` may change its task, and the team must have the right size."""

    class Bonus(Relay):
        env = make("grid")

        def reset(self, task, rng):
            del task["id"]
            return super().reset(task, rng)

    lock, tasks = LockStep(Bonus()), Relay().tasks(count=2)
    lock.reset(tasks, np.random.default_rng(0))
    assert lock.reset(tasks, np.random.default_rng(0))[1][0] == ["you first"] * 2
    team, params = make_team(tiny_pair[:1])
    with pytest.raises(ValueError, match="prompts for 2 agents and the team has 1"):
        sample = partial(sample_team, team, params)
        play(sample, team, tasks, lock, SETTINGS, Episodes(num_turns=3), 2, Randomness(seed=0, step=0))


@pytest.mark.parametrize(
    "name, options",
    [
        ("grid", {"moves": 2}),
        ("grid", {"stop": False}),
        ("grid", {"brief": True}),
        ("sudoku", {"blanks": (1, 2)}),
        ("sudoku", {"max_turns": 5}),
    ],
)
def test_describe_depends_on_the_options(name, options):
    assert LockStep(make(name)).describe() != LockStep(make(name, **options)).describe()


@pytest.mark.long
def test_a_mixture_can_be_sampled_dynamically(tiny_pair):
    """The rounds of one step have parts of different environments."""
    team, params = make_team(tiny_pair)
    both = Mixture({"a": Scaled(), "b": Silent(), "c": make("grid", brief=True)})
    options = dict(num_prompts=1, num_generations=4, max_new_tokens=3, dynamic_sampling=3, progress=False)
    result = train(
        team, both, both.tasks("train", 9), TrainConfig.of(algorithm="grpo", num_updates=4, **options), params=params
    )
    assert len(result.rewards) == 4


def test_lambda_returns_ignore_values_of_idle_agents():
    """By hand: with lam = 0 the value of the child counts, and where it is NaN, the reward that followed."""
    rewards = [np.array([[[1.0, 1.0]]]), np.array([[[4.0, 4.0]]])]
    rollout = discounted(rewards, [np.array([0])] * 2, 1.0, [np.zeros((1, 2)), np.array([[10.0, np.nan]])], lam=0.0)
    assert rollout[0].tolist() == [[[11.0, 5.0]]]


# --- joint rewards and rewards per agent ---------------------------------------------------------------------------------


class Scaled(TextEnvironment):
    """The reward of each agent depends on its own text; that of agent 1 is scaled by -1000."""

    roles, reward_range = ("a", "b"), (-1e6, 1e6)

    def tasks(self, split="train", count=100, seed=0):
        return [{"id": i} for i in range(count)]

    def reset(self, task, rng):
        return None, ["go", "go"]

    def step(self, state, messages, rng):
        worth = [sum(map(ord, text)) % 97 / 97 for text in messages]
        return Step(None, [None, None], [worth[0], 500 - 1000 * worth[1]], True)


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out"])
def test_advantages_are_centered_per_agent(tiny_pair, estimator):
    """Advantages have mean zero in every group of every agent, whatever the scale of rewards, and similar sizes when divided by
    the std."""
    team, params = make_team(tiny_pair)
    lock = LockStep(Scaled())
    rollout = play(
        partial(sample_team, team, params), team, [{}, {"more": 1}], lock, SETTINGS, Episodes(), 6, Randomness(seed=0, step=0)
    )
    assert (rollout.returns[0][0] <= 1).all() and np.abs(rollout.returns[0][1]).max() > 10
    batch = jax.tree.map(jnp.asarray, to_batches(team, rollout)[0])
    plain, scaled = [], []
    for agent in range(2):
        estimate = partial(advantages.estimate, getattr(advantages, estimator), batch.rewards[agent], batch.groups[agent])
        plain.append(np.asarray(estimate()))
        scaled.append(np.asarray(estimate(scale="std")))
    for agent_advantages, size in zip(plain, (1.0, 1000.0), strict=True):
        assert agent_advantages.shape == (2, 6)
        np.testing.assert_allclose(agent_advantages.mean(-1), 0, atol=1e-5 * size)
    assert np.abs(plain[1]).max() > 30 * np.abs(plain[0]).max()
    assert 0.5 < np.abs(scaled[0]).max() / np.abs(scaled[1]).max() < 2


SHORT = ("num_updates=1", "num_prompts=2", "num_generations=2", "max_new_tokens=3", "progress=False")


# --- examples ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_example_of_the_base_module_runs(tiny_pair):
    """A tiny agent trains on it; and by hand: wrong twice, then right in the last of its three turns."""
    (example,) = re.findall(r"\n(    import numpy as np\n.*?)\n\nWith two", base.__doc__, re.DOTALL)
    example = textwrap.dedent(example).replace('Team.load(["a Hub id or a directory"])', "Team.of([agent])")
    example = example.replace("TrainConfig.of(num_turns", f"TrainConfig.of({', '.join(SHORT)}, num_turns")
    names: dict = {"agent": tiny_pair[0], "__name__": __name__}
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
