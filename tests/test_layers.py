"""The layers of jmarl: imports point down only, and the host world and the device world do not mix.

The table is read bottom up. A module imports modules of lower layers; within a layer only what SIDEWAYS lists. A new
module must be added to LAYERS, and to DEVICE or HOST if it belongs to one of the two worlds.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

LAYERS = [
    {"types", "settings", "order", "config", "masked", "models", "models.config", "models.decoder", "models.decoding"},
    {"advantages", "batches", "losses", "scoring", "sampling", "stack", "centralized", "pairs", "peft_format", "replay"}
    | {
        "sandbox.inside",
        "sandbox",
        "envs",
        "text",
        "metrics",
        "rewards",
        "returns",
        "environment",
        "core",
        "lockstep",
        "pool",
        "manifest",
        "logfile",
        "markdown",
        "memory",
        "lock",
        "interrupt",
        "fingerprint",
        "chat_api",
        "hf_format",
        "gguf_weights",
        "weights",
        "zeroshot",
    },
    {"algorithms", "sharding", "lora"},
    {
        "offline_objective",
        "objective",
        "update",
        "team",
        "generate",
        "parts",
        "rollout",
        "critics",
        "probes",
        "checkpoint",
        "failed_update",
        "dynamic",
    }
    | {"learners", "preferences", "comparators", "counterfactual", "prompts", "step", "runs", "text_model"},
    {"train", "fit", "rounds", "learned_reward", "programs", "rundir", "runlog", "loop", "saving", "evaluate", "trainers"}
    | {"crossplay", "demonstrations", "seeds", "utils"},
    {""},  # jmarl/__init__.py
]
SIDEWAYS = {
    "config": {"settings"},
    "models.decoder": {"models.config"},
    "models.decoding": {"models.config", "models.decoder"},
    "environment": {"rewards"},
    "metrics": {"logfile", "markdown"},
    "fingerprint": {"rewards"},
    "lockstep": {"core", "environment", "rewards"},
    "pool": {"lockstep"},
    "sandbox": {"sandbox", "sandbox.inside"},
    "envs": {"chat_api", "envs", "core", "environment", "lockstep", "rewards", "sandbox", "sandbox.inside"},
    "centralized": {"environment"},
    "sampling": {"stack"},
    "lora": {"stack"},
    "replay": {"environment"},
    "counterfactual": {"rollout", "team"},
    "gguf_weights": {"hf_format"},
    "weights": {"hf_format", "gguf_weights"},
    "zeroshot": {"returns"},
    "objective": {"offline_objective"},
    "update": {"objective"},
    "team": {"objective", "update"},
    "probes": {"objective", "update"},
    "critics": {"generate", "objective", "rollout", "team"},
    "generate": {"team"},
    "learners": {"team", "update"},
    "parts": {"generate", "team"},
    "rollout": {"generate", "parts", "team"},
    "dynamic": {"generate", "rollout", "team"},
    "prompts": {"rollout", "team"},
    "preferences": {"generate", "objective", "offline_objective", "team"},
    "runlog": {"evaluate"},
    "demonstrations": {"fit"},
    "loop": {"runlog", "saving"},
    "fit": {"loop", "rundir", "runlog", "saving"},
    "comparators": {"generate", "preferences", "rollout", "team"},
    "rounds": {"evaluate", "fit", "loop", "runlog", "saving"},
    "learned_reward": {"fit", "rounds", "rundir"},
    "text_model": {"generate", "team"},
    "step": {"critics", "dynamic", "generate", "learners", "rollout", "team"},
    "runs": {"critics", "generate", "rollout", "step", "team"},
    "seeds": {"train", "evaluate", "loop", "rundir", "runlog", "saving"},
    "train": {"fit", "rounds", "learned_reward", "evaluate", "loop", "programs", "rundir", "runlog", "saving"},
    "trainers": {"train", "fit", "evaluate", "trainers"},
    "utils": {"utils"},
}

# Pure functions of arrays: no tokenizer, file, clock or log.
DEVICE = {
    "types", "masked", "models", "models.decoder", "models.decoding", "scoring", "sampling",
    "advantages", "losses", "algorithms", "stack", "lora",
    "batches", "sharding", "offline_objective", "objective", "update", "probes",
}  # fmt: skip
NOT_ON_DEVICE = {
    "transformers", "tokenizers", "datasets", "safetensors", "huggingface_hub", "tensorboardX", "rich", "os", "io",
    "time", "datetime", "logging", "pathlib", "shutil", "tempfile", "subprocess", "random", "threading",
}  # fmt: skip
NOT_CALLED_ON_DEVICE = {"open", "print", "input"}

# Text, files and numbers: no jax, also not through a module of jmarl that needs it.
HOST = {
    "text", "weights", "gguf_weights", "hf_format", "peft_format", "metrics", "rewards", "returns", "environment",
    "core", "lockstep", "pool", "chat_api", "manifest", "logfile", "markdown", "lock", "interrupt", "fingerprint",
    "centralized", "pairs", "replay", "zeroshot", "sandbox", "sandbox.inside", "envs",
}  # fmt: skip
NOT_ON_HOST = {"jax", "jaxlib", "flax", "optax", "orbax"}
HOST_MAY_USE = HOST | {"order", "config", "settings", "models.config"}

FLAX_USERS = {"models", "models.config", "models.decoder", "models.decoding", "checkpoint"}
NEVER = {"torch", "tensorflow", "experiments", "tests", "notebooks"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "jmarl").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted((ROOT / "jmarl").rglob("*.py"))}


def entry(module: str) -> str | None:
    """The name under which a module stands in LAYERS: its own, or that of the package it is in."""
    known = set().union(*LAYERS)
    if module in known:
        return module
    package = module.rpartition(".")[0]
    return package if package in known and package else None


def layer(module: str) -> int:
    name = entry(module)
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(tree: ast.AST, modules: set[str]) -> set[str]:
    """Full names of the imported modules, those inside functions too; `from jmarl import text` is `jmarl.models.hub.tokenize`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            inner = {f"{base}.{a.name}" for a in node.names if f"{base}.{a.name}".removeprefix("jmarl.") in modules}
            found |= inner if len(inner) == len(node.names) else inner | {base}
    return found


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    """What `module` with this source does against the rules above, in words."""
    if entry(module) is None:
        return [f"jmarl.{module} is in no layer: add it to LAYERS (and to DEVICE or HOST) in tests/test_layers.py"]
    tree = ast.parse(source)
    found = imports(tree, modules)
    if entry(module) == "sandbox.inside":  # all that is visible of the project where programs run
        beyond = {name for name in found if not name.startswith(".")} - {"numpy"}
        return [
            f"is inside the sandbox and imports {name}"
            for name in sorted(beyond)
            if name.split(".")[0] not in sys.stdlib_module_names
        ]
    wrong = [f"relative import {name}: write jmarl..." for name in found if name.startswith(".")]
    outside = {name.split(".")[0] for name in found} - {"jmarl", ""}
    inside = {name.removeprefix("jmarl").removeprefix(".") for name in found if name.split(".")[0] == "jmarl"}
    for target in sorted(inside):
        if entry(target) is None:
            wrong.append(f"imports jmarl.{target}, which is in no layer: add it to LAYERS in tests/test_layers.py")
        elif layer(target) >= layer(module) and entry(target) not in SIDEWAYS.get(entry(module) or "", set()):
            wrong.append(f"imports jmarl.{target} of layer {layer(target)}, itself being in layer {layer(module)}")
    if module in DEVICE:
        wrong += [f"is device code and imports {name}" for name in sorted(outside & NOT_ON_DEVICE)]
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        wrong += [f"is device code and calls {name}()" for name in sorted(called & NOT_CALLED_ON_DEVICE)]
        wrong += [f"is device code and imports host code jmarl.{name}" for name in sorted(inside & HOST)]
    if entry(module) in HOST:
        wrong += [f"is host code and imports {name}" for name in sorted(outside & NOT_ON_HOST)]
        wrong += [
            f"is host code and imports jmarl.{name}, not one of it"
            for name in sorted(inside)
            if entry(name) not in HOST_MAY_USE
        ]
    if "flax" in outside and entry(module) not in FLAX_USERS:
        wrong.append("imports flax; only jmarl.models and jmarl.training.files.checkpoint do")
    wrong += [f"imports {name}, which the library never does" for name in sorted(outside & NEVER)]
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_to_its_layer(module):
    wrong = violations(module, MODULES[module].read_text(), set(MODULES))
    assert not wrong, f"jmarl.{module}: " + "; ".join(wrong)


