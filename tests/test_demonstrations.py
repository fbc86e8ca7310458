"""What an environment's own solver shows, and agents that imitate it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.demonstrations import demonstrate, imitate
from jmarl.envs import ENVIRONMENTS, make
from jmarl.envs.grid import GridPlanning
from jmarl.envs.tool_use import ToolTeam, ToolUse
from jmarl.evaluate import evaluate, numbers
from jmarl.lockstep import LockStep, Step, TextEnvironment
from jmarl.team import make_team

SOLVED = {  # what an episode of the solver earns: sum of all agents' rewards, and turns
    "grid": (1.0, 1), "sudoku": (1.0, 1), "str_build": (2.0, 1), "house_build": (2.0, 1), "function_calling": (1.1, 1),
    "math": (1.0, 1), "math_verifier": (2.0, 2),
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
    """A turn for each round of calls and one for the answer, where there are so many turns; else the answer is in the last."""
    for rounds in (1, 2, 4):
        env = make_env(max_turns=most * rounds)
        for task in env.tasks("train", 40):
            total, step = solver_plays(env, task)
            turns = min(len(task["calls"]), rounds - 1)
            assert step.info["solved"] == 1.0
            assert total == pytest.approx(0.3 * len(task["tools"]) + 0.5 + 0.3 + 0.2 * (1 - turns / rounds))


def test_a_question_of_ones_own_has_no_solver():
    env = ToolUse()
    state, _ = env.reset({"question": "2 + 2?", "answer": "4", "tools": ["calculator"]}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="only generated tasks do"):
        env.solve(state)


def test_demonstrations_are_what_each_agent_reads_and_writes():
    env = Parts()
    first, second = demonstrate(env, env.tasks(count=2))
    assert [(t.observations, t.actions) for t in first] == [(("market",), ("seven",)), (("seven",), ("river",))]
    assert [(t.observations, t.actions) for t in second] == [(("echo seven",), ("seven",)), (("echo river",), ("river",))]
    planner = make("math_planner")
    none, solver = demonstrate(planner, planner.tasks(count=3))
    assert none == [] and len(solver) == 3 and all(one.actions[0].startswith("Answer: ") for one in solver)


def test_slips_show_the_others_what_to_make_of_a_mistake():
    """A verifier is shown wrong answers, and its solver a second turn; what is shown is right all the same."""
    env = make("math_verifier")
    tasks = env.tasks(count=200)
    verdicts = {slips: [one.actions[0] for one in demonstrate(env, tasks, slips)[1]] for slips in (0.0, 0.5)}
    assert set(verdicts[0.0]) == {"CORRECT"} and 60 < verdicts[0.5].count("WRONG") < 140
    solver, _ = demonstrate(env, tasks, 0.5)
    answers = {f"Answer: {task['answer']}{task['unit']}" for task in tasks}
    assert len(solver) > 250 and {one.actions[0] for one in solver} == answers
    assert demonstrate(env, tasks, 0.5) == demonstrate(env, tasks, 0.5) != demonstrate(env, tasks, 0.5, seed=1)


def test_all_that_have_no_solver_say_so():
    without = [name for name in ENVIRONMENTS if type(make(name)).solve is TextEnvironment.solve]
    assert set(without) == {"story", "tldr", "arxiv", "debate", "debate_scripted"}
    env = make("story")
    with pytest.raises(NotImplementedError, match="Story.* has no solver of its own: override solve"):
        demonstrate(env, env.tasks(count=1))


@pytest.fixture(scope="module")
def pair(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(max_positions=512), tiny_tokenizer, seed) for seed in range(2)]


def test_agents_that_imitate_solve_what_they_were_shown(pair, tmp_path):
    env = Parts()
    cfg = TrainConfig(algorithm="sft", num_updates=60, learning_rate=1e-2, batch_size=4, progress=False)
    how = TrainConfig(num_turns=2, branching="chain", max_new_tokens=6, eval_temperature=0.0, eval_generations=1)
    agents = imitate(pair, env, env.tasks(count=4), cfg)
    solved = [numbers(evaluate(*make_team(of), env.tasks(count=4), LockStep(env), how))["eval/reward"] for of in (pair, agents)]
    assert solved == [0.0, 1.0]


def test_an_agent_without_demonstrations_stays_as_it_was(pair, tmp_path):
    env = make("math_planner")
    cfg = TrainConfig(algorithm="sft", num_updates=1, batch_size=2, progress=False, output_dir=str(tmp_path))
    planner, solver = imitate(pair, env, env.tasks(count=2), cfg)
    assert planner is pair[0] and [path.name for path in tmp_path.iterdir()] == ["agent_1"]
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (solver.params, pair[1].params)), strict=True))


def test_as_many_agents_as_the_environment_has(pair):
    with pytest.raises(ValueError, match="GridPlanning has 3 agents, and 2 were given"):
        imitate(pair, GridPlanning(3), [], TrainConfig(algorithm="sft"))
