"""Let the modules of a package be reached as its attributes without importing them before: `jmarl.envs.calls` after `import
jmarl`. A package has `__getattr__ = modules_of(__name__)`."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Return the `__getattr__` of a package, which imports a module of the package when it is first used."""

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
