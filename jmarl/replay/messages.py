"""Play a step with messages replaced: what comes before is forced to be as it was, what comes after is played on.

A message is what one agent writes in one turn. Messages of the same turn are written at the same time and stay as they are;
later turns read the new message. Completions depend on their prompts and keys alone, so those that do not read it stay equal.

- Replacing a message by its own text changes nothing: its tokens are those that the agent sampled.
- With history=append, a replaced message is not in the caches of keys and values, so all conversations are computed anew from
  the next turn on. Their numbers are equal up to rounding.
- An environment draws seeds for all joint actions of a turn in order. Where an episode becomes longer or shorter, environments
  with random numbers draw others for the episodes behind it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Environment, Texts, special_tokens
from jmarl.evaluation.statistics import valid_mean
from jmarl.models.hub.special_tokens import encode_text
from jmarl.randomness import Randomness
from jmarl.replay.steps import OpenStep, RemadeStep, check_settings
from jmarl.rl.returns import episode_path
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.runs.kinds.rollouts import sampler_of, shared, tasks_at
from jmarl.sampling.generate import Sampler, SampleRequest, on_host, tokens_of
from jmarl.team import Team, to_agents, to_stacks
from jmarl.types import Completions, TeamState

FIRST_PURPOSE = 1000  # of the random numbers of continuations 1, 2, ...; those of `randomness` are below


class MessagePlace(NamedTuple):
    """Where a message is in a rollout."""

    turn: int
    agent: int
    node: int
    sample: int  # which completion of the group


class Change(NamedTuple):
    """Messages that an agent writes in a turn in place of its own."""

    turn: int
    agent: int
    tokens: Mapping[tuple[int, int], Sequence[int]]  # (node, completion of the group) -> token ids, the one that ends included


def path_of(rollout: Rollout, task: int, sample: int, agent: int, joint: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the node and the joint action of each turn of an episode: the joint actions that are given, else in the first turn
    the first one with completion `sample` of the agent, later the first one of each node."""
    turn = rollout.turns[0]
    parents, counts = [turn.parents for turn in rollout.turns], [len(turn.joint) for turn in rollout.turns]
    numbers = [("task", task, len(turn.items)), ("agent", agent, len(turn.texts)), ("sample", sample, turn.group_size)]
    for name, number, count in [*numbers, *(("joint action", j, count) for j, count in zip(joint, counts, strict=False))]:
        if not 0 <= number < count:
            raise ValueError(f"there is no {name} {number}: the step has {name}s 0 to {count - 1}")
    first = joint[0] if joint else int(np.flatnonzero(turn.joint[:, agent] == sample)[0])
    return episode_path(parents, counts, task, first, joint[1:])


def find_message(rollout: Rollout, task: int, sample: int, agent: int, turn: int, joint: Sequence[int] = ()) -> MessagePlace:
    """Return the message of an agent in a turn of an episode, see `path_of`. Raises ValueError if there is none."""
    path = path_of(rollout, task, sample, agent, joint)
    if not 0 <= turn < len(path):
        raise ValueError(f"there is no turn {turn}: this episode of task {task} has turns 0 to {len(path) - 1}")
    (node, chosen), acts = path[turn], rollout.turns[turn].acts
    if not acts[agent, node]:
        others = ", ".join(map(str, np.flatnonzero(acts[:, node])))
        raise ValueError(f"agent {agent} does not act in turn {turn}, only agent {others}")
    return MessagePlace(turn, agent, node, int(rollout.turns[turn].joint[chosen, agent]))


def tokens_of_text(step: OpenStep, rollout: Rollout, message: MessagePlace, text: str) -> list[int]:
    """Return the token ids of a text in place of a message: those that were sampled if it is the same text."""
    turn, (team, limit) = rollout.turns[message.turn], (step.run.team, step.run.cfg.sampling.max_new_tokens)
    if text == turn.texts[message.agent][message.node][message.sample]:
        return sampled_tokens(team, rollout, message.turn)[message.agent][message.node][message.sample]
    spec = team.agent_specs[message.agent]
    ids = encode_text(spec.tokenizer, text)
    if len(ids) > limit:
        raise ValueError(f"the message has {len(ids)} tokens, and max_new_tokens={limit}: say less")
    return [*ids, spec.stop[0]][:limit]


