"""Rules for keys of MRLM that are not one setting of ours under another name.

A rule takes the keys that belong to it, as far as they are given, and the kind of data that the algorithm learns from
(rollouts, pairs or texts). The keys are in order: those of newer sources come first, and those of one source as `precedence`
says, so that where several keys decide one thing the first one counts. Two keys of `layers.ONE_NAME` come under one name. A
rule returns our settings; a `Weak` one gives way to any other source of the setting. A ValueError says why a value cannot act
here.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]
Rule = Callable[[Values, str], dict[str, Any]]

NUM_EPISODES = 20  # held-out episodes where eval_every is given without eval_episodes
DIRECTORIES = ("checkpoint_dir", "save_dir", "output_dir")  # the first one that is given is the run's directory


class Refused(NamedTuple):
    """A key of MRLM that has no effect here."""

    reason: str


class Ignored(NamedTuple):
    """A key of MRLM that changes nothing here. One warning names all of them."""

    reason: str


class UnusedKey(UserWarning):
    """What a rule warns of: a key, with the reason why its value changes nothing."""

    def __init__(self, key: str, reason: str):
        super().__init__(f"{key} ({reason})")
        self.key, self.reason = key, reason


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A number of episodes, of which each completion of a group is one."""

    number: int


@dataclasses.dataclass(frozen=True)
class Steps:
    """A number of optimizer steps."""

    number: int


class Weak(NamedTuple):
    """The value of a setting if nothing else sets it."""

    value: Any


def precedence(key: str, value: Any) -> int:
    """Return where a key comes among those of its source: lower ones first."""
    if key in DIRECTORIES:
        return DIRECTORIES.index(key)
    if key in ("use_bf16", "use_fp16"):  # on, each counts more than the type of the weights; off, it counts less
        return 0 if value else 2
    if key == "do_sample" or (key in ("normalize_rewards", "normalize_advantages") and not value):
        return 0
    return 1


def unused(key: str, reason: str) -> None:
    """Warn that the value of a key changes nothing; `MRLMLayers` puts all such keys into one warning."""
    warnings.warn(UnusedKey(key, reason), stacklevel=2)


def only(allowed: Any, reason: str) -> Rule:
    """Return a rule for a key that may only have the one value which asks for nothing. reason: why there is no other."""

    def rule(values: Values, kind: str) -> dict[str, Any]:
        for name, value in values.items():
            if value != allowed:
                raise ValueError(f"{name} can only be {allowed!r}: {reason}")
        return {}

    rule.__doc__ = f"Only {allowed!r}: {reason}."
    return rule


# --- training


def number_of_updates(values: Values, kind: str) -> dict[str, Any]:
    """num_epochs, num_iterations: updates of the team, whatever it learns from."""
    return {"num_updates": values["num_epochs"]}


def batches(values: Values, kind: str) -> dict[str, Any]:
    """Episodes (pairs, texts) of an update and how they are split into optimizer steps.

    num_rollouts_per_iteration episodes are played for an update, of which the completions of a group are some, and each
    optimizer step learns from mini_batch_size of them, or else from batch_size. Without it batch_size tasks are played.
    gradient_accumulation_steps makes a step that many times larger and computes its gradient in as many parts.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1")
    size, parts = values.get("batch_size"), values.get("gradient_accumulation_steps", 1)
    settings: dict[str, Any] = {"micro_batches": parts} if "gradient_accumulation_steps" in values else {}
    if kind != "rollouts":
        for name in ("mini_batch_size", "num_rollouts_per_iteration"):
            if name in values:
                unused(name, f"a step takes batch_size {kind}")
        if size is None and parts > 1:
            raise ValueError("gradient_accumulation_steps needs batch_size")
        return settings | ({"batch_size": size * parts} if size else {})
    rollouts, mini = values.get("num_rollouts_per_iteration"), values.get("mini_batch_size")
    step = (mini or (size if rollouts else None) or 0) * parts
    episodes = rollouts or (size and size * (1 if mini else parts))
    if episodes is None:
        if settings or mini:
            raise ValueError("mini_batch_size and gradient_accumulation_steps need batch_size")
        return settings
    if step and episodes % step:
        raise ValueError(f"an optimizer step on {step} episodes does not divide the {episodes} of an update evenly")
    settings["num_prompts"] = Rollouts(episodes) if rollouts else episodes
    return settings | ({"num_minibatches": episodes // step} if step else {})


def optimizer(values: Values, kind: str) -> dict[str, Any]:
    """Adam without weight decay is adamw with weight_decay 0, the default."""
    return {"optimizer": {"adam": "adamw"}.get(values["optimizer"], values["optimizer"])}


def schedule(values: Values, kind: str) -> dict[str, Any]:
    """The learning rate schedule: constant, linear or cosine."""
    name = values["lr_scheduler"]
    return {"lr_schedule": {"constant_with_warmup": "constant", "none": "constant"}.get(name, name)}


def warmup(values: Values, kind: str) -> dict[str, Any]:
    """Optimizer steps of the warm-up, which `keys.count_warmup` turns into updates."""
    steps = values["warmup_steps"]
    if type(steps) is not int or steps < 0:
        raise ValueError(f"warmup_steps={steps!r} must be a whole number >= 0")
    return {"warmup_updates": Steps(steps)}


def turns(values: Values, kind: str) -> dict[str, Any]:
    """Turns of an episode at most; several form a chain."""
    count = values["max_episode_length"]
    if kind != "rollouts":
        unused("max_episode_length", f"{kind} have no turns to count")
        return {}
    return {"num_turns": count} | ({"branching": Weak("chain")} if count != 1 else {})


def evaluation(values: Values, kind: str) -> dict[str, Any]:
    """Held-out tasks, of which each is played once per evaluation."""
    settings: dict[str, Any] = {"eval_every": values["eval_every"]} if "eval_every" in values else {}
    if "eval_episodes" in values:
        settings["held_out"] = values["eval_episodes"]
    elif values.get("eval_every"):
        settings["held_out"] = Weak(NUM_EPISODES)
    return settings | ({"eval_generations": Weak(1)} if kind == "rollouts" and "held_out" in settings else {})


def directory(values: Values, kind: str) -> dict[str, Any]:
    """The run's directory, which has its checkpoints, logs and models."""
    name, value = next(iter(values.items()))
    for other, path in values.items():
        if path != value:
            unused(other, f"everything is in {name}")
    return {"output_dir": value}


