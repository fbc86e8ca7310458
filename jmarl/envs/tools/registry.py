"""Tools of an agent: what they are called, what they take, and how they are called.

A tool is a function with a JSON schema of its parameters. It returns a text; what is wrong with a call it says by `ToolError`,
for the agent to read. A service that cannot be reached raises `base.Unanswered`, which masks the joint action. Any other
error is a fault of the tool, and ends the run.

    def weather(town): return f"rain in {town}"

    registry = ToolRegistry([Tool("weather", "says the weather", {
        "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"], "additionalProperties": False,
    }, weather, {"town": "Oslo"})])
    registry.call("weather", {"town": "Oslo"})    # Outcome(ok=True, text="rain in Oslo")
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jsonschema
from jsonschema.exceptions import best_match

MAX_MESSAGE = 200  # characters of what a schema says


class ToolError(ValueError):
    """What is wrong with a call, for the agent that made it."""


class Tool(NamedTuple):
    """A function that agents can call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type object
    run: Callable[..., str]  # takes the parameters by name; before them the `Workspace`, if it needs one
    example: Mapping[str, Any]  # parameters of a call, for the prompt
    question: str = ""  # that the example is a good call for
    answer: str = ""  # to that question; also what the call returns
    sandboxed: bool = False  # whether it needs the workspace: a Python session and files in the sandbox

    def signature(self) -> str:
        """As in `file_system(action: read|write|list, path: string, text: string, optional)`."""
        required = self.parameters.get("required", ())
        parts = []
        for name, schema in self.parameters.get("properties", {}).items():
            kind = "|".join(map(str, schema["enum"])) if "enum" in schema else schema.get("type", "any")
            parts.append(f"{name}: {kind}" + ("" if name in required else ", optional"))
        return f"{self.name}({', '.join(parts)})"


class Outcome(NamedTuple):
    """Of a call."""

    ok: bool
    text: str


class ToolRegistry:
    """The tools that agents have, by their names."""

    def __init__(self, tools: Iterable[Tool] = ()):
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Add a tool; its schema and its example have to be right."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", tool.name):
            raise ValueError(f"tool name {tool.name!r}: use letters, digits and _")
        if tool.name in self.tools:
            raise ValueError(f"there is a tool {tool.name!r} already: {', '.join(self.tools)}")
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        if problem := problem_of(tool, tool.example):
            raise ValueError(f"the example of tool {tool.name!r} does not fit its parameters: {problem}")
        self.tools[tool.name] = tool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tools)

    def call(self, name: str, parameters: Any, workspace: Any = None) -> Outcome:
        """Check a call and make it. workspace: of tools that need one."""
        if name not in self.tools:
            near = difflib.get_close_matches(name[:50], self.tools, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            return Outcome(False, f"error: there is no tool {name[:50]!r}: {meant}there are {', '.join(self.tools)}")
        tool = self.tools[name]
        if problem := problem_of(tool, parameters):
            return Outcome(False, f"error: {problem}. Write {tool.signature()}, as in {json.dumps(dict(tool.example))}")
        try:
            text = tool.run(workspace, **parameters) if tool.sandboxed else tool.run(**parameters)
        except ToolError as error:
            return Outcome(False, f"error: {error}")
        if not isinstance(text, str):
            raise TypeError(f"tool {name!r} returned {type(text).__name__}: return a text")
        return Outcome(True, text)


def problem_of(tool: Tool, parameters: Any) -> str:
    """What is wrong with a call's parameters by their schema; empty if nothing is."""
    error = best_match(jsonschema.Draft202012Validator(tool.parameters).iter_errors(parameters))
    if error is None:
        return ""
    where = ".".join(map(str, error.absolute_path))
    message = error.message  # begins with the value, and ends with what is wrong with it
    if len(message) > MAX_MESSAGE:
        message = f"{message[:50]} … {message[50 - MAX_MESSAGE :]}"
    return f"{where}: {message}" if where else message
