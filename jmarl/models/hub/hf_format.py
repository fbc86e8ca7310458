"""Convert between the tensors of Hugging Face's files and the decoder's parameters, by one description for both directions.

Pure functions of dicts and numpy arrays: files, the hub and the cache are in `jmarl.models.hub.agents`, GGUF in
`jmarl.models.hub.gguf`. The description is `jmarl.models.weights`; a family names its modules. Weights are stored as they are
filed, so saving gives back the last bit.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jmarl.models.config import ModelConfig
from jmarl.models.families import FAMILIES
from jmarl.models.hub.weight_files import Tensor
from jmarl.models.weights import LAYERS, PARTS, WEIGHTS, layers_with, param_shapes, sizes_of, weights_of

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TEXT_PARTS = {  # beginnings of names in files of text and images -> of a text model
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # experts as transformers 5 has them in memory
NOT_WEIGHTS = ".rotary_emb.inv_freq"  # a constant in old Llama checkpoints


class Slot(NamedTuple):
    """The place of rows of a Hugging Face tensor in the parameters: ``view[part] == rows.reshape(split).transpose(axes)``.

    The view of a leaf has an axis for each letter.
    """

    leaf: str  # "embed", "layers.qkv", ...
    part: tuple[Any, ...]  # an index of the view
    split: tuple[int, ...]  # the shape of the rows, with one axis per letter
    axes: tuple[int, ...]  # the order of these axes in the leaf
    rows: slice


class Filed(NamedTuple):
    """A tensor of Hugging Face's files."""

    shape: tuple[int, ...]
    slots: tuple[Slot, ...]


def filed_tensors(cfg: ModelConfig) -> dict[str, Filed]:
    """Return every tensor of an architecture in Hugging Face's files."""
    filed: dict[str, Filed] = {}
    weights = weights_of(cfg)
    layers = {name: layers_with(cfg, name) for name in weights if name.startswith(LAYERS)}
    places: list[tuple[str, int | None]] = [(name, None) for name in weights if name not in layers]
    places += [(name, n) for n in range(cfg.num_layers) for name in layers if n in layers[name]]
    for (leaf, layer), (module, axes) in [(place, item) for place in places for item in weights[place[0]].modules.items()]:
        name = FAMILIES[cfg.family].module(module) + weights[leaf].suffix
        place = () if layer is None else (layers[leaf].index(layer),)
        name = name if layer is None else f"model.layers.{layer}.{name}"
        if "*" in name:  # a tensor for each expert
            for n in range(cfg.num_experts):
                filed[name.replace("*", str(n))] = _with_slot(cfg, None, leaf, (*place, n), module, axes[2:])
        else:
            filed[name] = _with_slot(cfg, filed.get(name), leaf, place, module, axes)
    return filed


def _with_slot(cfg: ModelConfig, before: Filed | None, leaf: str, place: tuple[int, ...], module: str, axes: str) -> Filed:
    """Return a tensor with the rows of one more module of a weight.

    Args:
      before: the tensor without them.
      place: in the stack of layers, and the expert if each has a tensor of its own.
      axes: of the rows.
    """
    sizes, letters = sizes_of(cfg), axes.replace(" ", "")
    shape = tuple(math.prod(sizes[letter] for letter in word) for word in axes.split())
    first = before.shape[0] if before else 0
    part: list[Any] = [*place]
    order = []
    for letter in WEIGHTS[leaf].axes.replace(" ", "")[len(place) > 1 :]:
        part.append(PARTS[module] if letter == "P" else slice(None))
        order += [letters.index(x) for x in ("U" if letter == "P" else letter) if x in letters]
    slot = Slot(leaf, tuple(part), tuple(sizes[x] for x in letters), tuple(order), slice(first, first + shape[0]))
    return Filed((first + shape[0], *shape[1:]), (*(before.slots if before else ()), slot))