def precision(values: Values, kind: str) -> dict[str, Any]:
    """The type of activations; master weights are float32."""
    names = {"float32": ("float32", "fp32", "auto"), "bfloat16": ("bfloat16", "bf16"), "float16": ("float16", "fp16", "half")}
    types = {name: width for width, others in names.items() for name in others}
    given = str(values.get("dtype", "auto")).removeprefix("torch.")
    if given not in types:
        raise ValueError(f"{given!r} is no type of weights: choose float32, bfloat16 or float16")
    chosen, off = "float32", set()
    for name, value in values.items():
        meant = {"use_bf16": "bfloat16", "use_fp16": "float16"}.get(name, types[given])
        if name != "dtype" and not value:
            off.add(meant)
        elif meant not in off:
            chosen = meant
            break
    if chosen == "float16":
        warnings.warn(
            "float16 is computed as bfloat16 here, which needs no scaling of the loss; master weights stay float32",
            stacklevel=2,
        )
        chosen = "bfloat16"
    return {"compute_dtype": chosen}


def wandb(values: Values, kind: str) -> dict[str, Any]:
    """Arguments of `wandb.init`; W&B is on if one of them is given. use_wandb: false switches it off."""
    names = {"wandb_project": "project", "wandb_entity": "entity", "wandb_run_name": "name", "wandb_mode": "mode"}
    if values.get("use_wandb") is False:
        return {"wandb": {}}
    given = {names[name]: value for name, value in values.items() if name in names}
    return {"wandb": given or {"project": "jmarl"}}


# --- algorithms


def clip_range(values: Values, kind: str) -> dict[str, Any]:
    """The ratio is clipped to the same distance below and above 1."""
    return dict.fromkeys(("clip_eps_low", "clip_eps_high"), values["clip_range"])


def value_loss(values: Values, kind: str) -> dict[str, Any]:
    """The value loss has a weight where the critic is a head of the policy, as in MRLM."""
    return {"value_coef": values["value_loss_coef"], "separate_critic": Weak(False)}


def token_advantages(values: Values, kind: str) -> dict[str, Any]:
    """Whether advantages are divided by their std over the batch."""
    return {"advantage_scale": "batch_std" if values["normalize_advantages"] else "none"}


def group_advantages(values: Values, kind: str) -> dict[str, Any]:
    """What returns minus the mean of their group are divided by."""
    scales = {"group": "std", "batch": "batch_std", "running": "running_std", "none": "none"}
    over = values.get("reward_normalization", "group")
    if over not in scales:
        raise ValueError(f"choose {', '.join(scales)}")
    name, value = next(iter(values.items()))
    on = name == "reward_normalization" or value
    return {"advantage_scale": scales[over] if on else "none"}


def imitation(values: Values, kind: str) -> dict[str, Any]:
    """What sft learns: the actions (behavior cloning), the environment's answers (a world model), or both."""
    modes = {"behavioral_cloning": (1.0, 0.0), "bc": (1.0, 0.0), "world_model": (0.0, 1.0), "combined": (0.5, 0.5)}
    mode = values.get("mode")
    if mode is not None and mode not in modes:
        raise ValueError(f"mode={mode!r} is not allowed: choose {', '.join(modes)}")
    names = ("bc_weight", "world_model_weight")
    if mode not in (None, "combined"):
        for name, weight in zip(names, modes[mode], strict=True):
            if values.get(name, weight) != weight:
                unused(name, f"mode={mode} has the weight {weight:g}; use mode: combined for weights")
        return dict(zip(names, modes[mode], strict=True))
    defaults = dict(zip(names, modes[mode], strict=True)) if mode else {}
    return {name: values.get(name, defaults.get(name)) for name in names if name in values or name in defaults}


