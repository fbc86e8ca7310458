"""Check the prompts of all items before anything runs: that there are any, and that they fit the agents' contexts.

One pass over the items by the formatters of a `RewardEnvironment`; each distinct prompt is encoded at most once by a stack's
tokenizer.
A token holds at least one byte, so a text with fewer bytes than the context has room is not encoded at all. (Where a
tokenizer's normalizer makes a text longer than it was, one may be passed over: it is then met in its step, where it is an
error or cut as any other.)

Left out: environments that write their prompts in `reset`. It may be random or take long, and says nothing of later turns. The
items of the first update and the held-out ones are read when programs are compiled; the others in their step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.models.hub.tokenize import prompt_text
from jmarl.rollout.play import check_size
from jmarl.team import StackSpec, Team


class LongPrompts(NamedTuple):
    """Items with a prompt that leaves no room for a completion."""

    items: list[int]  # their numbers
    longest: tuple[int, int, int, int]  # tokens of the longest such prompt, its item, its agent, that agent's context


def items_that_fit(
    team: Team, env: Environment, items: Sequence[dict], eval_items: Sequence[dict], cfg: TrainConfig
) -> tuple[Sequence[dict], Sequence[dict]]:
    """The items and held-out items that a run is to play, after a check of all their prompts; see `Episodes.long_prompts`.

    error: raises where an item's prompt is too long, with the count, the longest and its item. truncate_left: warns with the
    same words; prompts are cut where they are read. drop: leaves such items out and warns; an error if none is left.
    """
    if not isinstance(env, RewardEnvironment):
        if cfg.episodes.long_prompts == "drop":
            raise ValueError(
                "long_prompts='drop' leaves items out before training, and this environment writes its prompts only when they "
                "are played: use long_prompts='truncate_left' or 'error', or leave long items out of its tasks"
            )
        return items, eval_items
    return fitting(team, env, items, cfg, "items"), fitting(team, env, eval_items or (), cfg, "held-out items")


def fitting(team: Team, env: RewardEnvironment, items: Sequence[dict], cfg: TrainConfig, called: str) -> Sequence[dict]:
    """The items of one list that are played, see `items_that_fit`."""
    prompts = env.first_prompts(items)
    check_size(team, prompts)
    found = long_prompts(team, prompts, cfg)
    if found is None:
        return items
    tokens, item, agent, context = found.longest
    new_tokens = cfg.sampling.max_new_tokens
    problem = (
        f"{len(found.items)} of {len(items)} {called} have a prompt too long for the context: the longest, of item {item} for "
        f"agent {agent}, has {tokens} tokens; with max_new_tokens={new_tokens} that is {tokens + new_tokens}, "
        f"and the context is {context}"
    )
    if cfg.episodes.long_prompts == "error":
        raise ValueError(f"{problem}: set long_prompts='truncate_left' or 'drop', lower max_new_tokens, or shorten the prompts")
    if cfg.episodes.long_prompts == "truncate_left":
        warnings.warn(f"{problem}; such prompts are cut on the left (long_prompts='truncate_left')", stacklevel=4)
        return items
    left_out = set(found.items)
    kept = [items[p] for p in range(len(items)) if p not in left_out]
    if not kept:
        raise ValueError(f"{problem}: long_prompts='drop' leaves none; lower max_new_tokens or shorten the prompts")
    warnings.warn(f"{problem}; these {called} are left out (long_prompts='drop')", stacklevel=4)
    return kept


def long_prompts(team: Team, prompts: Sequence[Sequence[str | None]], cfg: TrainConfig) -> LongPrompts | None:
    """Which of prompts [N][P] leave no room for a completion; None: all do. An empty one is an error."""
    found: list[tuple[int, int, int, int]] = []
    for spec in team.stacks:
        context = spec.config.max_positions
        texts = {text for agent in spec.order for text in prompts[agent] if text is not None}
        lengths = lengths_of_long(spec, texts, context - cfg.sampling.max_new_tokens, cfg.episodes.chat)
        for agent in spec.order:
            for p, text in enumerate(prompts[agent]):
                if text not in lengths:
                    continue
                if not lengths[text]:
                    raise ValueError(f"the prompt of item {p} for agent {agent} is empty: there is no token to continue from")
                found.append((lengths[text], p, agent, context))
    if not found:
        return None
    longest = max(found, key=lambda one: (one[0] - one[3], -one[1], -one[2]))  # by how much it is too long
    return LongPrompts(sorted({p for _, p, *_ in found}), longest)


def lengths_of_long(spec: StackSpec, texts: Iterable[str], room: int, chat: bool) -> dict[Any, int]:
    """Tokens of each text that has more than `room` of them, and of each that has none."""
    added = spec.tokenizer.num_special_tokens_to_add(pair=False)
    lengths = {}
    for prompt in texts:
        text, special = prompt_text(spec.tokenizer, prompt, chat)
        if text and len(text.encode("utf-8", "replace")) + added * special <= room:
            continue
        count = len(spec.tokenizer.encode(text, add_special_tokens=special, verbose=False))
        if count > room or not count:
            lengths[prompt] = count
    return lengths
