"""The rooms of jmarl: each imports only earlier ones, there is no circle, the host world and the device world do not mix, and
the core does without its guests.

ORDER is the picture of the README. A module may import modules of its own room, of earlier rooms and the earlier files at the
top of the package. A new room or a new file at the top must be added to ORDER.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
MAX_FILES = 13  # of a room, besides its __init__.py
MAX_COMMANDS = 19  # files of jmarl/cli: each command has one
MAX_TOP = 10  # modules directly under jmarl/

ORDER = [
    "lazy",
    "shadows",
    "types",
    "columns",
    "config",
    "randomness",
    "memory",
    "hardware",
    "processes",
    "rl",
    "algorithms",
    "models",
    "team",
    "sampling",
    "objectives",
    "learning",
    "sandbox",
    "envs",
    "remote",
    "rollout",
    "evaluation",
    "logs",
    "files",
    "league",
    "preferences",
    "runs",
    "replay",
    "serving",
    "plan",
    "report",
    "comlrl",
    "mrlm",
    "cli",
    "",  # jmarl/__init__.py
    "__main__",
]

# Pure functions of arrays: no tokenizer, environment, file, clock or log. A name stands for a module or for a whole room.
DEVICE = {
    "types", "hardware", "algorithms", "rl", "models",
    "sampling.choice", "sampling.slots", "sampling.sampler", "sampling.scoring", "objectives",
    "learning.batches", "learning.optimizer", "learning.step", "learning.program",
}  # fmt: skip
NOT_ON_DEVICE = {
    "transformers", "tokenizers", "datasets", "safetensors", "huggingface_hub", "tensorboard", "rich", "os", "io",
    "time", "datetime", "logging", "pathlib", "shutil", "tempfile", "subprocess", "random", "threading",
}  # fmt: skip
NOT_CALLED_ON_DEVICE = {"open", "print", "input"}

# Text, files and numbers: no jax, also not through a module of jmarl that needs it.
HOST = {
    "shadows", "models.hub", "models.families", "envs", "sandbox", "remote", "rl.returns", "rollout.counterfactual",
    "evaluation.statistics", "evaluation.zero_shot", "models.agent",
    "preferences.pairs", "preferences.formats",
    "logs.metrics_writer", "logs.log_file", "logs.tables",
    "logs.samples", "logs.sinks", "logs.terminal", "logs.completions_file",
    "logs.diversity", "report",
    "files.manifest", "files.lock", "files.interrupt", "files.fingerprint",
    "files.run_files", "files.trusted", "files.constants", "files.writes",
    "processes.meeting", "processes.ending", "processes.launch", "processes.children", "processes.kept_output",
}  # fmt: skip
NOT_ON_HOST = {"jax", "jaxlib", "flax", "optax", "orbax"}
HOST_MAY_USE = HOST | {"lazy", "columns", "randomness", "config", "models.config", "models.weights", "processes.place"}

# What stands beside the core, which knows it by names in tables alone (`jmarl.lazy.Table`) and trains without it.
GUESTS = {
    "sandbox", "envs.code", "envs.debate", "envs.games", "envs.math", "envs.tools", "envs.writing",
    "remote", "replay", "serving", "plan", "report", "comlrl", "mrlm", "cli",
    "preferences", "league", "runs.kinds.given", "runs.kinds.rounds", "runs.kinds.learned",
    "evaluation.cross_play", "evaluation.zero_shot", "processes.launch", "processes.children",
}  # fmt: skip
FACES = {"sandbox", "preferences", "plan", "replay", "report", "remote", "serving"}  # others import them through __init__ alone
KINDS = {"runs.kinds.given", "runs.kinds.rounds", "runs.kinds.learned"}  # stand on preferences, and know it inside
DOORS = {"", "__main__"}  # jmarl/__init__.py names guests for type checkers

FLAX_USERS = {"models.config", "models.decoder", "models.decoding", "files.checkpoint"}
NEVER = {"torch", "tensorflow", "experiments", "tests", "notebooks"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "jmarl").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))  # by jmarl.remote.generate


MODULES = {module_name(path): path for path in sorted((ROOT / "jmarl").rglob("*.py")) if not is_generated(path)}
PACKAGES = {name: path for name, path in MODULES.items() if path.name == "__init__.py" and name}


def is_in(module: str, names: set[str]) -> bool:
    """Whether a module, or a room that it is in, is among the names. The most specific world wins: `rl` is a room of the device
    world and `rl.returns` a module of the host world."""
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)] or [""]
    nearest = next((prefix for prefix in prefixes if prefix in DEVICE | HOST | names), "")
    return nearest in names


def is_guest(module: str) -> bool:
    return any(f"{module}.".startswith(f"{guest}.") for guest in GUESTS)


def position(module: str) -> int:
    return ORDER.index(module.split(".")[0])


def imports(tree: ast.AST, modules: set[str]) -> set[str]:
    """Return the full names of the imported modules, those inside functions and under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            inner = {f"{base}.{a.name}" for a in node.names if f"{base}.{a.name}".removeprefix("jmarl.") in modules}
            names |= inner if len(inner) == len(node.names) else inner | {base}
    return names


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    """Return what `module` with this source does against the rules above, in words."""
    if module.split(".")[0] not in ORDER:
        return [f"jmarl.{module} is in no room: add it to ORDER in tests/test_layers.py"]
    tree = ast.parse(source)
    names = imports(tree, modules)
    if module.startswith("sandbox.inside"):  # all that is visible of the project where programs run
        outside = {name.split(".")[0] for name in names if not name.startswith(".")} - {"numpy", *sys.stdlib_module_names}
        return [f"is inside the sandbox and imports {name}" for name in sorted(outside)]
    wrong = [f"relative import {name}: write jmarl..." for name in names if name.startswith(".")]
    outside = {name.split(".")[0] for name in names} - {"jmarl", ""}
    inside = {name.removeprefix("jmarl").removeprefix(".") for name in names if name.split(".")[0] == "jmarl"}
    for target in sorted(inside):
        if target.split(".")[0] not in ORDER:
            wrong.append(f"imports jmarl.{target}, which is in no room: add it to ORDER in tests/test_layers.py")
        elif position(target) > position(module):
            wrong.append(f"imports jmarl.{target}, which comes later in ORDER")
    if module not in DOORS and not is_guest(module):
        wrong += [f"is of the core and imports the guest jmarl.{name}" for name in sorted(inside) if is_guest(name)]
    if is_in(module, DEVICE):
        wrong += [f"is device code and imports {name}" for name in sorted(outside & NOT_ON_DEVICE)]
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        wrong += [f"is device code and calls {name}()" for name in sorted(called & NOT_CALLED_ON_DEVICE)]
        wrong += [f"is device code and imports host code jmarl.{name}" for name in sorted(inside) if is_in(name, HOST)]
    if is_in(module, HOST):
        wrong += [f"is host code and imports {name}" for name in sorted(outside & NOT_ON_HOST)]
        not_host = [name for name in sorted(inside) if not is_in(name, HOST_MAY_USE)]
        wrong += [f"is host code and imports jmarl.{name}, which is not" for name in not_host]
    if "flax" in outside and module not in FLAX_USERS:
        wrong.append(f"imports flax; only {', '.join(sorted(FLAX_USERS))} do")
    wrong += [f"imports {name}, which the library never does" for name in sorted(outside & NEVER)]
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_earlier_rooms_and_its_own_world(module):
    wrong = violations(module, MODULES[module].read_text(), set(MODULES))
    assert not wrong, f"jmarl.{module}: " + "; ".join(wrong)


