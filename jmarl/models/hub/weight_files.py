"""Read and write the files of a Hugging Face directory: JSON, and tensors in one safetensors file or in several (shards).

`jmarl.models.hub.agents` says what is in them. Left out: pickled ``.bin`` weights and types other than floats.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.config.bounded_files import read_json

DTYPES = ("F32", "F16", "BF16")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Tensor(NamedTuple):
    """A tensor of a checkpoint file, not read yet."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    file: str = ""  # for errors; empty: the checkpoint's name says it


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file of a model. Raises an error that says what to do if there are none."""
    if not path.is_file():
        if (path.parent / "adapter_config.json").is_file():
            what = "so it holds the adapters of a model: merge it into its model (peft: merge_and_unload, save_pretrained)"
        else:
            what = "so it is no Hugging Face model directory: give one with config.json and model.safetensors"
        raise FileNotFoundError(f"{path.parent} has no {path.name}, {what}")
    fields = read_json(path, inside=Path(path.absolute().anchor))  # links of Hugging Face's cache lead out of the directory
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}, not the fields of a model: get the file again")
    return fields


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a JSON file."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def open_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory's safetensors files; nothing is read yet."""
    index = directory / INDEX
    if (directory / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif index.is_file():
        files = sorted(set(read_fields(index)["weight_map"].values()))
    else:
        names = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise FileNotFoundError(f"{directory} has neither {WEIGHTS} nor {INDEX}; it has {names}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _open_file(directory / file)
    return tensors


def _open_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is named by the index of {path.parent} but is not there")
    tensors, version = {}, _version(path)
    with _safe_open(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            header = file.get_slice(name)
            if header.get_dtype() not in DTYPES:
                raise ValueError(f"{path}: {name} is {header.get_dtype()}, jmarl reads {', '.join(DTYPES)}")
            tensors[name] = Tensor(tuple(header.get_shape()), partial(_read_tensor, path, version, name), str(path))
    return tensors


def _read_tensor(path: Path, version: tuple[int, ...], name: str) -> np.ndarray:
    """Read a tensor. The file is opened for it alone, because the pages of an open one would stay in memory."""
    if not path.is_file() or _version(path) != version:
        raise ValueError(
            f"{path} was changed or removed after the model was opened, and is read only now: load the model again"
        )
    with _safe_open(path) as file:
        return file.get_tensor(name)


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that change if a file is written again or replaced."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _safe_open(path: Path) -> Any:
    import ml_dtypes  # noqa: F401  (adds bfloat16 to numpy)
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as e:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is not a complete safetensors file: {e}; get it again") from e


def save_tensors(directory: Path, tensors: Mapping[str, np.ndarray], max_shard_size: int | str, like: Path) -> None:
    """Write tensors in float32 to one file, or to shards with an index if they are larger than one shard. Weights of an older
    model in the directory are replaced when all files are written.

    Args:
      tensors: may be views: only those of one shard are copied at a time.
      like: a file with the permissions that the files get; safetensors makes files that only their owner can read.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    pattern = WEIGHTS.replace(".", "{suffix}.")
    shards = split_state_dict_into_shards_factory(
        dict(tensors), get_storage_size=lambda x: 4 * x.size, filename_pattern=pattern, max_shard_size=max_shard_size
    )
    old = {directory / WEIGHTS, directory / INDEX, *directory.glob(pattern.format(suffix="-*-of-*"))}
    new = {directory / f"{name}.saving": directory / name for name in shards.filename_to_tensors}
    try:
        for temporary, final in new.items():
            names = shards.filename_to_tensors[final.name]
            save_file({x: np.ascontiguousarray(tensors[x], np.float32) for x in names}, temporary, {"format": "pt"})
            shutil.copymode(like, temporary)
        for temporary, final in new.items():
            temporary.rename(final)
    finally:
        for temporary in new:
            temporary.unlink(missing_ok=True)
    for path in old - set(new.values()):
        path.unlink(missing_ok=True)
    if shards.is_sharded:
        write_json(directory / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})
