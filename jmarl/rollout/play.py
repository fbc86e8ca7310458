"""Play the episodes of one step, turn by turn, and make of them the batches that the stacks learn from.

The nodes of a turn are what the agents read together: at first the items, later the children of joint actions. All nodes of a
turn, of all episodes, are sampled in one batch, and their joint actions answered in one call of the environment.

`play` holds no models: it requests the completions of each turn from the function `sample`. For one run that is
`partial(sample_team, team, params)`; `training.lock_step` answers the requests of several runs together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import Episodes, Sampling
from jmarl.envs.base import Answer, Environment
from jmarl.learning.batches import (
    concatenate_prompts,
    make_batch,
    one_per_prompt,
    round_up_to_quarter,
    select_in_few_sizes,
    take_rows,
)
from jmarl.randomness import TRAIN
from jmarl.rl.returns import credit, discounted, joint_actions
from jmarl.rollout import counterfactual as replay
from jmarl.rollout.chunks import InTurn, cut_prompts, joined_answers, joined_completions, parts_of
from jmarl.sampling.generate import (
    Encoded,
    Past,
    Rows,
    Sampler,
    SampleRequest,
    bucket,
    cut_long,
    follow,
    on_host,
    pad,
    texts_of,
    tokenize,
    tokens_of,
    too_long,
)
from jmarl.team import StackSpec, Team
from jmarl.types import Batch, Completions


class Turn(NamedTuple):
    """One turn as the host sees it. N agents, P nodes, G completions, J joint actions a node."""

    prompts: list[list[str]]  # [N][P] what the agents read now, also where `encoded` is cut; empty of those that do not act
    acts: np.ndarray  # [N, P] bool: these agents act in this turn; the others' completions are nobody's
    texts: list[list[list[str]]]  # [N][P][G]; empty of agents that do not act
    joint: np.ndarray  # [J, N] which completion g of each agent; every node has J of them
    rewards: np.ndarray  # [P, J, N] after processing; NaN where invalid
    parts: dict[str, np.ndarray]  # reward function -> [P * J] raw values
    invalid: int  # joint actions whose reward was invalid
    fault: str  # what was wrong with the first of them, or with a value that was replaced; empty: nothing
    parents: np.ndarray  # [P] the joint action of the turn before that a node is the child of, in [P * J]; at first 0 to P - 1
    items: np.ndarray  # [P] the item of each node's episode
    encoded: Encoded  # per stack: prompts with their history [A, roles * P', S] and lengths; P' - P nodes are padding
    completions: tuple[Completions, ...]  # per stack, of P' nodes; on the host
    most: int  # nodes if none of the turns before had ended


class Rollout(NamedTuple):
    """The episodes of one step."""

    num_turns: int  # that there could have been
    turns: tuple[Turn, ...]
    joint_returns: tuple[np.ndarray, ...]  # of each turn [P, J, N]: what its joint actions led to; NaN where invalid
    returns: tuple[np.ndarray, ...]  # of each turn [N, P, G] credited to each completion; NaN where invalid, or
    # where the agent does not act
    expected: tuple[np.ndarray, ...] | None = None  # of each turn [N, P, G]: what the greedy completions got, where asked for
    notes: Mapping[str, float] = {}  # more for the log


class Nodes(NamedTuple):
    """What a turn starts from."""

    states: list[Any]  # [P] of the environment
    prompts: list[list[str | None]]  # [N][P]; None of agents that do not act
    rows: Rows  # [N][P] token ids of prompts with their history
    fresh: Rows  # the same, or where `past` has the keys and values of their beginning, only what comes after it
    parents: np.ndarray  # [P]
    items: np.ndarray  # [P]
    ids: np.ndarray  # [P] uint32: tell nodes apart in the random keys, by their way through the tree
    most: int  # nodes if none of the turns before had ended
    past: Past | None = None
    long: int = 0  # prompts that were too long and are cut, or joint actions that are not played on for that


def play(
    sample: Sampler,
    team: Team,
    items: Sequence[dict],
    env: Environment,
    settings: Sampling,
    episodes: Episodes,
    *,
    seed: int,
    step: int,
    group: int,
    purpose: int = TRAIN,
    draw: int = 0,
    rng: np.random.Generator | None = None,
) -> Rollout:
    """Play episodes on the items: in the first turn every agent writes `group` completions for each.

    sample: returns the completions that a `SampleRequest` asks for. draw: tells apart what is played on several lists of items
    in one step; rng: the environment's, where it is not to follow from these numbers.
    """
    rng = rng or np.random.default_rng((seed, step, purpose, draw))  # of draw 0 the same as without it
    states, prompts = env.reset(items, rng)
    check_size(team, prompts)
    first = np.arange(len(items))
    rows = tokenize(team, prompts, settings, episodes.chat, whole=episodes.long_prompts == "truncate_left")
    long = int(too_long(team, rows, settings).sum())
    rows = cut_long(team, rows, settings, episodes.chat) if long else rows
    ids = (first + draw * len(items)).astype(np.uint32)
    nodes = Nodes(states, prompts, rows, rows, first, first, ids, len(items), long=long)
    turns: list[Turn] = []
    answers: list[Answer] = []
    computed = 0
    for t in range(episodes.num_turns):
        how: dict[str, Any] = dict(seed=seed, step=step, turn=t, purpose=purpose, keep=keeps(episodes, settings, t))
        size = group if t == 0 or episodes.branching == "tree" or episodes.forks else 1
        computed += sum(len(row) for of_agent in nodes.fresh for row in of_agent)
        turn, answer, tokens = play_turn(sample, team, env, nodes, settings, episodes, size, rng, **how)
        turns.append(turn._replace(completions=tuple(done._replace(kept=None) for done in turn.completions)))
        answers.append(answer)
        going = played_on(answer, turn.rewards, episodes)
        if t + 1 == episodes.num_turns or not going.size:
            break
        nodes = children(team, env, nodes, turn, answer, going, tokens, settings, episodes)
        long += nodes.long
        if not nodes.states:
            break
    if episodes.forks:
        said = [replay.Said(answer, t.rewards, t.texts, t.parents) for answer, t in zip(answers, turns, strict=True)]
        joint_returns, how_credited = replay.returns(said, env, episodes.gamma, rng), "counterfactual"
    else:
        joint_returns = discounted([turn.rewards for turn in turns], [turn.parents for turn in turns], episodes.gamma)
        how_credited = episodes.cross_credit
    returns = [credited(of, turn, how_credited) for turn, of in zip(turns, joint_returns, strict=True)]
    notes = {"prefilled_tokens": float(computed)} | counts_of_faults(answers, long, episodes)
    return Rollout(episodes.num_turns, tuple(turns), tuple(joint_returns), tuple(returns), notes=notes)


def counts_of_faults(answers: Sequence[Answer], long: int, episodes: Episodes) -> dict[str, float]:
    """For the log: joint actions on which a reward raised or came late, where there are any; and where long prompts are no
    error, how many there were, of which the first is told."""
    counts = {}
    if raised := sum(answer.result.num_raised for answer in answers):
        counts["reward/raised"] = float(raised)
    if episodes.long_prompts != "error":
        counts["long_prompts"] = float(long)
    if long:
        what = "cut on the left" if episodes.long_prompts == "truncate_left" else "not read: their episodes end there"
        warnings.warn(
            f"prompts longer than the context are {what} (long_prompts={episodes.long_prompts!r}; in the log `long_prompts` "
            "counts them, this is told once)",
            stacklevel=2,
        )
    return counts


def credited(returns: np.ndarray, turn: Turn, how: str = "mean") -> np.ndarray:
    """Returns [N, P, G] of a turn's completions from those of its joint actions [P, J, N]; NaN of agents that do not act."""
    return np.where(turn.acts[..., None], credit(returns, turn.joint, len(turn.texts[0][0]), how), np.nan)