@pytest.mark.parametrize("guest", sorted(FACES))
def test_a_guest_has_one_face_of_at_most_ten_names(guest):
    names = set()
    for module in MODULES.keys() - DOORS - KINDS:
        for node in ast.walk(ast.parse(MODULES[module].read_text())) if not module.startswith(guest) else ():
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"jmarl.{guest}."):
                assert node.module == f"jmarl.{guest}", f"jmarl.{module} imports {node.module}, which is inside a guest"
                names |= {alias.name for alias in node.names}
    assert len(names) <= 10


def test_what_tables_name_is_there():
    for path in MODULES.values():
        for home, name in re.findall(r'"jmarl\.([\w.]+):(\w+)"', path.read_text()):
            text = MODULES[home].read_text()
            listed = "= face(" in text and name in re.findall(r"\w+", text.partition("= face(")[2])
            defined = re.search(rf"^(?:def |class |    |from .* import .*\b)?{name}\b", text, re.M)
            assert listed or defined, f"jmarl.{home} has no {name}"


TRAIN = """
import sys
import jmarl

def reward(completions_1, completions_2):
    return [float(len(x) + len(y)) for x, y in zip(completions_1, completions_2)]

team = jmarl.Team.load([sys.argv[1]] * 2)
cfg = jmarl.TrainConfig.of(
    num_updates=1, num_prompts=1, num_generations=2, max_new_tokens=4, output_dir=sys.argv[2], progress=False, eval_every=1
)
result = jmarl.train(team, reward, [{"prompt": "the sea"}], cfg, eval_items=[{"prompt": "a hill"}])
assert len(result.rewards) == 1 and result.after is not None and not result.unsaved
result.save(sys.argv[2] + "/models")
print(jmarl.__file__)
"""


