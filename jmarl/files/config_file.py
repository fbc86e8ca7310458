"""The file config.yaml of a run: all settings, which `jmarl train --config RUN/config.yaml` repeats. That of a run begun in
Python lacks the part `task`, which was made there, and says so."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jmarl.config import SECTION_OF, ExperimentConfig, TeamConfig, TrainConfig, flat
from jmarl.config.experiment import plain_values
from jmarl.config.yaml_file import dump_run, parse_yaml
from jmarl.envs.base import class_name, describe
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.files.lock import reserved
from jmarl.files.run_directory import CHOSEN, check_contents
from jmarl.files.run_files import CONFIG_FILE, config_file_of, leaves, read_config, replace_text
from jmarl.files.trusted import is_trusted, named_code, record_trust
from jmarl.team import Team

WAITING: dict[str, str] = {}  # directory of a run that this process prepares -> its config.yaml


def plain_config(cfg: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that describe a run as if it had never stopped: without those of the resuming itself."""
    return cfg.replace(resume=False, resume_step=None, allow_changed=None).as_dict()


def changed_settings(cfg: ExperimentConfig) -> list[str] | None:
    """Return the names of settings that differ from those in config.yaml of the output directory, without those that are auto
    here and were chosen; None if there is no such file. A setting that the file does not have, which a newer version brought,
    had its default."""
    file = Path(cfg.train.run.output_dir) / CONFIG_FILE
    if not file.is_file():
        return None
    defaults, now = (
        leaves(json.loads(json.dumps(plain_config(x)))) for x in (ExperimentConfig.of(models="-", environment="-"), cfg)
    )
    before = defaults | leaves(read_config(file).tree)
    chosen = {name for name in CHOSEN if now[name] == "auto"}
    return sorted(name for name in {**before, **now} if before.get(name) != now.get(name) and name not in chosen)


def record_choices(cfg: TrainConfig, team: Team, env: Any, items: Sequence[Any]) -> None:
    """Record that the directory of a run that begins is trusted. Write its config.yaml, with the settings that were chosen in
    place of auto; of a run which did not start from an `ExperimentConfig` see `python_config`."""
    if not cfg.run.output_dir or cfg.run.replay_rollout:
        return
    file = Path(cfg.run.output_dir) / CONFIG_FILE
    if text := WAITING.pop(os.path.abspath(cfg.run.output_dir), ""):
        record_trust(file.parent, named_code(leaves(parse_yaml(text, str(file)).tree)))
        replace_text(file, text)
    if not is_trusted(file.parent):
        record_trust(file.parent, {})
    if not text and not file.is_file():
        if not cfg.run.resume:
            replace_text(file, python_config(cfg, team, env, items))
        return
    tree, settings = read_config(file).tree, flat(cfg)
    sections = [tree.get("train", {}).get(SECTION_OF[name], {}) for name in CHOSEN]
    changes = [(section, name) for section, name in zip(sections, CHOSEN, strict=True) if section.get(name) == "auto"]
    for section, name in changes:
        section[name] = settings[name]
    if changes:
        replace_text(file, dump_run(tree))


def python_config(cfg: TrainConfig, team: Team, env: Any, items: Sequence[Any]) -> str:
    """Return the config.yaml of a run that was begun in Python, or by a run for a round's reward model. env: None for given
    data."""
    directory = Path(cfg.run.output_dir).absolute()
    is_of_round = directory.name.startswith("reward_model_") and config_file_of(directory.parent) is not None
    given = f"{len(items)} {'example' if env is None else 'item'}{'s' * (len(items) != 1)}"
    if isinstance(env, RewardEnvironment):
        given = f"the reward {' + '.join(env.reward.names)} and {given}"
    elif env is not None:
        given = f"the environment {describe(env).get('class', class_name(env))} and {given}"
    says = (
        f"# This run was begun in Python and was given {given} there, which no file holds: there is no part `task`.\n"
        "# It is resumed there too, with resume=True. `jmarl play` and `jmarl eval` take its agents and settings; name the\n"
        "# task with --environment, or with --data and --reward.\n"
    )
    if is_of_round:
        says = f"# This is the reward model of a round of the run in the directory above, with {given}. That run resumes it.\n"
    models, shared = tuple(agent.name for agent in team.agents), any(len(s.members[0]) > 1 for s in team.stacks)
    random = team.random_weights
    parts = {"team": plain_values(TeamConfig(models, shared_weights=shared, random_weights=random))} if models else {}
    settings = plain_values(cfg)
    for name in ("resume", "resume_step", "allow_changed"):
        settings[SECTION_OF[name]].pop(name)
    return dump_run(parts | {"train": settings}, says)


@contextlib.contextmanager
def written_config(cfg: ExperimentConfig) -> Iterator[None]:
    """Hold the lock of the directory of the run in the context, and its settings in `WAITING`.

    They become its config.yaml when it begins (`record_choices`), after the files of an earlier run are set aside: a run that
    is refused before changes nothing. Raises `DirectoryInUse` if another process runs in the directory, and `CannotGoOn` if the
    directory does not allow this run.
    """
    run = cfg.train.run
    if not run.output_dir or run.replay_rollout:
        yield
        return
    with reserved(run.output_dir):
        for single in [cfg.train.for_seed(seed) for seed in cfg.seeds] or [cfg.train]:
            check_contents(single)  # again, because another process may have written before the lock was taken
        directory = os.path.abspath(run.output_dir)
        WAITING[directory] = dump_run(plain_config(cfg))
        try:
            yield
        finally:
            WAITING.pop(directory, None)
