"""Play the episodes of one step, turn by turn.

A node is a state of an episode in which agents act. All nodes of a turn, of all episodes, are sampled in one batch, and their
joint actions are answered in one call of the environment. `play` holds no models: it requests the completions of each turn from
`sample`, such as `partial(sample_team, team, params)`; `rollout.together` answers requests of several runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import Episodes, Sampling
from jmarl.envs.base import Answer, Environment, special_tokens
from jmarl.envs.calls.copies import copies
from jmarl.envs.calls.user_code import calling
from jmarl.lazy import Table
from jmarl.randomness import Randomness
from jmarl.rl.returns import credit, discounted, joint_actions
from jmarl.rollout.chunks import join_answers, num_parts
from jmarl.rollout.spelling import Spellings, allowed, first_spellings, next_spellings
from jmarl.rollout.turns import Rollout, Turn, fault_counts, join_completions, padded_nodes, take_rows_of_nodes
from jmarl.sampling.generate import (
    Encoded,
    Past,
    Rows,
    Sampler,
    SampleRequest,
    Special,
    cut_long,
    on_host,
    pad,
    texts_of,
    tokenize,
    tokenize_follow_ups,
    tokens_of,
    too_long,
)
from jmarl.team import Team
from jmarl.types import Completions

Tokens = list[list[list[list[int]]]]  # [N][P][G] token ids that agents chose


class Game(NamedTuple):
    """The arguments that all turns of a rollout share."""

    team: Team
    env: Environment
    settings: Sampling
    episodes: Episodes
    randomness: Randomness
    rng: np.random.Generator  # of the environment


class Nodes(NamedTuple):
    """The nodes of a turn (see `turns`) before anything is sampled."""

    states: list[Any]  # [P] of the environment
    prompts: list[list[str | None]]  # [N][P]; None for agents that do not act
    rows: Rows  # [N][P] token ids of prompts with their history
    fresh: Rows  # the same; with `past` only what follows the cached tokens
    parents: np.ndarray  # [P] as in `Turn`
    items: np.ndarray  # [P] as in `Turn`
    ids: np.ndarray  # [P] uint32: tell nodes apart in the random keys, by their path through the tree
    max_nodes: int  # nodes if no episode had ended before
    spellings: Spellings  # [N][P] the special tokens in the episodes so far
    past: Past | None = None
    num_long: int = 0  # prompts that were too long and are cut, or joint actions that do not continue because of one


def play(
    sample: Sampler,
    team: Team,
    items: Sequence[dict],
    env: Environment,
    settings: Sampling,
    episodes: Episodes,
    group: int,
    randomness: Randomness,
) -> Rollout:
    """Play episodes on items: one turn after the other, until all episodes are done.

    Args:
        sample: returns the completions that a `SampleRequest` asks for, such as `partial(sample_team, team, params)`.
        team: the agents.
        items: what the episodes are about.
        env: writes the prompts and rewards joint actions.
        settings: how completions are sampled.
        episodes: turns, joint actions and history.
        group: completions that every agent writes for an item in the first turn.
        randomness: what all random numbers follow from.
    """
    game = Game(team, env, settings, episodes, randomness, randomness.environment_rng())
    with calling("turn 0"):
        nodes = first_nodes(game, items)
    turns: list[Turn] = []
    answers: list[Answer] = []
    prefilled, num_long = 0, nodes.num_long
    for t in range(episodes.num_turns):
        size = group if t == 0 or episodes.branching == "tree" or episodes.forks else 1
        prefilled += sum(len(row) for rows in nodes.fresh for row in rows)
        turn, answer, tokens = play_turn(sample, game, nodes, t, size)
        turns.append(without_caches(turn))
        answers.append(answer)
        continuing = continued_actions(answer, turn.rewards, episodes)
        if t + 1 == episodes.num_turns or not continuing.size:
            break
        with calling(f"turn {t + 1}"):
            nodes = next_nodes(game, nodes, turn, tokens, [answer.after[i] for i in continuing], continuing)
        num_long += nodes.num_long
        if not nodes.states:
            break
    notes = {"prefilled_tokens": float(prefilled)} | fault_counts(answers, num_long, episodes)
    return Rollout(episodes.num_turns, tuple(turns), *returns_of(game, turns, answers), notes=notes)


def first_nodes(game: Game, items: Sequence[dict]) -> Nodes:
    """Reset the environment and encode the first prompts."""
    team, settings, episodes = game.team, game.settings, game.episodes
    states, prompts = game.env.reset(copies(items), game.rng)
    check_number_of_agents(team, prompts)
    chat = episodes.chat_settings
    rows = tokenize(team, prompts, settings, chat, allow_long=episodes.long_prompts == "truncate_left")
    num_long = int(too_long(team, rows, settings).sum())
    rows = cut_long(team, rows, prompts, settings, chat) if num_long else rows
    numbers = np.arange(len(items))
    ids = (numbers + game.randomness.draw * len(items)).astype(np.uint32)
    spellings = first_spellings(team, prompts)
    return Nodes(states, prompts, rows, rows, numbers, numbers, ids, len(items), spellings, num_long=num_long)


def first_request(
    team: Team,
    items: Sequence[dict],
    env: Environment,
    settings: Sampling,
    episodes: Episodes,
    group: int,
    randomness: Randomness,
) -> SampleRequest:
    """Return what `play` requests first. Arguments as of `play`."""
    game = Game(team, env, settings, episodes, randomness, randomness.environment_rng())
    return requests_of_turn(game, first_nodes(game, items), 0, group)[1][0]


REPLAY = Table[Callable[..., Sequence[np.ndarray]]]({"counterfactual": "jmarl.rollout.counterfactual:returns"})  # by joint mode


def returns_of(
    game: Game, turns: Sequence[Turn], answers: Sequence[Answer]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the returns of joint actions, per turn [P, J, N], and those of completions, per turn [N, P, G]."""
    gamma, mode = game.episodes.gamma, game.episodes.cross_credit
    if game.episodes.forks:
        mode = "counterfactual"
        joint_returns = REPLAY[mode](turns, answers, game.env, gamma, game.rng)
    else:
        joint_returns = discounted([turn.rewards for turn in turns], [turn.parents for turn in turns], gamma)
    returns = [credit_completions(x, turn, mode) for turn, x in zip(turns, joint_returns, strict=True)]
    return tuple(joint_returns), tuple(returns)


