"""Who sits where in an episode: players are the agents of several teams, one behind the other, and strangers.

`Seated` widens an environment to all players, so that `rollout.play` plays with them as with any team: at each node of an
episode the one who holds a seat acts, and the same agents of the other teams do not. A stranger writes as soon as its prompt is
there, one text for all completions of a group: no row is sampled for it. `narrowed` makes the rollout one of the first team
again, which learns from what it wrote itself.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Environment, Texts, special_tokens
from jmarl.rollout.turns import Rollout, Turn
from jmarl.team import StackSpec, Team, to_agents, to_stacks

Stranger = Callable[[Sequence[Any]], list[str]]  # prompts -> texts, see `strangers`


class Seating(NamedTuple):
    """The opponent of an episode."""

    opponent: int  # number among those of the step; -1: there is none
    seat: int = 0  # that it holds

    def holders(self, num_agents: int, number: int) -> list[int]:
        """Return who holds each seat, see `Seated`: the first team, but for the opponent, which has this number."""
        return [number if self.opponent >= 0 and agent == self.seat else 0 for agent in range(num_agents)]


class SeatedState(NamedTuple):
    """The state of an episode with seats."""

    holders: Sequence[int]  # of each seat, see `Seated`
    state: Any  # of the environment
    written: Mapping[int, tuple[Any, str]]  # agents that strangers play for -> what they read and wrote


def players_of(team: Team, opponents: int) -> Team:
    """Return a team whose agents are those of the team, and behind them those of each opponent, in the same stacks."""

    def widened(spec: StackSpec) -> StackSpec:
        copies = range(opponents + 1)
        members = tuple(tuple(n + k * team.num_agents for n in roles) for k in copies for roles in spec.members)
        tokenizers = (spec.tokenizers or (spec.tokenizer,) * len(spec.order)) * len(copies)
        configs = spec.generation_configs * len(copies)
        return dataclasses.replace(spec, members=members, tokenizers=tokenizers, generation_configs=configs)

    return Team(tuple(map(widened, team.stacks)))


class Seated:
    """An environment in which the items of a step have seats.

    Args:
        env: the environment.
        holders: of each item and agent the number of who plays for it: of a team, or behind them of a stranger.
        num_agents: of each team.
        num_teams: whose agents are the players of the rollout, one team behind the other.
        strangers: what they write; None for numbers that no item has.
    """

    def __init__(
        self,
        env: Environment,
        holders: Sequence[Sequence[int]],
        num_agents: int,
        num_teams: int,
        strangers: Sequence[Stranger | None] = (),
    ):
        self.env, self.holders, self.num_agents, self.num_teams, self.strangers = env, holders, num_agents, num_teams, strangers
        self.special_tokens = special_tokens(env)
        self.steps: list[Sequence[SeatedState]] = []  # the states of each call of `step`

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[SeatedState], list[list[Any]]]:
        return self.seated(self.holders, *self.env.reset(items, rng))

    def step(self, states: Sequence[SeatedState], actions: Texts, rng: np.random.Generator) -> Answer:
        self.steps.append(states)
        answer = self.env.step([x.state for x in states], self.joined(actions, states), rng)
        rewards = np.tile(answer.result.rewards, (1, self.num_teams))
        after = [state._replace(state=own) for state, own in zip(states, answer.after, strict=True)]
        return answer._replace(result=answer.result._replace(rewards=rewards), after=after)

    def observe(self, after: Sequence[SeatedState]) -> tuple[list[SeatedState], list[list[Any]]]:
        return self.seated([x.holders for x in after], *self.env.observe([x.state for x in after]))

    def seated(
        self, holders: Sequence[Sequence[int]], states: Sequence[Any], prompts: Sequence[Sequence[Any]]
    ) -> tuple[list[SeatedState], list[list[Any]]]:
        """Return states with what strangers write there, and what each player reads, from what each agent reads [N][B]."""
        rows: list[list[Any]] = [[None] * len(states) for _ in range(self.num_agents * self.num_teams)]
        waiting: dict[int, list[tuple[int, int]]] = {}  # strangers -> where they write
        for agent, texts in enumerate(prompts):
            for b, text in enumerate(texts):
                if holders[b][agent] < self.num_teams:
                    rows[self.player(holders[b], agent)][b] = text
                elif text is not None:
                    waiting.setdefault(holders[b][agent] - self.num_teams, []).append((b, agent))
        written: list[dict[int, tuple[Any, str]]] = [{} for _ in states]
        for number, places in waiting.items():
            read, write = [prompts[agent][b] for b, agent in places], self.strangers[number]
            assert write is not None
            for (b, agent), *both in zip(places, read, write(read), strict=True):
                written[b][agent] = (both[0], both[1])
        return [SeatedState(*row) for row in zip(holders, states, written, strict=True)], rows

    def player(self, holders: Sequence[int], agent: int) -> int:
        """Return who plays for an agent that a team plays for."""
        return agent + holders[agent] * self.num_agents

    def joined(self, actions: Texts, states: Sequence[SeatedState]) -> list[list[str]]:
        """Return what was written for each agent, from what each player wrote."""

        def text(agent: int, b: int) -> str:
            if (number := states[b].holders[agent]) >= self.num_teams:
                return states[b].written[agent][1] if agent in states[b].written else ""
            return actions[agent + number * self.num_agents][b]

        return [[text(agent, b) for b in range(len(states))] for agent in range(self.num_agents)]


def narrowed(rollout: Rollout, team: Team, players: Team, seated: Seated) -> Rollout:
    """Return a rollout of players as one of the first team. What others wrote stands in the place of the agents that they play
    for, who do not act there."""
    n = team.num_agents

    def first(stacks: Sequence[Any]) -> tuple[Any, ...]:
        return to_stacks(team, to_agents(players, stacks)[:n])

    def of_team(turn: Turn, states: Sequence[SeatedState]) -> Turn:
        prompts, texts = [[*row] for row in turn.prompts[:n]], [[*row] for row in turn.texts[:n]]
        for p, state in enumerate(states[:: len(turn.joint)]):
            for agent, number in enumerate(state.holders):
                if number < seated.num_teams:
                    player = seated.player(state.holders, agent)
                    prompts[agent][p], texts[agent][p] = turn.prompts[player][p], turn.texts[player][p]
                elif agent in state.written:
                    prompts[agent][p], text = state.written[agent]
                    texts[agent][p] = [text] * turn.group_size
        rows = first([done._replace(steps=None, cache=None) for done in turn.completions])
        steps = [done.steps[: len(spec.members)] for done, spec in zip(turn.completions, team.stacks, strict=True)]
        return turn._replace(
            prompts=prompts,
            acts=turn.acts[:n],
            texts=texts,
            joint=turn.joint[:, :n],
            rewards=turn.rewards[..., :n],
            encoded=first(turn.encoded),
            completions=tuple(done._replace(steps=x) for done, x in zip(rows, steps, strict=True)),
        )

    returns = tuple(x[:n] for x in rollout.returns)
    joint_returns = tuple(x[..., :n] for x in rollout.joint_returns)
    turns = tuple(map(of_team, rollout.turns, seated.steps))
    return rollout._replace(turns=turns, joint_returns=joint_returns, returns=returns)
