"""Cross-play: all pairings of the agents of several runs, as a matrix and a zero-shot score.

Agents that learned together may have agreed on habits that nobody else shares. So k runs are compared by teams that never met
in training, agent 0 of one run with agent 1 of another, against each run's own team (Hu et al. 2020, arXiv 2003.02979).

In an episode of one turn nothing that an agent writes depends on its partners. So the k N agents are sampled once each, all of
one architecture in one program, and the k^N pairings are only put together afterwards, and judged in one call of the
environment. Random keys are those of `evaluate` in the agent's own run: the same stack, number in its team, prompt and g.
Therefore the diagonal is what `evaluate` gives of each run alone, and a difference between two cells of one row or column is
due to the partner. (Not so for a reward that draws random numbers of its own: those depend on the place in the call. And
where the agents lie otherwise on devices or in arrays, rounding may choose another token; none was seen to.)

Left out: several turns, where what an agent reads depends on its partners, and every pairing would have to be sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmarl.config import Episodes, Sampling, check
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.vector import vectorize
from jmarl.evaluation.zero_shot import CrossPlay, Texts
from jmarl.models.hub.agents import Agent, load_agent, load_tokenizer
from jmarl.models.hub.tokenize import decode, encode_prompts, stop_ids
from jmarl.models.platforms import platform_of
from jmarl.models.sharding import mesh_for, mesh_of, place
from jmarl.models.stack import stack_params
from jmarl.randomness import EVAL
from jmarl.rl.returns import joint_actions
from jmarl.sampling.generate import pad, sample_stack, tokens_of
from jmarl.team import StackSpec, Team, kinds_of

MAX_PAIRINGS = 1024


def cross_play(
    teams: Sequence[Sequence[Agent]],
    items: Sequence[dict],
    env: Environment | TextEnvironment,
    settings: Sampling,
    episodes: Episodes,
    *,
    seed: int,
    group: int,
    names: Sequence[str] | None = None,
    max_pairings: int = MAX_PAIRINGS,
    mesh: str = "auto",
) -> CrossPlay:
    """Play every pairing of the agents of several runs on items, `group` completions an agent and item.

    teams: the agents of each run, see `load_runs` and `team.agents_of`; agent n of one takes the place of agent n of another.
    episodes: of one turn; `aligned` judges completion g of every agent with g of the others, `cross` all combinations.
    """
    names = [f"run {i}" for i in range(len(teams))] if names is None else list(names)
    check_runs(names, [len(agents) for agents in teams], max_pairings)
    check("num_turns", episodes.num_turns, episodes.num_turns == 1, "1: later prompts depend on the partners")
    check("items", len(items), len(items) > 0, "at least one")
    check("group", group, group >= 1, ">= 1")
    world: Environment = vectorize(env, episodes.num_turns)
    n, rng = len(teams[0]), np.random.default_rng((seed, 0, EVAL, 0))  # as in `play`
    states, prompts = world.reset(items, rng)
    if len(prompts) != n:
        raise ValueError(f"the environment writes prompts for {len(prompts)} agents and the teams have {n}: give them as many")
    if any(text is None for of_agent in prompts for text in of_agent):
        raise ValueError("cross-play is of agents that all act in one turn, and in this environment they act in turns")
    texts = write(teams, names, prompts, settings, episodes.chat, seed=seed, group=group, mesh=mesh)
    pairings = list(itertools.product(range(len(teams)), repeat=n))
    joint = joint_actions(episodes.joint_mode, n, group)
    chosen = [[[of_item[g] for of_item in run[a] for g in joint[:, a]] for a in range(n)] for run in texts]  # [k][N][P * J]
    actions = [[text for runs in pairings for text in chosen[runs[a]][a]] for a in range(n)]
    result = world.step([state for _ in pairings for state in states for _ in joint], actions, rng).result
    rewards = result.rewards.reshape(*(len(teams),) * n, len(items), len(joint), n)
    return CrossPlay(tuple(names), rewards, texts, next(iter(result.faults.values()), ""))


class Player(NamedTuple):
    agent: Agent  # with the tokenizer that its team reads and writes by
    number: int  # in its own team
    stack: int  # that it is part of there


def write(
    teams: Sequence[Sequence[Agent]],
    names: Sequence[str],
    prompts: Sequence[Sequence[str]],
    settings: Sampling,
    chat: bool,
    *,
    seed: int,
    group: int,
    mesh: str = "auto",
) -> tuple[Texts, ...]:
    """Texts [k][N][P][G] of all agents for prompts [N][P]: each agent's prompts are sampled once."""
    players = [player for agents in teams for player in players_of(agents)]
    for i, player in enumerate(players):
        check_template(player.agent.tokenizer, chat, player.number, names[i // len(prompts)])
    limits = (settings.max_new_tokens, chat)
    rows = [encode_prompts(p.agent.tokenizer, prompts[p.number], p.agent.config.max_positions, *limits) for p in players]
    kinds: dict[Any, list[int]] = {}
    for kind, indices in kinds_of([player.agent for player in players]).items():
        for i in indices:  # a program has one set of stop tokens
            kinds.setdefault((*kind, stop_ids(players[i].agent.tokenizer)), []).append(i)
    alike = list(kinds.values())
    specs = [StackSpec(players[i[0]].agent.config, players[i[0]].agent.tokenizer, tuple((j,) for j in i)) for i in alike]
    together = Team(tuple(specs))
    where, done = mesh_for(mesh, [len(i) for i in alike]), []
    for spec, indices, (ids, lengths) in zip(specs, alike, pad(together, rows), strict=True):
        weights = place(stack_params([players[i].agent.params for i in indices]), where)
        number, stack = (jnp.array([getattr(players[i], name) for i in indices]) for name in ("number", "stack"))
        arrays = (jnp.asarray(ids), jnp.asarray(lengths), 0, number[:, None], jnp.arange(len(prompts[0])), jnp.array(spec.stop))
        how: dict[str, Any] = dict(cfg=spec.config, settings=settings, roles=1, group=group, mesh=mesh_of(weights))
        how["platform"] = platform_of(weights)
        done.append(sample_stack(weights, *arrays, seed=seed, stack=stack, purpose=EVAL, **how))
    tokens = tokens_of(together, done, len(prompts[0]))
    texts = [[decode(p.agent.tokenizer, of_item) for of_item in ids] for p, ids in zip(players, tokens, strict=True)]
    return tuple(texts[i : i + len(prompts)] for i in range(0, len(texts), len(prompts)))


def players_of(agents: Sequence[Agent]) -> list[Player]:
    """The agents of one run with their places in the team that `make_team` makes of them."""
    kinds = list(kinds_of(agents).values())
    own = {i: (stack, agents[indices[0]].tokenizer) for stack, indices in enumerate(kinds) for i in indices}
    return [Player(agent._replace(tokenizer=own[i][1]), i, own[i][0]) for i, agent in enumerate(agents)]


def check_runs(names: Sequence[str], sizes: Sequence[int], max_pairings: int = MAX_PAIRINGS) -> None:
    """Refuse runs that have no pairings, or too many; sizes: agents of each."""
    k, told = len(sizes), ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=False))
    if k < 2:
        raise ValueError(f"cross-play pairs agents of different runs, got {k} ({told}): give at least 2")
    if len(names) != k or len(set(names)) != k:
        raise ValueError(f"{k} runs need as many different names, got {list(names)}")
    if len(set(sizes)) > 1:
        raise ValueError(f"the runs have different numbers of agents ({told}): agent n of one replaces agent n of another")
    if sizes[0] < 2:
        raise ValueError("teams of 1 agent have no partners to exchange: cross-play needs at least 2 agents a team")
    if k ** sizes[0] > max_pairings:
        raise ValueError(
            f"{k} runs of {sizes[0]} agents make {k}^{sizes[0]} = {k ** sizes[0]} pairings, more than "
            f"max_pairings={max_pairings}: give fewer runs, or raise max_pairings (each is judged on every item)"
        )


