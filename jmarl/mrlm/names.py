"""Names and module paths of MRLM that have no file here: where each is found, or what to use in its place.

`ALIASES` are modules whose names another module has, `LEFT_OUT` names and `LEFT_OUT_MODULES` modules that are refused with one
sentence. The modules of this room refuse names by `__getattr__ = refusing(__name__)`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = "jmarl.mrlm"

ALIASES: dict[str, str] = {
    **dict.fromkeys(("core.types", "core.base", "core.simulated_environment"), "core"),
    "config.training_config": "config",
    "config.loader": "config",
    "config.parser": "config",
    "algorithms.base_trainer": "algorithms.trainer",
    **{f"algorithms.{name}.trainer": f"algorithms.{name}" for name in ("ppo", "grpo", "dpo", "sft")},
    **{f"algorithms.{name}.loss": f"algorithms.{name}" for name in ("ppo", "grpo", "dpo", "sft")},
    "algorithms.ppo.config": "algorithms.ppo",
    "algorithms.ppo.utils": "algorithms.ppo",
    "algorithms.dpo.dataset": "algorithms.data",
    "algorithms.sft.dataset": "algorithms.data",
    "algorithms.utils": "algorithms",
    **{
        f"environments.code.{name}": "environments.code"
        for name in ("code_env", "environment", "problem_generator", "executor")
    },
    **{f"environments.math.{name}": "environments.math" for name in ("math_env", "environment", "problem_generator", "solver")},
    **{f"environments.debate.{name}": "environments.debate" for name in ("debate_env", "environment", "judge", "topics")},
    **{f"environments.tools.{name}": "environments.tools" for name in ("tool_env", "environment", "tool_registry")},
    "environments.tools.builtin_tools": "environments.tools",
    "environments.tools.task_generator": "environments.tools",
    "environments.base": "core",
    "models.hf_model": "models",
    "models.generation": "models",
    "utils": "core",
    "training": "algorithms",
}

_SERVERS = "jmarl serve offers environments, and jmarl.RemoteEnvironment(address, name) is one of them"
_ROLLOUTS = "rollouts are records of jmarl.rollout, which trainers make and learn from"
_LOSS = "losses are pure functions in jmarl.rl, which the trainers call"
_JUDGE = "a judge is a function (transcript, rng) -> DebateVerdict, as in jmarl.envs.debate"

LEFT_OUT_MODULES: dict[str, str] = {
    "distributed": "jmarl launch or torchrun starts several processes, and jmarl.join_processes joins them; choose GPUs by "
    "CUDA_VISIBLE_DEVICES, and see them by `jmarl info`",
    **dict.fromkeys(("server", "client", "protocols", "core.remote_environment", "core.environment_server"), _SERVERS),
    "data": _ROLLOUTS,
    "cli": "the command line is `jmarl train`, `eval`, `collect` and `info` (jmarl.cli); jmarl.make makes environments",
}

LEFT_OUT: dict[str, str] = {
    "RolloutBatch": _ROLLOUTS,
    "RolloutBuffer": _ROLLOUTS,
    **dict.fromkeys(("RemoteEnvironment", "EnvironmentServer"), _SERVERS),
    **dict.fromkeys(
        (
            "compute_ppo_loss", "compute_ppo_total_loss", "compute_value_loss", "compute_entropy_bonus", "compute_gae",
            "compute_grpo_loss", "compute_group_advantages", "normalize_rewards_by_group", "normalize_rewards_in_groups",
            "normalize_advantages", "compute_dpo_loss", "compute_dpo_loss_with_kl", "compute_conservative_dpo_loss",
            "compute_preference_log_ratio", "compute_sft_loss", "compute_next_state_loss", "compute_behavioral_cloning_loss",
            "compute_combined_sft_loss",
        ),
        _LOSS,
    ),  # fmt: skip
    "generate_with_log_probs": "jmarl.sampling samples with log-probabilities, and trainers use it",
    "compute_log_probs": "jmarl.sampling.logprobs has log-probabilities of given tokens",
    "compute_sequence_log_probs": "jmarl.sampling.logprobs has log-probabilities of given tokens",
    "format_messages_for_chat": "the chat template of the tokenizer writes prompts",
    "PythonExecutor": "jmarl.sandbox.Sandbox runs programs",
    "CodeExecutor": "jmarl.sandbox.Sandbox runs programs",
    "ExecutionResult": "jmarl.sandbox.ExecutionResult is the result of a program",
    "extract_answer": "jmarl.envs.math.answers finds and compares answers",
    "verify_answer": "jmarl.envs.math.answers finds and compares answers",
    "DebateJudge": _JUDGE,
    "LLMJudge": "jmarl.envs.debate.llm_judge.LLMJudge(model) takes a text model",
    "DebatePosition": "the sides of a debate are the roles pro and con",
    "ConfigParser": "load_config and save_config read and write files",
    "merge_configs": "`jmarl train --config a.yaml,b.yaml` joins files, of which later ones override",
}  # fmt: skip


def refuse(module: str, name: str) -> Any:
    """Raise ImportError with the sentence of a name that is left out, and AttributeError for any other name."""
    if name in LEFT_OUT:
        raise ImportError(f"{module} has no {name} here: {LEFT_OUT[name]}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def refusing(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, whose submodules are then looked for in `ALIASES`."""
    vars(sys.modules[module]).setdefault("__path__", [])
    return functools.partial(refuse, module)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `ALIASES`. Raises ImportError with the sentence for those of `LEFT_OUT_MODULES`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{ROOT}.")
        if name == fullname:
            return None
        for module, sentence in LEFT_OUT_MODULES.items():
            if name == module or name.startswith(f"{module}."):
                raise ModuleNotFoundError(f"{fullname} is not here: {sentence}", name=fullname)
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if name in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(f"{ROOT}.{ALIASES[module.__name__.removeprefix(f'{ROOT}.')]}")
        names = {name: value for name, value in vars(source).items() if not name.startswith("__")}
        module.__dict__.update(names, __getattr__=functools.partial(refuse, module.__name__))


def install() -> None:
    """Let Python find the modules of `ALIASES`."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