def _view(cfg: ModelConfig, name: str, leaf: np.ndarray, in_layers: bool) -> np.ndarray:
    """Return a view of a leaf with one axis for each letter. in_layers: whether it has an axis of layers."""
    sizes, letters = sizes_of(cfg), WEIGHTS[name].axes.replace(" ", "")
    return leaf.reshape(*leaf.shape[:in_layers], *(sizes[letter] for letter in letters))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A leaf of the decoder's parameters that stays in its files: `leaf[n]` reads a layer, `np.asarray(leaf)` all of it.

    What was read is not kept.
    """

    shape: tuple[int, ...]
    in_layers: bool  # its first axis is that of the layers
    read: Callable[[int], np.ndarray]  # returns layer n; of a leaf that has no layers, all of it
    dtype: ClassVar[np.dtype] = np.dtype(np.float32)

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def __getitem__(self, n: int) -> np.ndarray:
        return self.read(n) if self.in_layers else np.asarray(self)[n]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.in_layers:
            return self.read(0).astype(dtype or self.dtype, copy=False)
        array = np.empty(self.shape, dtype or self.dtype)
        for n in range(len(array)):
            array[n] = self.read(n)
        return array


def params_from_tensors(cfg: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Read a checkpoint's tensors, one at a time, to the decoder's parameters in float32. where: its name in errors."""
    return read_params(stored_params(cfg, tensors, where))


def read_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as numpy arrays: read those that are stored."""
    return _nest({name: np.asarray(leaf) for name, leaf in _flatten(params)})


def stored_params(cfg: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Return the decoder's parameters as leaves that are read when they are needed, see `StoredLeaf`.

    Names and shapes are checked now; that all weights are finite is when they are read. where: as of `params_from_tensors`.
    """
    filed, tensors = filed_tensors(cfg), text_part(tensors)
    names = {name for name in tensors if not name.endswith(NOT_WEIGHTS)}
    if ignored := {name for name in names if name.startswith(FAMILIES[cfg.family].ignores)}:
        text = f"{where}: tensors such as {min(ignored)} are left out: jmarl has no such part, and saves none"
        warnings.warn(text, stacklevel=2)
        names -= ignored
    redundant_head = cfg.tie_embeddings and HEAD in names
    check_names(names - {HEAD} if redundant_head else names, filed, where)
    parts: dict[str, dict[int, list[tuple[str, Slot]]]] = {}  # leaf -> layer -> its tensors
    for name, tensor in filed.items():
        if tuple(tensors[name].shape) != tensor.shape:
            raise ValueError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, the config asks for {tensor.shape}")
        for slot in tensor.slots:
            layer = slot.part[0] if slot.leaf.startswith(LAYERS) else 0
            parts.setdefault(slot.leaf, {}).setdefault(layer, []).append((name, slot))

    def read(leaf: str, shape: tuple[int, ...], n: int) -> np.ndarray:
        array = np.empty(shape, np.float32)
        view = _view(cfg, leaf, array, False)
        for name, slot in parts[leaf][n]:
            rows = read_finite(tensors[name], name, where)[slot.rows]
            view[slot.part[leaf.startswith(LAYERS) :]] = rows.reshape(slot.split).transpose(slot.axes)
        if leaf == "embed" and redundant_head and not np.array_equal(read_finite(tensors[HEAD], HEAD, where), array):
            raise ValueError(f"{where}: tie_word_embeddings is true, but {HEAD} differs from {EMBED}")
        return array

    leaves = {}
    for leaf, shape in param_shapes(cfg).items():
        in_layers = leaf.startswith("layers.")
        leaves[leaf] = StoredLeaf(shape, in_layers, partial(read, leaf, shape[1:] if in_layers else shape))
    return _nest(leaves)


def read_finite(tensor: Tensor, name: str, where: str) -> np.ndarray:
    """Read a tensor in the type that it is stored in. Raises ValueError if a value is NaN or infinite.

    where: begins the message unless the tensor has a file."""
    array = tensor.read()
    if wrong := array.size - np.count_nonzero(np.isfinite(array)):
        raise ValueError(
            f"{tensor.file or where}: {name} has {wrong} of {array.size} weights that are NaN or infinite: it is damaged, "
            "or the training that wrote it diverged; get the file again or take an earlier checkpoint"
        )
    return array


