"""Rules for keys of MRLM that several of ours follow from, or that are read together.

A rule takes the keys that belong to it, as far as they are given, the kind of data that the algorithm learns from (rollouts,
pairs or texts), and the notes of the run: it adds keys that change nothing with the reason, and sentences with none. The keys
are in order: those of newer sources come first, and those of one source as `precedence` says, so that where several keys decide
one thing the first one counts. Two keys of `convert.ONE_NAME` come under one name. A rule returns our settings; a `Weak` one
gives way to any other source of the setting. A ValueError says why a value cannot act here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]
Notes = dict[str, str]  # key -> why it changes nothing; sentence -> ""
Rule = Callable[[Values, str, Notes], dict[str, Any]]

DIRECTORIES = ("checkpoint_dir", "save_dir", "output_dir")  # the first one that is given is the run's directory
WEIGHTS = ("bc_weight", "world_model_weight")
MODES = {"behavioral_cloning": (1.0, 0.0), "bc": (1.0, 0.0), "world_model": (0.0, 1.0), "combined": (0.5, 0.5)}  # their weights
SCALES = {"group": "std", "batch": "batch_std", "running": "running_std", "none": "none"}
TYPES = {"float32": ("float32", "fp32", "auto"), "bfloat16": ("bfloat16", "bf16"), "float16": ("float16", "fp16", "half")}
HALVES = {"use_bf16": "bfloat16", "use_fp16": "float16"}  # types of half the width, of which one source sets one
WANDB = {"wandb_project": "project", "wandb_entity": "entity", "wandb_run_name": "name", "wandb_mode": "mode"}


class OptimizerSteps(NamedTuple):
    """A number of optimizer steps."""

    number: int


class Rollouts(NamedTuple):
    """A number of episodes, of which each completion of a group is one."""

    number: int


class Weak(NamedTuple):
    """The value of a setting if nothing else sets it."""

    value: Any


def precedence(key: str, value: Any) -> int:
    """Return where a key comes among those of its source: lower ones first."""
    if key in DIRECTORIES:
        return DIRECTORIES.index(key)
    if key in HALVES:  # on, each counts more than the type of the weights; off, it counts less
        return 0 if value else 2
    return 0 if key == "do_sample" or (key in ("normalize_rewards", "normalize_advantages") and not value) else 1


def batches(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
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
        unread = values.keys() & {"mini_batch_size", "num_rollouts_per_iteration"}
        notes.update(dict.fromkeys(sorted(unread), f"a step takes batch_size {kind}"))
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


def turns(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """Turns of an episode at most; several form a chain."""
    count = values["max_episode_length"]
    if kind != "rollouts":
        notes["max_episode_length"] = f"{kind} have no turns to count"
        return {}
    return {"num_turns": count} | ({"branching": Weak("chain")} if count != 1 else {})


def evaluation(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """Held-out tasks, of which each is played once per evaluation."""
    settings: dict[str, Any] = {"eval_every": values["eval_every"]} if "eval_every" in values else {}
    if "eval_episodes" in values:
        settings["held_out"] = values["eval_episodes"]
    elif values.get("eval_every"):
        settings["held_out"] = Weak(20)
    return settings | ({"eval_generations": Weak(1)} if kind == "rollouts" and "held_out" in settings else {})


def directory(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """The run's directory, which has its checkpoints, logs and models."""
    name, value = next(iter(values.items()))
    notes.update({other: f"everything is in {name}" for other, path in values.items() if path != value})
    return {"output_dir": value}


