"""Encode pairs and trajectories, make batches of them, and compute the scores of their completions.

Sampled pairs keep the tokens that were sampled. Texts get the token that ends a completion appended, which is trained like the
others. Reference log-probabilities are computed once for a data set and kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmarl.algorithms import Algorithm
from jmarl.learning.data_objective import PairTargets, completion_numbers, pair_token_weights
from jmarl.learning.objective import pair_numbers
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.models.hub.tokenize import chat_follow_up, chat_messages, encode_prompts
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import batch_shardings, mesh_of, over_agents, splits_only_agents
from jmarl.models.stack import per_agent
from jmarl.sampling.generate import bucket
from jmarl.sampling.scoring import hidden_states
from jmarl.team import StackSpec, Team, to_agents, to_stacks
from jmarl.training.preferences.pairs import Pair, Prompt, Trajectory
from jmarl.types import TRACES, Data, PreferenceBatch, TextBatch


class Encoded(NamedTuple):
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


def encode_pairs(team: Team, pairs: Sequence[Pair], chat: bool) -> list[list[Encoded]]:
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
                    out[i][n] = Encoded(prompt, tuple(rows))
                    check_length(spec, out[i][n], what, str(pair.prompts[n]))
                else:
                    end = ends[chat or not isinstance(pair.prompts[n], str)]  # a list of messages is a chat
                    out[i][n] = encode_answers(spec, pair.prompts[n], (pair.chosen[n], pair.rejected[n]), chat, end, what)
    return out


def encode_answers(spec: StackSpec, prompt: Prompt, texts: Sequence[str], chat: bool, end: int, what: str) -> Encoded:
    """Texts [G] behind a prompt, each ended by the token `end`; raises, with `what` they are, where they do not fit."""
    encoded = Encoded(encode_prompt(spec, prompt, chat, what), tuple(encode_text(spec, text) + [end] for text in texts))
    check_length(spec, encoded, what, str(prompt))
    return encoded


def encode_text(spec: StackSpec, text: str) -> list[int]:
    return spec.tokenizer.encode(text, add_special_tokens=False, verbose=False)


def check_length(spec: StackSpec, encoded: Encoded, what: str, begins: str) -> None:
    tokens, most = len(encoded.prompt) + max(map(len, encoded.rows)), spec.config.max_positions
    if tokens > most:
        raise ValueError(f"{what} ({begins[:40]!r}...) has {tokens} tokens, the context {most}: leave it out or shorten it")


def encode_trajectories(team: Team, trajectories: Sequence[Trajectory], chat: bool) -> list[list[Encoded]]:
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
        out.append([Encoded(prompt, (row,), kinds)])
        check_length(spec, out[-1][0], f"trajectory {i}", text_of(one.observations[0]))
    return out


def text_of(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def _pad_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> np.ndarray:
    out = np.full((len(rows), width), fill, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _arrays(spec: StackSpec, encoded: Sequence[Sequence[Encoded]], count: int, longer: int = 0) -> tuple[np.ndarray, ...]:
    """Prompts [A, R * P, S], lengths, tokens [A, R * P, G, T] and their mask, P = count: padding repeats the first row."""
    order, a = spec.order, len(spec.members)
    padded = [encoded[i] if i < len(encoded) else encoded[0] for i in range(count)]
    parts = [row[n] for n in order for row in padded]
    width = min(bucket(max(len(part.prompt) for part in parts)), spec.config.max_positions)
    size = bucket(max(len(row) for part in parts for row in part.rows) + longer)
    prompts = _pad_rows([part.prompt for part in parts], width, spec.stop[0])
    group = len(parts[0].rows)
    tokens = _pad_rows([row for part in parts for row in part.rows], size, spec.stop[0]).reshape(a, -1, group, size)
    counts = np.array([len(row) for part in parts for row in part.rows]).reshape(a, -1, group, 1)
    lengths = np.array([len(part.prompt) for part in parts], np.int32)
    return prompts.reshape(a, -1, width), lengths.reshape(a, -1), tokens, np.arange(size) < counts


def pair_batches(
    team: Team, encoded: Sequence[Sequence[Encoded]], reference: np.ndarray | None, count: int, algorithm: Algorithm
) -> tuple[PreferenceBatch, ...]:
    """Return each stack's batch of up to `count` pairs.

    reference: [M, N, 2] of the completions, None: 0. Instead of pairs there may be single completions, which can be scored but
    not learned from."""
    batches, by_agent = [], np.zeros((team.num_agents, count, len(encoded[0][0].rows)), np.float32)
    if reference is not None:
        by_agent[:, : len(encoded)] = reference.swapaxes(0, 1)
    for spec, numbers in zip(team.stacks, to_stacks(team, by_agent), strict=True):
        longer = int(algorithm.row.margin == "score")  # a score stands behind the last token
        prompts, lengths, tokens, mask = _arrays(spec, encoded, count, longer)
        shape = lengths.shape
        valid = np.tile(np.arange(count) < len(encoded), len(spec.order)).reshape(shape)
        arrays = (prompts, lengths, tokens, mask, numbers, np.zeros(shape, np.float32), valid)
        batches.append(PreferenceBatch(*map(jnp.asarray, arrays)))
    return tuple(batches)


def text_batches(team: Team, encoded: Sequence[Sequence[Encoded]], count: int) -> tuple[TextBatch, ...]:
    """Return the batch of up to `count` trajectories of a team of one."""
    spec = team.stacks[0]
    prompts, lengths, tokens, _ = _arrays(spec, encoded, count)
    kinds = np.zeros(tokens.shape, np.int32)
    kinds[0, : len(encoded), 0] = _pad_rows([row[0].kinds for row in encoded], tokens.shape[-1], 0)
    return (TextBatch(*map(jnp.asarray, (prompts, lengths, tokens, kinds))),)


@partial(jax.jit, static_argnames=("model", "algorithm", "mesh"), compiler_options=COMPILER_OPTIONS)
def _token_numbers(params: Any, batch: Data, *, model: ModelConfig, algorithm: Algorithm, mesh: Mesh | None) -> jax.Array:
    """Return `pair_numbers` of every token, [A, P, G, T]."""
    TRACES["scores"] += 1
    agents = batch.tokens.shape[0]

    def one_agent(params: Any, batch: Data) -> jax.Array:
        weights = decoder.cast(params, jnp.dtype(algorithm.compute_dtype))
        hidden = hidden_states(weights, model, batch.prompts, batch.prompt_lengths, batch.tokens, "full")
        return pair_numbers(params, weights, hidden, batch.tokens, algorithm)

    mode = algorithm.optimizer.per_agent if mesh is None or splits_only_agents(mesh, agents) else "vmap"
    return over_agents(per_agent(one_agent, mode), mesh, agents)(params, batch)


def token_numbers(params: Any, spec: StackSpec, batch: Data, algorithm: Algorithm) -> jax.Array:
    """Return log-probabilities or values [A, P, G, T] of a stack's batch, where its parameters lie."""
    mesh = mesh_of(params)
    batch = batch if mesh is None else jax.device_put(batch, batch_shardings(mesh, batch))
    return _token_numbers(params, batch, model=spec.config, algorithm=algorithm, mesh=mesh)


