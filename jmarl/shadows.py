"""Say which file of the user has the name of a package and is imported in its place: a datasets.py beside a script.

Such a file does no harm while the package is not needed. When it is, Python says that a module lacks something, and not why.
"""

import contextlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path


class ShadowedPackage(ImportError):
    """A file of the user is imported in place of a package."""


def explained(error: Exception) -> Exception:
    """Return a `ShadowedPackage` for an error of importing that such a file has caused, and any other error as it is."""
    if not isinstance(error, ImportError | AttributeError) or isinstance(error, ShadowedPackage):
        return error
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    names = dict.fromkeys(re.findall(r"'(\w+)[.']", "\n".join(texts)))  # as in: module 'datasets' has no attribute 'Dataset'
    shadowed = [(name, file) for name in names if name != "jmarl" and (file := _shadow(name))]
    if not shadowed:
        return error
    name, file = shadowed[-1]
    return ShadowedPackage(
        f"{file} has the name of the package {name}, which is needed here, and Python imports the file in its place: rename "
        f"the file ({type(error).__name__}: {texts[0]})"
    )


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Raise `ShadowedPackage` where a package cannot be imported or used because a file of the user has its name."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if (reason := explained(error)) is error:
            raise
        raise reason from error


def _shadow(name: str) -> str | None:
    """Return the file that is imported by a name in place of an installed package of this name; None if none is."""
    specs = (PathFinder.find_spec(name, [entry]) for entry in dict.fromkeys(sys.path))
    files = list(dict.fromkeys(spec.origin for spec in specs if spec is not None and spec.origin))
    return files[0] if len(files) > 1 and not _is_installed(files[0]) else None


def _is_installed(file: str) -> bool:
    """Return whether a file is of Python or of an installed package."""
    return bool({"site-packages", "dist-packages"} & {*Path(file).parts}) or file.startswith(sysconfig.get_path("stdlib"))