def say(step: OpenStep, remade: RemadeStep, message: MessagePlace, text: str) -> Rollout:
    """Play a step again in which an agent writes another text in place of a message."""
    ids = tokens_of_text(step, remade.rollout, message, text)
    return with_messages(step, remade.state, Change(message.turn, message.agent, {(message.node, message.sample): ids}))


def sampled_tokens(team: Team, rollout: Rollout, turn: int) -> list[list[list[list[int]]]]:
    """Return the token ids [N][P][G] that the agents sampled in a turn."""
    return tokens_of(team, rollout.turns[turn].completions, len(rollout.turns[turn].items))


def with_messages(step: OpenStep, state: TeamState, change: Change, number: int = 0) -> Rollout:
    """Play a step again with messages replaced.

    Args:
        step: the step.
        state: before its update.
        change: the messages.
        number: of the continuation. 0: with the random keys of the run; others have their own from the answer to the message
            on, the same for every change.
    """
    setup, cfg, index = step.run.setup, step.run.cfg, step.number - 1
    check_settings(cfg, replaces=True)
    task = shared(setup, step.run.task)
    changed = ChangedStep(setup.team, sampler_of(setup, state), task.env, change, cfg.run.seed, index, number)
    arguments = (cfg.sampling, cfg.episodes, cfg.episodes.num_generations, Randomness(cfg.run.seed, index))
    return play(changed.sample, setup.team, tasks_at(task.items, cfg, index), changed, *arguments)


class ChangedStep:
    """Stands between `play` and its sampler and environment, and replaces messages.

    Args: as of `with_messages`; sampler, env: of the run.
    """

    def __init__(
        self, team: Team, sampler: Sampler, env: Environment, change: Change, seed: int, step: int, number: int
    ):  # fmt: skip
        self.team, self.sampler, self.env, self.change = team, sampler, env, change
        self.special_tokens, self.observe = special_tokens(env), env.observe
        self.purpose = FIRST_PURPOSE + number if number else None
        self.rng = Randomness(seed, step, self.purpose or 0).environment_rng()
        self.turn, self.nodes = -1, 0  # the turn that is played, and its nodes so far

    def sample(self, request: SampleRequest) -> tuple[Completions, ...]:
        """Return the completions of a request, with the messages in place of some."""
        self.nodes, self.turn = self.nodes if self.turn == request.turn else 0, request.turn
        start, size = self.nodes, len(request.prompt_ids)
        self.nodes += size
        if self.purpose and request.turn > self.change.turn:
            request = request._replace(randomness=request.randomness._replace(purpose=self.purpose))
        completions = self.sampler(request)
        here = {(p - start, g): ids for (p, g), ids in self.change.tokens.items() if start <= p < start + size}
        return replaced(self.team, completions, self.change.agent, here) if request.turn == self.change.turn else completions

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        return self.env.reset(items, rng)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        return self.env.step(states, actions, self.rng if self.purpose and self.turn >= self.change.turn else rng)


def replaced(
    team: Team, completions: tuple[Completions, ...], agent: int, messages: Mapping[tuple[int, int], Sequence[int]]
) -> tuple[Completions, ...]:
    """Return completions with other token ids of an agent: (prompt, completion of the group) -> ids. Without caches, if there
    are other ones."""
    done = tuple(map(on_host, completions))
    agents = to_agents(team, [one._replace(steps=None, cache=None) for one in done])
    rows, stop = agents[agent], team.agent_specs[agent].stop
    tokens, mask, ended = (np.array(x) for x in (rows.tokens, rows.action_mask, rows.ended))
    changed = False
    for place, ids in messages.items():
        if tokens[place][mask[place]].tolist() == list(ids):
            continue
        changed, size = True, len(ids)
        tokens[place], mask[place], ended[place] = stop[0], False, size > 0 and ids[-1] in stop
        tokens[place][:size], mask[place][:size] = ids, True
    if not changed:
        return completions
    agents[agent] = rows._replace(tokens=tokens, action_mask=mask, ended=ended)
    return tuple(one._replace(steps=old.steps) for one, old in zip(to_stacks(team, agents), done, strict=True))


def return_of(rollout: Rollout, message: MessagePlace) -> np.ndarray:
    """Return the return [N] of each agent from a message on: the mean over the joint actions with it; NaN where invalid."""
    turn = rollout.turns[message.turn]
    rows = turn.joint[:, message.agent] == message.sample
    return valid_mean(rollout.joint_returns[message.turn][message.node][rows].T)
