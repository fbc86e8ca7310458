"""Who sits where in an episode: players are the agents of the present team, and behind them those of each opponent.

`Seated` widens an environment to all players, so that `rollout.play` plays with them as with any team: at each node of an
episode with an opponent, the one who holds the seat acts, and the present agent of this seat does not. `narrowed` makes the
rollout one of the present team again, which learns from what it wrote itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Environment, Texts, special_tokens
from jmarl.rollout.turns import Rollout, Turn
from jmarl.team import StackSpec, Team, to_agents, to_stacks


class Seating(NamedTuple):
    """The opponent of an episode."""

    opponent: int  # number among those of the step; -1: there is none
    seat: int = 0  # that it holds


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
    """An environment in which the items of a step have seats. Its agents are the players of `players_of`."""

    def __init__(self, env: Environment, seats: Sequence[Seating], num_agents: int, opponents: int):
        self.env, self.seats, self.num_agents, self.opponents = env, seats, num_agents, opponents
        self.special_tokens = special_tokens(env)

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        states, prompts = self.env.reset(items, rng)
        return [*zip(self.seats, states, strict=True)], self.widened(prompts, self.seats)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        seats, own = zip(*states, strict=True)
        answer = self.env.step(own, self.joined(actions, seats), rng)
        rewards = np.tile(answer.result.rewards, (1, self.opponents + 1))
        after = [*zip(seats, answer.after, strict=True)]
        return answer._replace(result=answer.result._replace(rewards=rewards), after=after)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        seats, own = zip(*after, strict=True)
        states, prompts = self.env.observe(own)
        return [*zip(seats, states, strict=True)], self.widened(prompts, seats)

    def player(self, seat: Seating, agent: int) -> int:
        """Return who plays for an agent."""
        return agent + (seat.opponent + 1) * self.num_agents if seat.opponent >= 0 and seat.seat == agent else agent

    def widened(self, prompts: Sequence[Sequence[Any]], seats: Sequence[Seating]) -> list[list[Any]]:
        """Return what each player reads, from what each agent reads [N][B]."""
        rows: list[list[Any]] = [[None] * len(seats) for _ in range(self.num_agents * (self.opponents + 1))]
        for agent, texts in enumerate(prompts):
            for b, (seat, text) in enumerate(zip(seats, texts, strict=True)):
                rows[self.player(seat, agent)][b] = text
        return rows

    def joined(self, actions: Texts, seats: Sequence[Seating]) -> list[list[str]]:
        """Return what was written for each agent, from what each player wrote."""
        return [[actions[self.player(seat, agent)][b] for b, seat in enumerate(seats)] for agent in range(self.num_agents)]


def narrowed(rollout: Rollout, team: Team, players: Team, seats: Sequence[Seating], seated: Seated) -> Rollout:
    """Return a rollout of players as one of the present team. What opponents wrote stands in the place of the agents that they
    play for, who do not act there."""
    n = team.num_agents

    def first(stacks: Sequence[Any]) -> tuple[Any, ...]:
        return to_stacks(team, to_agents(players, stacks)[:n])

    def of_team(turn: Turn) -> Turn:
        prompts, texts = [[*row] for row in turn.prompts[:n]], [[*row] for row in turn.texts[:n]]
        for p, item in enumerate(turn.items):
            agent, player = seats[item].seat, seated.player(seats[item], seats[item].seat)
            prompts[agent][p], texts[agent][p] = turn.prompts[player][p], turn.texts[player][p]
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
    return rollout._replace(turns=tuple(map(of_team, rollout.turns)), joint_returns=joint_returns, returns=returns)
