"""Encode pairs and trajectories, make batches of them, and compute the scores of their completions.

Sampled pairs keep the tokens that were sampled. To other completions the token that ends them is appended; it is trained like
the others. Reference log-probabilities are computed once for a data set and kept in memory.
"""

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jmarl.algorithms import Algorithm
from jmarl.config import Chat, as_chat
from jmarl.envs.data import Pair, Prompt, Trajectory
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.models.hub.prompt_warnings import warn_of_prompts
from jmarl.models.hub.tokenize import (
    ChatPrompt,
    encode_completion,
    encode_follow_up,
    encode_prompts,
    message_end,
    naming,
)
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.rows import on_rows
from jmarl.models.sharding import DeviceMesh, model_on, on_devices, place_agents, state_specs
from jmarl.models.stack import per_agent, to_host
from jmarl.objectives.objective import Outputs
from jmarl.objectives.pairs import PairTargets, completion_numbers, pair_token_weights
from jmarl.objectives.pairs import token_numbers as numbers_of_tokens
from jmarl.sampling.generate import NO_LIMIT, bucket, pad
from jmarl.sampling.scoring import hidden_states
from jmarl.team import StackSpec, Team, to_agents, to_stacks
from jmarl.types import TRACES, Data, PreferenceBatch, TextBatch


class AgentTokens(NamedTuple):
    """One agent's part of a pair or trajectory, as token ids."""

    prompt: list[int]
    rows: tuple[list[int], ...]  # chosen and rejected; of a trajectory one row: everything after its first observation
    kinds: Sequence[int] = ()  # of a trajectory: the kind of each token of the row, see `TextBatch`

    @property
    def length(self) -> int:
        """Tokens of the prompt and its longest row."""
        return len(self.prompt) + max(map(len, self.rows))


class Examples(NamedTuple):
    """Pairs or trajectories as token ids."""

    tokens: Sequence[Sequence[AgentTokens]]  # [M][N]
    reference: np.ndarray | None = None  # [M, N, 2] log-probabilities of the completions under the reference; None: 0

    def take(self, numbers: Sequence[int]) -> "Examples":
        """Return the examples with these numbers."""
        reference = None if self.reference is None else self.reference[list(numbers)]
        return Examples([self.tokens[i] for i in numbers], reference)


# --- encoding ----------------------------------------------------------------------------------------------------------


def encode_pairs(
    team: Team, pairs: Sequence[Pair], chat: bool | Chat, special: Collection[str] | None = None
) -> list[list[AgentTokens]]:
    """Return the token ids [M][N] of pairs [M], of any length.

    chat: texts are messages of a user. Lists of messages always are a chat. special: the special tokens that texts may write
    without a chat; None: all that they spell, since a data set may bring its own template.
    """
    for i, pair in enumerate(pairs):
        if len(pair.prompts) != team.num_agents:
            raise ValueError(f"pair {i} is of {len(pair.prompts)} agents, the team has {team.num_agents}")
    agents = []
    for n, spec in enumerate(team.agent_specs):
        parts, own = [], as_chat(chat).of(n)
        warn_of_prompts(spec.tokenizer, [pair.prompts[n] for pair in pairs if pair.tokens is None], own, n)
        for i, pair in enumerate(pairs):
            if pair.tokens is None:
                texts, name = (pair.chosen[n], pair.rejected[n]), f"pair {i} of agent {n}"
                parts.append(encode_completions(spec, pair.prompts[n], texts, own, name, special))
            else:
                ids, *rows = map(list, pair.tokens[n])
                parts.append(AgentTokens(ids, tuple(rows)))
        agents.append(parts)
    return [list(parts) for parts in zip(*agents, strict=True)]


def encode_completions(
    spec: StackSpec,
    prompt: Prompt,
    texts: Sequence[str],
    chat: bool | Chat,
    name: str,
    special: Collection[str] | None = None,
) -> AgentTokens:
    """Encode a prompt and its completions [G], each followed by the token that ends it.

    name: what errors call them. special: see `encode_pairs`.
    """
    ids, chat = encode_prompt(spec, prompt, chat, name, special), chat_for(prompt, chat)
    end = end_token(spec, chat)
    return AgentTokens(ids, tuple(encode_completion(spec.tokenizer, text, end, chat, special, spec.stop) for text in texts))


def encode_trajectories(team: Team, trajectories: Sequence[Trajectory], chat: bool | Chat) -> list[list[AgentTokens]]:
    """Return the token ids [M][1] of trajectories [M]: the first observation is the prompt, everything after it one row."""
    if team.num_agents != 1:
        raise ValueError(f"trajectories are of one agent, the team has {team.num_agents}: train its agents one by one")
    spec, own = team.stacks[0], as_chat(chat).of(0)
    warn_of_prompts(spec.tokenizer, [x.observations[0] for x in trajectories if x.observations], own, 0)
    return [[encode_trajectory(spec, trajectory, own, f"trajectory {i}")] for i, trajectory in enumerate(trajectories)]


