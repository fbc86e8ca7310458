"""Check the prompts of all items before anything runs: that there are any, and that they fit the agents' contexts.

The items go once through the formatters of a `RewardEnvironment`; each distinct prompt is encoded at most once by a stack's
tokenizer. A token holds at least one byte, so a text that has fewer bytes than the context has room is not encoded at all. If
a tokenizer's normalizer makes a text longer, a long prompt may be missed here: it is then found in its step, where it is an
error or cut as any other.

Left out: environments that write their prompts in `reset`. It may be random or take long, and says nothing about later turns.
The items of the first update and the held-out ones are read when programs are compiled; the others in their step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jmarl.config import Chat, TrainConfig
from jmarl.envs.base import Environment
from jmarl.envs.data import shared_line
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.models.hub.messages import ChatPrompt, messages_of
from jmarl.models.hub.prompt_warnings import warn_of_prompts
from jmarl.models.hub.template import render
from jmarl.models.hub.tokenize import encode_prompt, naming, text_start
from jmarl.rollout.play import check_number_of_agents
from jmarl.team import StackSpec, Team


class LongPrompt(NamedTuple):
    """A prompt that leaves no room for a completion."""

    tokens: int
    item: int
    agent: int
    context: int  # of the agent


def items_that_fit(
    team: Team, env: Environment, items: Sequence[Mapping], eval_items: Sequence[Mapping], cfg: TrainConfig
) -> tuple[Sequence[Any], Sequence[Any], str]:
    """Check all prompts and return the items and held-out items that a run plays, see `Episodes.long_prompts`, and a line that
    counts the held-out items that are also trained on, empty if there are none.

    Two items are the same if their agents read the same prompts, whatever other columns they have. Where the environment writes
    its prompts later, they are the same if their content is.

    error: raises ValueError if an item's prompt is too long, with the count, the longest and its item. truncate_left: warns
    with the same text; prompts are cut when they are read. drop: leaves such items out and warns; raises ValueError if none is
    left.
    """
    if not isinstance(env, RewardEnvironment):
        if cfg.episodes.long_prompts == "drop" and cfg.episodes.num_turns == 1:
            raise ValueError(
                "long_prompts='drop' leaves items out before training, and this environment writes its prompts only when they "
                "are played: use long_prompts='truncate_left' or 'error', or leave long items out of its tasks"
            )
        return items, eval_items, shared_line(items, eval_items, "tasks")
    items, prompts = fitting(team, env, items, cfg, "items")
    chats = any(cfg.episodes.chat_settings.of(n).on for n in range(team.num_agents))
    if cfg.episodes.chat_template_kwargs and not chats and not any(isinstance(x, ChatPrompt) for row in prompts for x in row):
        warnings.warn(
            f"chat_template_kwargs={dict(cfg.episodes.chat_template_kwargs)} has no effect on prompts that are texts: set "
            "chat=True, or give messages",
            stacklevel=3,
        )
    eval_items, eval_prompts = fitting(team, env, eval_items or (), cfg, "held-out items")
    return items, eval_items, shared_line(prompts, eval_prompts, "tasks")


def needs_long_context(team: Team, env: Environment, items: Sequence[dict], cfg: TrainConfig) -> bool:
    """Return whether a prompt leaves no room for a completion in the short one of a model's two contexts, or for those of all
    turns if later ones read them."""
    if not isinstance(env, RewardEnvironment) or not any(spec.config.has_two_contexts for spec in team.stacks):
        return False
    prompts, completions = env.first_prompts(items), cfg.episodes.num_turns if cfg.episodes.history == "append" else 1
    check_number_of_agents(team, prompts)
    cfg = cfg.replace(max_new_tokens=completions * cfg.sampling.max_new_tokens)
    return any(team.agent_specs[x.agent].config.has_two_contexts for x in long_prompts(team, prompts, cfg))


def fitting(
    team: Team, env: RewardEnvironment, items: Sequence[Any], cfg: TrainConfig, name: str
) -> tuple[Sequence[Any], Sequence[Sequence[Any]]]:
    """Return the items of one list that are played, see `items_that_fit`, and their prompts [P][N].

    name: what messages call the list.
    """
    prompts = env.first_prompts(items)
    check_number_of_agents(team, prompts)
    joint = list(zip(*prompts, strict=True))
    long = long_prompts(team, prompts, cfg)
    if not long:
        return items, joint
    longest = max(long, key=lambda x: (x.tokens - x.context, -x.item, -x.agent))
    left_out, new_tokens = {prompt.item for prompt in long}, cfg.sampling.max_new_tokens
    problem = (
        f"{len(left_out)} of {len(items)} {name} have a prompt too long for the context: the longest, of item {longest.item} "
        f"for agent {longest.agent}, has {longest.tokens} tokens; with max_new_tokens={new_tokens} that is "
        f"{longest.tokens + new_tokens}, and the context is {longest.context}"
    )
    if cfg.episodes.long_prompts == "error":
        raise ValueError(f"{problem}: set long_prompts='truncate_left' or 'drop', lower max_new_tokens, or shorten the prompts")
    if cfg.episodes.long_prompts == "truncate_left":
        warnings.warn(f"{problem}; such prompts are cut on the left (long_prompts='truncate_left')", stacklevel=4)
        return items, joint
    remaining = [p for p in range(len(items)) if p not in left_out]
    if not remaining:
        raise ValueError(f"{problem}: long_prompts='drop' leaves none; lower max_new_tokens or shorten the prompts")
    warnings.warn(f"{problem}; these {name} are left out (long_prompts='drop')", stacklevel=4)
    return [items[p] for p in remaining], [joint[p] for p in remaining]


def long_prompts(team: Team, prompts: Sequence[Sequence[str | None]], cfg: TrainConfig) -> list[LongPrompt]:
    """Return those of the prompts [N][P] that leave no room for a completion. Raises ValueError if a prompt is empty."""
    long = []
    for agents in agents_by_encoding(team, cfg.episodes.chat_settings):
        spec, chat = team.agent_specs[agents[0]], cfg.episodes.chat_settings.of(agents[0])
        context = spec.config.context
        texts = {text for agent in agents for text in prompts[agent] if text is not None}
        lengths = lengths_of_long(spec, texts, context - cfg.sampling.max_new_tokens, chat, f"a prompt of agent {agents[0]}")
        for agent in agents:
            warn_of_prompts(spec.tokenizer, prompts[agent], chat, agent)
            for p, text in enumerate(prompts[agent]):
                if text not in lengths:
                    continue
                if not lengths[text]:
                    raise ValueError(f"the prompt of item {p} for agent {agent} is empty: there is no token to continue from")
                long.append(LongPrompt(lengths[text], p, agent, context))
    return long


def agents_by_encoding(team: Team, chat: Chat) -> list[list[int]]:
    """Return the agents in groups whose prompts become the same tokens and have the same room."""
    groups: dict[Any, list[int]] = {}
    for agent, spec in enumerate(team.agent_specs):
        groups.setdefault((id(spec.tokenizer), spec.stop, spec.config.context, chat.of(agent).on), []).append(agent)
    return list(groups.values())


def lengths_of_long(spec: StackSpec, texts: Iterable[str], room: int, chat: Chat, named: str) -> dict[Any, int]:
    """Return the number of tokens of each text that has none, or more than `room`. named: a prompt in errors."""
    added, stop = len(text_start(spec.tokenizer)), spec.stop
    lengths = {}
    with naming(named):
        for prompt in texts:
            is_chat = chat or isinstance(prompt, ChatPrompt)
            text = render(spec.tokenizer, messages_of(prompt), chat) if is_chat else prompt
            if text and len(text.encode("utf-8", "replace")) + added <= room:
                continue
            count = len(encode_prompt(spec.tokenizer, prompt, chat, stop=stop))
            if count > room or not count:
                lengths[prompt] = count
    return lengths
