"""From pairs and trajectories to the batches that stacks learn from, and what completions score.

Text meets the device here, as in `generate` for sampling. Sampled pairs keep the tokens they were sampled as; texts get the
token behind them that ends a completion, which is trained like the others. Reference log-probabilities are made once for a
data set and kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import algorithm, option
from jmarl.config import Learning
from jmarl.learning.data_objective import Pairs, completions_scores, scores_values, takes
from jmarl.learning.objective import numbers_of
from jmarl.models import decoder
from jmarl.models.hub.tokenize import chat_follow_up, chat_messages, encode_prompts
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import apart, batch_shardings, mesh_of, over_agents
from jmarl.models.stack import per_agent
from jmarl.sampling.generate import bucket
from jmarl.sampling.scoring import hidden_states
from jmarl.team import StackSpec, Team
from jmarl.training.preferences.pairs import Pair, Prompt, Trajectory
from jmarl.types import TRACES, Data, PreferenceBatch, TextBatch


class Coded(NamedTuple):
    """One agent's part of a pair or trajectory as token ids."""

    prompt: list[int]
    rows: tuple[list[int], ...]  # chosen and rejected; of a trajectory all that follows its first observation
    kinds: Sequence[int] = ()  # of a trajectory's row, as in `TextBatch`


def encode_prompt(spec: StackSpec, prompt: Prompt, chat: bool, what: str) -> list[int]:
    """Token ids of a text, or of chat messages up to where the assistant begins to write. what: that it is the prompt of."""
    if isinstance(prompt, str):
        named = f"the prompt of {what}"
        return encode_prompts(spec.tokenizer, [prompt], 2**30, 0, chat, named=named)[0]  # checked with what follows
    return spec.tokenizer.encode(chat_messages(spec.tokenizer, prompt), add_special_tokens=False, verbose=False)


def ending(spec: StackSpec, chat: bool) -> int:
    """The token that ends a completion: in a chat the one that ends the assistant's message."""
    if chat:
        after = spec.tokenizer.encode(chat_follow_up(spec.tokenizer, "-"), add_special_tokens=False)
        if after and after[0] in spec.stop:
            return after[0]
    return spec.stop[0]


def encode_pairs(team: Team, pairs: Sequence[Pair], chat: bool) -> list[list[Coded]]:
    """[M][N] of pairs [M]; raises where one does not fit an agent's context."""
    out: list[list[Any]] = [[None] * team.num_agents for _ in pairs]
    for i, pair in enumerate(pairs):
        if len(pair.prompts) != team.num_agents:
            raise ValueError(f"pair {i} is of {len(pair.prompts)} agents, the team has {team.num_agents}")
    for spec in team.stacks:
        chats = {chat, *(chat or not isinstance(text, str) for pair in pairs for text in pair.prompts)}
        ends = {asked: ending(spec, asked) for asked in chats}
        for n in spec.order:
            for i, pair in enumerate(pairs):
                what = f"pair {i} of agent {n}"
                if pair.tokens is not None:
                    prompt, *rows = (list(ids) for ids in pair.tokens[n])
                    out[i][n] = Coded(prompt, tuple(rows))
                    check_length(spec, out[i][n], what, str(pair.prompts[n]))
                else:
                    end = ends[chat or not isinstance(pair.prompts[n], str)]  # a list of messages is a chat
                    out[i][n] = encode_answers(spec, pair.prompts[n], (pair.chosen[n], pair.rejected[n]), chat, end, what)
    return out


def encode_answers(spec: StackSpec, prompt: Prompt, texts: Sequence[str], chat: bool, end: int, what: str) -> Coded:
    """Texts [G] behind a prompt, each ended by the token `end`; raises, with `what` they are, where they do not fit."""
    coded = Coded(encode_prompt(spec, prompt, chat, what), tuple(encode_text(spec, text) + [end] for text in texts))
    check_length(spec, coded, what, str(prompt))
    return coded


def encode_text(spec: StackSpec, text: str) -> list[int]:
    return spec.tokenizer.encode(text, add_special_tokens=False, verbose=False)