def acting(prompts: Sequence[Sequence[str | None]]) -> np.ndarray:
    """Which agents are to act at which nodes, bool [N, P], from what they read."""
    return np.array([[text is not None for text in of_agent] for of_agent in prompts])


def writing(acts: np.ndarray) -> np.ndarray | None:
    """Which agents [N] have anything to write; None: all have."""
    of_agent = np.any(acts, 1)
    return None if np.all(of_agent) else of_agent


def check_size(team: Team, prompts: Sequence[Sequence[str | None]]) -> None:
    """Refuse an environment of another number of agents."""
    if len(prompts) != team.num_agents:
        given = f"the environment writes prompts for {len(prompts)} agents and the team has {team.num_agents}"
        raise ValueError(f"{given}: make a team, or an environment, of as many as the other")


def keeps(episodes: Episodes, settings: Sampling, turn: int) -> bool:
    """Whether the next turn goes on from this one's keys and values; a repetition penalty needs the tokens themselves."""
    return episodes.history == "append" and turn + 1 < episodes.num_turns and settings.repetition_penalty == 1


def play_turn(sample: Sampler, team, env, nodes: Nodes, settings, episodes: Episodes, group: int, rng, **how) -> tuple:
    """Sample the nodes of a turn and ask the environment: the turn, its answer and the token ids [N][P][G] that were chosen.
    The environment answers one part of the nodes while the next is sampled, in a thread of its own, part after part."""
    count = len(nodes.states)
    padded = np.concatenate([np.arange(count), np.zeros(min(bucket(count, 1), nodes.most) - count, int)])
    encoded = pad(team, [[row[p] for p in padded] for row in nodes.rows])
    fresh = pad(team, [[row[p] for p in padded] for row in nodes.fresh]) if nodes.past else encoded
    past = nodes.past and nodes.past.padded(padded)
    joint = joint_actions(episodes.joint_mode, team.num_agents, group)
    parts = parts_of(len(padded), episodes)
    size = len(padded) // parts

    acts = acting(nodes.prompts)

    def answer(first: int, tokens: list) -> tuple:
        texts = texts_of(team, tokens)
        for n, p in np.argwhere(~acts[:, first : first + size]):
            texts[n][p] = [""] * group
        actions = [[texts[n][p][g] for p in range(len(texts[n])) for g in joint[:, n]] for n in range(team.num_agents)]
        states = [state for state in nodes.states[first : first + size] for _ in joint]
        return texts, env.step(states, actions, rng)

    done, tokens = [], []
    with InTurn(beside=parts > 1 and episodes.overlap_rewards) as rewarding:
        for first in range(0, len(padded), size):
            part, ids = slice(first, first + size), nodes.ids[padded[first : first + size]]
            of_part = fresh if parts == 1 else cut_prompts(team, fresh, part)
            request = SampleRequest(of_part, settings, group=group, prompt_ids=ids, past=past, acts=writing(acts), **how)
            done.append(tuple(map(on_host, sample(request))))
            if first < count:  # what comes behind is padding
                tokens.append(tokens_of(team, done[-1], min(size, count - first)))
                rewarding.call(answer, first, tokens[-1])
        texts, answers = zip(*rewarding.results(), strict=True)
    answer_, chosen = joined_answers(answers), [sum(of_agent, []) for of_agent in zip(*tokens, strict=True)]
    result = answer_.result
    rewards = result.rewards.reshape(count, len(joint), team.num_agents)
    fault = next(iter(result.faults.values()), "")
    about = (result.parts, int(result.invalid.sum()), fault, nodes.parents, nodes.items)
    said = [sum(of_agent, []) for of_agent in zip(*texts, strict=True)]
    prompts = [[text or "" for text in of_agent] for of_agent in nodes.prompts]
    turn = Turn(prompts, acts, said, joint, rewards, *about, encoded, joined_completions(team, done), nodes.most)
    return turn, answer_, chosen