def low_rewards(values: Values, kind: str) -> dict[str, Any]:
    """Which trajectories are left out: those with a lower sum of rewards."""
    threshold = values.get("min_reward_threshold", 0.0)
    return {"min_reward": threshold} if values.get("filter_low_reward", "min_reward_threshold" in values) else {}


# --- model


def lora(values: Values, kind: str) -> dict[str, Any]:
    """Adapters; use_lora: false switches them off whatever the other keys say.

    Without use_lora there are none, as in MRLM, unless lora_rank is set elsewhere: else the other keys are an error there."""
    if not values.get("use_lora", True):
        return {"lora_rank": 0}
    if "lora_r" in values and "use_lora" not in values:
        unused("lora_r", "all weights are trained: use_lora is not set")
    settings: dict[str, Any] = {"lora_rank": values.get("lora_r", 8)} if "use_lora" in values else {}
    settings |= {name: values[name] for name in ("lora_alpha", "lora_dropout") if name in values}
    if (targets := values.get("lora_target_modules")) is not None:
        settings["lora_targets"] = targets if isinstance(targets, str) else ",".join(map(str, targets))
    return settings


def checkpointing(values: Values, kind: str) -> dict[str, Any]:
    """Whether the backward pass computes activations again: of whole layers, or not at all."""
    return {"remat": "full" if values["gradient_checkpointing"] else "none"}


def sampling(values: Values, kind: str) -> dict[str, Any]:
    """The temperature; do_sample: false is temperature 0."""
    name, value = next(iter(values.items()))
    if name == "do_sample" and not value:
        return {"temperature": 0.0}
    return {"temperature": values["temperature"]} if "temperature" in values else {}


def group_temperature(values: Values, kind: str) -> dict[str, Any]:
    """The temperature, if the model has none."""
    return {"temperature": Weak(values["temperature"])}


def tokenizer(values: Values, kind: str) -> dict[str, Any]:
    """The tokenizer, which `MRLMLayers` compares with the model."""
    return {"tokenizer": values["tokenizer_name_or_path"]}


def policy_env(value: Any) -> str:
    """Return why the policy of MRLM's file changes nothing. Raises ValueError for one that is not the model."""
    entry = value if isinstance(value, Mapping) else {"env_type": value}
    if entry.get("env_type", "llm") not in ("llm", None) or entry.get("custom_class"):
        raise ValueError(f"{value!r:.80} is no policy: the policy is the model, so set model, or agents")
    if entry.get("remote"):
        raise ValueError("remote: the policy is trained here; environments can be remote, and jmarl serve --http offers a team")
    return "the policy is the model, or agents"


def device(values: Values, kind: str) -> dict[str, Any]:
    """The platform is chosen when Python starts; auto is what is there."""
    if str(values["device"]) not in ("auto", "cuda", "gpu", "cpu", "tpu"):
        raise ValueError("choose auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs")
    return {"device": {"cuda": "gpu"}.get(values["device"], values["device"])}


# --- distributed, dataset


def distributed(values: Values, kind: str) -> dict[str, Any]:
    """Divide the rows of a batch over all devices, and with fsdp the weights too. `processes` is what the processes of the run
    are compared with once they have joined: the section starts none."""
    if values.get("strategy", "ddp") not in ("ddp", "fsdp"):
        raise ValueError(f"strategy={values['strategy']!r} is not allowed: choose ddp or fsdp")
    counts = ("num_nodes", "nnodes", "nproc_per_node", "world_size")
    for name in counts:
        if not isinstance(values.get(name, 1), int) or values.get(name, 1) < 1:
            raise ValueError(f"{name}={values[name]!r} is not allowed: give a number of at least 1")
    defaults = {"num_gpus": 1, "strategy": "ddp"} | dict.fromkeys(counts, 1)
    given = [name for name, default in defaults.items() if values.get(name, default) != default]
    if given and "enabled" not in values:
        raise ValueError(f"{given[0]} has no effect without enabled: set distributed.enabled to true, or remove {given[0]}")
    if not values.get("enabled", False):
        return {"processes": {"enabled": False}} if "enabled" in values else {}
    asked = {name: values[name] for name in counts if name in values}
    nodes, gpus = asked.get("num_nodes", asked.get("nnodes", 1)), values.get("num_gpus", "all")
    mesh = f"data={gpus if gpus == 'all' else gpus * nodes}"  # num_gpus are those of a node
    return {"mesh": mesh, "strategy": values.get("strategy", "ddp")} | ({"processes": asked} if asked else {})


def dataset(values: Values, kind: str) -> dict[str, Any]:
    """Given data, or prompts with a reward: a file, or a data set of the Hub."""
    name, path, source = values.get("name"), values.get("path"), values.get("type")
    if source not in (None, "json", "jsonl", "huggingface"):
        raise ValueError(f"type={source!r} is not allowed: choose json or huggingface")
    if source in ("json", "jsonl"):
        if path is None or name is not None:
            raise ValueError("a data set of type json has a path, a .json or .jsonl file, and no name")
        return {"data": path}
    if path is None and name is None:
        raise ValueError("a data set needs a path (a file), or a name (of the Hub)")
    settings = {"data": path if path is not None else name}
    if path is not None and name is not None:
        settings["subset"] = name
    return settings