@pytest.mark.long
def test_the_core_trains_without_its_guests(tiny_dir, tmp_path):
    shutil.copytree(ROOT / "jmarl", tmp_path / "jmarl", ignore=shutil.ignore_patterns("__pycache__"))
    for guest in GUESTS:
        place = tmp_path / "jmarl" / guest.replace(".", "/")
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    command = [sys.executable, "-c", TRAIN, str(tiny_dir("llama")), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "jmarl" / "__init__.py")


@pytest.mark.parametrize("module", MODULES)
def test_module_is_short(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MAX_LINES, f"jmarl.{module} has {lines} lines, {MAX_LINES} are allowed: split it by idea"


def test_no_module_imports_itself_through_others():
    graph = {}
    for module, path in MODULES.items():
        names = imports(ast.parse(path.read_text()), set(MODULES))
        graph[module] = {n.removeprefix("jmarl").removeprefix(".") for n in names if n.startswith("jmarl")} & set(MODULES)
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module] - {module}):
                visit(target, [*way, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_rooms_are_small():
    files = defaultdict(list)
    for path in MODULES.values():
        files[path.parent.relative_to(ROOT / "jmarl")].append(path.name)
    assert len(files.pop(Path("."))) <= MAX_TOP
    del files[Path("models/families")]  # a file for each, however many there are
    limits = {room: MAX_COMMANDS if room == Path("cli") else MAX_FILES for room in files}
    assert {str(room): len(names) - 1 for room, names in files.items() if len(names) - 1 > limits[room]} == {}


def test_tests_mirror_the_rooms():
    directories = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert directories - {"families"} == {room for room in PACKAGES if "." not in room}  # models/families has its own


@pytest.mark.parametrize("room", [room for room, path in PACKAGES.items() if len([*path.parent.glob("*.py")]) > 1])
def test_a_room_says_what_it_is_for_and_which_file_to_open_first(room):
    docstring = ast.get_docstring(ast.parse(PACKAGES[room].read_text())) or ""
    first = re.search(r"Open `(\w+)(?:\.py)?`", docstring)
    assert first, f"the docstring of jmarl/{room}/__init__.py does not say 'Open `file.py` first'"
    directory = PACKAGES[room].parent
    assert (directory / f"{first[1]}.py").is_file() or (directory / first[1] / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("rl.losses", "from jmarl.learning.step import x", "imports jmarl.learning.step, which comes later"),
        ("rl.losses", "from jmarl.sampling import scoring", "imports jmarl.sampling.scoring, which comes later"),
        (
            "learning.step",
            "if TYPE_CHECKING:\n    from jmarl.envs.vector import Step",
            "imports jmarl.envs.vector, which comes",
        ),
        ("team", "from jmarl.learning.optimizer import optimizer", "imports jmarl.learning.optimizer, which comes later"),
        ("rl.losses", "def f():\n    import time", "is device code and imports time"),
        ("learning.step", "open('x')", "is device code and calls open()"),
        ("learning.step", "from jmarl.models.hub import tokenize", "imports host code jmarl.models.hub.tokenize"),
        ("models.hub.tokenize", "import jax.numpy as jnp", "is host code and imports jax"),
        ("logs.metrics_writer", "from jmarl.types import Batch", "is host code and imports jmarl.types"),
        ("runs.train", "from flax import linen", "imports flax"),
        ("runs.train", "import torch", "imports torch"),
        ("runs.train", "from .config import x", "relative import .config"),
        ("sandbox.inside.wire", "from jmarl.types import x", "is inside the sandbox and imports jmarl"),
        ("envs.code.syntax", "import jax", "is host code and imports jax"),
        ("runs.train", "def f():\n    from jmarl.sandbox import Limits", "is of the core and imports the guest jmarl.sandbox"),
        ("evaluation.evaluate", "import jmarl.evaluation.cross_play", "imports the guest jmarl.evaluation.cross_play"),
        ("runs.train", "import jmarl.novel", "imports jmarl.novel, which is in no room"),
        ("novel", "", "jmarl.novel is in no room: add it to ORDER"),
    ],
)
def test_a_violation_is_found(module, source, message):
    assert message in "; ".join(violations(module, source, set(MODULES)))


def test_imports_of_earlier_rooms_are_fine():
    source = "from jmarl.models.hub.hf_format import x\nfrom jmarl.models.config import y"
    assert not violations("models.hub.agents", source, set(MODULES))
    assert not violations("runs.train", "from jmarl.evaluation import evaluate\nimport time, jax", set(MODULES))


def test_experiments_import_neither_tests_nor_notebooks():
    for path in (ROOT / "experiments").rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(ast.parse(path.read_text()), set(MODULES))}
        assert not roots & {"tests", "notebooks"}, f"{path.relative_to(ROOT)} imports tests or notebooks"