def credit_completions(returns: np.ndarray, turn: Turn, mode: str = "mean") -> np.ndarray:
    """Return the returns [N, P, G] of completions from those of joint actions [P, J, N]; NaN for inactive agents. See
    `credit`."""
    return np.where(turn.acts[..., None], credit(returns, turn.joint, turn.group_size, mode), np.nan)


def acting_mask(prompts: Sequence[Sequence[str | None]]) -> np.ndarray:
    """Return which agents act at which nodes, bool [N, P]: those that have a prompt."""
    return np.array([[text is not None for text in row] for row in prompts])


def check_number_of_agents(team: Team, prompts: Sequence[Sequence[str | None]]) -> None:
    """Raise ValueError if the environment writes prompts for another number of agents than the team has."""
    if len(prompts) != team.num_agents:
        raise ValueError(
            f"the environment writes prompts for {len(prompts)} agents and the team has {team.num_agents}: use a team and an "
            "environment with the same number of agents"
        )


def without_caches(turn: Turn) -> Turn:
    """Return a turn without the caches that its completions hold."""
    return turn._replace(completions=tuple(done._replace(cache=None) for done in turn.completions))


def requests_of_turn(game: Game, nodes: Nodes, t: int, group: int) -> tuple[Encoded, list[SampleRequest]]:
    """Return the prompts of turn `t`, padded, and the requests for `group` completions of each, one of each part of them."""
    team, settings, episodes = game.team, game.settings, game.episodes
    padded, acts = padded_nodes(len(nodes.states), nodes.max_nodes), acting_mask(nodes.prompts)
    encoded = pad(team, [[row[p] for p in padded] for row in nodes.rows])
    fresh = pad(team, [[row[p] for p in padded] for row in nodes.fresh]) if nodes.past else encoded
    size = len(padded) // num_parts(len(padded), episodes)
    parts = [slice(start, start + size) for start in range(0, len(padded), size)]
    # Whether the next turn continues from the caches of this one. A repetition penalty needs the tokens themselves.
    keeps = episodes.history == "append" and t + 1 < episodes.num_turns and settings.repetition_penalty == 1
    return encoded, [
        SampleRequest(
            fresh if len(parts) == 1 else take_rows_of_nodes(team, fresh, part),
            settings,
            game.randomness,
            group,
            nodes.ids[padded[part]],
            turn=t,
            past=nodes.past and nodes.past.take(padded),
            keep_cache=keeps,
            acts=None if acts.all() else acts[:, padded[part]],
        )
        for part in parts
    ]


