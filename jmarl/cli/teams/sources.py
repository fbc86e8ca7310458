"""Agents of `--model`: the directory of a run, a directory of agents (`agent_0/`, ...), one model, or one model per role.

Of a run the newest weights are taken: those in `models/`, or the newest checkpoint if the run has not ended. A checkpoint has
neither tokenizers nor, with LoRA, the base: these come from the models in the run's config.yaml, or from `--base-model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported in the functions, so that `--help` answers at once
    from jmarl.config import ExperimentConfig, TrainConfig
    from jmarl.files.run_files import Best
    from jmarl.models.hub.agents import Agent
    from jmarl.team import Team


@dataclasses.dataclass(frozen=True)
class TeamSource:
    """The agents that `--model` names."""

    agents: list[Agent]  # on the host, with merged adapters
    text: str  # where their weights come from
    cfg: TrainConfig | None = None  # settings of their run
    experiment: ExperimentConfig | None = None  # all of its config.yaml
    directory: Path | None = None  # of the run
    adapters: list[Any] | None = None  # models with separate adapters, if they come from a checkpoint of a run with LoRA

    def agents_for(self, roles: Sequence[str], name: str) -> list[Agent]:
        """Return one agent for each role of what is called `name`. Raises ValueError for another number of agents."""
        agents = self.agents * len(roles) if len(self.agents) == 1 else self.agents
        if len(agents) != len(roles):
            raise ValueError(
                f"environment {name!r} has {len(roles)} roles ({', '.join(roles)}), and --model gives {len(agents)} agents: "
                "give one model for all roles, or one per role"
            )
        return agents


def load_source(models: Sequence[str], base_models: Sequence[str] | None = None, best: bool = False) -> TeamSource:
    """Return the agents of `--model`. Raises FileNotFoundError or ValueError if there are none, with what is there instead.

    base_models: those of `--base-model`. best: of a run the weights of its best evaluation, not the newest ones."""
    from jmarl.config.paths import expand_home
    from jmarl.models.hub.agents import open_agent

    paths = [Path(expand_home(model)) for model in models]
    if len(models) == 1 and is_run(paths[0]):
        return load_run(paths[0], base_models, best)
    if best:
        raise ValueError(f"--best is for the directory of a run with keep_best, and --model {' '.join(models)} is none")
    if base_models:
        raise ValueError(f"--base-model is for the directory of a run, and --model {' '.join(models)} is none")
    if len(models) == 1 and (paths[0] / "agent_0").is_dir():
        return TeamSource(load_directory(paths[0]), f"the agents in {models[0]}")
    for model, path in zip(models, paths, strict=True):
        if below := sorted(x for pattern in ("*", "*/*") for x in path.glob(pattern) if is_run(x)):
            raise ValueError(f"{model} holds several runs: give one of them, such as {below[0]}")
        if len(models) > 1 and (is_run(path) or (path / "agent_0").is_dir()):
            raise ValueError(f"with several models each is one agent, and {model} is a team: give it alone, or its agent_0")
    loaded = {model: open_agent(model) for model in models}  # equal models are read once, when they are needed
    return TeamSource([loaded[model] for model in models], ", ".join(models))


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run."""
    return (path / "checkpoints").is_dir() or (path / "models" / "agent_0").is_dir()


def load_directory(path: Path) -> list[Agent]:
    """Return the agents in a directory of them."""
    from jmarl.evaluation.cross_play import agents_in
    from jmarl.models.hub.agents import open_agent

    return [open_agent(agent) for agent in agents_in(path)]


def check_links(run: Path) -> None:
    """Raise ValueError if files of the agents of a run from elsewhere, but weights, are links out of their folders: what is in
    them is written again when the agents are saved."""
    from jmarl.config.bounded_files import check_inside
    from jmarl.evaluation.cross_play import agents_in
    from jmarl.files.trusted import is_trusted

    for agent in () if is_trusted(run) else agents_in(run):
        for file in agent.rglob("*"):
            if file.suffix != ".safetensors":
                check_inside(file, agent)


def tree_of(path: Path) -> dict[str, Any]:
    """Return the config.yaml of a run; {} if it has none."""
    from jmarl.files.run_files import config_file_of, read_config

    file = config_file_of(path)
    return {} if file is None else read_config(file).tree


def experiment_of(path: Path) -> ExperimentConfig | None:
    """Return all settings of a run, those in its config.yaml; None if it has none, or not all because it began in Python."""
    from jmarl.config import ExperimentConfig
    from jmarl.config.layers import located
    from jmarl.config.yaml_file import Given
    from jmarl.files.run_files import config_file_of, leaves

    if (tree := tree_of(path)).keys() <= {"team", "train"}:
        return None
    experiment, file = ExperimentConfig.of(**tree), config_file_of(path)
    given = {name: Given(value, 0, "") for name, value in leaves(experiment.as_dict()).items()}
    places = located(given, [file.absolute().parent] if file else [])
    experiment = experiment.replace(**{name: x.value for name, x in places.items() if x != given[name]})
    if not experiment.seeds:
        return experiment
    seed = int(path.absolute().name.removeprefix("seed_"))  # the file is of all seeds, and this is the run of one
    return experiment.replace(seeds=(), seed=seed, output_dir=str(path))


