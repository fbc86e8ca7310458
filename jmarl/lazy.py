"""Import modules when they are first used: those that a table names, and those that are reached as attributes of a package.

The core knows its guests by names alone, in a `Table`; a setting chooses one, and only that is imported.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's search for garbage in the context. It goes through all objects again and again while many are made that
    stay: a fifth of the time in which modules are imported and programs are traced."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Table(MutableMapping[str, T]):
    """What can be chosen by its name; each is imported when it is first read. Users may add their own.

    targets: name -> "module:attribute".
    """

    def __init__(self, targets: Mapping[str, str]):
        self._targets = dict(targets)
        self._own: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._own:
            return self._own[name]
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __setitem__(self, name: str, value: T) -> None:
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        owner: MutableMapping[str, Any] = self._own if name in self._own else self._targets
        del owner[name]

    def __contains__(self, name: object) -> bool:  # that of Mapping would import it
        return name in self._own or name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets | self._own)

    def __len__(self) -> int:
        return len(self._targets | self._own)


def face(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a guest: what other rooms may import from it. names: module of the package -> its names."""
    targets = {name: f"{package}.{module}:{name}" for module, those in names.items() for name in those.split()}
    table, modules = Table[Any](targets), modules_of(package)
    return lambda name: table[name] if name in table else modules(name)


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Return the `__getattr__` of a package, which imports a module of the package when it is first used: `jmarl.envs.calls`
    after `import jmarl`."""

    def imported(name: str) -> ModuleType:
        import pkgutil  # here, because few need it

        if name not in {module.name for module in pkgutil.iter_modules(sys.modules[package].__path__)}:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return imported


def keep_old_name(old: str, new: str) -> None:
    """Let a module also be imported by an old name. It is imported when one of its names is first used by the old one."""

    def attribute(name: str) -> object:
        if name.startswith("__"):  # which tools ask of all modules
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        return getattr(importlib.import_module(new), name)

    package, _, last = old.rpartition(".")
    module = sys.modules[old] = ModuleType(old)
    vars(module)["__getattr__"] = attribute
    setattr(sys.modules[package], last, module)
