"""Texts of models as cells of Markdown tables, which TensorBoard shows."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np


def joint_actions_table(
    prompts: Sequence[str],
    completions_per_agent: Sequence[Sequence[str]],
    rewards: Sequence[float],
    limit: int,
    rng: np.random.Generator,
    max_chars: int = 600,
) -> str:
    """A markdown table of the best, the worst and random joint actions, a third of `limit` rows each.

    Args:
      prompts, rewards: one for each joint action.
      completions_per_agent: for each agent, its completion in each joint action.
      max_chars: longer texts lose their middle, and the table says how much.
    """
    sizes = {"prompts": len(prompts), "rewards": len(rewards)}
    sizes |= {f"completions of agent {a}": len(texts) for a, texts in enumerate(completions_per_agent)}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"each joint action needs one of each, got {sizes}")
    order = np.argsort([-r if math.isfinite(r) else math.inf for r in map(float, rewards)], kind="stable").tolist()
    third = (limit + 2) // 3
    best, rest = order[:third], order[third:]
    worst = rest[len(rest) - min(third, limit - len(best), len(rest)) :]
    middle = rest[: len(rest) - len(worst)]
    count = min(limit - len(best) - len(worst), len(middle))
    chosen = sorted(rng.choice(len(middle), size=count, replace=False).tolist()) if count > 0 else []
    picked: list[tuple[str, list[int]]] = [("best", best), ("random", [middle[i] for i in chosen]), ("worst", worst)]
    lines = ["| | reward | prompt |" + "".join(f" agent {a} |" for a in range(len(completions_per_agent)))]
    lines.append("| --- " * (3 + len(completions_per_agent)) + "|")
    for label, indices in picked:
        for i in indices:
            cells = [prompts[i], *(texts[i] for texts in completions_per_agent)]
            shown = " | ".join(escape(_shorten(cell, max_chars)) for cell in cells)
            lines.append(f"| {label} | {float(rewards[i]):.3f} | {shown} |")
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text as it reads, within one cell of a markdown table: nothing in it acts as markdown or HTML."""
    text = html.escape("\n".join(text.expandtabs(4).splitlines()), quote=False)
    text = "".join(f"&#{ord(c)};" if c in "|*_`[]\\~$#" else c for c in text)
    return text.replace("  ", "&nbsp; ").replace("\n", "<br>")


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ...({len(text) - limit // 2 * 2} more characters)... {text[-(limit // 2) :]}"