def encode_trajectory(spec: StackSpec, trajectory: Trajectory, chat: bool | Chat, name: str) -> AgentTokens:
    """Return the token ids of one trajectory. name: what errors call it.

    Raises ValueError unless each action follows an observation; one more observation may answer the last action.
    """
    counts = len(trajectory.observations), len(trajectory.actions)
    if counts[0] - counts[1] not in (0, 1):
        raise ValueError(
            f"{name} has {counts[0]} observations and {counts[1]} actions: give one observation before each action, and at "
            "most one after the last"
        )
    first, *later = trajectory.observations
    if first == "" and len(trajectory.actions) == 1 and not later:
        return whole_text(spec, trajectory.actions[0])
    prompt, chat = encode_prompt(spec, first, chat, name), chat_for(first, chat)
    end = end_token(spec, chat)
    row: list[int] = []
    kinds: list[int] = []
    for action, observation in zip(trajectory.actions, [*later, None], strict=False):
        written, answer = encode_completion(spec.tokenizer, action, end, chat, stop=spec.stop), []
        if observation is not None:
            with naming(f"an observation of {name}"):
                text = observation if chat else text_of(observation)
                answer = encode_follow_up(spec.tokenizer, text, written[-1:], chat, stop=spec.stop)
        row += [*written, *answer]
        kinds += [1] * len(written) + [2] * len(answer)
    return AgentTokens(prompt, (row,), kinds)


def whole_text(spec: StackSpec, text: str) -> AgentTokens:
    """Return the token ids of a text that is trained from its beginning, with the token that ends it: its own if it has one.

    The prompt is its first token, which nothing predicts: that of the beginning of a sequence if the tokenizer has one.
    """
    (ids,) = encode_prompts(spec.tokenizer, [text], NO_LIMIT, stop=())
    ids += [] if len(ids) > 1 and ids[-1] in spec.stop else [end_token(spec, chat=False)]
    return AgentTokens(ids[:1], (ids[1:],), [1] * (len(ids) - 1))


def encode_prompt(
    spec: StackSpec, prompt: Prompt, chat: bool | Chat, name: str, special: Collection[str] | None = None
) -> list[int]:
    """Return the token ids of a text, or of chat messages up to the beginning of the assistant's message."""
    allowed = None if special is None else [special]
    named = f"the prompt of {name}"
    return encode_prompts(spec.tokenizer, [prompt], NO_LIMIT, 0, chat, named=named, special=allowed, stop=spec.stop)[0]


def chat_for(prompt: Prompt, chat: bool | Chat) -> Chat:
    """Return the settings of what follows a prompt: chat messages always are a chat."""
    is_chat = isinstance(prompt, ChatPrompt) or not isinstance(prompt, str)
    return dataclasses.replace(as_chat(chat), on=True) if is_chat else as_chat(chat)


def end_token(spec: StackSpec, chat: bool | Chat) -> int:
    """Return the token that ends a completion; in a chat the one that ends the assistant's message."""
    end = message_end(spec.tokenizer, chat) if chat else None
    return spec.stop[0] if end is None or end not in spec.stop else end


def text_of(prompt: Prompt) -> str:
    """Return a prompt as a text: chat messages one per line, each after its role, as `ChatPrompt` writes them."""
    return prompt if isinstance(prompt, str) else str(ChatPrompt(prompt))


# --- batches -----------------------------------------------------------------------------------------------------------


def pair_batches(team: Team, examples: Examples, count: int, algorithm: Algorithm) -> tuple[PreferenceBatch, ...]:
    """Return each stack's batch of up to `count` pairs.

    Single completions in place of pairs can be scored, but not learned from."""
    longer = int(algorithm.compares_scores)  # a score is read behind the last token
    reference = np.zeros((team.num_agents, count, len(examples.tokens[0][0].rows)), np.float32)
    if examples.reference is not None:
        reference[:, : len(examples.tokens)] = examples.reference.swapaxes(0, 1)
    batches = []
    for arrays, stack_reference in zip(_arrays(team, examples, count, longer), to_stacks(team, reference), strict=True):
        shape = arrays[1].shape  # [A, R * P]
        valid = np.resize(np.arange(count) < len(examples.tokens), shape)
        columns = (*arrays, stack_reference, np.zeros(shape, np.float32), valid)
        batches.append(PreferenceBatch(*map(jnp.asarray, columns)))
    return tuple(batches)


def text_batches(team: Team, examples: Examples, count: int) -> tuple[TextBatch, ...]:
    """Return the batch of up to `count` trajectories of a team of one."""
    ((prompts, lengths, tokens, _),) = _arrays(team, examples, count)
    kinds = np.zeros(tokens.shape, np.int32)
    kinds[0, : len(examples.tokens), 0] = _pad_rows([part.kinds for (part,) in examples.tokens], tokens.shape[-1], 0)
    return (TextBatch(*map(jnp.asarray, (prompts, lengths, tokens, kinds))),)


