"""Names of CoMLRL that can be imported and not be used here: each says on its first use what does its work.

A script may import them without using them, or use them in a part that does not run. They are parts of torch: `models` and
`schedulers` of CoMLRL are this module, `utils` and `trainers.preference` have some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

LOADED = "give model names or loaded agents to the trainer, which makes the critics"
KEPT = "set kl_coef (reference_kl_enabled); the trainer then keeps the untrained weights"


class _Refuses(type):
    """The class of names that refuse every use but isinstance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls.__doc__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls()


def refused_class(name: str, instead: str) -> Any:
    """Return a class without instances. Calls, and attributes such as static methods, raise NotImplementedError."""
    return _Refuses(name, (), {"__doc__": f"{name} is not part of jmarl.comlrl: {instead}"})


def refused_function(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(refuse.__doc__)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"{name}() is not part of jmarl.comlrl: {instead}"
    return refuse


ActorCriticOutput = refused_class("ActorCriticOutput", LOADED)
CausalLMWithValueHead = refused_class("CausalLMWithValueHead", LOADED)
ValueHead = refused_class("ValueHead", LOADED)
DeviceScheduler = refused_class(
    "DeviceScheduler", "agents are spread over the devices that are there; set mesh to choose, such as mesh='agent=2'"
)
JointRewardModel = refused_class(
    "JointRewardModel", "give reward_model= (a name or a loaded agent) to MARLHFTrainer, which trains it"
)
PreferenceReplayShard = refused_class(
    "PreferenceReplayShard", "rounds keep their pairs in the checkpoints of the run; set replay and replay_k"
)
clone_reference_models = refused_function("clone_reference_models", KEPT)
load_reference_models_from_sources = refused_function("load_reference_models_from_sources", KEPT)
reference_kl_for_sequence = refused_function(
    "reference_kl_for_sequence", "set kl_coef (reference_kl_enabled); the KL of every update is in metrics.jsonl"
)
resolve_reference_devices = refused_function(
    "resolve_reference_devices", "the reference is on the devices of its agent; set mesh to choose them"
)
