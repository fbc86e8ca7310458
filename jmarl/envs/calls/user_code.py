"""Say where in the user's code an error was raised, and in which call.

Functions of the user (rewards, formatters, environments, metrics) are called inside `calling(...)`. An error that leaves it
gets notes: the innermost line of the user's code, and what was called with which item. The error itself stays as it is, so that
`except KeyError` still catches it. Python and notebooks show the notes below the traceback; `sentence` is one line with all of
them, for the command line. Left out: errors that are no `Exception`, such as Ctrl+C.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATHS = (PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
LIBRARIES = tuple(os.path.join(path, "") for path in PATHS)
CELLS = ("<ipython", "<stdin>")  # sources of the user that have no file; others, such as <string>, are made by libraries
WITHOUT_NAME = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class CallNote(str):
    """A note that `calling` adds to an error."""


@contextlib.contextmanager
def calling(*notes: str | Callable[[], str], function: Any = None) -> Iterator[None]:
    """Add the place in the user's code, and these notes, to an error that leaves the context.

    Args:
        notes: texts, or functions that return one, called only for an error: to write the text of a large item takes long.
        function: that is called. Where jmarl refuses what it returned, the place is its definition.
    """
    try:
        yield
    except Exception as error:
        known, texts = notes_of(error), [note() if callable(note) else note for note in notes]
        if not known:
            place = place_of(error)
            texts = [f"in {place}", *texts] if place else [*texts, *filter(None, [definition_of(function)])]
        for note in texts:
            if note not in known:
                error.add_note(CallNote(note))
        raise


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of `calling`, the innermost first."""
    return [note for note in getattr(error, "__notes__", ()) if isinstance(note, CallNote)]


def place_of(error: BaseException) -> str:
    """Return "file, line N, in function" of the innermost line of the user's code in the traceback; empty without one."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{shown_path(error.filename)}, line {error.lineno}"
    if isinstance(error, ExceptionGroup):
        return place_of(error.exceptions[0])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_user(frame.filename)]
    if not frames:  # of another process, where `calling` has noted the place
        return next((note.removeprefix("in ") for note in notes_of(error) if note.startswith("in ")), "")
    name = next((frame.name for frame in reversed(frames) if frame.name not in WITHOUT_NAME), "")
    return f"{shown_path(frames[-1].filename)}, line {frames[-1].lineno}" + (f", in {name}" if name else "")


def is_of_user(filename: str) -> bool:
    """Return whether a source file is neither of jmarl nor of Python or an installed package."""
    return not filename.startswith((*LIBRARIES, "<")) or filename.startswith(CELLS)


def defined_text(function: Any) -> str:
    """Return the end of a message that says where a function is defined; empty for what is not the user's."""
    definition = definition_of(function)
    return f"; it is {definition}" if definition else ""


def definition_of(function: Any) -> str:
    """Return "defined in file, line N"; empty for what is not the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function if inspect.isroutine(function) else type(function).__call__, "__code__", None)
    if code is None or not is_of_user(code.co_filename):
        return ""
    return f"defined in {shown_path(code.co_filename)}, line {code.co_firstlineno}"


def shown_path(filename: str) -> str:
    """Return the path of a file, relative to the working directory if it is in there. Cells of a notebook have no file."""
    if filename.startswith("<stdin>"):
        return "standard input"
    if "ipykernel_" in filename or filename.startswith(CELLS):
        return "a cell of the notebook"
    inside = os.path.join(os.getcwd(), "")
    return filename.removeprefix(inside)


def named(error: BaseException) -> str:
    """Return the type and the message of an error, as Python does: a message alone, such as 'town', may say nothing."""
    if isinstance(error, ExceptionGroup):
        return named(error.exceptions[0])
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} without a message"


def raised(error: BaseException) -> str:
    """Return the type, the message and the place in the user's code of an error."""
    place = place_of(error)
    return f"{named(error)}, in {place}" if place else named(error)


def message_of(error: BaseException) -> str:
    """Return the message of an error; for one of the user's code also its type and place."""
    return raised(error) if place_of(error) else str(error)


def sentence(error: BaseException) -> str:
    """Return all that is known of an error of the user's code in one line; empty for an error that is of jmarl alone."""
    place, notes = place_of(error), notes_of(error)
    has_place = bool(notes) and notes[0].startswith("in ")
    if place and not has_place:  # of a function that is called without `calling`
        notes, has_place = [f"in {place}", *notes], True
    start = f"{named(error)}, {notes.pop(0)}" if has_place else str(error)  # else jmarl refuses what the user's code returned
    return f"{start} ({'; '.join(notes)})" if notes else start * has_place


def excerpt(value: Any, size: int = 120) -> str:
    """Return the beginning of the text of a value."""
    text = repr(value)
    return text if len(text) <= size else f"{text[: size - 3]}..."