def play_turn(sample: Sampler, game: Game, nodes: Nodes, t: int, group: int) -> tuple[Turn, Answer, Tokens]:
    """Sample the nodes of turn `t`, `group` completions each, and call the environment.

    Returns the turn, whose completions hold the caches that the next one continues from, the answer, and the agents' tokens.
    With several parts (`sample_parts`) the environment answers one part of the nodes while the next is sampled.
    """
    team, episodes, count = game.team, game.episodes, len(nodes.states)
    encoded, requests = requests_of_turn(game, nodes, t, group)
    acts, joint = acting_mask(nodes.prompts), joint_actions(episodes.joint_mode, team.num_agents, group)
    size = len(requests[0].prompt_ids)
    sampled, tokens, answered, waiting = [], [], [], []

    def answer_parts() -> None:
        """Let the environment answer the sampled parts."""
        while waiting:
            part = waiting.pop(0)
            tokens.append(tokens_of(team, sampled[part.start // size], min(size, count - part.start)))
            with calling(f"turn {t}"):
                answered.append(step_environment(game, nodes.states[part], acts[:, part], tokens[-1], joint))

    for i, request in enumerate(requests):
        completions = sample(request._replace(meanwhile=answer_parts if waiting else None))
        sampled.append(tuple(map(on_host, completions)))
        if i * size < count:  # the nodes after `count` are padding
            waiting.append(slice(i * size, (i + 1) * size))
        if not episodes.overlap_rewards or request is requests[-1]:
            answer_parts()
    texts, answers = zip(*answered, strict=True)
    answer = join_answers(answers)
    turn = make_turn(nodes, joint, join_parts(texts), answer, encoded, join_completions(team, sampled))
    return turn, answer, join_parts(tokens)


def step_environment(
    game: Game, states: Sequence[Any], acts: np.ndarray, tokens: Tokens, joint: np.ndarray
) -> tuple[list[list[list[str]]], Answer]:
    """Return the texts [N][P][G] of tokens [N][P][G], and the answer of the environment to their joint actions [J, N]."""
    texts = texts_of(game.team, tokens, game.episodes.skip_special_tokens, special_tokens(game.env))
    for n, p in np.argwhere(~acts):
        texts[n][p] = [""] * len(texts[n][p])
    actions = [[group[g] for group in texts[n] for g in joint[:, n]] for n in range(game.team.num_agents)]
    return texts, game.env.step([state for state in states for _ in joint], actions, game.rng)


def join_parts(parts: Sequence[Sequence[list]]) -> list[list]:
    """Concatenate lists [N][P] along P."""
    return [sum(rows, []) for rows in zip(*parts, strict=True)]


def make_turn(
    nodes: Nodes,
    joint: np.ndarray,
    texts: list[list[list[str]]],
    answer: Answer,
    encoded: Encoded,
    completions: tuple[Completions, ...],
) -> Turn:
    """Return the record of a turn."""
    result = answer.result
    return Turn(
        prompts=[[text or "" for text in row] for row in nodes.prompts],
        acts=acting_mask(nodes.prompts),
        texts=texts,
        joint=joint,
        rewards=result.rewards.reshape(len(nodes.states), *joint.shape),
        parts=result.parts,
        invalid=int(result.invalid.sum()),
        fault=next(iter(result.faults.values()), ""),
        parents=nodes.parents,
        items=nodes.items,
        encoded=encoded,
        completions=completions,
        max_nodes=nodes.max_nodes,
        measures=result.measures,
    )


def continued_actions(answer: Answer, rewards: np.ndarray, episodes: Episodes) -> np.ndarray:
    """Return which joint actions, as indices into [P * J], have a next turn.

    A joint action continues if its reward is valid, the episode is not done, and the mean reward of its node is not above
    `early_termination_threshold` (in a chain its own reward). With counterfactual joint actions (`forks`) only the first one of
    a node continues; the others are alternatives to single completions of it.
    """
    totals = answer.result.total.reshape(rewards.shape[:2])
    valid = np.isfinite(totals)
    continuing = ~answer.done & valid.reshape(-1)
    if episodes.forks:
        continuing &= np.arange(continuing.size) % rewards.shape[1] == 0
    if episodes.early_termination_threshold is not None:
        # Subtracted before the sum: a mean of totals that equal the threshold may round to a number above it.
        above = np.where(valid, totals - episodes.early_termination_threshold, 0)
        above = above if episodes.branching == "chain" else np.broadcast_to(above.sum(1, keepdims=True), above.shape)
        continuing &= (above <= 0).reshape(-1)
    return np.flatnonzero(continuing)


def next_nodes(game: Game, nodes: Nodes, turn: Turn, tokens: Tokens, after: Sequence[Any], continuing: np.ndarray) -> Nodes:
    """Return the nodes that the joint actions `continuing` of a turn lead to. after: the states behind them.

    With long_prompts=drop, nodes with a prompt that is too long are left out. If a conversation is cut, the cached keys and
    values of its beginning are no longer right, and the next turn computes the whole conversation again.
    """
    team, settings, episodes = game.team, game.settings, game.episodes
    states, prompts = game.env.observe(after)
    if episodes.history == "append" and any(text is None for row in [*nodes.prompts, *prompts] for text in row):
        raise ValueError(
            "history='append' needs agents that act in every turn, and here they act in turns: set history to 'none'"
        )
    spellings = next_spellings(team, nodes.spellings, turn, continuing, prompts)
    rows, history = next_rows(game, nodes, turn, tokens, continuing, prompts, allowed(spellings))
    long, drop = too_long(team, rows, settings), episodes.long_prompts == "drop"
    num_long = int((long.any(0) if drop else long).sum())
    if num_long and drop:
        staying = np.flatnonzero(~long.any(0))
        states, continuing = [states[i] for i in staying], continuing[staying]
        prompts = [[row[i] for i in staying] for row in prompts]
        rows, history = ([[row[i] for i in staying] for row in x] for x in (rows, history))
        spellings = [[row[i] for i in staying] for row in spellings]
    elif num_long:
        rows = cut_long(team, rows, prompts, settings, episodes.chat_settings, whole=episodes.history == "none")
    node, joint = np.divmod(continuing, len(turn.joint))
    branches = 1 if episodes.forks else len(turn.joint)
    ids = (nodes.ids[node].astype(np.uint64) * branches + joint).astype(np.uint32)
    max_nodes = nodes.max_nodes * branches
    following = Nodes(states, prompts, rows, rows, continuing, nodes.items[node], ids, max_nodes, spellings, num_long=num_long)
    caches = tuple(done.cache for done in turn.completions)
    if episodes.history == "none" or caches[0] is None or (num_long and not drop) or not states:
        return following
    # The last token of a completion was sampled but never computed: it is the first of what follows the cache.
    fresh = [[row[len(old) - 1 :] for row, old in zip(*pair, strict=True)] for pair in zip(rows, history, strict=True)]
    return following._replace(fresh=fresh, past=Past(caches, cache_rows(team, turn, node, turn.joint[joint])))


def next_rows(
    game: Game,
    nodes: Nodes,
    turn: Turn,
    tokens: Tokens,
    continuing: np.ndarray,
    prompts: Sequence[Sequence[Any]],
    special: Special,
) -> tuple[Rows, Rows]:
    """Return the token ids [N][P] that the agents read after the joint actions `continuing`, and their part that is history.

    The history (prompt and completion so far) is empty with history=none. Rows that are too long raise an error with
    long_prompts=error, and are returned uncut otherwise.
    """
    team, settings, episodes = game.team, game.settings, game.episodes
    options = episodes.chat_settings, episodes.long_prompts != "error", special
    if episodes.history == "none":
        return tokenize(team, prompts, settings, *options), [[[]] * len(continuing)] * team.num_agents
    node, joint = np.divmod(continuing, len(turn.joint))
    history = [
        [nodes.rows[n][p] + tokens[n][p][g] for p, g in zip(node, turn.joint[joint, n], strict=True)]
        for n in range(team.num_agents)
    ]
    return tokenize_follow_ups(team, history, prompts, settings, *options), history


def cache_rows(team: Team, turn: Turn, node: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return per stack [A, R, P] where completion chosen[p, n] of node[p] is among the rows [R * P', G] of the stack."""
    rows = []
    for spec in team.stacks:
        members = np.array(spec.members)
        starts = np.arange(members.shape[1])[None, :, None] * turn.padded_size  # of each role
        rows.append((starts + node) * turn.group_size + chosen.T[members])
    return tuple(rows)
