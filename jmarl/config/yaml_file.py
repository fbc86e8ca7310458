"""Read a YAML file as plain values, with the line of every key for error messages (pyyaml's safe loader)."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jmarl.config.bounded_files import DEPTH, open_file
from jmarl.config.paths import expand_home
from jmarl.config.validation import did_you_mean

KeyPath = tuple[str | int, ...]  # keys and indices from the top of a file to a value
MAX_VALUES = 1_000_000  # of a file, where each alias counts as all that it stands for
MAX_BYTES = 2**24  # of a file
MAX_DIGITS = 400  # of an integer
FIRST_LINE = "# All settings of a run; the last line says that the file is whole."
LAST_LINE = "# The settings of the run end here."


class Given(NamedTuple):
    """A value and where it was given."""

    value: Any
    rank: int  # number of the source: higher ones override
    place: str  # for messages
    name: str = ""  # of TRL, whose value is converted when all settings are known


class YamlFile(NamedTuple):
    """The values of a file or a flag, and where they are."""

    name: str
    tree: dict[str, Any]
    lines: dict[KeyPath, int]  # path of a key or list item -> its line, from 1
    is_flag: bool = False  # whether it is one NAME=VALUE of the command line or of a sweep
    converted: Mapping[str, Given] = {}  # settings by short name that its foreign keys set

    def place(self, path: KeyPath) -> str:
        """Return "file, line N" of a key, or of the nearest key above it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}, line {self.lines.get(path, 1)}"


class CutShort(ValueError):
    """A file with the settings of a run lacks its end."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} is cut short, so settings of the run are lost: copy it again, or, if you edited it, delete its first line"
        )


def put(settings: dict[str, Given], name: str, given: Given) -> None:
    """Set a value that overrides those of earlier sources. Raises ValueError for two different values of one source."""
    old = settings.get(name)
    if old is not None and old.rank == given.rank and (old.value, old.name) != (given.value, given.name):
        raise ValueError(f"{old.place} and {given.place} both set {name}: give one of them")
    if old is None or old.rank <= given.rank:
        settings[name] = given


class _Loader(yaml.SafeLoader):
    """The safe loader, which also reads 1e-5 as a number (YAML 1.1 wants 1.0e-5), and dates as texts: no setting is a date."""


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which puts quotes around the texts that `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(path: str | Path, inside: Path | None = None) -> YamlFile:
    """Return the contents of a YAML file, a mapping. inside: see `open_file`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no YAML, no mapping, too large, or a key occurs twice; with the line.
    """
    name, path = str(path), Path(expand_home(path))
    if not path.exists():
        hint = did_you_mean(str(path), [str(file) for file in path.parent.glob("*.y*ml")])
        raise FileNotFoundError(f"{name} does not exist: give a YAML file; `jmarl configs list` shows the shipped ones{hint}")
    with open_file(path, inside) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{name} has more than {MAX_BYTES} bytes: a configuration names its data, and does not hold them")
    try:
        return parse_yaml(content.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise ValueError(
            f"{name}, line {line}, column {column} is not UTF-8 (the byte {content[error.start]:#x}): save the file as UTF-8"
        ) from None


def parse_yaml(text: str, name: str) -> YamlFile:
    """Return the contents of a text. name: what errors call it. Raises as `read_yaml`."""
    if text.startswith(FIRST_LINE) and LAST_LINE not in text.splitlines():
        raise CutShort(name)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _check_size(node, name)
            _find_lines(node, (), lines, name)
        tree = {} if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{name} is nested deeper than {DEPTH}: a configuration is a mapping of sections") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # only some errors of the library have one
        problem, start = getattr(error, "problem", None) or error, getattr(error, "context_mark", None)
        context = str(getattr(error, "context", ""))
        if start and context.startswith("while scanning"):  # what is not closed: it is seen only where the text goes on
            mark = start
        elif start and context.startswith("while parsing a flow"):
            problem = f"{problem}, in the brackets that begin in line {start.line + 1}"
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if isinstance(error, yaml.reader.ReaderError):
            line, problem = text.count("\n", 0, error.position) + 1, f"remove the character {text[error.position]!r}"
            place = f", line {line}"
        raise ValueError(f"{name}{place} is not YAML: {problem}{_advice(str(problem))}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{name} holds a {type(tree).__name__}: a configuration is a mapping of settings, such as `seed: 1`")
    return YamlFile(name, tree, lines)


def _advice(problem: str) -> str:
    """Return what to do about a problem of pyyaml in the words of its user."""
    if "'\\t'" in problem:
        return "; indent with spaces, not with tabs"
    if "mapping values are not allowed" in problem or "expected <block end>" in problem:
        return "; indent the keys of a section alike, and put quotes around a text with ': '"
    return ""


def parse_value(text: str) -> Any:
    """Return the value of a text as in a YAML file: a number, a list, true, null, or the text itself.

    Raises ValueError for a text that is no YAML."""
    try:
        return yaml.load(text, _Loader) if text.strip() else text
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error  # only some errors of the library have one
        raise ValueError(f"{text!r} is not YAML: {problem}; put quotes around a text with such signs") from error


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return a tree of plain values as YAML, in its order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dump_run(tree: dict[str, Any], comment: str = "") -> str:
    """Return the settings of a run as YAML, which is refused where it is cut short."""
    return f"{FIRST_LINE}\n{comment}{dump_yaml(tree)}{LAST_LINE}\n"


def _check_size(node: yaml.Node, name: str) -> None:
    """Raise ValueError for a document that is too deep or has too many values, once its aliases are followed, and for a number
    with too many digits."""
    level, count = [node], 0
    for _ in range(DEPTH):
        for long in (x for x in level if x.tag == "tag:yaml.org,2002:int" and len(x.value) > MAX_DIGITS):
            raise ValueError(f"{name}, line {long.start_mark.line + 1} has a number of {len(long.value)} digits: shorten it")
        parts = ([x] if isinstance(x, yaml.Node) else x for node in level if isinstance(node.value, list) for x in node.value)
        level = [*itertools.islice(itertools.chain.from_iterable(parts), MAX_VALUES)]
        count += len(level)
        if count >= MAX_VALUES:
            raise ValueError(f"{name} has more than {MAX_VALUES} values, aliases included: a configuration names its data")
        if not level:
            return
    raise RecursionError


def _find_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """Write the line of every key and list item below a node to `lines`. Raises ValueError for a key that occurs twice."""
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines.setdefault((*path, i), item.start_mark.line + 1)
            _find_lines(item, (*path, i), lines, name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            _find_lines(value, path, lines, name)
            continue
        if key.value in seen:
            raise ValueError(f"{name}, line {line}: {key.value} is set twice, before in line {seen[key.value]}: give it once")
        seen[key.value] = lines[(*path, key.value)] = line
        _find_lines(value, (*path, key.value), lines, name)
