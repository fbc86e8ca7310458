"""The file config.yaml of a run: all settings, which `jmarl train --config RUN/config.yaml` repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jmarl.config import ExperimentConfig
from jmarl.config.yaml_file import dump_yaml
from jmarl.training.files.run_directory import set_aside

CONFIG_FILE = "config.yaml"


def plain_config(cfg: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that describe a run as if it had never stopped: without those of the resuming itself."""
    return cfg.replace(resume=False, resume_step=None, allow_changed=None).as_dict()


def write_config(cfg: ExperimentConfig) -> None:
    """Write the settings of a run into its directory, after the files of an earlier run there have been set aside."""
    run = cfg.train.run
    if not run.output_dir or run.replay_rollout:
        return
    if not run.resume:
        set_aside(run.output_dir, CONFIG_FILE)
    directory = Path(run.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{CONFIG_FILE}.tmp"
    temporary.write_text(dump_yaml(plain_config(cfg)), encoding="utf-8")
    temporary.replace(directory / CONFIG_FILE)