def tensors_from_params(cfg: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return one agent's parameters as Hugging Face tensors, float32 and contiguous. Inverts `params_from_tensors`."""
    return {name: np.ascontiguousarray(view, np.float32) for name, view in tensor_views(cfg, params).items()}


def tensor_views(cfg: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return one agent's parameters as Hugging Face tensors. Arrays on the host are not copied, apart from those of
    query, key and value, whose rows lie apart."""
    leaves = {name: np.asarray(leaf) for name, leaf in _flatten(params)}
    shapes = param_shapes(cfg)
    check_names(leaves, shapes, "params")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name]:
            raise ValueError(
                f"params: {name} has shape {leaf.shape}, the config asks for {shapes[name]} "
                "(of a stack of agents, export one agent at a time)"
            )
    views = {name: _view(cfg, name, leaf, name.startswith(LAYERS)) for name, leaf in leaves.items()}

    def rows(slot: Slot) -> np.ndarray:
        part = views[slot.leaf][slot.part].transpose(np.argsort(slot.axes))
        return part.reshape(slot.rows.stop - slot.rows.start, -1) if len(slot.split) > 1 else part

    tensors = {}
    for name, tensor in filed_tensors(cfg).items():
        parts = [rows(slot) for slot in tensor.slots]
        tensors[name] = (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(tensor.shape)
    return tensors


def text_name(name: str) -> str:
    """Return the name, in a text model, of a tensor of the text part of a model of text and images; others unchanged."""
    for begin, ours in TEXT_PARTS.items():
        if name.startswith(begin):
            return ours + name.removeprefix(begin)
    return name


def text_part(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of the text part of a model of text and images, by the names of a text model; of others unchanged."""
    if not any(name.startswith(("language_model.", "model.language_model.")) for name in tensors):
        return tensors
    return {text_name(name): tensor for name, tensor in tensors.items() if name.startswith(tuple(TEXT_PARTS))}


def tensors_of_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays with one for each expert, as files have them; of other models unchanged. See `STACKED`."""
    split: dict[str, Any] = {}
    for name, array in tensors.items():
        before, _, kind = name.rpartition(".experts.")
        if kind not in STACKED:
            split[name] = array
            continue
        rows = array.shape[1] // len(STACKED[kind])
        for (i, module), n in itertools.product(enumerate(STACKED[kind]), range(array.shape[0])):
            split[f"{before}.experts.{n}.{module}.weight"] = array[n, i * rows : (i + 1) * rows]
    return split


def stacked_experts(tensors: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return those of some names that stack the tensors of experts. Inverts `tensors_of_experts`."""
    stacks = {}
    for name in names:
        before, _, kind = name.rpartition(".experts.")
        if kind in STACKED:
            modules = [f"{before}.experts.{{}}.{module}.weight" for module in STACKED[kind]]
            experts = next(n for n in itertools.count() if modules[0].format(n) not in tensors)
            stacks[name] = np.stack([np.concatenate([tensors[x.format(n)] for x in modules]) for n in range(experts)])
    return stacks


def check_names(names: Iterable[str], expected_names: Iterable[str], where: str) -> None:
    """Raise ValueError unless the names are the expected ones; `where` begins the message."""
    actual, expected = set(names), set(expected_names)
    for wrong, problem in ((expected - actual, "missing"), (actual - expected, "unknown to this architecture")):
        if wrong:
            listed = ", ".join(sorted(wrong)[:5]) + (", ..." if len(wrong) > 5 else "")
            verb = "tensor is" if len(wrong) == 1 else "tensors are"
            counts = f"(expected {len(expected)}, found {len(actual)})"
            raise ValueError(f"{where}: {len(wrong)} {verb} {problem}: {listed} {counts}")


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if not name.startswith("layers.")}
    params["layers"] = {name.removeprefix("layers."): leaf for name, leaf in leaves.items() if name.startswith("layers.")}
    return params


def _flatten(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, leaf in params.items():
        if isinstance(leaf, Mapping):
            yield from ((f"{name}.{inner}", value) for inner, value in leaf.items())
        else:
            yield name, leaf
