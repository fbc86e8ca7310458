"""Sample completions: tokenize the prompts of every agent, and sample all agents of a stack in one program.

Host code meets device code here: tokenizers on one side, `sampler.sample` on the other. The prompt of a later turn may be the
conversation so far followed by new text (`Past`). Then only the new tokens are computed, and the keys and values of the
conversation are reused.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Lowered
from jaxtyping import Bool, Int, Integer

from jmarl.config import Chat, Episodes, Sampling, as_chat
from jmarl.memory import ProgramCall, explain_memory
from jmarl.models.hub.cut import cut_prompt
from jmarl.models.hub.prompt_warnings import warn_of_prompts
from jmarl.models.hub.tokenize import decode, encode_prompts, follow_ups
from jmarl.models.stack import to_host
from jmarl.randomness import Randomness
from jmarl.sampling.sampler import RowIds
from jmarl.sampling.stack_program import Acting, Prompts, SampleProgram, sample_stack
from jmarl.sampling.stop_texts import vocabulary
from jmarl.team import StackSpec, Team, to_agents
from jmarl.types import Completions, TeamState

NO_LIMIT = 2**30  # in place of a context: rows of any length
Rows = list[list[list[int]]]  # token ids [N][P]
Special = Sequence[Sequence[Collection[str]]]  # the special tokens [N][P] that a prompt may write
Encoded = tuple[Prompts, ...]  # of each stack


def bucket(n: int, smallest: int = 16) -> int:
    """Return the smallest power of two that is at least `n` and `smallest`. Few different shapes mean few compilations."""
    return max(smallest, 1 << (n - 1).bit_length())


class Past(NamedTuple):
    """The caches of the previous turn, and the row of them that each prompt follows."""

    caches: tuple[Any, ...]  # of each stack, on the device
    rows: tuple[Int[np.ndarray, "agent role prompt"], ...]  # of each stack: indices into the rows [R * P, G] of that turn

    def take(self, nodes: np.ndarray) -> "Past":
        """Return the past of some nodes."""
        return self._replace(rows=tuple(rows[..., nodes] for rows in self.rows))


class SampleRequest(NamedTuple):
    """What to sample in one turn: the arguments of `sample_team` except the models."""

    encoded: Encoded
    settings: Sampling
    randomness: Randomness
    group: int
    prompt_ids: Integer[np.ndarray, "... prompt"]  # [P], or [N, P], that distinguish the prompts in the random keys
    turn: int = 0
    past: Past | None = None
    keep_cache: bool = False  # whether the next turn continues from the caches of this one
    acts: Bool[np.ndarray, "team_agent prompt"] | None = None  # who acts where; others are ignored. None: all do
    meanwhile: Callable[[], None] | None = None  # work of the host while the device samples, called once
    alike: Bool[np.ndarray, " team_agent"] | None = None  # whose completions of a prompt have one key; None: nobody's
    fewer: bool = False  # sample only rows that act, in quarters of all: each number of them is a program of its own


Sampler = Callable[[SampleRequest], tuple[Completions, ...]]  # returns the completions of each stack


def lower_samplers(team: Team, params: Sequence[Any], request: SampleRequest) -> tuple[Lowered, ...]:
    """Return the programs of `sample_team`, without running them."""
    stacks = enumerate(zip(team.stacks, params, request.encoded, strict=True))
    return tuple(_call_stack(i, *stack, request, sample_stack.lower) for i, stack in stacks)


def sample_team(team: Team, params: Sequence[Any], request: SampleRequest) -> tuple[Completions, ...]:
    """Return the completions of each stack.

    With `meanwhile` the programs run in a thread, and the work of the host in the caller's: what the user writes, such as
    rewards, may need the main thread, and a call of a GPU's program returns only when its last token is sampled.

    Args:
        team: the team.
        params: parameters [A, ...] of each stack.
        request: what to sample.
    """
    stacks = [*enumerate(zip(team.stacks, params, request.encoded, strict=True))]
    with explain_memory(lambda: [sampling_call(team, params, request, i) for i, _ in stacks]):
        if request.meanwhile is None:
            return jax.block_until_ready(tuple(_call_stack(i, *stack, request, sample_stack) for i, stack in stacks))
        return _sample_meanwhile([_call_stack(i, *stack, request, compiled_call) for i, stack in stacks], request.meanwhile)


class StepSampler:
    """Samples the completions of each step of a run. `refill.EarlyRows` also begins those of the next step, and
    `league.LeagueSampler` also samples past weights; both keep something in `TeamState.pending`."""

    def __init__(self, team: Team):
        self.team = team

    def take(self, state: TeamState) -> TeamState:
        """Take the rows of an initial or restored state that have begun, and return the state without them."""
        return state

    def put_back(self, state: TeamState) -> TeamState:
        """Return a state with the rows that have begun, for a checkpoint."""
        return state

    def begin(self, step: int, params: Sequence[Any]) -> None:
        """Begin a step. params: [A, ...] of each stack, which it samples with."""
        del step, params

    def at(self, step: int) -> Sequence[Any]:
        """Return the rows of a step that have begun, and free those of earlier ones, whose updates are made."""
        del step
        return ()

    def sample(
        self, params: Sequence[Any], step: int, following: SampleRequest | None, request: SampleRequest
    ) -> tuple[Completions, ...]:
        """Return the completions of a request in a step, and perhaps begin rows of the next step.

        Args:
            params: parameters [A, ...] of each stack.
            step: number of the step.
            following: the request of the next step's first turn; None: none of its rows begins early.
            request: what the step's episodes request.
        """
        del step, following
        return sample_team(self.team, params, request)

    def notes(self, step: int, completions: Sequence[Completions]) -> dict[str, float]:
        """Return columns of a step for the log. completions: of each stack."""
        del step, completions
        return {}


def _sample_meanwhile(programs: Sequence[Callable[[], Completions]], meanwhile: Callable[[], None]) -> tuple[Completions, ...]:
    """Run programs in a thread and `meanwhile` in the caller's; return the completions."""
    with ThreadPoolExecutor(1, "sampling") as thread:
        completions = thread.submit(lambda: jax.block_until_ready(tuple(program() for program in programs)))
        meanwhile()
        return completions.result()


