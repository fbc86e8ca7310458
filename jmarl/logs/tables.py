"""Write completions into Markdown tables, which TensorBoard shows."""

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
    """Return a Markdown table of the best, the worst and random joint actions, a third of `limit` rows each.

    Args:
        prompts: [J] one per joint action.
        completions_per_agent: [N][J].
        rewards: [J].
        limit: largest number of rows.
        rng: draws the random rows.
        max_chars: longer texts are shortened in the middle.
    """
    sizes = {"prompts": len(prompts), "rewards": len(rewards)}
    sizes |= {f"completions of agent {a}": len(texts) for a, texts in enumerate(completions_per_agent)}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"numbers of joint actions differ: {sizes}")
    order = np.argsort([-r if math.isfinite(r) else math.inf for r in map(float, rewards)], kind="stable").tolist()
    third = (limit + 2) // 3
    best, others = order[:third], order[third:]
    num_worst = min(third, limit - len(best), len(others))
    middle, worst = others[: len(others) - num_worst], others[len(others) - num_worst :]
    count = min(limit - len(best) - num_worst, len(middle))
    drawn = sorted(rng.choice(len(middle), size=count, replace=False).tolist()) if count > 0 else []
    groups: list[tuple[str, list[int]]] = [("best", best), ("random", [middle[i] for i in drawn]), ("worst", worst)]
    lines = ["| | reward | prompt |" + "".join(f" agent {a} |" for a in range(len(completions_per_agent)))]
    lines.append("| --- " * (3 + len(completions_per_agent)) + "|")
    for label, indices in groups:
        for i in indices:
            cells = [prompts[i], *(texts[i] for texts in completions_per_agent)]
            text = " | ".join(escape(_shorten(cell, max_chars)) for cell in cells)
            lines.append(f"| {label} | {float(rewards[i]):.3f} | {text} |")
    return "\n".join(lines)


def escape(text: str) -> str:
    """Return text for a cell of a Markdown table, in which nothing is interpreted as Markdown or HTML."""
    text = html.escape("\n".join(text.expandtabs(4).splitlines()), quote=False)
    text = "".join(f"&#{ord(c)};" if c in "|*_`[]\\~$#" else c for c in text)
    return text.replace("  ", "&nbsp; ").replace("\n", "<br>")


def _shorten(text: str, limit: int) -> str:
    """Return text, with the middle replaced by a note if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ...({len(text) - limit // 2 * 2} more characters)... {text[-(limit // 2) :]}"
