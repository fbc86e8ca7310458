"""Find given pairs and texts that are longer than the context, and do with them what `Episodes.long_prompts` says.

error: one error counts them. drop: they are left out. truncate_left: their prompts are cut on the left, inside the chat
template; those whose completions (of a text: everything after its first observation) leave no room for a prompt are left out.
A row is left out for all agents of a team together. A warning counts those that are; if these are all, that is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmarl.config import Chat, Episodes
from jmarl.envs.data import Pair, Prompt, Trajectory
from jmarl.models.hub.cut import NoRoom, cut_prompt
from jmarl.preferences.encoding import AgentTokens, chat_for, text_of
from jmarl.team import StackSpec, Team

Tokens = Sequence[AgentTokens]  # of a row: [N]


class LongRow(NamedTuple):
    """A row that is longer than the context of an agent."""

    tokens: int
    number: int
    agent: int
    context: int


def rows_that_fit(
    team: Team, data: Sequence[Any], tokens: Sequence[Tokens], episodes: Episodes, name: str
) -> tuple[Sequence[Any], Sequence[Tokens]]:
    """Return the data [M] that is trained or evaluated, and its tokens [M][N], see above. name: what messages call the data."""
    long, choice = long_rows(team, tokens), episodes.long_prompts
    if not long:
        return data, tokens
    prompts = [prompts_of(row) for row in data]
    problem, advice = problem_of(long, prompts, name), "or shorten them"
    if choice == "error":
        raise ValueError(f"{problem}: set long_prompts='drop' to leave them out, or 'truncate_left' to cut prompts, {advice}")
    fitting = fit_rows(team, prompts, tokens, episodes)
    num_left_out = len(data) - len(fitting)
    if not fitting:
        raise ValueError(f"{problem}: long_prompts={choice!r} leaves none; shorten them")
    if choice == "drop":
        done = f"{num_left_out} are left out"
    else:
        done = f"the prompts of {len({row.number for row in long}) - num_left_out} are cut on the left"
        done += f", {num_left_out} with completions that leave no room for a prompt are left out" if num_left_out else ""
    warnings.warn(f"{problem}; {done} (long_prompts={choice!r})", stacklevel=3)
    return [data[i] for i in fitting], [*fitting.values()]


def fit_rows(
    team: Team, prompts: Sequence[Sequence[Prompt]], tokens: Sequence[Tokens], episodes: Episodes
) -> dict[int, list[AgentTokens]]:
    """Return the tokens [N] of the rows [M] that fit, by their numbers: with truncate_left also of those with a cut prompt.

    prompts: the prompts [M][N] of the rows.
    """
    fitting: dict[int, Any] = {i: [*parts] for i, parts in enumerate(tokens)}
    cuts = episodes.long_prompts == "truncate_left"
    for row in long_rows(team, tokens):
        chat = episodes.chat_settings.of(row.agent)
        part, prompt = tokens[row.number][row.agent], prompts[row.number][row.agent]
        cut = cut_part(team.agent_specs[row.agent], part, prompt, chat) if cuts else None
        if cut is None:
            fitting.pop(row.number, None)
        elif row.number in fitting:
            fitting[row.number][row.agent] = cut
    return fitting


def cut_part(spec: StackSpec, part: AgentTokens, prompt: Prompt, chat: Chat) -> AgentTokens | None:
    """Return an agent's part of a row with a prompt that leaves room for its completions; None if no prompt does."""
    room = spec.config.context - max(map(len, part.rows))
    try:
        return part._replace(prompt=cut_prompt(spec.tokenizer, part.prompt, prompt, room, chat_for(prompt, chat), spec.stop))
    except NoRoom:
        return None


def long_rows(team: Team, tokens: Sequence[Tokens]) -> list[LongRow]:
    """Return the rows among tokens [M][N] that are longer than the context, once for each agent."""
    contexts = [spec.config.context for spec in team.agent_specs]
    return [
        LongRow(part.length, i, n, contexts[n])
        for i, parts in enumerate(tokens)
        for n, part in enumerate(parts)
        if part.length > contexts[n]
    ]


def problem_of(long: Sequence[LongRow], prompts: Sequence[Sequence[Prompt]], name: str) -> str:
    """Return the part of a sentence that counts long rows and describes the longest. Arguments as above."""
    row = max(long, key=lambda x: (x.tokens - x.context, -x.number, -x.agent))
    begins = text_of(prompts[row.number][row.agent])[:40]
    return (
        f"{len({row.number for row in long})} of {len(prompts)} {name} are too long for the context: the longest, number "
        f"{row.number} for agent {row.agent} ({begins!r}...), has {row.tokens} tokens, and the context is {row.context}"
    )


def prompts_of(row: Pair | Trajectory) -> Sequence[Prompt]:
    """Return the prompts [N] of a row; of a text that is trained whole, which has none, its beginning."""
    return row.prompts if isinstance(row, Pair) else (row.observations[0] or row.actions[0],)
