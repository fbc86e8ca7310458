"""Functions of CoMLRL's `utils`. Trainers do here what most of them are for; a script may call them itself."""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jmarl.comlrl.arguments import name_of, one_per_agent
from jmarl.comlrl.checkpoints import read_metadata
from jmarl.comlrl.only_in_comlrl import clone_reference_models as clone_reference_models
from jmarl.comlrl.only_in_comlrl import load_reference_models_from_sources as load_reference_models_from_sources
from jmarl.comlrl.only_in_comlrl import reference_kl_for_sequence as reference_kl_for_sequence
from jmarl.comlrl.only_in_comlrl import resolve_reference_devices as resolve_reference_devices
from jmarl.comlrl.paths import add_paths
from jmarl.comlrl.rewards import bind_rewards
from jmarl.envs.reward_environment import Formatter, bind_formatter
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.rewards import RewardProcessors as RewardProcessors

F = TypeVar("F", bound=Callable[..., Any])


# --- checkpoints and processes


def read_checkpoint_metadata(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """Return what a checkpoint says about itself, without loading its arrays.

    checkpoint: a run's directory (its newest checkpoint), or DIRECTORY/checkpoints/STEP. The result has the version of the
    format, sequence (the number of updates made), trainer_class, and the run's algorithm and settings as config. run_id and
    wandb are None: a run that continues has its W&B run without them.
    """
    from jmarl.comlrl import trainers

    classes = [value for name, value in vars(trainers).items() if name.endswith("Trainer")]
    names = {trainer.config_class().algorithm: trainer.__name__ for trainer in classes}
    metadata = read_metadata(checkpoint)
    return metadata | {"trainer_class": names.get(metadata["algorithm"])}


class DistributedContext(NamedTuple):
    """What a script may ask about its process. Here it is always a single one; devices are chosen by `mesh`."""

    is_main: bool = True
    device: Any = None


def local_context(device: Any = None) -> DistributedContext:
    """Return the context of the only process."""
    return DistributedContext(device=device)


def unwrap_model(model: Any) -> Any:
    """Return the model inside a wrapper such as DistributedDataParallel, or the model itself."""
    return getattr(model, "module", model)


# --- models and tokenizers


def infer_model_name(source: Any) -> str | None:
    """Return the name of a model: a name itself, that of a loaded agent, or what a model of transformers was loaded from."""
    return None if source is None else name_of(source) or type(source).__name__


def resolve_model_sources(
    *,
    kind: str,
    model: Any,
    models: Sequence[Any] | None,
    expected_count: int,
    expected_label: str | None = None,
    model_label: str = "model",
) -> tuple[list[Any], str | None]:
    """Return what each of expected_count models is loaded from, and the name of the first.

    model: of all of them; models: a list of one each. Both may be given if they name the same. kind, expected_label,
    model_label: how messages call the list, its length and the one model.
    """
    label = expected_label or f"num_agents ({expected_count})"
    if model is None and models is None:
        raise ValueError(f"give {model_label}= (one name) or {kind}= (a list)")
    models = [model] * expected_count if models is None else models
    if isinstance(models, str | bytes) or not isinstance(models, Sequence):
        raise ValueError(f"{kind}= is a list of models or names; one is {model_label}=")
    if len(models) != expected_count or None in models:
        raise ValueError(f"{kind}= has {len(models)} entries {list(models)!r:.80}: give one for each of {label}")
    names = [infer_model_name(source) for source in models]
    if model is not None and set(names) != {infer_model_name(model)}:
        raise ValueError(f"{model_label}= {infer_model_name(model)!r} and {kind}= {names} differ: give one of them")
    return list(models), names[0]


def ensure_pad_token(tokenizer: Any) -> Any:
    """Give a tokenizer without a padding token its end token as one, and return it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has neither a padding token nor an end token: set tokenizer.pad_token")
    return tokenizer


def ensure_tokenizer(model: Any, tokenizer: Any) -> Any:
    """Return a tokenizer, or that of the model of this name, with a padding token."""
    if tokenizer is None and not isinstance(model, str):
        raise ValueError(f"the tokenizer of a {type(model).__name__} is not known: give tokenizer=, or a model's name")
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    return ensure_pad_token(tokenizer)


def resolve_tokenizers(model: Any, tokenizer: Any, agents: Sequence[Any] | None) -> Any:
    """Return one tokenizer for all agents, or a list of one per agent, each with a padding token."""
    if isinstance(tokenizer, list | tuple):
        count = len(tokenizer) if agents is None else len(agents)
        return [ensure_pad_token(one) for one in one_per_agent("tokenizers", tokenizer, count)]
    if tokenizer is None and agents is not None:
        return [ensure_tokenizer(agent, None) for agent in agents]
    return ensure_tokenizer(model, tokenizer)


def apply_tokenizer_specials(tokenizer: Any, models: Iterable[Any]) -> None:
    """Write the padding and end tokens of a tokenizer into the configurations of models of transformers."""
    ensure_pad_token(tokenizer)
    for model in models:
        if model is not None:
            model.config.pad_token_id = tokenizer.pad_token_id
            model.config.eos_token_id = tokenizer.eos_token_id or tokenizer.pad_token_id


# --- formatters and rewards


def build_formatters(
    formatters: Formatter | Sequence[Formatter] | None, num_agents: int, *, pass_none_external_prompts: bool = True
) -> list[Callable[..., Any]]:
    """Return a function of (item, external_prompts=None) for each agent.

    formatters: one for all agents, one per agent, or None: the item's prompt, and in later turns the transition's text. A
    formatter gets external_prompts if it has that parameter; with pass_none_external_prompts also where it is None.
    """
    del pass_none_external_prompts  # the default of a formatter's parameter is None in both cases
    if formatters is None:
        return [_prompt_of_item] * num_agents
    per_agent = one_per_agent("formatters", formatters if callable(formatters) else list(formatters), num_agents)
    return [bind_formatter(formatter, every_turn=True) for formatter in per_agent]


def _prompt_of_item(item: dict, external_prompts: Any = None) -> Any:
    return item.get("prompt", "") if external_prompts is None else external_prompts


def call_reward_function(
    reward_func: Callable,
    prompts: Sequence[str],
    agent_completions: Sequence[Sequence[str]],
    *,
    num_agents: int,
    batch_items: Sequence[Mapping[str, Any]] | None = None,
    signature: inspect.Signature | None = None,
) -> list[float]:
    """Return the reward of each joint action, as a trainer would compute it (the mean over agents).

    agent_completions: [N][J]. prompts, batch_items: one of each for all joint actions, or one per joint action.
    """
    del signature  # it is that of the function
    count = len(agent_completions[0])
    items = [dict(item) for item in batch_items] if batch_items else [{}]
    prompts = list(prompts) * count if len(prompts) == 1 else list(prompts)
    items = items * count if len(items) == 1 else items
    function = RewardFunction(bind_rewards(reward_func, num_agents, False), num_agents=num_agents)
    result = function([list(texts) for texts in agent_completions], prompts, items, np.random.default_rng(0))
    return [float(x) for x in result.total]


def normalize_reward_lengths(rewards: Sequence[float], *, num_agents: int, num_generations: int, algorithm: str) -> list[float]:
    """Return rewards as a list with one number per agent or per generation. A single number goes to every agent."""
    values = [float(reward) for reward in rewards]
    if num_agents == 1 or len(values) in (num_agents, num_generations):
        return values
    if len(values) == 1:
        return values * num_agents
    raise ValueError(
        f"a reward of {algorithm} returned {len(values)} numbers for {num_agents} agents: return one, or one per agent"
    )


def resolve_reward_range(reward_func: Callable) -> tuple[float, float] | None:
    """Return the range that a reward declares in its attribute reward_range; None without one."""
    bounds = vars(reward_func).get("reward_range") if hasattr(reward_func, "__dict__") else None
    if bounds is None:
        return None
    low, high = (math.nan, math.nan) if isinstance(bounds, str) or len(bounds) != 2 else map(float, bounds)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range={bounds!r} is not allowed: give two finite numbers, (smallest, largest)")
    return low, high


def set_reward_range(reward_func: F, minimum: float, maximum: float) -> F:
    """Declare the range of a reward's values, and return the reward."""
    reward_func.reward_range = (float(minimum), float(maximum))  # type: ignore[attr-defined]
    resolve_reward_range(reward_func)
    return reward_func


# --- the KL term, which the trainer computes: see `kl_coef`


def reference_kl_enabled(args: Any) -> bool:
    """Return whether a configuration has the KL term."""
    return bool(args.reference_kl_enabled or args.kl_coef)


def reference_kl_coef(args: Any) -> float:
    """Return the coefficient of the KL term, as it was set, also where it is off."""
    return float(args.kl_coef or args.reference_kl_coef)


def validate_reference_kl_config(args: Any, expected_count: int) -> None:
    """Do nothing: a configuration has checked its settings when it was made."""


add_paths(__name__)
