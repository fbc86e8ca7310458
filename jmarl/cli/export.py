"""`jmarl export`: write the agents of a run for other programs, each with a model card.

`DIR/agent_0/`, ... are directories that transformers and vLLM load. Of a run with LoRA they hold the adapters for peft, and
with `--merge` the merged weights. A base that peft cannot load by its name (a .gguf file) is written to `DIR/base`. The card
has the settings of the run that are not defaults, and its curve. Nothing appears in DIR before all of it is written.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import check_output, plural, to_stderr
from jmarl.cli.teams.match import add_model_argument
from jmarl.cli.teams.sources import TeamSource, load_source

if TYPE_CHECKING:
    from jmarl.config import ExperimentConfig, TrainConfig
    from jmarl.models.config import ModelConfig

CURVE_ROWS = 12  # of a card
CURVE = {  # column of metrics.jsonl -> of the card
    "reward/mean": "reward", "reward/invalid": "without a reward", "loss": "loss", "eval/reward": "held-out reward",
    "eval/reward/invalid": "held out without a reward",
}  # fmt: skip
COUNTS = ("reward/invalid", "eval/reward/invalid")  # on the card where there are any
NOT_ON_CARD = ("output_dir", "progress", "resume", "resume_step", "allow_changed", "replay_rollout", "algorithm")
TORCH_DTYPES = ("float32", "bfloat16", "float16")

EPILOG = """examples:
  jmarl export --model runs/mine --output exported --dtype bfloat16
  jmarl export --model runs/lora --output adapters            adapters for peft
  jmarl export --model runs/lora --output merged --merge      whole models"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    add_model_argument(parser)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--merge", action="store_true", help="of a run with LoRA: whole models instead of adapters")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="float32", help="type of the weights; default: float32")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and is not empty: give a new directory")
    check_output(output)
    to_stderr(f"reading {' '.join(args.model)} ...")
    source = load_source(args.model, args.base_model, args.best)
    as_adapters = has_adapters(source) and not args.merge
    if args.merge and not has_adapters(source):
        raise ValueError(f"--merge is for runs with LoRA, and {source.text} has no adapters: remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.saving")
    shutil.rmtree(temporary, ignore_errors=True)  # left by an export that was killed
    try:
        write_agents(source, temporary, output, args, as_adapters)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for line in lines_of_vllm(source):
        to_stderr(line)
    kind = "adapter" if as_adapters else "whole model"
    to_stderr(f"{output} has {plural(len(source.agents), kind)} in {args.dtype}, from {source.text}")
    return 0


WITH_IMAGES = ("gemma3_text", "mistral", "ministral3")  # families that are also parts of models of text and images


def has_adapters(source: TeamSource) -> bool:
    """Return whether agents have adapters beside their merged weights."""
    if source.adapters is not None:
        return True
    return source.directory is not None and (source.directory / "models" / "agent_0" / "adapter").is_dir()


def no_vllm(config: ModelConfig) -> bool:
    """Return whether vLLM lacks biases of an architecture, which it refuses or leaves out. Read in its sources (0.33.0)."""
    lacks = {"qwen3": config.out_bias, "qwen3_moe": config.out_bias, "qwen3_5_text": config.qkv_bias or config.out_bias}
    return lacks.get(config.family, False)


def lines_of_vllm(source: TeamSource) -> list[str]:
    """Return what one must know to open the agents in vLLM, which chooses longrope's factors once, by its longest row."""
    lines = []
    for i, config in enumerate(agent.config for agent in source.agents):
        if no_vllm(config):
            lines.append(f"agent {i} opens in transformers and not in vLLM, whose {config.family} lacks biases of attention")
        if config.has_two_contexts and source.cfg is not None and source.cfg.run.long_context is not True:
            length = config.in_context(long=False).context
            lines.append(f"agent {i} learned with longrope's short factors: open it in vLLM with --max-model-len {length}")
    return lines