def check_template(tokenizer: Any, chat: bool, agent: int, run: str) -> None:
    if chat and tokenizer.chat_template is None:
        raise ValueError(f"agent {agent} of {run} has no chat template: use chat=False, or set tokenizer.chat_template")


def load_runs(
    directories: Sequence[str | Path], *, chat: bool, num_agents: int | None = None, max_pairings: int = MAX_PAIRINGS
) -> tuple[list[str], list[list[Agent]]]:
    """Names and agents of finished runs: `models/agent_0/`, … in an output directory, or `agent_0/`, … as `save_team` writes
    them. All that can be refused is refused before the first model is read. num_agents: that the task needs."""
    given, paths = [str(d) for d in directories], [Path(d).resolve() for d in directories]
    twice = sorted({str(p) for p in paths if paths.count(p) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given more than once: its pairings with itself would pass for zero-shot ones")
    names = [path.name for path in paths]
    names = given if len(set(names)) < len(names) else names
    found = [agents_in(path) for path in paths]
    check_runs(names, [len(agents) for agents in found], max_pairings)
    if num_agents is not None and len(found[0]) != num_agents:
        raise ValueError(f"the runs have {len(found[0])} agents, the task has {num_agents}: give runs of this task")
    for name, agents in zip(names, found, strict=True):
        for i, where in enumerate(agents):
            check_template(load_tokenizer(where), chat, i, name)
    return names, [[load_agent(where) for where in agents] for agents in found]


def agents_in(run: Path) -> list[Path]:
    """The directories of a run's agents, in order."""
    root = run / "models" if (run / "models").is_dir() else run
    there = {path.name: path for path in root.glob("agent_*") if path.is_dir()}
    wanted = [f"agent_{i}" for i in range(len(there))]
    if not there or set(there) != set(wanted):
        got = ", ".join(sorted(there)) or "none"
        raise FileNotFoundError(
            f"{root} has no whole team: agent_0, agent_1, … are needed, it has {got}; a run writes them into models/ when it "
            "has finished, save_team writes them anywhere"
        )
    return [there[name] for name in wanted]