def require_trusted_task(directory: Path, experiment: ExperimentConfig, trust: bool) -> None:
    """Raise PermissionError if the task of a run names code, and neither its user nor --trust says that it may be run."""
    from jmarl.files.run_files import config_file_of, leaves
    from jmarl.files.trusted import OTHERS, require_trust

    settings = {name: value for name, value in leaves(experiment.as_dict()).items() if name not in OTHERS}
    require_trust(config_file_of(directory) or directory, settings, trust)


def load_run(path: Path, base_models: Sequence[str] | None = None, best: bool = False) -> TeamSource:
    """Return the newest agents of a run, or those of its best evaluation."""
    from jmarl.config import TrainConfig
    from jmarl.files.checkpoint import saved_steps
    from jmarl.files.run_directory import is_finished
    from jmarl.files.run_files import CONFIG_FILE, read_best

    checkpoints, experiment = path / "checkpoints", experiment_of(path)
    step = max(saved_steps(checkpoints), default=None)
    chosen = read_best(path) if best else None
    if best and chosen is None:
        raise ValueError(
            f"{path} has no best weights: its run has no keep_best, or no evaluation of all episodes yet; leave --best out for "
            "the newest ones"
        )
    if not best and (path / "models" / "agent_0").is_dir() and (step is None or is_finished(checkpoints, step)):
        if experiment:
            cfg = experiment.train
        else:
            cfg = config_of(checkpoints, step) if step is not None else TrainConfig.of(**tree_of(path).get("train", {}))
        check_links(path)
        return TeamSource(load_directory(path), f"the models of {path}", cfg, experiment, path)
    if step is None:
        raise FileNotFoundError(f"{path} has neither models nor a complete checkpoint yet: wait for the first one")
    known = experiment.team.models if experiment else tree_of(path).get("team", {}).get("models", ())
    models = list(base_models or known)
    if not models:
        raise ValueError(
            f"{path} has checkpoints and no {CONFIG_FILE}, so the models that it started from are unknown: name them with "
            "--base-model"
        )
    return load_checkpoint(path, models, experiment, chosen)


def config_of(checkpoints: Path, step: int) -> TrainConfig:
    """Return the settings in a checkpoint."""
    from jmarl.config.bounded_files import read_json
    from jmarl.files.checkpoint import META

    return train_config(read_json(checkpoints / str(step) / META)["meta"])


def train_config(meta: dict[str, Any]) -> TrainConfig:
    """Return the settings in the metadata of a checkpoint, which may have fields of an experiment too."""
    from jmarl.config import SECTION_OF, TrainConfig

    known = {name: value for name, value in meta["config"].items() if name in SECTION_OF or name == "algorithm"}
    return TrainConfig.of(**known)


def load_checkpoint(
    path: Path, models: Sequence[str], experiment: ExperimentConfig | None, best: Best | None = None
) -> TeamSource:
    """Return the agents in the newest intact checkpoint of a run, or in that of its best evaluation.

    models: those that the run started from."""
    from jmarl.files.changes import team_changes
    from jmarl.files.checkpoint import Checkpointer
    from jmarl.models.heads import without_value_head
    from jmarl.models.lora import describe
    from jmarl.team import Team, agents_of

    with Checkpointer(path / "checkpoints", read_only=True) as saved:
        arrays, meta, step = saved.read_arrays(best and best.updates)
    roles = [len(members) for stack in meta["team"] for members in stack["members"]]
    models = list(models) * sum(roles) if len(models) == 1 else models
    lora = train_config(meta).lora.lora_rank > 0  # else all weights are in the checkpoint
    team = Team.load(models, shared_weights=max(roles) > 1, random_weights=not lora)
    if changes := team_changes(meta["team"], team.describe()):
        names = ", ".join(dict.fromkeys(models))
        raise ValueError(f"the run in {path} started from other models than {names}: {'; '.join(changes)}")
    params = [without_value_head(x) for x in stacks_in(arrays, team, train_config(meta), meta["bases"])]
    adapters = params if describe(params[0]).rank else None
    cfg = experiment.train if experiment else train_config(meta)
    text = f"the checkpoint of step {step} in {path}" + (f", the best by {best.column} on its held-out tasks" if best else "")
    return TeamSource(agents_of(team, params), text, cfg, experiment, path, adapters)


def stacks_in(arrays: dict[str, Any], team: Team, cfg: TrainConfig, bases: Sequence[str]) -> list[Any]:
    """Return the parameters [A, ...] of each stack from the arrays of a checkpoint, which lack the base of LoRA.

    bases: digests of the bases that the adapters were trained on."""
    from jmarl.learning.per_agent import with_adapters
    from jmarl.models import lora
    from jmarl.team import initial_params

    stacks = [nested(arrays, f"stacks/{i}/params/") for i in range(len(team.stacks))]
    if not cfg.lora.lora_rank:
        return stacks
    adapted = [lora.split(stack)[0] for stack in with_adapters(team, initial_params(team, None, True), cfg)]
    if [lora.digest(base) for base in adapted] != list(bases[: len(adapted)]):
        raise ValueError("the models differ from those that the adapters were trained on: give the run's own with --base-model")
    return [lora.join(base, trained) for base, trained in zip(adapted, stacks, strict=True)]


def nested(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the arrays whose paths begin with a prefix as nested dicts."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            *above, last = name.removeprefix(prefix).split("/")
            node = tree
            for key in above:
                node = node.setdefault(key, {})
            node[last] = array
    return tree
