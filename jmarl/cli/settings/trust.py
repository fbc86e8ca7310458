"""Which settings come from the config.yaml of a run, which may be of somebody else or a copy."""

import os
from collections.abc import Mapping
from pathlib import Path

from jmarl.config.layers import FLAGS, TREES
from jmarl.config.paths import expand_home
from jmarl.config.yaml_file import Given
from jmarl.files.own_files import is_of_run
from jmarl.files.run_files import CONFIG_FILE, read_config
from jmarl.files.trusted import require_trust


def files_of_runs(files: Mapping[str, str]) -> list[str]:
    """Return which of the files are the config.yaml of a run. files: by the name of each or of its directory, as given."""

    def is_written(name: str, file: Path) -> bool:
        return is_of_run(file.parent) or (file.parent / "models" / "agent_0").is_dir() or file == Path(name) / CONFIG_FILE

    return [file for name, file in files.items() if Path(file).name == CONFIG_FILE and is_written(name, Path(file))]


def require_trusted_names(files: Mapping[str, str], given: Mapping[str, Given], trust: bool) -> None:
    """Raise PermissionError if the config.yaml of a run among the files names code that is not trusted. What flags and other
    files set is the user's own.

    given: the settings, with the places where they were given."""
    for file in files_of_runs(files):
        sweeps = () if "sweep" in read_config(Path(file)).tree else ("sweep:",)
        others = ("--set", *sweeps, *(f"{other}, line " for other in files.values() if other != file))
        own = {
            name: x.value
            for name, x in given.items()
            if x.place != FLAGS and (not x.place.startswith(others) or is_part(name, x.place))
        }
        require_trust(Path(file), own, trust)


def is_part(name: str, place: str) -> bool:
    """Return whether a flag changes a part of a setting, whose others may come from a file: `--set train_envs.0.options.x`."""
    return name in TREES and place.startswith(("--set", "sweep:")) and place.rpartition(".")[2] != name


def check_copy(files: Mapping[str, str], given: Mapping[str, Given]) -> None:
    """Raise ValueError if a run is to be resumed by its config.yaml, and that names another directory: the run was copied."""
    output, resumes = given["output_dir"], "resume" in given and given["resume"].value
    for file in files_of_runs(files) if resumes else ():
        folder, named = os.path.dirname(file) or ".", expand_home(output.value)
        if output.place.startswith(f"{file}, line ") and os.path.realpath(folder) != os.path.realpath(named):
            raise ValueError(
                f"{output.place}: output_dir={output.value!r} is not the directory of this file: give --output {folder} to "
                f"resume the run beside it, or --output {named}"
            )
