"""Tool use: an agent answers questions with tools over several turns.

Task: a question, its answer, and the names of the tools that finding it needs (`question`, `answer`, `tools`); optionally
`tolerance` (of a number) and `files` (path -> text, for tools of the sandbox). Tasks are generated (`tasks.py`) or your own.
Role: one agent. In each turn it reads the question, the tools, its calls so far and their results, and writes

    <tool_call>{"name": "calculator", "parameters": {"expression": "2 * 21"}}</tool_call>      up to 8 per message
    <answer>42</answer>                                                                        ends the episode

Calls in the forms of Qwen, Hermes, Llama 3 and Mistral are read too (`tool_calls.py`).

Team form (`ToolTeam`): a planner writes what to do next, a caller reads the plan and writes the calls.
Tools: calculator and web_search; also python_repl and file_system in `ToolSandbox`; or any registry.

Reward of a turn, the same for all agents:

    calls     + 0.3 the first time that a tool which the task needs succeeds            sum over the episode at most + 0.6
              - 0.1 per call of a tool that the task does not need
              - 0.2 per call of an unknown tool
              - 0.1 per message without an answer and without a readable call           sum over the episode at least - 1
    answer    0.5 if it is correct + 0.3 * coverage + 0.2 * (1 - turn / max_turns)

Coverage is the share of the needed tools that have succeeded, 1 if none is needed. Turns count from 0, in a team in pairs of
steps. A call that is refused (wrong parameters) or fails (division by zero) earns nothing. Since both sums are capped, no
number of calls earns more than the needed tools do. An episode without an answer ends after max_turns and earns nothing for
one. So the reward of a turn, and of an episode, is in [-1, 1.6]. With one needed tool, used before answering, and 4 turns it is
1.25; for an immediate wrong answer 0.2.

Coverage and speed are paid for wrong answers too, as the formula says, and a call needs only to succeed. So any sum and any
search that finds something, with a wrong answer in the same message, earn 0.8 if one tool is needed (1.3 with a right answer),
1.1 if two are (1.6). Look at `solved`, not only at the reward.

Prompts show an example of each tool and end with the question in the same form, because small models copy that best without a
chat template. A result is cut at 800 characters; all results together at 3000, by leaving out older ones. If a tool is not
available (the sandbox, a service), the joint action is masked.
Parts of the reward: `calls` (reward for calls), `correct`, `coverage`, `speed`. Measures: `solved` (correct, and all needed
tools succeeded), `num_calls`, `num_failed`.

Left out: judging whether an answer follows from the results (an agent that knows the answer may give it at once); tasks about
what agents write to files; repeating what Python programs read from clocks and random numbers when an episode continues in
another process (`workspace.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jmarl.config.validation import check
from jmarl.envs.tools import tasks as tool_tasks
from jmarl.envs.tools.answers import is_correct
from jmarl.envs.tools.calculator import CALCULATOR
from jmarl.envs.tools.episode import (
    Record,
    ToolEpisode,
    clean,
    cut,
    format_call,
    format_history,
    format_result,
    format_task,
    indent,
)
from jmarl.envs.tools.registry import ToolRegistry
from jmarl.envs.tools.search import Backend, search_corpus, web_search
from jmarl.envs.tools.tool_calls import (
    INSTRUCTIONS,
    SPECIAL_TOKENS,
    ParsedMessage,
    ToolCall,
    format_message,
    format_notes,
    parse_message,
)
from jmarl.envs.tools.workspace import FILE_SYSTEM, LIMITS, PYTHON_REPL, Workspace
from jmarl.envs.vector import Step, TextEnvironment
from jmarl.sandbox import Limits

NEEDED_TOOL, OTHER_TOOL, UNKNOWN_TOOL, NO_TAG = 0.3, -0.1, -0.2, -0.1
MAX_GAIN, MAX_PENALTY = 0.6, -1.0  # of the calls of an episode
CORRECT, COVERAGE, SPEED = 0.5, 0.3, 0.2
MAX_PLAN = 600  # characters
TOOLS = ("calculator", "web_search", "python_repl", "file_system")
PARTS, MEASURES = ("calls", "correct", "coverage", "speed"), ("solved", "num_calls", "num_failed")


def create_default_tool_registry(
    names: Iterable[str] = TOOLS, *, backend: Backend = search_corpus, documents: int = 3
) -> ToolRegistry:
    """Return a registry of this project's tools.

    Args:
        names: some of `TOOLS`.
        backend: used by web_search.
        documents: number of documents that web_search shows.
    """
    tools = {tool.name: tool for tool in (CALCULATOR, web_search(backend, documents), PYTHON_REPL, FILE_SYSTEM)}
    if unknown := [name for name in names if name not in tools]:
        raise ValueError(f"there is no tool {', '.join(unknown)}: choose some of {', '.join(TOOLS)}")
    return ToolRegistry([tools[name] for name in names])


class ToolUse(TextEnvironment):
    """The environment for one agent; see the module docstring.

    Args:
        registry: the tools; default: calculator and web_search, which need no sandbox.
        max_turns: after which an episode ends.
        kinds: of generated tasks (`tasks.MAKERS`); default: all that the tools can solve.
        limits: of Python sessions.
    """

    roles = ("agent",)
    special_tokens = SPECIAL_TOKENS
    reward_range = (MAX_PENALTY, MAX_GAIN + CORRECT + COVERAGE + SPEED)

    def __init__(
        self,
        registry: ToolRegistry | None = None,
        *,
        max_turns: int = 4,
        kinds: Sequence[str] | None = None,
        limits: Limits = LIMITS,
    ):
        if max_turns < 1 or max_turns % len(self.roles):
            raise ValueError(f"max_turns={max_turns}: use a positive multiple of {len(self.roles)}, the number of agents")
        self.registry = registry or create_default_tool_registry(TOOLS[:2])
        if not self.registry.names:
            raise ValueError("the registry is empty: register at least one tool")
        check("kinds", kinds, not isinstance(kinds, str), "a list of kinds of tasks")
        possible = tool_tasks.kinds_for(self.registry.names)
        if impossible := [kind for kind in kinds or () if kind not in possible]:
            raise ValueError(
                f"kinds {', '.join(impossible)} cannot be solved with these tools: choose some of {', '.join(possible)}"
            )
        self.max_turns, self.kinds, self.limits = max_turns, tuple(kinds or possible), limits

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` generated tasks of a split, the same for the same seed."""
        if not self.kinds:
            names = ", ".join(self.registry.names)
            raise ValueError(f"no generated task can be solved with {names} alone: pass your own tasks to train")
        return tool_tasks.generate_tasks(self.kinds, split, count, seed)

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find unchanged."""
        tools = [tool.signature() for tool in self.registry.tools.values()]
        return super().describe() | {"tools": tools, "kinds": list(self.kinds), "max_turns": self.max_turns}

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[ToolEpisode, list[str | None]]:
        """Return the state and the prompt of the first turn; raise ValueError for a malformed task."""
        del rng
        tool_tasks.check_task(task, self.registry.names)
        state = ToolEpisode(task)
        return state, [self.prompt(state)]

    def step(self, state: ToolEpisode, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Make the calls of the message and score it."""
        del rng
        played = self.play_message(state, messages[0])
        return played._replace(observations=[self.prompt(played.state)])

    def play_message(self, state: ToolEpisode, text: str) -> Step:
        """Make the calls of a message and score it. Return the step without what the agents read next."""
        message = parse_message(text, {name: tool.parameters for name, tool in self.registry.tools.items()})
        after, num_failed = self._make_calls(state, message)
        calls = after.gain - state.gain + after.penalty - state.penalty
        needed = set(state.task["tools"])
        coverage = len(after.used_tools) / len(needed) if needed else 1.0
        answer = self._score_answer(message.answer, state, coverage)
        solved = float(answer["correct"] > 0 and coverage == 1)
        measures = {"solved": solved, "num_calls": float(len(message.calls)), "num_failed": float(num_failed)}
        done = bool(message.answer) or after.turn >= self.max_turns
        return Step(after, [], calls + sum(answer.values()), done, measures, parts={"calls": calls} | answer)

    def _score_answer(self, answer: str, state: ToolEpisode, coverage: float) -> dict[str, float]:
        """Return the terms of the reward for an answer; zeros if there is none."""
        if not answer:
            return {"correct": 0.0, "coverage": 0.0, "speed": 0.0}
        task = state.task
        correct = is_correct(answer, task["answer"], task.get("tolerance", 0.0), task["question"])
        turn, num_turns = self._turn(state)
        return {"correct": CORRECT * correct, "coverage": COVERAGE * coverage, "speed": SPEED * (1 - turn / num_turns)}

    def _turn(self, state: ToolEpisode) -> tuple[int, int]:
        """Return the turn, from 0, and the number of turns; one turn is one step of every agent."""
        return state.turn // len(self.roles), self.max_turns // len(self.roles)

    def _make_calls(self, state: ToolEpisode, message: ParsedMessage) -> tuple[ToolEpisode, int]:
        """Make the calls of a message; return the next state and the number of calls that failed."""
        workspace = Workspace(state.task.get("files", {}), state.sandbox_calls, self.limits)
        needed, used_tools = set(state.task["tools"]), list(state.used_tools)
        records, penalty, num_failed = [], 0.0, 0
        for call in message.calls:
            if call.problem:
                ok, result = False, f"error: {call.problem}"
            else:
                ok, result = self.registry.call(call.name, call.parameters, workspace)
                penalty += self._penalty(call, needed)
                if ok and call.name in needed and call.name not in used_tools:
                    used_tools.append(call.name)
            num_failed += not ok
            records.append(Record(format_call(call), format_result(result)))
        has_content = bool(message.answer) or not all(call.problem for call in message.calls)
        if not has_content:
            penalty += NO_TAG
        workspace.release(episode_continues=not message.answer and state.turn + 1 < self.max_turns)
        after = state._replace(
            turn=state.turn + 1,
            records=(*state.records, *records),
            used_tools=tuple(used_tools),
            gain=min(NEEDED_TOOL * len(used_tools), MAX_GAIN),
            penalty=max(state.penalty + penalty, MAX_PENALTY),
            sandbox_calls=workspace.calls,
            notes=format_notes(message, has_content),
            plan=None,
        )
        return after, num_failed

    def _penalty(self, call: ToolCall, needed: set[str]) -> float:
        if call.name not in self.registry.tools:
            return UNKNOWN_TOOL
        return 0.0 if call.name in needed else OTHER_TOOL

    # Prompts

    def prompt(self, state: ToolEpisode) -> str:
        """Return what the calling agent reads. The question comes last, right behind the examples and in their form."""
        return f"{self.tool_list()}\n{INSTRUCTIONS}\n{self.status(state)}\n\n{self.examples()}{format_task(state)}\n"

    def tool_list(self) -> str:
        """Return the signatures and descriptions of the tools."""
        tools = [f"- {tool.signature()}: {tool.description}" for tool in self.registry.tools.values()]
        return "\n".join(["You answer questions with tools:", *tools])

    def examples(self) -> str:
        """Return questions that are no tasks, with what to write. Without them a small model makes no call at all."""
        tools, lines = self.registry.tools.values(), []
        for tool in tools:
            if tool.question:
                lines.append(f"Question: {tool.question}")
            lines += [format_message([{"name": tool.name, "parameters": dict(tool.example)}], ""), ""]
        for tool in tools:
            if tool.answer:
                record = Record(f"{tool.name} {json.dumps(dict(tool.example))}", tool.answer)
                lines += [f"Question: {tool.question}", *format_history([record]), format_message([], tool.answer), ""]
        return "".join(f"{line}\n" for line in lines)

    def status(self, state: ToolEpisode) -> str:
        """Return which turn it is, and what was wrong with the last message."""
        turn, num_turns = self._turn(state)
        number = turn + 1
        last = " It is the last one: answer now." if number == num_turns else ""
        text = f"Turn {number} of {num_turns}.{last}" if number <= num_turns else "There are no turns left."
        return "\n".join([text, *state.notes])

    # Demonstrations

    def solve(self, state: ToolEpisode) -> list[str | None]:
        """Return the next message of a generated task's solution: one round of calls, at the end the answer. In the last turn
        it contains everything that is missing."""
        return [format_message(*self._next_calls(state))]

    def _next_calls(self, state: ToolEpisode) -> tuple[list[dict], str]:
        """Return the calls of the next message, and its answer or the empty text."""
        if "calls" not in state.task:
            raise ValueError(f"task {state.task!r:.80} does not say which calls solve it: only generated tasks do")
        done = {record.call for record in state.records}
        rounds = [[call for call in calls if format_call(ToolCall(**call)) not in done] for calls in state.task["calls"]]
        rounds = [calls for calls in rounds if calls]
        turn, num_turns = self._turn(state)
        last = turn == num_turns - 1
        calls = [call for calls in (rounds if last else rounds[:1]) for call in calls]
        return calls, state.task["answer"] if last or not rounds else ""

    def render(self, state: ToolEpisode) -> str:
        """Return the state as text."""
        needed, used = ", ".join(state.task["tools"]), ", ".join(state.used_tools)
        lines = [self.status(state), format_task(state), f"needed: {needed}; used: {used}"]
        return "\n".join([*lines, f"answer: {state.task['answer']}", f"calls earned {state.gain + state.penalty:.1f}"])