def _arrays(team: Team, examples: Examples, count: int, longer: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Return for each stack prompts [A, R * P, S], lengths [A, R * P], tokens [A, R * P, G, T] and their mask, P = count.

    The first example is repeated as padding. longer: how many positions the longest row leaves free at least."""
    padded = [*examples.tokens, *[examples.tokens[0]] * (count - len(examples.tokens))]
    prompts = pad(team, [[example[n].prompt for example in padded] for n in range(team.num_agents)])
    arrays = []
    for spec, (ids, lengths) in zip(team.stacks, prompts, strict=True):
        rows = [row for n in spec.order for example in padded for row in example[n].rows]
        size = bucket(max(map(len, rows)) + longer)
        tokens = _pad_rows(rows, size, spec.stop[0]).reshape(*lengths.shape, -1, size)
        row_lengths = np.array([len(row) for row in rows]).reshape(*tokens.shape[:3], 1)
        arrays.append((ids, lengths, tokens, np.arange(size) < row_lengths))
    return arrays


def _pad_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> np.ndarray:
    padded = np.full((len(rows), width), fill, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


# --- scores ------------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("model", "values", "dtype", "mode", "mesh"), compiler_options=COMPILER_OPTIONS)
def _token_numbers(
    params: Any, batch: Data, *, model: ModelConfig, values: bool, dtype: str, mode: str, mesh: DeviceMesh | None
) -> jax.Array:
    """Return `objectives.pairs.token_numbers` of every token, [A, P, G, T]."""
    TRACES["scores"] += 1
    model = model_on(mesh, model)

    def one_agent(params: Any, *rows: jax.Array) -> jax.Array:
        weights = decoder.compute_weights(params, model, jnp.dtype(dtype))

        def numbers(prompts: jax.Array, lengths: jax.Array, tokens: jax.Array) -> jax.Array:
            hidden, _ = hidden_states(weights, model, prompts, lengths, tokens, "full")
            return numbers_of_tokens(Outputs(params, weights, hidden, tokens, model), values)

        return on_rows(numbers, model.placement.row_parts, *rows)

    rows, agents = (batch.prompts, batch.prompt_lengths, batch.tokens), P("agent")
    specs = state_specs(mesh, params), agents, agents, agents
    return on_devices(per_agent(one_agent, mode), mesh, specs, agents)(params, *rows)


def token_numbers(params: Any, spec: StackSpec, batch: Data, algorithm: Algorithm) -> jax.Array:
    """Return the log-probabilities (at temperature 1) or values [A, P, G, T] of a stack's batch, on the devices of params."""
    batch = batch if spec.mesh is None else place_agents(batch, spec.mesh)
    values, mode = algorithm.compares_scores, algorithm.optimizer.per_agent
    dtype = algorithm.compute_dtype  # only these: a program does not depend on the learning rate
    return _token_numbers(params, batch, model=spec.config, values=values, dtype=dtype, mode=mode, mesh=spec.mesh)


def pair_scores(team: Team, params: Sequence[Any], batches: Sequence[PreferenceBatch], algorithm: Algorithm) -> np.ndarray:
    """Return the scores [P, N, 2] of a batch's completions less the reference's; [P, N, 1] for single completions.

    Scores are log-probabilities, or what the value head of a reward model says."""
    scores = []
    for spec, weights, batch in zip(team.stacks, params, batches, strict=True):
        token_weights = pair_token_weights(batch.action_mask, algorithm)
        targets = PairTargets(token_weights, batch.reference, batch.team_margin, batch.valid)
        scores.append(to_host(jax.vmap(completion_numbers)(token_numbers(weights, spec, batch, algorithm), targets)))
    return np.stack(to_agents(team, scores), 1)


def example_scores(team: Team, params: Sequence[Any], examples: Examples, size: int, algorithm: Algorithm) -> np.ndarray:
    """Return `pair_scores` [M, N, 2] of any number of pairs, computed in batches of `size`."""
    scores = []
    for i in range(0, len(examples.tokens), size):
        part = examples.take(range(i, min(i + size, len(examples.tokens))))
        batches = pair_batches(team, part, size, algorithm)
        scores.append(pair_scores(team, params, batches, algorithm)[: len(part.tokens)])
    return np.concatenate(scores)


def with_reference(
    team: Team, params: Sequence[Any], tokens: Sequence[Sequence[AgentTokens]], size: int, algorithm: Algorithm
) -> Examples:
    """Return examples, pairs with their log-probabilities under params, the reference, if the loss has one."""
    examples = Examples(tokens)
    if not tokens or not algorithm.has_reference:
        return examples
    return Examples(tokens, example_scores(team, params, examples, size, algorithm))


def with_team_margin(
    team: Team, params: Sequence[Any], batches: Sequence[PreferenceBatch], algorithm: Algorithm
) -> tuple[PreferenceBatch, ...]:
    """Return batches with the margin of each pair's other agents (madpo): the sum over b != a of their own margins."""
    scores = pair_scores(team, params, batches, algorithm)
    margins = scores[..., 0] - scores[..., 1]  # [P, N]
    team_margins = margins.sum(1, keepdims=True) - margins
    stacks = zip(batches, to_stacks(team, team_margins.T), strict=True)
    return tuple(batch._replace(team_margin=jnp.asarray(x)) for batch, x in stacks)
