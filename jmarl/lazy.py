"""Import modules when they are first used: those that a table names, and those that are reached as attributes of a package.

The core knows its guests by names alone, in a `Table`; a setting chooses one, and only that is imported.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class Table(Mapping[str, T]):
    """What can be chosen by its name; each is imported when it is first read.

    targets: name -> "module:attribute".
    """

    def __init__(self, targets: Mapping[str, str]):
        self._targets = targets

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:  # that of Mapping would import it
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


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
