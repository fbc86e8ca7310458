"""Tools for agents: a function with a JSON schema of its parameters, and a registry that checks calls and makes them.

A tool returns a text for the agent. It raises `ToolError` if something is wrong with the call; the agent reads the message. If
a service cannot be reached, a tool raises `Unanswered`, which masks the joint action. Any other exception is a bug of the tool
and ends the run. It may be an `async def`.

    def weather(town): return f"rain in {town}"

    registry = ToolRegistry([Tool("weather", "says the weather", {
        "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"], "additionalProperties": False,
    }, weather, {"town": "Oslo"})])
    registry.call("weather", {"town": "Oslo"})    # Outcome(ok=True, text="rain in Oslo")
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jsonschema
from jsonschema.exceptions import best_match

from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.calls.copies import copied

MAX_SCHEMA_MESSAGE = 200  # characters of a message of jsonschema


class ToolError(ValueError):
    """Something is wrong with a call; the agent that made it reads the message."""


class Tool(NamedTuple):
    """A function that agents can call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of type object
    run: Callable[..., str]  # takes the parameters by name; a sandboxed tool takes the `Workspace` before them
    example: Mapping[str, Any]  # parameters of a call, for the prompt
    question: str = ""  # a question for which the example is a good call
    answer: str = ""  # to that question; also what the call returns
    sandboxed: bool = False  # whether it needs a workspace: a Python session and files in the sandbox

    def signature(self) -> str:
        """Return a line such as `file_system(action: read|write|list, path: string, text: string, optional)`."""
        required = self.parameters.get("required", ())
        parts = []
        for name, schema in self.parameters.get("properties", {}).items():
            kind = "|".join(map(str, schema["enum"])) if "enum" in schema else schema.get("type", "any")
            parts.append(f"{name}: {kind}" + ("" if name in required else ", optional"))
        return f"{self.name}({', '.join(parts)})"


class Outcome(NamedTuple):
    """What the agent gets for a call: a result, or (ok=False) an error message."""

    ok: bool
    text: str


class ToolRegistry:
    """The tools of an environment, by name."""

    def __init__(self, tools: Iterable[Tool] = ()):
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Add a tool; raise an error for a bad or used name, a bad schema, or an example that does not fit the schema."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", tool.name):
            raise ValueError(f"tool name {tool.name!r}: use letters, digits and _, and no digit first")
        if tool.name in self.tools:
            raise ValueError(f"there is a tool {tool.name!r} already: choose another name than {', '.join(self.tools)}")
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        if problem := schema_problem(tool, tool.example):
            raise ValueError(f"the example of tool {tool.name!r} does not fit its parameters: {problem}")
        self.tools[tool.name] = tool

    def get(self, name: str) -> Tool | None:
        """Return a tool by name, or None."""
        return self.tools.get(name)

    def list_tools(self) -> list[Tool]:
        """Return the tools, in the order in which they were registered."""
        return list(self.tools.values())

    def get_schemas(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool, as function calling has them."""
        return [{"name": x.name, "description": x.description, "parameters": dict(x.parameters)} for x in self.list_tools()]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in the order in which they were registered."""
        return tuple(self.tools)

    def call(self, name: str, parameters: Any, workspace: Any = None) -> Outcome:
        """Check a call and make it. workspace: the `Workspace` of the episode, for sandboxed tools."""
        if name not in self.tools:
            nearest = difflib.get_close_matches(name[:50], self.tools, 1)
            suggestion = f"did you mean {nearest[0]}? " if nearest else ""
            return Outcome(False, f"error: there is no tool {name[:50]!r}: {suggestion}there are {', '.join(self.tools)}")
        tool = self.tools[name]
        if problem := schema_problem(tool, parameters):
            return Outcome(False, f"error: {problem}. Write {tool.signature()}, as in {json.dumps(dict(tool.example))}")
        try:
            own = copied(parameters)  # what the tool does to them changes no record of the call
            text = awaited(tool.run(workspace, **own) if tool.sandboxed else tool.run(**own))
        except ToolError as error:
            return Outcome(False, f"error: {error}")
        if not isinstance(text, str):
            raise TypeError(f"tool {name!r} returned {type(text).__name__}: return a text")
        return Outcome(True, text)


def schema_problem(tool: Tool, parameters: Any) -> str:
    """Return why parameters do not fit the tool's schema; empty if they do."""
    error = best_match(jsonschema.Draft202012Validator(tool.parameters).iter_errors(parameters))
    if error is None:
        return ""
    path = ".".join(map(str, error.absolute_path))
    message = error.message  # begins with the value and ends with what is wrong, so the middle is cut
    if len(message) > MAX_SCHEMA_MESSAGE:
        message = f"{message[:50]} … {message[50 - MAX_SCHEMA_MESSAGE :]}"
    return f"{path}: {message}" if path else message