def text_logprobs(team: Team, params: Sequence[Any], batch: TextBatch, algorithm: Algorithm) -> np.ndarray:
    """Return the log-probabilities [1, P, 1, T] of a batch's tokens, at temperature 1."""
    return jax.device_get(token_numbers(params[0], team.stacks[0], batch, algorithm))


def pair_scores(team: Team, params: Sequence[Any], batches: Sequence[PreferenceBatch], algorithm: Algorithm) -> np.ndarray:
    """Return the numbers [P, N, 2] of a batch's completions (1 in place of 2 for single ones) less their reference:
    log-probabilities, or scores of a reward model."""
    scores = []
    for spec, weights, batch in zip(team.stacks, params, batches, strict=True):
        token_weights = pair_token_weights(batch.action_mask, algorithm)
        targets = PairTargets(token_weights, batch.reference, batch.team_margin, batch.valid)
        scores.append(jax.device_get(jax.vmap(completion_numbers)(token_numbers(weights, spec, batch, algorithm), targets)))
    return np.stack(to_agents(team, scores), 1)


def reference_scores(
    team: Team, params: Sequence[Any], encoded: Sequence[Sequence[Encoded]], count: int, algorithm: Algorithm
) -> np.ndarray | None:
    """Return numbers [M, N, 2] of pairs [M] under params, computed `count` at a time; None if the loss has no reference."""
    if algorithm.row.margin == "score" or algorithm.preference.reference_free:
        return None
    scores = []
    for i in range(0, len(encoded), count):
        part = encoded[i : i + count]
        scores.append(pair_scores(team, params, pair_batches(team, part, None, count, algorithm), algorithm)[: len(part)])
    return np.concatenate(scores)


def with_team_margin(
    team: Team, params: Sequence[Any], batches: Sequence[PreferenceBatch], algorithm: Algorithm
) -> tuple[PreferenceBatch, ...]:
    """Return batches with the margin of each pair's other agents (madpo): the sum over b != a of their own margins."""
    scores = pair_scores(team, params, batches, algorithm)
    margins = scores[..., 0] - scores[..., 1]  # [P, N]
    team_margins = margins.sum(1, keepdims=True) - margins
    stacks = zip(batches, to_stacks(team, team_margins.T), strict=True)
    return tuple(batch._replace(team_margin=jnp.asarray(x)) for batch, x in stacks)
