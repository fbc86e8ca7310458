"""Count what a reader holds in mind to follow one step of a plain run, and what the source says about its structure.

    python tests/count_step.py                  # of this checkout
    python tests/count_step.py --tree DIRECTORY # of another commit, checked out there

Not a test: it prints figures, to compare two commits. The first four come from a run: a magrpo training of two updates by
`jmarl.train`, two agents of random weights, one prompt, in a process that imports the tree. While it runs, `sys.setprofile`
sees every call of a Python function of jmarl; comprehensions are no functions, lambdas and functions inside functions are. The
others come from the source. Nothing here knows the names of the functions of a step. The core is jmarl without envs, sandbox,
comlrl, mrlm and cli.

records      distinct NamedTuples and dataclasses of the core that are an argument, a local variable or the result of a function
             of jmarl in one step. A step lasts from the first call of the reward function to the second: the end of playing,
             update, log, and the play of the next step. All programs are traced in it, because compiled ones are forgotten at
             each reward. What is only reached through another record (`setup.cfg.run` in an expression) is not counted.
to the loss  distinct functions of jmarl on the stack between the loop and the loss of the algorithm's row (both excluded), when
             the loss is first traced in that step. The loop is the innermost call that both calls of the reward have in common.
team         files of jmarl in which a function is called with a `Team` as argument (methods of `Team` too), from the call of
             `train` to its end; and, from the source, files of the core that have a function with such a parameter.
traced       distinct functions of jmarl that run in that step.
dispatch     lines in learning/ and objectives/ with isinstance, type() or a class pattern of match on a record of a batch
             (`Batch`, `...Batch`) or of targets or inputs of a loss (`...Targets`, `...Inputs`).
trains       lines there, comments and docstrings too, with the word `trains` (its values: policy, values, both).
upward       pairs of modules of which one imports the other from a room that stands later in ORDER of tests/test_layers.py (of
             the checkout that this script lies in), with the rooms of jmarl/training where they are now; circles are pairs of
             rooms that import each other.
code lines   of the core; no blank line, comment or docstring.
checks       functions named check, check_... or _check_..., and `raise` statements, in all of jmarl.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
NOT_CORE = {"envs", "sandbox", "comlrl", "mrlm", "cli"}
OLD_ROOMS = {"training.files": "files", "training.logs": "logs", "training.preferences": "preferences", "training": "runs"}
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>"}

# --- a run ---------------------------------------------------------------------------------------------------------------


class Recorder:
    """Sees all calls of functions of jmarl in a run of two updates."""

    def __init__(self, root: Path, loss: CodeType, team: type):
        self.root, self.loss, self.team = f"{root / 'jmarl'}{os.sep}", loss, team
        self.records: set[str] = set()
        self.functions: set[str] = set()
        self.team_files: set[str] = set()
        self.reward_stacks: list[list[FrameType]] = []
        self.loss_stack: list[FrameType] = []
        self.in_step = False

    def stack(self, frame: FrameType | None) -> list[FrameType]:
        """Return the frames of functions of jmarl from a frame outwards, innermost first."""
        frames = []
        while frame is not None:
            if self.is_function(frame.f_code):
                frames.append(frame)
            frame = frame.f_back
        return frames

    def is_function(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self.root) and code.co_name not in COMPREHENSIONS

    def name(self, code: CodeType) -> str:
        return f"{code.co_filename.removeprefix(self.root)}:{code.co_qualname}"

    def reward_is_called(self, frame: FrameType) -> None:
        """Begin or end the step. To be called by the reward function."""
        import jax

        self.reward_stacks.append(self.stack(frame))
        self.in_step = len(self.reward_stacks) == 1
        jax.clear_caches()  # so that programs are traced again

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(self.root):
            return
        if event == "call":
            values = list(frame.f_locals.values())  # only arguments yet
            if any(isinstance(value, self.team) for value in values):
                self.team_files.add(frame.f_code.co_filename.removeprefix(self.root))
            if self.in_step and self.is_function(frame.f_code):
                self.functions.add(self.name(frame.f_code))
            if self.in_step and frame.f_code is self.loss and not self.loss_stack:
                self.loss_stack = self.stack(frame.f_back)
        elif self.in_step:
            values = [*frame.f_locals.values(), result]
        if self.in_step:
            self.records |= {record_name(type(value)) for value in values} - {""}

    def functions_to_loss(self) -> list[str]:
        """Return the functions between the loop and the loss, outermost first."""
        first, second = self.reward_stacks
        loop = next(frame for frame in second if any(frame is other for other in first))
        inner = self.loss_stack[: next(i for i, frame in enumerate(self.loss_stack) if frame is loop)]
        return [self.name(loop.f_code), *dict.fromkeys(self.name(frame.f_code) for frame in reversed(inner))]


def record_name(cls: type) -> str:
    """Return the name of a NamedTuple or dataclass of the core; "" for other classes."""
    is_record = dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    package, _, module = cls.__module__.partition(".")
    return f"{module}.{cls.__qualname__}" if is_record and package == "jmarl" and is_core(module) else ""


def is_core(module: str) -> bool:
    return module.split(".")[0] not in NOT_CORE


def run_and_count(root: Path) -> dict[str, list[str]]:
    """Return what one step needs, from a run of two updates."""
    import jmarl
    from experiments.tiny import random_agents, tokenizer
    from jmarl.algorithms import find_row

    agents = random_agents("random", tokenizer(("red", "green", "blue")), 2, seed=0)
    team = jmarl.Team.of(agents)
    recorder = Recorder(root, find_row("magrpo").loss.__code__, type(team))

    def reward(first: list[str], second: list[str]) -> list[float]:
        recorder.reward_is_called(sys._getframe())
        return [float(len(a) - len(b)) for a, b in zip(first, second, strict=True)]

    settings: dict[str, Any] = dict(algorithm="magrpo", num_updates=2, num_generations=4, max_new_tokens=4, progress=False)
    cfg = jmarl.TrainConfig.of(**settings)
    sys.setprofile(recorder)
    jmarl.train(team, reward, [{"prompt": "red"}, {"prompt": "green"}], cfg)
    sys.setprofile(None)
    return {
        "records held for a plain magrpo step": sorted(recorder.records),
        "functions between the loop and the row's loss": recorder.functions_to_loss()[1:],
        "files that the team passes through in train": sorted(recorder.team_files),
        "functions that run in the step, traced ones too": sorted(recorder.functions),
    }


# --- source --------------------------------------------------------------------------------------------------------------


def modules_of(root: Path) -> dict[str, Path]:
    """Return the modules below jmarl by name, without the first part."""
    names = {}
    for path in sorted((root / "jmarl").rglob("*.py")):
        parts = path.relative_to(root / "jmarl").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def learning_files(root: Path) -> Iterator[Path]:
    for room in ("learning", "objectives"):
        yield from sorted((root / "jmarl" / room).glob("*.py"))


def dispatch_lines(root: Path) -> list[str]:
    """Return where a type of a batch, of targets or of inputs is asked for."""
    record = re.compile(r"(\w*Batch|\w+Targets|\w+Inputs|Data|Targets|Inputs)")

    def names(node: ast.AST) -> set[str]:
        inner = ast.walk(node)
        return {n.id if isinstance(n, ast.Name) else n.attr for n in inner if isinstance(n, ast.Name | ast.Attribute)}

    lines = []
    for path in learning_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            asked: set[str] = set()
            if isinstance(node, ast.Call) and names(node.func) & {"isinstance", "issubclass"}:
                asked = names(node.args[1])
            elif isinstance(node, ast.Compare) and "type" in names(node):
                asked = names(node)
            elif isinstance(node, ast.MatchClass):
                asked = names(node.cls)
            if any(record.fullmatch(name) for name in asked):
                lines.append(f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}")
    return sorted(set(lines))


def trains_lines(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}"
        for path in learning_files(root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\btrains\b", line)
    ]


def files_with_team(root: Path) -> list[str]:
    """Return the files of the core that have a function with a parameter of type Team."""

    def takes_team(node: ast.AST) -> bool:
        arguments = [x for x in ast.walk(node.args) if isinstance(x, ast.arg)] if isinstance(node, ast.FunctionDef) else []
        annotations = [x.annotation for x in arguments if x.annotation is not None]
        return any(isinstance(n, ast.Name) and n.id == "Team" for x in annotations for n in ast.walk(x))

    files = {name: path for name, path in modules_of(root).items() if is_core(name)}
    return [name for name, path in files.items() if any(map(takes_team, ast.walk(ast.parse(path.read_text()))))]


def room_of(module: str) -> str:
    """Return the room of a module, for modules of jmarl/training the one where it is now."""
    old = next((name for name in OLD_ROOMS if f"{module}.".startswith(f"{name}.")), "")
    return OLD_ROOMS[old] if old else module.split(".")[0]


def room_imports(root: Path) -> dict[tuple[str, str], list[str]]:
    """Return the imports between rooms: (importing, imported) room -> pairs of modules."""
    modules, pairs = modules_of(root), dict[tuple[str, str], list[str]]()
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                target = name.removeprefix("jmarl.")
                target = target if target in modules else target.rpartition(".")[0]
                if name.startswith("jmarl.") and target in modules and room_of(target) != room_of(module):
                    pairs.setdefault((room_of(module), room_of(target)), []).append(f"{module} -> {target}")
    return pairs


def upward_imports(root: Path) -> tuple[list[str], list[str]]:
    """Return the imports of later rooms, and the pairs of rooms that import each other."""
    tree = ast.parse((HERE / "test_layers.py").read_text())
    order = next(
        ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "ORDER"
    )
    position = {room: number for number, room in enumerate(order)}
    pairs = room_imports(root)
    upward = {line for (a, b), lines in pairs.items() if position.get(b, 0) > position.get(a, len(order)) for line in lines}
    circles = sorted(f"{a} <-> {b}" for a, b in pairs if a < b and (b, a) in pairs)
    return sorted(upward), circles


def code_lines(path: Path) -> int:
    """Return the number of lines with code: without blank lines, comments and docstrings."""
    source = path.read_text()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():  # docstrings, of fields of dataclasses too
            if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                lines -= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return len(lines)


def source_counts(root: Path) -> dict[str, Any]:
    upward, circles = upward_imports(root)
    modules = modules_of(root)
    nodes = [node for path in modules.values() for node in ast.walk(ast.parse(path.read_text()))]
    checks = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and re.match(r"_?check(_|$)", node.name)]
    return {
        "files of the core with a function that takes a Team": files_with_team(root),
        "dispatch on batch or target types in learning/": dispatch_lines(root),
        "lines with `trains` there": trains_lines(root),
        "imports of a later room": upward,
        "circles of two rooms": circles,
        "code lines of the core": sum(code_lines(path) for name, path in modules.items() if is_core(name)),
        "check functions": len(checks),
        "raise statements": sum(isinstance(node, ast.Raise) for node in nodes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="checkout of the commit to count")
    parser.add_argument("--names", action="store_true", help="print what was counted below each figure")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # in the process that imports the tree
    arguments = parser.parse_args()
    root = arguments.tree.resolve()
    if arguments.run:
        print(json.dumps(run_and_count(root)))
        return
    command = [sys.executable, "-P", __file__, "--run", "--tree", str(root)]
    environment = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1]) | source_counts(root)
    for name, value in counts.items():
        print(f"{len(value) if isinstance(value, list) else value:6}  {name}")
        for item in value if arguments.names and isinstance(value, list) else ():
            print(f"          {item}")


if __name__ == "__main__":
    main()