def played_on(answer: Answer, rewards: np.ndarray, episodes: Episodes) -> np.ndarray:
    """Which joint actions, of [P * J], have a next turn: those with a valid reward that do not end their episode, and whose
    node (in a chain: which themselves) is not above the threshold."""
    of_joint = answer.result.total.reshape(rewards.shape[:2])
    valid = np.isfinite(of_joint)
    going = ~answer.done & valid.reshape(-1)
    if episodes.forks:
        going &= np.arange(going.size) % rewards.shape[1] == 0  # alternatives are only asked about
    if episodes.early_termination_threshold is not None:
        above = np.where(valid, of_joint - episodes.early_termination_threshold, 0)  # so that equal ones are 0, not rounded
        above = above if episodes.branching == "chain" else np.broadcast_to(above.sum(1, keepdims=True), above.shape)
        going &= (above <= 0).reshape(-1)
    return np.flatnonzero(going)


def children(
    team: Team,
    env: Environment,
    nodes: Nodes,
    turn: Turn,
    answer: Answer,
    going: np.ndarray,
    tokens: list,
    settings: Sampling,
    episodes: Episodes,
) -> Nodes:
    """The nodes that the joint actions `going` lead to; none of those whose prompts are too long, where `long_prompts` is drop.
    Where it cuts a conversation, keys and values of its beginning are no longer right: the turn is computed anew."""
    states, prompts = env.observe([answer.after[i] for i in going])
    if episodes.history == "append" and any(text is None for of_agent in [*nodes.prompts, *prompts] for text in of_agent):
        raise ValueError(
            "history='append' needs agents that act in every turn, and here they act in turns: set history to 'none'"
        )
    rows, said = following(team, nodes, turn, going, prompts, tokens, settings, episodes)
    long = too_long(team, rows, settings)
    dropped = long.any(0) if episodes.long_prompts == "drop" else np.zeros(len(going), bool)
    if dropped.any():
        stay = np.flatnonzero(~dropped)
        states, going = [states[i] for i in stay], going[stay]
        prompts = [[of_agent[i] for i in stay] for of_agent in prompts]
        rows, said = ([[of_agent[i] for i in stay] for of_agent in of] for of in (rows, said))
    elif long.any():
        rows = cut_long(team, rows, settings, episodes.chat)
    cut = 0 if dropped.any() else int(long.sum())
    node, joint = np.divmod(going, len(turn.joint))
    ways = 1 if episodes.forks else len(turn.joint)  # of alternatives none goes on
    ids = (nodes.ids[node].astype(np.uint64) * ways + joint).astype(np.uint32)
    found = Nodes(states, prompts, rows, rows, going, nodes.items[node], ids, nodes.most * ways, long=cut + int(dropped.sum()))
    caches = tuple(done.kept for done in turn.completions)
    if episodes.history == "none" or caches[0] is None or cut or not states:
        return found
    # The last token of a completion was sampled but never computed: it is the first of what comes after the cache.
    fresh = [[row[len(old) - 1 :] for row, old in zip(*pair, strict=True)] for _, pair in _pairs(rows, said)]
    chosen = [turn.joint[joint, n] for n in range(team.num_agents)]  # [N][P] completion of each agent
    return found._replace(fresh=fresh, past=Past(caches, rows_of(team, turn, node, chosen)))