def check_length(spec: StackSpec, coded: Coded, what: str, begins: str) -> None:
    tokens, most = len(coded.prompt) + max(map(len, coded.rows)), spec.config.max_positions
    if tokens > most:
        raise ValueError(f"{what} ({begins[:40]!r}...) has {tokens} tokens, the context {most}: leave it out or shorten it")


def encode_trajectories(team: Team, trajectories: Sequence[Trajectory], chat: bool) -> list[list[Coded]]:
    """[M][1] of trajectories [M] of a team of one: what was read first is the prompt, and all that follows one row."""
    if team.num_agents != 1:
        raise ValueError(f"trajectories are of one agent, the team has {team.num_agents}: train its agents one by one")
    spec, out = team.stacks[0], []
    for i, one in enumerate(trajectories):
        prompt = encode_prompt(spec, one.observations[0], chat, f"trajectory {i}")
        as_chat = chat or not isinstance(one.observations[0], str)
        end, row, kinds = ending(spec, as_chat), [], []
        for t, action in enumerate(one.actions):
            new = encode_text(spec, action) + [end]
            row, kinds = row + new, kinds + [1] * len(new)
            if t + 1 < len(one.observations):
                told = text_of(one.observations[t + 1])
                new = encode_text(spec, chat_follow_up(spec.tokenizer, told) if as_chat else told)
                new = new[1:] if new[:1] == [end] else new
                row, kinds = row + new, kinds + [2] * len(new)
        out.append([Coded(prompt, (row,), kinds)])
        check_length(spec, out[-1][0], f"trajectory {i}", text_of(one.observations[0]))
    return out