class ToolTeam(ToolUse):
    """A planner and a caller, for two agents.

    In every other step the planner reads the question and the results and writes a plan, cut at 600 characters. The caller then
    reads the plan with everything else and writes the message. Tags in a plan are plain text. max_turns counts the steps of
    both. The arguments are those of `ToolUse`.
    """

    roles = ("planner", "caller")

    def __init__(
        self,
        registry: ToolRegistry | None = None,
        *,
        max_turns: int = 8,
        kinds: Sequence[str] | None = None,
        limits: Limits = LIMITS,
    ):
        super().__init__(registry, max_turns=max_turns, kinds=kinds, limits=limits)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[ToolEpisode, list[str | None]]:
        """Return the state and the planner's first prompt."""
        state, _ = super().reset(task, rng)
        return state, [self.planner_prompt(state), None]

    def step(self, state: ToolEpisode, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Store the planner's plan, or make the caller's calls and score them."""
        if state.plan is None:
            after = state._replace(turn=state.turn + 1, plan=cut(clean(messages[0].strip()), MAX_PLAN))
            zeros = dict.fromkeys(PARTS, 0.0)
            return Step(after, [None, self.prompt(after)], 0.0, False, dict.fromkeys(MEASURES, 0.0), parts=zeros)
        played = self.play_message(state, messages[1])
        return played._replace(observations=[self.planner_prompt(played.state), None])

    def solve(self, state: ToolEpisode) -> list[str | None]:
        """Return the next message of the solution; for the planner the same in words."""
        calls, answer = self._next_calls(state)
        if state.plan is not None:
            return [None, format_message(calls, answer)]
        sentences = [f"Call {call['name']} with {json.dumps(call['parameters'], ensure_ascii=False)}." for call in calls]
        if answer:
            sentences.append(f"The answer is {answer}.")
        return [" ".join(sentences), None]

    def planner_prompt(self, state: ToolEpisode) -> str:
        """Return what the planner reads."""
        return (
            f"{self.tool_list()}\nYou plan, and another agent makes the calls and answers: it reads what you write now. Say in "
            "one or two sentences which call to make next, with what, or what the answer is.\n"
            f"{self.status(state)}\n\n{format_task(state)}\nPlan:"
        )

    def prompt(self, state: ToolEpisode) -> str:
        """Return what the caller reads: the plan comes last, behind the question."""
        return f"{super().prompt(state)}Plan for this turn:\n{indent(state.plan or '(nothing)')}\n"


class ToolSandbox(ToolUse):
    """`ToolUse` with all four tools by default. The sandbox starts at the first call that needs it."""

    def __init__(
        self,
        registry: ToolRegistry | None = None,
        *,
        max_turns: int = 4,
        kinds: Sequence[str] | None = None,
        limits: Limits = LIMITS,
    ):
        super().__init__(registry or create_default_tool_registry(), max_turns=max_turns, kinds=kinds, limits=limits)


ToolUseEnvironment = ToolUse  # MRLM's name