def write_agents(source: TeamSource, directory: Path, final: Path, args: argparse.Namespace, as_adapters: bool) -> None:
    """Write all agents and their cards. directory: where they are written. final: where they will be."""
    from jmarl.models.hub.agents import save_pretrained, save_tokenizer

    bases = base_names(source, args, directory, final) if as_adapters else [""] * len(source.agents)
    if as_adapters:
        write_adapters(source, directory)
    for i, agent in enumerate(source.agents):
        path = directory / f"agent_{i}"
        if as_adapters:
            save_tokenizer(path, agent.tokenizer)
            set_field(path / "adapter_config.json", "base_model_name_or_path", bases[i])
        else:
            save_pretrained(path, agent.config, agent.params, agent.tokenizer, agent.generation_config)
        cast(path, args.dtype, agent.config)
        (path / "README.md").write_text(card(source, i, args.dtype, bases[i]), encoding="utf-8")


def write_adapters(source: TeamSource, directory: Path) -> None:
    """Write the adapters of each agent as files for peft."""
    import jax

    from jmarl.models.hub.peft import save_adapter
    from jmarl.models.lora import describe
    from jmarl.models.stack import unstack
    from jmarl.team import Team

    if source.adapters is None:
        for i in range(len(source.agents)):
            shutil.copytree(Path(str(source.directory)) / "models" / f"agent_{i}" / "adapter", directory / f"agent_{i}")
        return
    shared = source.experiment is not None and source.experiment.team.shared_weights
    for spec, stack in zip(Team.of(source.agents, shared_weights=shared).stacks, source.adapters, strict=True):
        for a, roles in enumerate(spec.members):
            for agent in roles:
                save_adapter(
                    directory / f"agent_{agent}", spec.config, jax.device_get(unstack(stack, a)), describe(stack).alpha
                )


def base_names(source: TeamSource, args: argparse.Namespace, directory: Path, final: Path) -> list[str]:
    """Return the name or path of each agent's base as peft loads it.

    A base in another format is written to `base/`; so is the text part of a model of text and images, whose modules have other
    names.
    """
    from jmarl.models.hub.agents import SMOLLM2, is_text_model, load_agent, save_pretrained

    models = list(args.base_model or (source.experiment.team.models if source.experiment else ()))
    models = models * len(source.agents) if len(models) == 1 else models
    if not models:
        raise ValueError(f"{source.text} does not say what its adapters are for: name the base with --base-model, or --merge")
    names = {}
    families = dict(zip(models, (agent.config.family for agent in source.agents), strict=False))
    for model in dict.fromkeys(models):
        is_whole = families[model] not in WITH_IMAGES or is_text_model(model)
        if model != SMOLLM2 and not Path(model).is_file() and is_whole:
            names[model] = str(Path(model).resolve()) if Path(model).is_dir() else model
            continue
        folder = "base" if len(set(models)) == 1 else f"base_{len(names)}"
        agent = load_agent(model)
        save_pretrained(directory / folder, agent.config, agent.params, agent.tokenizer, agent.generation_config)
        names[model] = str(final.resolve() / folder)
    return [names[model] for model in models]


def set_field(path: Path, name: str, value: Any) -> None:
    """Set a field of a JSON file."""
    fields = json.loads(path.read_text(encoding="utf-8")) | {name: value}
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def cast(directory: Path, dtype: str, config: ModelConfig) -> None:
    """Convert the weights in a directory from float32, but for those that the decoder does not round either. Raises ValueError
    for weights that float16 cannot hold."""
    if dtype == "float32":
        return
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from jmarl.models.families import FAMILIES
    from jmarl.models.weights import FLOAT32, LAYERS, WEIGHTS

    kind, total = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16), 0
    exact = tuple(f".{FAMILIES[config.family].module(x)}{WEIGHTS[LAYERS + x].suffix}" for x in FLOAT32)
    for path in directory.glob("*.safetensors"):
        tensors = {}
        for name, x in load_file(path).items():
            if dtype == "float16" and np.abs(x).max() > np.finfo(np.float16).max:
                raise ValueError(f"{name} has the weight {np.abs(x).max():.3g}, too large for float16: use --dtype bfloat16")
            tensors[name] = x if name.endswith(exact) else x.astype(kind)
        total += sum(x.nbytes for x in tensors.values())
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    if (index := directory / "model.safetensors.index.json").is_file():
        set_field(index, "metadata", {"total_size": total})
    if (directory / "config.json").is_file():
        set_field(directory / "config.json", "torch_dtype", dtype)


# --- the card ----------------------------------------------------------------------------------------------------------


