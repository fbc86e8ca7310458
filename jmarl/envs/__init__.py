"""Environments: the tasks of a team, what its agents read, and the rewards of what they write.

Host code, which never imports jax; only its worlds, the folders, import `sandbox`.
Open `base.py` first: it has the interfaces and a complete environment in one file.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from typing import Any

from jmarl.lazy import modules_of

__getattr__ = modules_of(__name__)  # such as jmarl.envs.rewards

ENVIRONMENTS: dict[str, str] = {  # name -> module:class; the tests of all environments cover what is listed here
    "arxiv": "jmarl.envs.writing.tldr_arxiv:Arxiv",
    "debate": "jmarl.envs.debate.debate:Debate",
    "debate_scripted": "jmarl.envs.debate.debate:DebateScripted",
    "function_calling": "jmarl.envs.tools.function_calling:FunctionCalling",
    "grid": "jmarl.envs.games.grid:GridPlanning",
    "house_build": "jmarl.envs.games.house_build:HouseBuild",
    "ipd": "jmarl.envs.games.prisoners_dilemma:PrisonersDilemma",
    "kuhn": "jmarl.envs.games.kuhn:KuhnPoker",
    "math": "jmarl.envs.math.reasoning:MathReasoning",
    "math_planner": "jmarl.envs.math.planner:MathPlanner",
    "math_verifier": "jmarl.envs.math.verifier:MathVerifier",
    "signals": "jmarl.envs.games.signals:Signals",
    "story": "jmarl.envs.writing.story:Story",
    "str_build": "jmarl.envs.games.str_build:StrBuild",
    "sudoku": "jmarl.envs.games.sudoku:Sudoku",
    "tictactoe": "jmarl.envs.games.tictactoe:TicTacToe",
    "tldr": "jmarl.envs.writing.tldr_arxiv:Tldr",
    "tools": "jmarl.envs.tools.tool_use:ToolUse",
    "tools_sandbox": "jmarl.envs.tools.tool_use:ToolSandbox",
    "tools_team": "jmarl.envs.tools.tool_use:ToolTeam",
}
own_places: list[str] = []  # directories that come to Python's with the first name of the user's code, and not before
# Other names for `make`. `code` plays all episodes in one call of the sandbox: the tests of one episode do not cover it.
OTHER_NAMES = {"code": "jmarl.envs.code.by_name:Code", "tool": ENVIRONMENTS["tools"]}
# Packages with games of their own: LIBRARY:GAME is the class with the game as its first argument.
LIBRARIES = {"textarena": "jmarl.envs.games.textarena:TextArena"}


def make(name: str, **options: Any) -> Any:
    """Return an environment by its name in ENVIRONMENTS or OTHER_NAMES, or of a class of your own, see `import_object`.

    Args:
        name: see above. `textarena:TicTacToe-v0` is a game of a package in LIBRARIES.
        **options: arguments of its constructor, and those that all environments have (see `options`). With `servers` it is
            played there, and `name` is its name on the servers.

    Raises:
        ValueError: the name is unknown, the module cannot be imported, or the constructor does not take an option.
    """
    from jmarl.config.validation import check_argument, did_you_mean  # here, so that this package is imported at once
    from jmarl.envs.base import TextEnvironment
    from jmarl.envs.messages import SimulatedEnvironment
    from jmarl.envs.options import GENERAL, GUESTS, WithOptions, split_options

    if "servers" in options:
        others = {option: value for option, value in options.items() if option != "servers"}
        return GUESTS["servers"](name, options["servers"], others)
    check_argument("name", name, str, "the name of an environment, or 'module:Class'; an environment itself needs no make")
    names = ENVIRONMENTS | OTHER_NAMES
    if name not in names and ":" not in name:
        nearest = difflib.get_close_matches(name, names, 1)
        package, _, last = name.rpartition(".")
        nearest = [f"{name}:NAME" if last == "py" else f"{package}:{last}"] if package else nearest
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(
            f"unknown environment {name!r}: {hint}choose {', '.join(names)}, {', '.join(f'{x}:GAME' for x in LIBRARIES)}, "
            "or a class as 'module:Class' or 'file.py:Class'"
        )
    try:
        cls = import_object(place_of(name))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"environment {name!r} cannot be imported: {error}") from error
    if not isinstance(cls, type):
        raise ValueError(f"environment {name!r} is a {type(cls).__name__}: give a class, such as a TextEnvironment")
    library, _, game = name.partition(":")
    first = (game,) if library in LIBRARIES else ()
    known = constructor_options(cls)[len(first) :]
    arguments, general = split_options(cls, options, known)
    try:
        inspect.signature(cls).bind(*first, **arguments)
    except TypeError as error:
        unknown = [option for option in arguments if option not in known]
        hint = did_you_mean(unknown[0], [*known, *GENERAL]) if unknown else ""
        raise ValueError(f"environment {name!r}: {error}; its options are {', '.join(known) or 'none'}{hint}") from None
    env = cls(*first, **arguments)
    if general and not isinstance(env, TextEnvironment | SimulatedEnvironment):
        raise ValueError(f"environment {name!r} has no option {next(iter(general))!r}; its options are {', '.join(known)}")
    return WithOptions(env, general) if general else env


def place_of(name: str) -> str:
    """Return an environment's name as one of `import_object`; one that is in no table is one already."""
    return (ENVIRONMENTS | OTHER_NAMES).get(name) or LIBRARIES.get(name.partition(":")[0], name)


