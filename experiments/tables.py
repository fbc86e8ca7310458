"""What the experiments share to write tables and pictures. Not an experiment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"


def markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(map(markdown_row, (head, ["---"] * len(head), *rows)))


def write_table(name: str, text: str, page: Path = README) -> None:
    """Replace a table in a page: the lines between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    marks = rf"(<!-- {name} -->\n).*(<!-- end of {name} -->)"
    old = page.read_text(encoding="utf-8")
    if not re.search(marks, old, re.DOTALL):
        raise ValueError(f"{page} has no lines '<!-- {name} -->' and '<!-- end of {name} -->': add them around the table")
    page.write_text(re.sub(marks, lambda match: match[1] + text + "\n" + match[2], old, flags=re.DOTALL), encoding="utf-8")


def pyplot() -> Any:
    """Import `matplotlib.pyplot` for files only; it needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