def card(source: TeamSource, agent: int, dtype: str, base: str) -> str:
    """Return the model card of an agent. base: of an adapter; empty: it is a whole model."""
    models = source.experiment.team.models if source.experiment else ()
    start = models[agent if len(models) > 1 else 0] if models else ""
    head = ["---", f"library_name: {'peft' if base else 'transformers'}"]
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", start) and not Path(start).exists():
        head.append(f"base_model: {start}")
    if license := license_of(start):
        head.append(f"license: {license}")
    head += ["pipeline_tag: text-generation", "tags: [jmarl, multi-agent, reinforcement-learning]", "---", ""]
    run = source.directory.resolve().name if source.directory else "a team"
    what = f"{'Adapter' if base else 'Weights'} ({dtype}) of agent {agent} of {len(source.agents)}"
    head += [
        f"# Agent {agent} of {run}",
        "",
        f"{what}, from {place(source)}. The agents of a team are trained to work together.",
    ]
    parts = [head, use_lines(base)]
    if source.cfg is not None:
        parts.append(["## Settings", "", *table(("setting", "value"), settings(source.cfg, source.experiment).items())])
        parts.append(["Settings that are not listed have jmarl's defaults."])
    if source.directory is not None and (source.directory / "metrics.jsonl").is_file():
        parts.append(curve_lines(source.directory / "metrics.jsonl"))
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def license_of(model: str) -> str:
    """Return the field `license` of the model card of a directory; empty if there is none."""
    path = Path(model) / "README.md"
    if not model or not path.is_file():
        return ""
    fields = re.match(r"---\n(.*?)\n---", path.read_text(encoding="utf-8"), flags=re.S)
    field = re.search(r"^license: *(.+)$", fields[1], flags=re.M) if fields else None
    return field[1].strip() if field else ""


def place(source: TeamSource) -> str:
    """Return where the weights come from, without the path of this machine."""
    return source.text.replace(str(source.directory), "the run") if source.directory else source.text


def use_lines(base: str) -> list[str]:
    """Return how to load the directory."""
    imports = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
    if not base:
        imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    name = "AutoPeftModelForCausalLM" if base else "AutoModelForCausalLM"
    loads = [("model", name), ("tokenizer", "AutoTokenizer")]
    lines = [f'{variable} = {name}.from_pretrained("this directory")' for variable, name in loads]
    return ["## Use", "", "```python", *imports, "", *lines, "```"]


def settings(cfg: TrainConfig, experiment: ExperimentConfig | None) -> dict[str, Any]:
    """Return the settings of a run that are not defaults, by name."""
    from jmarl.config import TrainConfig, flat

    rows: dict[str, Any] = {"algorithm": cfg.algorithm}
    if experiment is not None:
        names = ("environment", "options", "data", "reward", "train_envs", "eval_envs")
        task = {name: getattr(experiment.task, name) for name in names}
        rows |= {"models": ", ".join(experiment.team.models)} | {name: value for name, value in task.items() if value}
    default = flat(TrainConfig())
    return rows | {name: x for name, x in flat(cfg).items() if x != default[name] and name not in NOT_ON_CARD}


def curve_lines(path: Path) -> list[str]:
    """Return the curve of a run as a table of a few rows: the first, the last, and some between them."""
    from jmarl.logs.metrics_writer import read_rows

    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        number = int(row["step"])
        steps.setdefault(number, {}).update({name: row[name] for name in CURVE if name in row})
    rows = sorted((number, row) for number, row in steps.items() if row)
    if not rows:
        return []
    names = [name for name in CURVE if has(rows, name) and (name != "loss" or not has(rows, "reward/mean"))]
    names = [name for name in names if name not in COUNTS or any(row.get(name) for _, row in rows)]
    if len(rows) > CURVE_ROWS:
        chosen = sorted({round(i * (len(rows) - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})
        rows = [rows[i] for i in chosen]
    cells = [(number, *(cell(row.get(name)) for name in names)) for number, row in rows]
    return ["## Curve", "", *table(("updates", *(CURVE[name] for name in names)), cells)]


def has(rows: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> bool:
    """Return whether a row has a column."""
    return any(name in row for _, row in rows)


def cell(value: float | None) -> str:
    """Return a number for a table; empty if there is none."""
    return "" if value is None or not math.isfinite(value) else f"{value:.4g}"


def table(head: Sequence[str], rows: Any) -> list[str]:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(map(str, row)).replace("\n", " ") + " |" for row in (head, *rows)]
    return [lines[0], "|" + " --- |" * len(head), *lines[1:]]