def import_name(setting: str, name: str) -> Any:
    """Import what a setting names, see `import_object`. Raises ValueError with the setting."""
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        *package, last = name.removesuffix(":").split(".")
        meant = f"; did you mean '{'.'.join(package)}:{last}'?" if package and last else ""
        meant = f"; write {name}:NAME, with a name in this file" if last == "py" else meant
        raise ValueError(f"{setting}={name!r} is not allowed: {setting} must be module:function{meant}")
    try:
        return import_object(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}={name!r} cannot be imported: {error}") from error


def import_object(name: str) -> Any:
    """Import "module:name" or "file.py:name". Both may have a directory in front, which need not be one of Python's.

    This is the one place where names in settings, flags and stored configurations become code. Raises ImportError with the
    places where a module was looked for and the nearest name, or with the file and line of an error in the module."""
    from jmarl.config.paths import expand_home
    from jmarl.config.validation import did_you_mean
    from jmarl.envs.calls.user_code import raised

    place, _, attribute = name.rpartition(":")
    directory, _, module = expand_home(place).rpartition("/")
    if module.endswith(".py"):
        directory = os.path.abspath(directory)
        if not os.path.isfile(os.path.join(directory, module)):
            files = os.listdir(directory) if os.path.isdir(directory) else []
            raise ImportError(f"there is no file {module} in {directory}{did_you_mean(module, files)}")
        module = module.removesuffix(".py")
    if not module.startswith("jmarl."):
        sys.path[:0] = [place for place in own_places if place not in sys.path]
    if directory:
        import_from(os.path.abspath(directory), module)
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if not missing or (missing != module and not module.startswith(f"{missing}.")):  # the module itself has the error
            raise ImportError(raised(error)) from error
        package, _, last = missing.rpartition(".")
        places = list(sys.modules[package].__path__) if package else own_directories()
        hint = did_you_mean(last, [known.name for known in pkgutil.iter_modules(places)])
        installed = "" if package else ", nor is it installed"
        raise ImportError(f"there is no module {last!r} in {' or '.join(places)}{installed}{hint}") from None
    try:
        return getattr(imported, attribute)
    except AttributeError:
        raise ImportError(f"module {module!r} has no {attribute!r}{did_you_mean(attribute, dir(imported))}") from None


def import_from(directory: str, module: str) -> None:
    """Make a directory the first place for imports. Raises ImportError if another module of this name is loaded already."""
    if sys.path[0] != directory:
        sys.path.insert(0, directory)
    top = module.partition(".")[0]
    if (loaded := sys.modules.get(top)) is None:
        return
    file = getattr(loaded, "__file__", None)  # None: a directory without __init__.py, or built in
    places = [file] if file else [*getattr(loaded, "__path__", ["Python itself"])]
    own = {os.path.realpath(os.path.join(directory, end)) for end in (f"{top}.py", f"{top}/__init__.py", top)}
    if own.isdisjoint(map(os.path.realpath, places)):
        raise ImportError(f"another module {module!r}, of {places[0]}, is loaded already: rename the one in {directory}")


def own_directories() -> list[str]:
    """Return the directories that Python imports the user's modules from, without those of installed packages."""
    paths = [os.path.abspath(path) for path in sys.path if os.path.isdir(path or ".")]
    return [path for path in dict.fromkeys(paths) if not path.startswith((sys.prefix, sys.base_prefix))]


def constructor_options(cls: type) -> list[str]:
    """Return the parameters of a constructor, and of those above it that it passes keyword arguments on to."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
            names |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(names)