def following(
    team: Team,
    nodes: Nodes,
    turn: Turn,
    going: np.ndarray,
    prompts: Sequence[Sequence[Any]],
    tokens: list,
    settings: Sampling,
    episodes: Episodes,
) -> tuple[Rows, Rows]:
    """Token ids [N][P] of what is read behind the joint actions `going`, and with history=append what of it was said before. If
    too long they come whole where that is no error."""
    whole = episodes.long_prompts != "error"
    if episodes.history == "none":
        return tokenize(team, prompts, settings, episodes.chat, whole), [[[]] * len(going)] * team.num_agents
    node, joint = np.divmod(going, len(turn.joint))
    said = [
        [row[p] + ids[p][g] for p, g in zip(node, turn.joint[joint, n], strict=True)]
        for n, (row, ids) in _pairs(nodes.rows, tokens)
    ]
    return follow(team, said, prompts, settings, episodes.chat, whole), said


def rows_of(team: Team, turn: Turn, node: np.ndarray, chosen: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Per stack [A, roles, P]: where completion chosen[n] of each node lies among the stack's rows [roles * P', G]."""
    out = []
    for spec, done in zip(team.stacks, turn.completions, strict=True):
        _, count, group, _ = done.tokens.shape
        roles = len(spec.members[0])
        out.append(
            np.array([[((r * count // roles + node) * group + chosen[n]) for r, n in enumerate(m)] for m in spec.members])
        )
    return tuple(out)


def _pairs(first, second):
    return enumerate(zip(first, second, strict=True))


def to_batches(
    team: Team, rollout: Rollout, grouping: str = "turn", values: Sequence[np.ndarray] | None = None
) -> tuple[Batch, ...]:
    """What each stack learns from: the completions of all turns. Where later turns are chains, no two completions have a prompt
    in common: every row is then a node of its own.

    grouping: compare what an agent wrote in one turn, or in all turns of an episode's item (`episode`); values: of each turn
    [N, P, G], what was expected of its completions.
    """
    alone = len({len(turn.texts[0][0]) for turn in rollout.turns}) > 1
    batches = []
    for i, spec in enumerate(team.stacks):
        size = round_up_to_quarter(
            max(int(turn.completions[i].steps.max()) for turn in rollout.turns), rollout.turns[0].completions[i]
        )
        parts, number, roles = [], 0, len(spec.members[0])
        explicit = any(explicit_groups(grouping, turn.completions[i].tokens.shape[2]) for turn in rollout.turns)
        items = len(rollout.turns[0].items)
        for t, turn in enumerate(rollout.turns):
            a, count, group, _ = (done := turn.completions[i]).tokens.shape
            groups = np.zeros((roles, count // roles), np.int32)
            together = grouping == "episode" or group == 1
            groups[:, : len(turn.items)] = turn.items if together else np.arange(len(turn.items))
            apart = items if grouping == "episode" else groups.max() + 1
            groups += number + np.arange(roles)[:, None] * apart
            number = 0 if grouping == "episode" else groups.max() + 1
            of_rows = rows_of_stack(rollout.returns[t], spec, done, np.nan)  # what is not filled is padding
            expected = None if values is None else rows_of_stack(values[t], spec, done, 0)
            numbers = groups.reshape(-1) if explicit else None
            part = make_batch(turn.encoded[i], done, of_rows, numbers, size, roles=roles, values=expected)
            parts.append(one_per_prompt(part) if alone else part)
        batch = concatenate_prompts(parts) if len(parts) > 1 else parts[0]
        batches.append(take_rows(batch, used_rows(spec, i, rollout.turns, alone)))
    return tuple(batches)


def explicit_groups(grouping: str, group: int) -> bool:
    """Whether the rows that are compared are not simply the completions of a prompt: in whole episodes, or where prompts have
    one completion each."""
    return grouping == "episode" or group == 1


def used_rows(spec: StackSpec, i: int, turns: Sequence[Turn], alone: bool) -> np.ndarray | None:
    """Which rows [A, rows] of stack i's batch its agents learn from: those of nodes that were played and at which they act; in
    number at least those of the first turn, so that micro-batches have rows. alone: a row is one completion. None: all."""
    roles, used, most = len(spec.members[0]), [], 0
    for turn in turns:
        a, count, group, _ = turn.completions[i].tokens.shape
        acts = np.zeros((a, roles, count // roles), bool)
        acts[:, :, : len(turn.items)] = turn.acts[np.array(spec.members)]
        used.append(np.repeat(acts.reshape(a, -1), group if alone else 1, 1))
        most += roles * turn.most * (group if alone else 1)
    return select_in_few_sizes(np.concatenate(used, 1), most, used[0].shape[1])


def rows_of_stack(x: np.ndarray, spec: StackSpec, done: Completions, empty: float) -> np.ndarray:
    """x [N, P, G] of the team as [A, roles * P', G] of a stack."""
    a, count, group, _ = done.tokens.shape
    rows = np.full((len(spec.order), count * a // len(spec.order), group), empty, np.float32)
    rows[:, : x.shape[1]] = x[spec.order]
    return rows.reshape(a, count, group)