def sampling_call(team: Team, params: Sequence[Any], request: SampleRequest, i: int) -> ProgramCall:
    """Describe the sampling of stack i, to explain a lack of memory."""
    (a, count, width), new_tokens = request.encoded[i][0].shape, request.settings.max_new_tokens
    lowered = _call_stack(i, team.stacks[i], params[i], request.encoded[i], request, sample_stack.lower)
    return ProgramCall("sampling", a, count, request.group, width, new_tokens, 1, lowered)


def compiled_call(*arguments: Any, program: SampleProgram) -> Callable[[], Completions]:
    """Return a function that runs `sample_stack`. It is compiled here, because the settings of jax belong to a thread."""
    return partial(sample_stack.lower(*arguments, program=program).compile(), *arguments)


def _call_stack(
    i: int, spec: StackSpec, weights: Any, prompts: Prompts, request: SampleRequest, call: Callable[..., Any]
) -> Any:
    """Sample stack `i` of a team. Arguments stay on the host: the call moves them to the device of the weights, once."""
    (program, row_ids), past = stack_program(i, spec, weights, request), request.past
    cache = None if past is None else (past.caches[i], past.rows[i].reshape(len(spec.members), -1))
    acting = None if request.acts is None or request.keep_cache else choose_acting(spec, request.acts, request.fewer)
    arguments = (weights, prompts, row_ids, spec.stops, cache, acting, vocabulary(spec, request.settings.stop_texts))
    return call(*arguments, program=program)