def text_of(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def _filled(rows: Sequence[Sequence[int]], width: int, with_: int) -> np.ndarray:
    out = np.full((len(rows), width), with_, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _arrays(spec: StackSpec, coded: Sequence[Sequence[Coded]], count: int, longer: int = 0) -> tuple[np.ndarray, ...]:
    """Prompts [A, R * P, S], lengths, tokens [A, R * P, G, T] and their mask, P = count: padding repeats the first row."""
    order, a = spec.order, len(spec.members)
    filled = [coded[i] if i < len(coded) else coded[0] for i in range(count)]
    of_agents = [row[n] for n in order for row in filled]
    most = spec.config.max_positions
    width = min(bucket(max(len(c.prompt) for c in of_agents)), most)
    size = bucket(max(len(row) for c in of_agents for row in c.rows) + longer)
    prompts = _filled([c.prompt for c in of_agents], width, spec.stop[0])
    group = len(of_agents[0].rows)
    tokens = _filled([row for c in of_agents for row in c.rows], size, spec.stop[0]).reshape(a, -1, group, size)
    counts = np.array([len(row) for c in of_agents for row in c.rows]).reshape(a, -1, group, 1)
    lengths = np.array([len(c.prompt) for c in of_agents], np.int32)
    return prompts.reshape(a, -1, width), lengths.reshape(a, -1), tokens, np.arange(size) < counts


def pair_batches(
    team: Team, coded: Sequence[Sequence[Coded]], reference: np.ndarray | None, count: int, learning: Learning
) -> tuple[PreferenceBatch, ...]:
    """Each stack's batch of up to `count` pairs; reference [M, N, 2] of the completions, None: 0. Of single completions, which
    can be scored but not learned from, in place of 2 is 1."""
    batches = []
    for spec in team.stacks:
        prompts, lengths, tokens, mask = _arrays(spec, coded, count, longer=int(scores_values(learning)))
        of_reference = np.zeros((count, team.num_agents, tokens.shape[2]), np.float32)
        if reference is not None:
            of_reference[: len(coded)] = reference
        shape = lengths.shape
        of_stack = of_reference[:, spec.order].swapaxes(0, 1).reshape(*shape, -1)
        valid = np.tile(np.arange(count) < len(coded), len(spec.order)).reshape(shape)
        arrays = (prompts, lengths, tokens, mask, of_stack, np.zeros(shape, np.float32), valid)
        batches.append(PreferenceBatch(*map(jnp.asarray, arrays)))
    return tuple(batches)


def text_batches(team: Team, coded: Sequence[Sequence[Coded]], count: int) -> tuple[TextBatch, ...]:
    """The batch of up to `count` trajectories of a team of one."""
    spec = team.stacks[0]
    prompts, lengths, tokens, _ = _arrays(spec, coded, count)
    kinds = np.zeros(tokens.shape, np.int32)
    kinds[0, : len(coded), 0] = _filled([row[0].kinds for row in coded], tokens.shape[-1], 0)
    return (TextBatch(*map(jnp.asarray, (prompts, lengths, tokens, kinds))),)


@partial(jax.jit, static_argnames=("cfg", "learning", "mode", "mesh"), compiler_options=COMPILER_OPTIONS)
def _numbers(params, batch, *, cfg, learning, mode, mesh):
    """What `numbers_of` gives for every token, [A, P, G, T]."""
    TRACES["scores"] += 1
    agents = batch.tokens.shape[0]

    def of_agent(params, batch):
        weights = decoder.cast(params, jnp.dtype(learning.compute_dtype))
        hidden = hidden_states(weights, cfg, batch.prompts, batch.prompt_lengths, batch.tokens, "full")
        return numbers_of(params, weights, hidden, batch.tokens, learning)

    how = mode if mesh is None or apart(mesh, agents) else "vmap"
    return over_agents(per_agent(of_agent, how), mesh, agents)(params, batch)


def _call(weights: Any, spec: StackSpec, batch: Data, learning: Learning, mode: str) -> jax.Array:
    mesh = mesh_of(weights)
    batch = batch if mesh is None else jax.device_put(batch, batch_shardings(mesh, batch))
    return _numbers(weights, batch, cfg=spec.config, learning=learning, mode=mode, mesh=mesh)


def text_scores(team: Team, params: Sequence[Any], batch: TextBatch, learning: Learning, mode: str) -> np.ndarray:
    """Log-probabilities [1, P, 1, T] of a batch's tokens, at temperature 1."""
    return jax.device_get(_call(params[0], team.stacks[0], batch, learning, mode))


def pair_scores(
    team: Team, params: Sequence[Any], batches: Sequence[PreferenceBatch], learning: Learning, mode: str
) -> np.ndarray:
    """What a batch's completions score less their reference [P, N, 2 (of single ones 1)]: log-probabilities, or values of a
    reward model."""
    group = batches[0].tokens.shape[2]
    out = np.zeros((batches[0].valid.size // len(team.stacks[0].order), team.num_agents, group), np.float32)
    for spec, weights, batch in zip(team.stacks, params, batches, strict=True):
        of = Pairs(takes(batch.action_mask, learning), batch.reference, batch.others, batch.valid)
        found = jax.device_get(jax.vmap(completions_scores)(_call(weights, spec, batch, learning, mode), of))
        out[:, spec.order] = found.reshape(len(spec.order), -1, group).swapaxes(0, 1)
    return out


def reference_scores(
    team: Team, params: Sequence[Any], coded: Sequence[Sequence[Coded]], count: int, learning: Learning, mode: str
) -> np.ndarray | None:
    """[M, N, 2] of pairs [M], by the team that params are of, so many at once; None where the loss has no reference."""
    row = algorithm(learning.algorithm)
    if scores_values(learning) or option("reference_free", learning.reference_free, row):
        return None
    parts = [coded[i : i + count] for i in range(0, len(coded), count)]
    found = [pair_scores(team, params, pair_batches(team, p, None, count, learning), learning, mode)[: len(p)] for p in parts]
    return np.concatenate(found)


def with_others(
    team: Team, params: Sequence[Any], batches: Sequence[PreferenceBatch], learning: Learning, mode: str
) -> tuple[PreferenceBatch, ...]:
    """Batches with what each pair's other agents add to the margin (madpo): sum over b != a of their own margins."""
    scores = pair_scores(team, params, batches, learning, mode)
    margins = scores[..., 0] - scores[..., 1]  # [P, N]
    others = margins.sum(1, keepdims=True) - margins
    return tuple(
        batch._replace(others=jnp.asarray(others.T[spec.order].reshape(batch.others.shape)))
        for spec, batch in zip(team.stacks, batches, strict=True)
    )
