"""Cross-play of episodes that are played: several turns, agents that write in turns, strangers in any seat.

What an agent reads there depends on its partners, so every pairing is sampled, where `evaluation.cross_play` samples each agent
once. k runs of N agents make k^N pairings. They are played k at a time by `rollout.play`, such that each agent plays in one of
the k: agent n of run r with agents of runs r + s, s a shift of each seat. So a round takes the memory of k evaluations, and
k^(N - 1) rounds have equal shapes. Agents of one architecture are one program. Random keys are those of `evaluate` in the
agent's own run (the same stack, number, item, turn and g), whatever the partner: the diagonal is what `evaluate` returns for
each run alone, and pairings differ by who plays alone. (This does not hold for an environment that draws random numbers, which
depend on the place in the call.)

Left out: history=append, in which agents do not act where another holds their seat, and cross joint actions, which players who
do not sit in an episode would multiply.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import TrainConfig, check
from jmarl.envs.rows import Rows, read_rows
from jmarl.evaluation.cross_play import MAX_PAIRINGS, check_runs, check_template
from jmarl.evaluation.environment import Reward, as_environment
from jmarl.evaluation.zero_shot import CrossPlay
from jmarl.league.seats import Seated, Stranger
from jmarl.models.agent import Agent, agents_by_model
from jmarl.processes import exchange
from jmarl.randomness import EVAL, Randomness
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import SampleRequest, choose_acting, stack_program
from jmarl.sampling.stack_program import sample_stack
from jmarl.sampling.stop_texts import vocabulary
from jmarl.team import Team, check_agents, on_mesh, stack_agents
from jmarl.types import Completions


class PairedRuns(NamedTuple):
    """The agents of several runs as one team: those of the first run, behind them those of the next."""

    team: Team
    params: Sequence[Any]  # [A, ...] of each stack
    num_agents: int  # of a run
    stacks: Sequence[int]  # of each agent the number of its stack in its own run, which its random keys follow from

    @classmethod
    def of(cls, teams: Sequence[Sequence[Agent]], cfg: TrainConfig) -> "PairedRuns":
        """Return runs of loaded agents, on the devices that the settings name."""
        for agents in teams:
            check_agents(agents)
        agents = [agent for own in teams for agent in own]
        team = on_mesh(Team.of(agents), cfg.run)
        stacks = [{i: k for k, members in enumerate(agents_by_model(own).values()) for i in members} for own in teams]
        return cls(team, stack_agents(team.stacks, agents), len(teams[0]), [own[i] for own in stacks for i in range(len(own))])


def play_pairings(
    runs: PairedRuns,
    items: Rows,
    env: Reward,
    cfg: TrainConfig,
    names: Sequence[str],
    strangers: Sequence[Stranger] = (),
    max_pairings: int = MAX_PAIRINGS,
) -> CrossPlay:
    """Play every pairing of the agents of several runs, and of strangers, each of which is as a run that it is all agents of.

    The numbers of the result are returns of episodes. They are those of agents, if these have rewards of their own.

    Args:
        runs: who plays: `PairedRuns.of` loaded agents, or stacked parameters, such as the slots of a league behind its team.
        items: what the episodes are about, as for `cross_play`.
        env: a reward or an environment, as for `jmarl.train`.
        cfg: settings of the evaluation, as for `evaluate`.
        names: of the runs, and then of the strangers.
        strangers: see `strangers.open_stranger`.
        max_pairings: the largest number of pairings.

    Raises:
        ValueError: if the runs cannot be paired, or are played with a history.
    """
    exchange.require_one("pairings of cross-play")
    n, count, items = runs.num_agents, runs.team.num_agents // runs.num_agents, read_rows(items)
    check_runs(names, [n] * (count + len(strangers)), max_pairings)
    check("items", len(items), len(items) > 0, "at least one")
    episodes = dataclasses.replace(cfg.eval_episodes(), sample_parts=1)
    no_history = "none: players who do not sit in an episode read nothing, and have no history of it"
    check("history", episodes.history, episodes.history == "none" or episodes.num_turns == 1, no_history)
    aligned = "aligned: completions of players who do not sit in an episode would multiply"
    check("joint_mode", episodes.joint_mode, episodes.joint_mode != "cross", aligned)
    for i, spec in enumerate(runs.team.agent_specs):
        check_template(spec.tokenizer, bool(episodes.chat_settings.of(i % n)), i % n, names[i // n])
    if isinstance(episodes.chat, tuple):  # one value per agent
        episodes = dataclasses.replace(episodes, chat=episodes.chat * count)
    one = Team((dataclasses.replace(runs.team.stacks[0], members=tuple((i,) for i in range(n))),))  # for its number of agents
    world = as_environment(one, env, episodes.num_turns)
    settings, group, randomness = cfg.eval_sampling(), cfg.run.eval_generations, Randomness(cfg.run.seed, 0, EVAL)
    k, rewards, rounds = len(names), dict[tuple[int, ...], np.ndarray](), list[Rollout]()
    for shifts in itertools.product(range(k), repeat=n - 1):
        pairings = [(run, *((run + shift) % k for shift in shifts)) for run in range(k)]
        seated = Seated(world, [pairing for pairing in pairings for _ in items], n, count, strangers)
        sample = partial(sample_runs, runs, len(items), group)
        rounds.append(play(sample, runs.team, [*items] * k, seated, settings, episodes, group, randomness))
        returns = rounds[-1].joint_returns[0][..., :n]
        rewards |= zip(pairings, returns.reshape(k, len(items), *returns.shape[1:]), strict=True)
    table = np.array([rewards[pairing] for pairing in itertools.product(range(k), repeat=n)])
    fault = next((turn.fault for played in rounds for turn in played.turns if turn.fault), "")
    raised = int(sum(played.notes.get("reward/raised", 0) for played in rounds))
    return CrossPlay(tuple(names), table.reshape(*[k] * n, *table.shape[1:]), (), fault, raised)


def sample_runs(runs: PairedRuns, num_items: int, group: int, request: SampleRequest) -> tuple[Completions, ...]:
    """Return the completions of each stack, with random keys that do not follow from the pairing.

    num_items, group: of each pairing; the nodes of a later turn follow a completion of an item each."""
    ids = request.prompt_ids % (num_items * (group if request.turn else 1))
    request, numbers, stacks = request._replace(prompt_ids=ids), np.arange(runs.team.num_agents), np.array(runs.stacks)
    sampled = []
    for i, (spec, params) in enumerate(zip(runs.team.stacks, runs.params, strict=True)):
        program, keys = stack_program(i, spec, params, request)
        members = np.array(spec.members)
        alike = len(np.unique(stacks[members])) == 1
        own = int(stacks[members[0, 0]]) if alike else stacks[members[:, 0]]  # a team with shared weights is one stack
        keys = keys._replace(agents=(numbers % runs.num_agents)[members], stack=own)
        acting = None if request.acts is None else choose_acting(spec, request.acts, fewer=True)
        known = vocabulary(spec, request.settings.stop_texts)
        sampled.append(
            sample_stack(params, request.encoded[i], keys, spec.stops, acting=acting, vocabulary=known, program=program)
        )
    return tuple(sampled)
