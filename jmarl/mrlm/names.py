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
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = "jmarl.mrlm"


def by_word(table: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each word of a table's values. A word with a point in front continues its key."""
    return {key + word if word.startswith(".") else word: key for key, words in table.items() for word in words.split()}


ALIASES = by_word({
    "core": ".types .base .simulated_environment environments.base utils",
    "config": ".training_config .loader .parser generation_config sections",
    "algorithms.trainer": "algorithms.base_trainer",
    "algorithms.ppo": ".trainer .loss .config .utils algorithms.ppo_config",
    "algorithms.grpo": ".trainer .loss",
    "algorithms.dpo": ".trainer .loss",
    "algorithms.sft": ".trainer .loss",
    "algorithms.data": "algorithms.dpo.dataset algorithms.sft.dataset",
    "algorithms": "algorithms.utils training",
    "environments.code": ".code_env .environment .problem_generator .executor",
    "environments.math": ".math_env .environment .problem_generator .solver",
    "environments.debate": ".debate_env .environment .judge .topics",
    "environments.tools": ".tool_env .environment .tool_registry .builtin_tools .task_generator",
    "models": ".hf_model .generation",
})  # fmt: skip

_SERVERS = "jmarl serve offers environments, and jmarl.RemoteEnvironment(address, name) is one of them"
_ROLLOUTS = "rollouts are records of jmarl.rollout, which trainers make and learn from"

LEFT_OUT_MODULES = by_word({
    "jmarl launch or torchrun starts several processes, and jmarl.join_processes joins them; choose GPUs by "
    "CUDA_VISIBLE_DEVICES, and see them by `jmarl info`": "distributed",
    _SERVERS: "server client protocols core.remote_environment core.environment_server",
    _ROLLOUTS: "data",
    "the command line is `jmarl train`, `eval`, `collect` and `info` (jmarl.cli); jmarl.make makes environments": "cli",
})  # fmt: skip

LEFT_OUT = by_word({
    _ROLLOUTS: "RolloutBatch RolloutBuffer",
    _SERVERS: "RemoteEnvironment EnvironmentServer",
    "losses are pure functions in jmarl.rl, which the trainers call":
    "compute_ppo_loss compute_ppo_total_loss compute_value_loss compute_entropy_bonus compute_gae compute_grpo_loss "
    "compute_group_advantages normalize_rewards_by_group normalize_rewards_in_groups normalize_advantages compute_dpo_loss "
    "compute_dpo_loss_with_kl compute_conservative_dpo_loss compute_preference_log_ratio compute_sft_loss "
    "compute_next_state_loss compute_behavioral_cloning_loss compute_combined_sft_loss",
    "jmarl.sampling samples with log-probabilities, and trainers use it": "generate_with_log_probs",
    "jmarl.sampling.logprobs has log-probabilities of given tokens": "compute_log_probs compute_sequence_log_probs",
    "the chat template of the tokenizer writes prompts": "format_messages_for_chat",
    "jmarl.sandbox.Sandbox runs programs": "PythonExecutor CodeExecutor",
    "jmarl.sandbox.ExecutionResult is the result of a program": "ExecutionResult",
    "jmarl.envs.math.answers finds and compares answers": "extract_answer verify_answer",
    "a judge is a function (transcript, rng) -> DebateVerdict, as in jmarl.envs.debate": "DebateJudge",
    "jmarl.envs.debate.llm_judge.LLMJudge(model) takes a text model": "LLMJudge",
    "the sides of a debate are the roles pro and con": "DebatePosition",
    "load_config and save_config read and write files": "ConfigParser",
    "`jmarl train --config a.yaml,b.yaml` joins files, of which later ones override": "merge_configs",
})  # fmt: skip


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