def precision(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """The type of activations; master weights are float32."""
    given = str(values.get("dtype", "auto")).removeprefix("torch.")
    width = next((name for name, others in TYPES.items() if given in others), None)
    if width is None:
        raise ValueError(f"{given!r} is no type of weights: choose float32, bfloat16 or float16")
    chosen, off = "float32", set[str]()
    for name, value in values.items():
        meant = HALVES.get(name, width)
        if name in HALVES and not value:
            off.add(meant)
        elif meant not in off:
            chosen = meant
            break
    if chosen == "float16":
        notes["float16 is computed as bfloat16 here, which needs no scaling of the loss; master weights stay float32"] = ""
        chosen = "bfloat16"
    return {"compute_dtype": chosen}


def wandb(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """Arguments of `wandb.init`; W&B is on if one of them is given. use_wandb: false switches it off."""
    if values.get("use_wandb") is False:
        return {"wandb": {}}
    return {"wandb": {WANDB[name]: value for name, value in values.items() if name in WANDB} or {"project": "jmarl"}}


def group_advantages(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """What returns minus the mean of their group are divided by."""
    over = values.get("reward_normalization", "group")
    if over not in SCALES:
        raise ValueError(f"choose {', '.join(SCALES)}")
    name, value = next(iter(values.items()))
    return {"advantage_scale": SCALES[over] if name == "reward_normalization" or value else "none"}


def imitation(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """What sft learns: the actions (behavior cloning), the environment's answers (a world model), or both."""
    mode = values.get("mode")
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r} is not allowed: choose {', '.join(MODES)}")
    defaults: dict[str, Any] = dict(zip(WEIGHTS, MODES[mode], strict=True)) if mode else {}
    if mode in (None, "combined"):
        return defaults | {name: values[name] for name in WEIGHTS if name in values}
    for name, weight in defaults.items():
        if values.get(name, weight) != weight:
            notes[name] = f"mode={mode} has the weight {weight:g}; use mode: combined for weights"
    return defaults


def low_rewards(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """Which trajectories are left out: those with a lower sum of rewards."""
    threshold = values.get("min_reward_threshold", 0.0)
    return {"min_reward": threshold} if values.get("filter_low_reward", "min_reward_threshold" in values) else {}


def lora(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """Adapters; use_lora: false switches them off whatever the other keys say.

    Without use_lora there are none, as in MRLM, unless lora_rank is set elsewhere: else the other keys are an error there."""
    if not values.get("use_lora", True):
        return {"lora_rank": 0}
    if "lora_r" in values and "use_lora" not in values:
        notes["lora_r"] = "all weights are trained: use_lora is not set"
    settings: dict[str, Any] = {"lora_rank": values.get("lora_r", 8)} if "use_lora" in values else {}
    settings |= {name: values[name] for name in ("lora_alpha", "lora_dropout") if name in values}
    if (targets := values.get("lora_target_modules")) is not None:
        settings["lora_targets"] = targets if isinstance(targets, str) else ",".join(map(str, targets))
    return settings


def sampling(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """The temperature; do_sample: false is temperature 0."""
    name, value = next(iter(values.items()))
    if name == "do_sample" and not value:
        return {"temperature": 0.0}
    return {"temperature": values["temperature"]} if "temperature" in values else {}


def distributed(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
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


def dataset(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
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
    return {"data": name} if path is None else {"data": path} | ({} if name is None else {"subset": name})


def agents(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """One model per role, in the order of the environment's roles."""
    entries = values["agents"]
    if not isinstance(entries, list) or not entries:
        raise ValueError("agents is a list with one model per role")
    models, settings = [], {"frozen_agents": [], "roles": [], "learning_rate": []}
    for i, entry in enumerate(entries):
        entry = {"model_name_or_path": entry} if isinstance(entry, str) else entry
        if entry.get("model_name_or_path") is None:
            raise ValueError(f"agent {i} has no model_name_or_path")
        models.append(entry["model_name_or_path"])
        if entry.get("mode", "server") not in ("server", "client"):
            raise ValueError(f"mode={entry['mode']!r} of agent {i}: choose server (trained) or client (frozen)")
        if entry.get("mode") == "client":
            settings["frozen_agents"].append(i)
        for key, name in (("system_prompt", "roles"), ("learning_rate", "learning_rate")):
            if key in entry:
                settings[name].append(entry[key])
    for name in ("roles", "learning_rate"):
        if len(settings[name]) not in (0, len(entries)):
            raise ValueError(f"{len(settings[name])} of {len(entries)} agents have a {name}: give all one, or none")
    return {"models": models, **{name: value for name, value in settings.items() if value}}