EMPTY_NAMES = {
    "found", "how", "each", "made", "kept", "told", "of_stack", "about", "still", "settle", "ample", "begin_nothing", "Played",
    "Drawn", "of_training", "with_ample_memory",
}  # fmt: skip
FILES = [path for folder in ("jmarl", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [path.relative_to(ROOT) for path in FILES if not is_generated(path)]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_names_say_what_things_are(path):
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    assert not {name for name in names if name.strip("_") in EMPTY_NAMES}


# Classes of CoMLRL's and MRLM's documents, which keep their names beside others of jmarl and of each other.
NAMES_OF_GUESTS = {
    "CodeExecutionEnvironment", "DPOConfig", "DPOTrainer", "EnvironmentConfig", "ExperimentConfig", "ModelConfig", "PPOConfig",
    "SFTConfig", "SFTTrainer", "Trajectory",
}  # fmt: skip


def test_a_class_name_means_one_thing():
    modules = defaultdict(list)
    for module, path in MODULES.items():
        names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        for name in names - (NAMES_OF_GUESTS if module.startswith(("comlrl.", "mrlm.")) else set()):
            modules[name].append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_all_parameters_are_annotated(path):
    missing = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
            missing += [
                f"{node.name}({x.arg})" for x in parameters if x and x.annotation is None and x.arg not in ("self", "cls")
            ]
    assert not missing


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if "NamedTuple" in path.read_text()])
def test_fields_of_named_tuples_can_be_read(module):
    """pdoc and `typing.get_type_hints` do not find what the text of a field names, unless it is built in."""
    tree = ast.parse(MODULES[module].read_text())
    if not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body):
        return
    classes = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and any("NamedTuple" in ast.unparse(b) for b in node.bases)
    ]
    fields = [field.annotation for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    unknown = {n.id for field in fields for n in ast.walk(field) if isinstance(n, ast.Name) and not hasattr(builtins, n.id)}
    assert not unknown, f"leave out `from __future__ import annotations` of {module}: {unknown}"