def stack_program(i: int, spec: StackSpec, weights: Any, request: SampleRequest) -> tuple[SampleProgram, RowIds]:
    """Return the static settings of the program that samples stack `i`, and what its random keys follow from."""
    agents, (seed, step, purpose, *_) = np.array(spec.members), request.randomness
    seed = np.repeat(seed, agents.size // np.size(seed)) if np.ndim(seed) else seed
    ids = request.prompt_ids if request.prompt_ids.ndim == 1 else request.prompt_ids[spec.order]
    alike = None if request.alike is None else request.alike[spec.order]
    row_ids = RowIds(seed, step, purpose, i, agents, ids, request.turn, alike)
    return SampleProgram.of(spec, request.settings, request.group, weights, request.keep_cache), row_ids


def on_host(completions: Completions) -> Completions:
    """Copy completions to the host, where slicing and joining them needs no compiled program. Caches stay on the device."""
    return to_host(completions._replace(cache=None))._replace(cache=completions.cache)


def choose_acting(spec: StackSpec, acts: Bool[np.ndarray, "team_agent prompt"], fewer: bool = False) -> Acting | None:
    """Return the parameter sets and roles of a stack that include all acting agents, and with `fewer` their rows; None: all are
    sampled.

    If parameter sets are spread over devices, all sets are included: the devices of the others would be idle anyway.
    """
    active = acts[np.array(spec.members)]  # [A, R, P]
    sets, roles = np.flatnonzero(active.any((1, 2))), np.flatnonzero(active.any((0, 2)))
    if len(roles) and spec.mesh is not None and spec.mesh.shape["agent"] > 1:
        sets = np.arange(len(active))
    rows = active[sets][:, roles].reshape(len(sets), -1) if len(roles) else active.reshape(len(active), -1)
    chosen = fewer_rows(rows) if fewer else None
    return None if chosen is None and (len(sets), len(roles)) == active.shape[:2] else Acting(sets, roles, chosen)


def fewer_rows(active: Bool[np.ndarray, "set row"]) -> Int[np.ndarray, "set size"] | None:
    """Return which rows of each set to sample, as many as the busiest needs in quarters of all, since each number is a program
    of its own; those of other sets are repeated. None: all rows."""
    counts, unit = active.sum(1), -(-active.shape[1] // 4)
    size = -(-max(1, *counts.tolist()) // unit) * unit
    if size >= active.shape[1]:
        return None
    first = np.argsort(~active, 1, kind="stable")
    return np.take_along_axis(first, np.arange(size) % np.maximum(counts, 1)[:, None], 1)


def pad(team: Team, rows: Rows) -> Encoded:
    """Return the prompts of each stack, padded on the right to a bucket, and their lengths."""
    encoded = []
    for spec in team.stacks:
        flat = [row for agent in spec.order for row in rows[agent]]
        width = min(bucket(max(map(len, flat))), spec.config.context)
        ids = np.full((len(flat), width), spec.stop[0], np.int32)
        for i, row in enumerate(flat):
            ids[i, : len(row)] = row
        a = len(spec.members)
        encoded.append((ids.reshape(a, -1, width), np.array([len(row) for row in flat], np.int32).reshape(a, -1)))
    return tuple(encoded)


def tokenize(
    team: Team,
    prompts: Sequence[Sequence[str | None]],
    settings: Sampling,
    chat: bool | Chat,
    allow_long: bool = False,
    special: Special | None = None,
) -> Rows:
    """Return the token ids of prompts.

    Args:
        team: the team.
        prompts: texts [N][P]. None: the agent does not act at this node. Its ids are then one stop id, because agents that act
            somewhere may be sampled at all nodes; the completion is ignored.
        settings: the sampling settings.
        chat: whether to apply the chat template, and with what.
        allow_long: return prompts that leave no room for a completion as they are. Otherwise they raise a ValueError.
        special: the special tokens that prompts without a template may write; None: all that they spell.
    """
    rows = []
    for i, spec in enumerate(team.agent_specs):
        limits, own = (_context(spec, allow_long), settings.max_new_tokens), as_chat(chat).of(i)
        acting = [p for p, text in enumerate(prompts[i]) if text is not None]
        texts, allowed = [prompts[i][p] for p in acting], None if special is None else [special[i][p] for p in acting]
        warn_of_prompts(spec.tokenizer, texts, own, i)
        name = f"prompt {{}} of agent {i}"
        options = (own, None, name, allowed, spec.stop)
        encoded = iter(encode_prompts(spec.tokenizer, texts, *limits, *options))
        rows.append([[spec.stop[0]] if text is None else next(encoded) for text in prompts[i]])
    return rows


def tokenize_follow_ups(
    team: Team,
    history: Rows,
    prompts: Sequence[Sequence[str]],
    settings: Sampling,
    chat: bool | Chat,
    allow_long: bool = False,
    special: Special | None = None,
) -> Rows:
    """Return the token ids [N][P] of conversations that continue: the history (prompts and completions so far) and new prompts.

    Arguments as for `tokenize`.
    """
    rows = []
    for i, spec in enumerate(team.agent_specs):
        limits, own = (_context(spec, allow_long), settings.max_new_tokens), as_chat(chat).of(i)
        name, allowed = f"prompt {{}} of a later turn of agent {i}", None if special is None else special[i]
        rows.append(
            follow_ups(spec.tokenizer, history[i], prompts[i], *limits, own, named=name, special=allowed, stop=spec.stop)
        )
    return rows


def _context(spec: StackSpec, allow_long: bool) -> int:
    """Return the context length of a stack, or no limit for prompts that are cut or left out later."""
    return NO_LIMIT if allow_long else spec.config.context


def cut_long(
    team: Team, rows: Rows, prompts: Sequence[Sequence[Any]], settings: Sampling, chat: bool | Chat, whole: bool = True
) -> Rows:
    """Cut rows [N][P] that leave no room for a completion on the left, see `cut_prompt`.

    whole: each row is its prompt [N][P]; False: it is a conversation that ends with it.
    """
    shortened = []
    for i, (spec, *agent) in enumerate(zip(team.agent_specs, rows, prompts, strict=True)):
        room, own = spec.config.context - settings.max_new_tokens, as_chat(chat).of(i)
        cut = partial(cut_prompt, spec.tokenizer, room=room, chat=own, stop=spec.stop, whole=whole)
        shortened.append([cut(row, prompt) for row, prompt in zip(*agent, strict=True)])
    return shortened


def too_long(team: Team, rows: Rows, settings: Sampling) -> Bool[np.ndarray, "agent prompt"]:
    """Return which rows leave no room for a completion."""
    rooms = [spec.config.context - settings.max_new_tokens for spec in team.agent_specs]
    return np.array([[len(row) > room for row in agent_rows] for agent_rows, room in zip(rows, rooms, strict=True)])


def tokenize_first_turn(
    team: Team,
    prompts: Sequence[Sequence[str | None]],
    settings: Sampling,
    episodes: Episodes,
    special: Special | None = None,
) -> Rows:
    """Return the token ids [N][P] of the prompts of a first turn. Long ones are cut if `long_prompts` is truncate_left.

    special: as for `tokenize`.
    """
    cut = episodes.long_prompts == "truncate_left"
    rows = tokenize(team, prompts, settings, episodes.chat_settings, allow_long=cut, special=special)
    return cut_long(team, rows, prompts, settings, episodes.chat_settings) if cut else rows


def tokens_of(team: Team, completions: Sequence[Completions], count: int) -> list[Rows]:
    """Return the token ids [N][P][G] that each agent chose after the first `count` prompts. Later prompts are padding."""
    agents = to_agents(team, [(np.asarray(x.tokens), np.asarray(x.action_mask)) for x in completions])
    groups = [zip(ids[:count], masks[:count], strict=True) for ids, masks in agents]
    return [[[row[mask].tolist() for row, mask in zip(*group, strict=True)] for group in prompts] for prompts in groups]


def texts_of(
    team: Team, tokens: Sequence[Sequence[Sequence[Sequence[int]]]], skip: bool = True, shown: Collection[str] = ()
) -> list[list[list[str]]]:
    """Decode token ids [N][P][G] with the tokenizer of each agent. skip, shown: which special tokens, see `decode`."""
    texts = []
    for spec, prompts in zip(team.agent_specs, tokens, strict=True):
        decoded = iter(decode(spec.tokenizer, [row for group in prompts for row in group], skip, shown))  # all in one call
        texts.append([[next(decoded) for _ in group] for group in prompts])
    return texts
