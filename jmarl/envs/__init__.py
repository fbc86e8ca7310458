"""Environments: what a team is asked, and what its answers earn. Each in a file of its own, host side, without jax.

`ENVIRONMENTS` has them all by name. A new one is a class (`base.TextEnvironment`) and a line there, and the tests that hold
for every environment then hold for it too. Open `base.py` first.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

ENVIRONMENTS: dict[str, str] = {  # name -> module:class
    "arxiv": "jmarl.envs.writing.tldr_arxiv:Arxiv",
    "debate": "jmarl.envs.debate.debate:Debate",
    "debate_scripted": "jmarl.envs.debate.debate:DebateScripted",
    "function_calling": "jmarl.envs.tools.function_calling:FunctionCalling",
    "grid": "jmarl.envs.games.grid:GridPlanning",
    "house_build": "jmarl.envs.games.house_build:HouseBuild",
    "math": "jmarl.envs.math.reasoning:MathReasoning",
    "math_planner": "jmarl.envs.math.planner:MathPlanner",
    "math_verifier": "jmarl.envs.math.verifier:MathVerifier",
    "story": "jmarl.envs.writing.story:Story",
    "str_build": "jmarl.envs.games.str_build:StrBuild",
    "sudoku": "jmarl.envs.games.sudoku:Sudoku",
    "tldr": "jmarl.envs.writing.tldr_arxiv:Tldr",
    "tools": "jmarl.envs.tools.tool_use:ToolUse",
    "tools_sandbox": "jmarl.envs.tools.tool_use:ToolSandbox",
    "tools_team": "jmarl.envs.tools.tool_use:ToolTeam",
}


def make(name: str, **options: Any) -> Any:
    """An environment by its name, or a class of one's own as "module:Class"; options go to its constructor."""
    if name not in ENVIRONMENTS and ":" not in name:
        near = difflib.get_close_matches(name, ENVIRONMENTS, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown environment {name!r}: {meant}choose {', '.join(ENVIRONMENTS)}, or a class as 'module:Class'")
    module, _, cls = ENVIRONMENTS.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"environment {name!r} cannot be imported: {error}") from error
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        known = ", ".join(options_of(found))
        raise ValueError(f"environment {name!r}: {error}; its options are {known or 'none'}") from None
    return found(**options)


def options_of(cls: type) -> list[str]:
    """What its constructor takes, and what it hands on to that of the class above."""
    found: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
            found |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(found)
