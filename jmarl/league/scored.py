"""The exact policy of an agent on prompts with few answers: how probably it writes each of them, without sampling.

For games in which an agent answers one of a few words, so that values, best responses and the distance from an equilibrium
(`nash_conv` of `envs.games.kuhn` and `envs.games.tictactoe`) have no noise. Left out: other ways to spell an answer, which the
missing probability is of, and samplers that cut the vocabulary (top_k, top_p, min_p).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int

from jmarl.config import Chat, Sampling, as_chat, check
from jmarl.models.agent import Agent
from jmarl.models.hub.tokenize import encode_answer, encode_prompts
from jmarl.sampling.generate import bucket
from jmarl.sampling.scoring import score

_score = jax.jit(score, static_argnums=1, static_argnames="temperature")
Policy = dict[str, dict[str, float]]  # prompt -> answer -> probability


def policy_of(
    agent: Agent, prompts: Sequence[str], answers: Sequence[str], settings: Sampling, chat: bool | Chat = False
) -> Policy:
    """Return how probably an agent answers each prompt with each answer, and then ends.

    Args:
        agent: the agent, see `jmarl.agents_of` and `jmarl.load_agent`.
        prompts: texts [P].
        answers: texts [K], tokenized as completions are. One of `max_new_tokens` tokens needs no end; a longer one has
            probability 0.
        settings: of the sampler; its temperature counts (0 as 1).
        chat: whether prompts are put into the chat template.
    """
    for name in ("top_k", "top_p", "min_p"):
        value, default = getattr(settings, name), getattr(Sampling, name)
        check(name, value, value == default, f"{default}: only then each answer has a probability")
    own = as_chat(chat).of(0)
    rows = encode_prompts(agent.tokenizer, prompts, agent.config.context, settings.max_new_tokens, own, stop=agent.stop)
    ids = np.zeros((len(rows), bucket(max(map(len, rows)))), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens, counted = answer_tokens(agent, answers, settings, own)  # [K, S, T]
    flat = np.broadcast_to(tokens.reshape(-1, tokens.shape[-1]), (len(rows), tokens[..., 0].size, tokens.shape[-1]))
    scores = _score(agent.params, agent.config, ids, lengths, flat, temperature=settings.temperature)
    logprobs = np.asarray(scores.logprobs, np.float64)
    odds = np.exp(logprobs.reshape(len(rows), *tokens.shape).sum(-1, where=counted))  # [P, K, S]
    odds = odds.sum(-1, where=counted.any(-1))
    return {prompt: dict(zip(answers, map(float, row), strict=True)) for prompt, row in zip(prompts, odds, strict=True)}


def answer_tokens(
    agent: Agent, answers: Sequence[str], settings: Sampling, chat: Chat
) -> tuple[Int[np.ndarray, "answer stop token"], Bool[np.ndarray, "answer stop token"]]:
    """Return the tokens of each answer with each end token, and which count; none of an answer that is too long counts."""
    width, stops = settings.max_new_tokens, agent.stop
    tokens, counted = np.zeros((2, len(answers), len(stops), width), np.int32)
    for k, answer in enumerate(answers):
        row = encode_answer(agent.tokenizer, answer, chat)
        for s, stop in enumerate(stops if len(row) < width else stops[:1]):
            whole = [*row, stop][:width]
            if len(row) <= width:
                tokens[k, s, : len(whole)], counted[k, s, : len(whole)] = whole, 1
    return tokens, counted.astype(bool)
