"""Code completion: a team fills in the methods of one class (ClassEval, arXiv 2308.01861).

Task: an item with the skeleton of a class (every method with its description, none with its body) and hidden unittest classes.
Data: ClassEval from the hub or a file; about a fifth of its classes are `eval`.
Roles: every agent reads the whole skeleton and is asked for some of its methods:

    arguments    agent 0 writes the methods that take only `self`; the other agents share the rest in turn
    alternate    the agents take the methods in turn
    self_select  nobody is asked for a particular method: each agent writes what it chooses

Reward of a joint action, the same for all agents, from 0 to 6:

    2 (methods with a valid snippet) / (methods)  +  4 (tests passed) / (tests)
    - (methods that more than one agent wrote) / (methods)

A snippet is valid if it parses, has the name of the method, and has a body that does something. The class is assembled from the
given constructor, one snippet per method, and the other methods that agents added; imports come first. If several agents wrote
the same method, a hash of the task and the completions picks one, so that the choice is random but reproducible. A method that
takes neither `self` nor `cls` becomes static. If the result is no valid program, the reward is 0.

Columns: `reward/snippets`, `reward/tests`, `reward/overlap`, `measures/solved`, `measures/limited`. Turns and feedback are
those of `generation.py`. Left out: functions outside the class, and showing tests in feedback.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from jmarl.envs.code.classes import MergedClass, merge
from jmarl.envs.code.data import load_items
from jmarl.envs.code.generation import CodeEpisode, CodeGeneration
from jmarl.envs.code.scoring import CodeScore, add_test_problem, passed_share
from jmarl.envs.data import split_rows
from jmarl.envs.rewards import Processor
from jmarl.sandbox import ExecutionResult, Limits, Sandbox, Tests, unittests

PARTITIONS = ("arguments", "alternate", "self_select")
SNIPPETS, TESTS, OVERLAP = 2.0, 4.0, -1.0


def partition_methods(methods: Sequence[dict], partition: str, num_agents: int) -> list[list[str]]:
    """Return the names of the methods that each agent is asked for [N]."""
    names = [method["name"] for method in methods]
    if partition == "self_select" or num_agents == 1:
        return [list(names) for _ in range(num_agents)]
    parts: list[list[str]] = [[] for _ in range(num_agents)]
    num_shared = 0  # methods shared out so far among the agents other than 0
    for i, method in enumerate(methods):
        if partition == "alternate":
            agent = i % num_agents
        elif method["only_self"]:
            agent = 0
        else:
            agent = 1 + num_shared % (num_agents - 1)
            num_shared += 1
        parts[agent].append(method["name"])
    return parts


class ClassEval:
    """Generator of tasks: the classes of ClassEval.

    Args:
        path: JSON Lines file to read instead of the hub.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = path

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` items of a split in random order."""
        items = split_rows(load_items("classeval", path=self.path), split, key=lambda item: item["task_id"])
        return random.Random(f"{seed} {split}").sample(items, min(count, len(items)))


class CodeCompletion(CodeGeneration):
    """The ClassEval environment; see the module docstring.

    Args:
        num_agents: agents that write code.
        partition: one of `PARTITIONS`, described in the module docstring.
        data_path: JSON Lines file to read instead of the hub.
        feedback, expert, processor, limits, sandbox: as in `CodeGeneration`.
    """

    def __init__(
        self,
        num_agents: int = 2,
        *,
        partition: str = "arguments",
        data_path: str | Path | None = None,
        feedback: str = "level_feedback",
        expert: Callable[[str], str] | None = None,
        processor: Processor | None = None,
        limits: Limits | None = None,
        sandbox: Sandbox | None = None,
    ):
        if partition not in PARTITIONS:
            raise ValueError(f"partition={partition!r}: choose {', '.join(PARTITIONS)}")
        super().__init__(
            num_agents,
            feedback=feedback,
            expert=expert,
            processor=processor,
            limits=limits,
            sandbox=sandbox,
            generator=ClassEval(data_path),
        )
        self.partition = partition
        self.reward_range = (0.0, SNIPPETS + TESTS)

    def tests(self, item: dict) -> Tests:
        """Return the hidden tests of an item; raise ValueError for a malformed item."""
        missing = [name for name in ("prompt", "test", "constructor") if not str(item.get(name) or "").strip()]
        if not item.get("methods"):
            missing.append("methods")
        if missing:
            name = item.get("task_id", item)
            raise ValueError(f"item {name!r:.80} has no {', '.join(missing)}: load ClassEval with load_items('classeval')")
        return unittests(item["test"], item["imports"])

    def code_of(self, completion: str) -> str:
        """Return the whole completion: `merge` looks for methods anywhere in it."""
        return completion.encode("utf-8", "backslashreplace").decode()

    def program(self, codes: Sequence[str], item: dict) -> str:
        """Return the class of all agents together; empty if it is no valid program."""
        return merge(codes, item).program

    def scores(self, items: Sequence[dict], codes: Sequence[Sequence[str]]) -> list[CodeScore]:
        """Return the scores of completions [B][N]. All valid programs run side by side."""
        classes = [merge(texts, item) for item, texts in zip(items, codes, strict=True)]
        runnable = [i for i, merged in enumerate(classes) if merged.program]
        programs = [classes[i].program for i in runnable]
        results = self.sandbox.run_many(programs, [self.tests(items[i]) for i in runnable], self.limits)
        result_at: dict[int, ExecutionResult] = dict(zip(runnable, results, strict=True))
        return [score_class(classes[i], len(item["methods"]), result_at.get(i)) for i, item in enumerate(items)]

    def levels(self, state: CodeEpisode) -> dict[str, bool]:
        """Return which levels the last turn's methods have passed, for `level_passed`."""
        merged = merge(state.codes, state.item)
        solved = state.score is not None and state.score.solved
        complete = merged.num_valid == len(state.item["methods"])
        return {"all methods": complete, "syntax": bool(merged.program), "tests": solved}

    def first_prompts(self, item: dict) -> list[str]:
        """Return the prompts of the first turn [N]."""
        prompts = []
        for names in partition_methods(item["methods"], self.partition, self.num_agents):
            part = f"the methods {', '.join(names)}" if names else "no method: leave them to the others"
            if self.partition == "self_select" and self.num_agents > 1:
                part = "the methods that you choose; what several of you write counts against you"
            others_write = " Other programmers write the rest." if self.num_agents > 1 else ""
            prompts.append(
                f"Complete this class:\n\n{item['prompt']}\n\nWrite {part}.{others_write} "
                "Answer with the code of the methods only."
            )
        return prompts


def score_class(merged: MergedClass, num_methods: int, result: ExecutionResult | None) -> CodeScore:
    """Return the reward in its parts; all are 0 without a valid program."""
    if not merged.program:
        return CodeScore({"snippets": 0.0, "tests": 0.0, "overlap": 0.0}, ("the methods make no valid class",), result)
    parts = {
        "snippets": SNIPPETS * merged.num_valid / num_methods,
        "tests": TESTS * passed_share(result),
        "overlap": OVERLAP * merged.num_overlaps / num_methods,
    }
    problems = []
    if merged.num_valid < num_methods:
        problems.append(f"{num_methods - merged.num_valid} of {num_methods} methods are missing")
    if merged.num_overlaps:
        problems.append(f"{merged.num_overlaps} methods were written more than once")
    return CodeScore(parts, add_test_problem(tuple(problems), result), result)
