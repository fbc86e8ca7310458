"""The file config.yaml of a run: all settings, which `jmarl train --config RUN/config.yaml` repeats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jmarl.config import ExperimentConfig
from jmarl.config.yaml_file import dump_yaml
from jmarl.training.files.lock import reserved
from jmarl.training.files.run_directory import CannotGoOn, check_contents, set_aside
from jmarl.training.files.run_files import CONFIG_FILE


def plain_config(cfg: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that describe a run as if it had never stopped: without those of the resuming itself."""
    return cfg.replace(resume=False, resume_step=None, allow_changed=None).as_dict()


@contextlib.contextmanager
def written_config(cfg: ExperimentConfig) -> Iterator[None]:
    """Write the settings of the run in the context into its directory, after the files of an earlier run are set aside.

    The lock of the directory is held all the time. A run that is refused leaves the old file. Raises `DirectoryInUse` if
    another process runs in the directory, and `CannotGoOn` if the directory does not allow this run.
    """
    run = cfg.train.run
    if not run.output_dir or run.replay_rollout:
        yield
        return
    with reserved(run.output_dir):
        for single in [cfg.train.for_seed(seed) for seed in cfg.seeds] or [cfg.train]:
            check_contents(single)  # again, because another process may have written before the lock was taken
        if not run.resume:
            set_aside(run.output_dir, CONFIG_FILE)
        file = Path(run.output_dir) / CONFIG_FILE
        old = file.read_bytes() if file.is_file() else None
        temporary = file.with_name(f"{CONFIG_FILE}.tmp")
        temporary.write_text(dump_yaml(plain_config(cfg)), encoding="utf-8")
        temporary.replace(file)
        try:
            yield
        except CannotGoOn:
            if old is not None:
                file.write_bytes(old)
            raise
