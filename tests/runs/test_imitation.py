"""Demonstrations by the solver of an environment, and agents that imitate them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from experiments.building import BuildingConfig
from experiments.start import start
from experiments.tools import ToolsConfig
from jmarl.config import TrainConfig
from jmarl.envs import ENVIRONMENTS, make
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.grid import GridPlanning
from jmarl.envs.math.reasoning import answer_line
from jmarl.envs.messages import Message, Observation, Reward, SimulatedAdapter, SimulatedEnvironment
from jmarl.envs.tools.tool_calls import format_message
from jmarl.envs.tools.tool_use import ToolTeam, ToolUse
from jmarl.envs.vector import LockStep, solve_once
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.preferences.encoding import encode_trajectories
from jmarl.runs.imitation import demonstrate, imitate
from jmarl.team import agents_of, make_team

SOLVED = {  # what an episode of the solver earns: sum of all agents' rewards, and turns
    "grid": (1.0, 1), "sudoku": (1.0, 1), "str_build": (2.0, 1), "house_build": (2.0, 1), "function_calling": (1.1, 1),
    "math": (1.0, 1), "math_verifier": (2.0, 2), "math_planner": (1.0, 2),
}  # fmt: skip


class Parts(TextEnvironment):
    """The first agent says the word after the one it reads, then the second the word that the first said."""

    roles, reward_range, max_turns = ("teller", "echo"), (0.0, 1.0), 2
    words = ("market", "seven", "river", "stone")

    def tasks(self, split="train", count=100, seed=0):
        return [{"number": n % 4} for n in range(count)]

    def reset(self, task, rng):
        return {"number": task["number"], "said": None}, [self.words[task["number"]], None]

    def step(self, state, messages, rng):
        if state["said"] is None:
            state["said"] = messages[0].strip()
            return Step(state, [None, f"echo {state['said']}"], 0.0, False)
        right = self.solve(state)[1] == messages[1].strip() == self.words[(state["number"] + 1) % 4]
        return Step(state, [None, None], float(right), True, {"solved": float(right)})

    def solve(self, state):
        return [self.words[(state["number"] + 1) % 4], None] if state["said"] is None else [None, state["said"]]


def solver_plays(env, task):
    """Sum of rewards, and the last step."""
    rng, total = np.random.default_rng(0), 0.0
    state, _ = env.reset(task, rng)
    for _ in range(env.max_turns):
        step = env.step(state, [text or "" for text in env.solve(state)], rng)
        state, total = step.state, total + np.asarray(step.reward)
        if step.done:
            return total, step
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize("name", sorted(SOLVED))
def test_solvers_earn_the_most(name):
    env = make(name)
    for task in env.tasks("train", 30):
        total, step = solver_plays(env, task)
        assert np.sum(total) == pytest.approx(SOLVED[name][0]) and step.info["solved"] == 1.0


@pytest.mark.parametrize("make_env, most", [(ToolUse, 1), (ToolTeam, 2)])
def test_generated_questions_are_solved_by_their_calls(make_env, most):
    """Each round of calls takes a turn, and so does the answer, unless the turns run out: then the answer is in the last."""
    for rounds in (1, 2, 4):
        env = make_env(max_turns=most * rounds)
        for task in env.tasks("train", 40):
            total, step = solver_plays(env, task)
            turns = min(len(task["calls"]), rounds - 1)
            assert step.info["solved"] == 1.0
            assert total == pytest.approx(0.3 * len(task["tools"]) + 0.5 + 0.3 + 0.2 * (1 - turns / rounds))


@pytest.mark.parametrize("make_env", [ToolUse, ToolTeam])
def test_an_answer_is_demonstrated_once_all_its_calls_were_made(make_env):
    """Even if calls of an earlier task are played instead: then the right calls are demonstrated again."""
    env = make_env(max_turns=20)
    tasks, counts = {task["question"]: task for task in env.tasks("train", 100)}, [0, 0]
    for one in demonstrate(env, list(tasks.values()), 0.3)[-1]:
        [read], [said] = one.observations, one.actions
        asked = read.split("Question: ")[-1]
        task = tasks[asked.splitlines()[0]]
        calls_made = [
            f"- {call['name']} {json.dumps(call['parameters'], ensure_ascii=False)}" in asked
            for round_calls in task["calls"]
            for call in round_calls
        ]
        assert (said == format_message([], task["answer"])) == all(calls_made)
        counts[all(calls_made)] += 1
    assert min(counts) > 60


def test_buildings_are_solved_from_the_ground_up():
    """Without a correct message, there is no demonstration."""
    env, rng = make("str_build", num_turns=2), np.random.default_rng(0)
    [task] = env.tasks(count=1)
    begun, _ = env.reset(task, rng)
    assert env.solve(env.step(begun, ["/setblock 0 0 0 stone", ""], rng).state) == [None, None] != env.solve(begun)


def test_a_user_defined_question_has_no_solver():
    env = ToolUse()
    state, _ = env.reset({"question": "2 + 2?", "answer": "4", "tools": ["calculator"]}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="only generated tasks do"):
        env.solve(state)


def test_demonstrations_are_what_each_agent_reads_and_writes():
    env = Parts()
    first, second = demonstrate(env, env.tasks(count=2))
    assert [(t.observations, t.actions) for t in first] == [(("market",), ("seven",)), (("seven",), ("river",))]
    assert [(t.observations, t.actions) for t in second] == [(("echo seven",), ("seven",)), (("echo river",), ("river",))]


def test_slips_demonstrate_answers_to_mistakes():
    """A verifier reads wrong answers, and its solver gets a second turn; the demonstrated messages are still right."""
    env = make("math_verifier")
    tasks = env.tasks(count=200)
    verdicts = {slips: [one.actions[0] for one in demonstrate(env, tasks, slips)[1]] for slips in (0.0, 0.5)}
    assert set(verdicts[0.0]) == {"CORRECT"} and 60 < verdicts[0.5].count("WRONG") < 140
    solver, _ = demonstrate(env, tasks, 0.5)
    assert len(solver) > 250 and {one.actions[0] for one in solver} == {answer_line(task) for task in tasks}
    assert demonstrate(env, tasks, 0.5) == demonstrate(env, tasks, 0.5) != demonstrate(env, tasks, 0.5, seed=1)


def test_environments_without_a_solver_raise():
    without = [name for name in ENVIRONMENTS if type(make(name)).solve is TextEnvironment.solve]
    assert set(without) == {"story", "tldr", "arxiv", "debate", "debate_scripted", "kuhn", "ipd"}
    env = make("story")
    with pytest.raises(NotImplementedError, match="Story.* has no solver of its own: override solve"):
        demonstrate(env, env.tasks(count=1))
    with pytest.raises(NotImplementedError, match="Doubling has no solver of its own"):
        demonstrate(Doubling(), [{"seed": 1}])
    with pytest.raises(TypeError, match="give the environment of one episode"):
        demonstrate(LockStep(env), env.tasks(count=1))  # type: ignore[arg-type]


class Doubling(SimulatedEnvironment):
    """An environment with the interface of MRLM, without a solver."""

    def reset(self):
        return Observation([Message("user", f"Double {self.task['seed']}.")])

    def step(self, action):
        return Observation([], done=True), Reward(float(action.content == str(2 * self.task["seed"])))


class Doubled(Doubling):
    reward_range = (0.0, 1.0)

    def solve(self):
        self.task["seed"] *= 2  # changes a copy
        return str(self.task["seed"])


class TwoDoubled(Doubled):
    roles = ("one", "other")


def test_what_solve_returns_is_checked():
    with pytest.raises(TypeError, match="TwoDoubled.solve returned '8': return a list of 2, texts or None"):
        solve_once(SimulatedAdapter(TwoDoubled()), _begun(TwoDoubled(), {"seed": 4}))


def _begun(env, task):
    env.task = task
    return env


def test_a_simulated_environment_can_be_demonstrated():
    [shown] = demonstrate(Doubled(), [{"seed": 4}, {"seed": 21}])
    assert [(one.observations, one.actions) for one in shown] == [(("Double 4.",), ("8",)), (("Double 21.",), ("42",))]
    begun = _begun(Doubled(), {"seed": 4})
    assert [solve_once(SimulatedAdapter(Doubled()), begun) for _ in range(2)] == [["8"], ["8"]]  # plays on copies


def test_answers_have_the_requested_format():
    assert answer_line({"answer": "-17, 17", "kind": "set"}) == "Answer: x = -17 or x = 17"
    assert answer_line({"answer": "x = 2, y = 5/2", "kind": "assignments"}) == "Answer: x = 2, y = 5/2"


@pytest.fixture(scope="module")
def pair(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(max_positions=512), tiny_tokenizer, seed) for seed in range(2)]


SFT = TrainConfig.of(algorithm="sft", num_updates=60, learning_rate=1e-2, batch_size=4, progress=False)
EVAL = TrainConfig.of(num_turns=2, branching="chain", max_new_tokens=6, eval_temperature=0.0, eval_generations=1)


@pytest.mark.parametrize("chat", [False, True])
def test_agents_imitate_on_the_prompts_that_they_are_trained_on(pair, chat):
    env, tasks = Parts(), Parts().tasks(count=4)
    [(prompts, lengths)] = evaluate(*make_team(pair), tasks, LockStep(env), EVAL.replace(chat=chat)).rollout.turns[0].encoded
    read = [ids[:length].tolist() for ids, length in zip(prompts[0], lengths[0], strict=True)]
    shown = encode_trajectories(make_team(pair[:1])[0], demonstrate(env, tasks)[0], chat)
    assert [coded.prompt for [coded] in shown] == read[:4]


@pytest.mark.long
def test_agents_that_imitate_solve_what_they_were_shown(pair):
    env = Parts()
    tasks = env.tasks(count=4)
    agents = imitate(pair, demonstrate(env, tasks), SFT)
    solved = [numbers(evaluate(*make_team(of), tasks, LockStep(env), EVAL))["eval/reward"] for of in (pair, agents)]
    assert solved == [0.0, 1.0]


def test_an_agent_without_demonstrations_stays_as_it_was(pair, tmp_path):
    env = Parts()
    cfg = SFT.replace(num_updates=1, output_dir=str(tmp_path))
    first, second = imitate(pair, [[], demonstrate(env, env.tasks(count=2))[1]], cfg)
    assert first is pair[0] and [path.name for path in tmp_path.iterdir()] == ["agent_1"]
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (second.params, pair[1].params)), strict=True))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(demonstrations=4, max_new_tokens=8),
            "max_new_tokens=8 is not allowed: .* at least .*, the longest demonstration",
        ),
        (dict(demonstrations=600), "demonstrations=600 is not allowed: .* at most 500, the number of tasks"),
    ],
)
def test_impossible_demonstrations_are_refused(tiny_dir, options, message):
    cfg = ToolsConfig.of(model=str(tiny_dir("llama")), held_out=0, output_dir="", **options)
    env = ToolUse()
    with pytest.raises(ValueError, match=message):
        start(cfg, env, env.tasks("train", 500), [])


@pytest.mark.long
def test_a_building_team_starts_by_imitation(tiny_dir, tmp_path, capsys):
    """All agents start from the same weights, and each imitates its own messages."""
    cfg = BuildingConfig.of(
        model=str(tiny_dir("llama", max_position_embeddings=2048)), environment="function_calling", chat=False,
        demonstrations=4,
        imitation_updates=2, imitation_batch_size=2, held_out=2, eval_generations=1, max_new_tokens=400, progress=False,
        output_dir=str(tmp_path),
    )  # fmt: skip
    env = make("function_calling")
    team, params = start(cfg, env, env.tasks("train", 4), env.tasks("eval", 2))
    first, second = (agent.params for agent in agents_of(team, params))
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (first, second)), strict=True))
    assert "held-out untrained: reward" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "imitation").iterdir()) == ["agent_0", "agent_1"]


def test_imitation_needs_demonstrations_for_each_agent(pair):
    env = GridPlanning(3)
    with pytest.raises(ValueError, match="2 agents were given, and demonstrations of 3"):
        imitate(pair, demonstrate(env, env.tasks(count=1)), TrainConfig.of(algorithm="sft"))
