"""MRLM's `environments.tools`; see `jmarl.envs.tools`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jmarl.envs.messages import EnvironmentMode
from jmarl.envs.options import OwnTasks
from jmarl.envs.tools.calculator import CALCULATOR
from jmarl.envs.tools.registry import Tool as Tool
from jmarl.envs.tools.registry import ToolRegistry as ToolRegistry
from jmarl.envs.tools.search import search_corpus, web_search
from jmarl.envs.tools.tool_use import ToolUse
from jmarl.envs.tools.tool_use import create_default_tool_registry as create_default_tool_registry
from jmarl.envs.tools.workspace import FILE_SYSTEM, PYTHON_REPL
from jmarl.mrlm.environments.played import PlayedByMessages, check_client
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)


@dataclass(frozen=True)
class ToolUseTask:
    """A question, its answer, and the names of the tools that it needs."""

    question: str
    required_tools: Sequence[str]
    ground_truth: str
    hints: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def task(self) -> dict[str, Any]:
        """Return the task as `ToolUse` reads it; agents do not read hints."""
        return {"question": self.question, "answer": self.ground_truth, "tools": list(self.required_tools)}


class ToolUseEnvironment(PlayedByMessages, ToolUse):
    """`ToolUse` under MRLM's name and arguments.

    Args:
        tool_registry: the tools.
        tasks: tasks of the user, of which a fifth is held out; None: generated ones.
        max_turns: after which an episode ends.
        mode: CLIENT, since environments are never trained.
        **options: other arguments of `ToolUse`.
    """

    def __init__(
        self,
        tool_registry: ToolRegistry | None = None,
        tasks: Sequence[ToolUseTask | Mapping[str, Any]] | None = None,
        max_turns: int = 4,
        mode: EnvironmentMode = EnvironmentMode.CLIENT,
        **options: Any,
    ):
        check_client(mode)
        super().__init__(tool_registry, max_turns=max_turns, **options)
        rows = [task.task() if isinstance(task, ToolUseTask) else task for task in tasks or ()]
        self.own_tasks = OwnTasks(rows) if tasks is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.own_tasks.tasks(split, count, seed) if self.own_tasks else super().tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return super().describe() | (self.own_tasks.describe() if self.own_tasks else {})


def CalculatorTool() -> Tool:
    """Return the calculator."""
    return CALCULATOR


def WebSearchTool(knowledge_base: Mapping[str, str] | None = None) -> Tool:
    """Return the search in this project's documents. knowledge_base: refused, a backend takes its place."""
    if knowledge_base is not None:
        raise ValueError("knowledge_base= is not here: give create_default_tool_registry(backend=) a function of the query")
    return web_search(search_corpus)


def PythonREPLTool() -> Tool:
    """Return the tool that runs Python in the sandbox."""
    return PYTHON_REPL


def FileSystemTool() -> Tool:
    """Return the tool for files in the sandbox."""
    return FILE_SYSTEM