@pytest.mark.parametrize("module", MODULES)
def test_module_is_short(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MAX_LINES, f"jmarl.{module} has {lines} lines, {MAX_LINES} are allowed: split it by idea"


def test_worlds_and_layers_do_not_overlap():
    assert not DEVICE & HOST
    names = [name for names in LAYERS for name in names]
    assert len(names) == len(set(names)) and names


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("losses", "from jmarl.learning.update import x", "imports jmarl.learning.update of layer 3, itself being in layer 1"),
        ("losses", "from jmarl import scoring", "imports jmarl.sampling.scoring of layer 1"),
        ("losses", "from jmarl import magic", "imports jmarl. of layer 5"),
        ("stack", "import jmarl.models.sharding", "imports jmarl.models.sharding of layer 2"),
        ("losses", "def f():\n    import time", "is device code and imports time"),
        ("update", "open('x')", "is device code and calls open()"),
        ("update", "from jmarl.envs.rewards import x", "imports host code jmarl.envs.rewards"),
        ("text", "import jax.numpy as jnp", "is host code and imports jax"),
        ("metrics", "from jmarl.types import Batch", "is host code and imports jmarl.types"),
        ("train", "from flax import linen", "imports flax"),
        ("train", "import torch", "imports torch"),
        ("train", "from .config import x", "relative import .config"),
        ("sandbox.inside.wire", "from jmarl.types import x", "is inside the sandbox and imports jmarl.types"),
        ("envs.code_text", "import jax", "is host code and imports jax"),
        ("train", "import jmarl.novel", "imports jmarl.novel, which is in no layer"),
        ("novel", "", "jmarl.novel is in no layer: add it to LAYERS"),
    ],
)
def test_a_violation_is_found(module, source, message):
    assert message in "; ".join(violations(module, source, set(MODULES)))


def test_downward_and_listed_imports_are_fine():
    assert not violations(
        "weights", "from jmarl.models.hub.hf_format import x\nfrom jmarl.models.config import y", set(MODULES)
    )
    assert not violations("train", "from jmarl import evaluate, text\nimport time, jax", set(MODULES))
    assert not violations(
        "trainers.grpo", "from jmarl.training.train import train\nfrom jmarl.comlrl.trainers import x", set(MODULES)
    )


def test_experiments_import_neither_tests_nor_notebooks():
    for path in (ROOT / "experiments").rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(ast.parse(path.read_text()), set(MODULES))}
        assert not roots & {"tests", "notebooks"}, f"{path.relative_to(ROOT)} imports tests or notebooks"
