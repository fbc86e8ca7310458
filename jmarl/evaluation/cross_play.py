"""Cross-play: all pairings of the agents of several runs, as a matrix and a zero-shot score.

Agents that learned together may have agreed on habits that nobody else shares. So k runs are compared by teams that never met
in training, agent 0 of one run with agent 1 of another, against each run's own team (Hu et al. 2020, arXiv 2003.02979).

In an episode of one turn nothing that an agent writes depends on its partners. So the k N agents are sampled once each, all of
one architecture in one program. The k^N pairings are only combined afterwards, and rewarded in one call of the environment.
Random keys are those of `evaluate` in the agent's own run: the same stack, number in its team, prompt and g. Therefore the
diagonal is what `evaluate` returns for each run alone, and a difference between two cells of one row or column is due to the
partner. (This does not hold for a reward that draws random numbers: those depend on the place in the call. And if the agents
are placed differently on devices or in arrays, rounding may choose another token; this was not observed.)

Left out: several turns, where what an agent reads depends on its partners, so that every pairing is sampled, and strangers:
`league.pairings` plays those.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import TrainConfig, check, check_argument
from jmarl.envs.base import special_tokens
from jmarl.envs.calls.copies import copies
from jmarl.envs.rows import Rows, read_rows
from jmarl.evaluation.environment import Reward, as_environment
from jmarl.evaluation.zero_shot import CrossPlay, Texts
from jmarl.models.agent import agents_by_model
from jmarl.models.hub.agents import Agent, load_tokenizer, open_agent
from jmarl.models.hub.tokenize import decode, encode_prompts
from jmarl.processes import exchange
from jmarl.randomness import EVAL, Randomness
from jmarl.rl.returns import joint_actions
from jmarl.sampling.generate import RowIds, pad, tokens_of
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from jmarl.sampling.stop_texts import vocabulary
from jmarl.team import StackSpec, Team, check_agents, check_arguments, on_mesh, stack_agents

MAX_PAIRINGS = 1024


def cross_play(
    teams: Sequence[Sequence[Agent]],
    items: Rows,
    env: Reward,
    cfg: TrainConfig,
    *,
    names: Sequence[str] | None = None,
    max_pairings: int = MAX_PAIRINGS,
) -> CrossPlay:
    """Play every pairing of the agents of several runs.

    Args:
        teams: the agents of each run, see `load_runs` and `team.agents_of`. Agent n of one replaces agent n of another.
        items: what the episodes are about, in anything that `jmarl.envs.rows.read_rows` reads.
        env: a reward or an environment, as for `jmarl.train`.
        cfg: settings of the evaluation, as for `evaluate`. With joint_mode `aligned` completion g of every agent is rewarded
            with g of the others, with `cross` all combinations are.
        names: of the runs; None: run 0, run 1, ...
        max_pairings: the largest number of pairings.

    Raises:
        ValueError: if the runs cannot be paired, or the episodes have several turns.
    """
    check_argument("teams", teams, list | tuple, "a list with the agents of each run, as load_runs returns them")
    for agents in teams:
        check_agents(agents)
    check_arguments(Team(()), cfg, env)
    exchange.require_one("pairings of cross-play")
    episodes, group = cfg.eval_episodes(), cfg.run.eval_generations
    names = [f"run {i}" for i in range(len(teams))] if names is None else list(names)
    check_runs(names, [len(agents) for agents in teams], max_pairings)
    one_turn = "1: later prompts depend on the partners; evaluate plays one team, also of agents of several runs"
    check("num_turns", episodes.num_turns, episodes.num_turns == 1, one_turn)
    items = read_rows(items)
    check("items", len(items), len(items) > 0, "at least one")
    world = as_environment(Team.of(teams[0]), env, episodes.num_turns)
    n, rng = len(teams[0]), Randomness(cfg.run.seed, 0, EVAL).environment_rng()
    states, prompts = world.reset(copies(items), rng)
    check_prompts(prompts, n)
    texts = sample_texts(teams, names, prompts, cfg, special_tokens(world))
    pairings = list(itertools.product(range(len(teams)), repeat=n))
    joint = joint_actions(episodes.joint_mode, n, group)
    chosen = [[[row[g] for row in run[a] for g in joint[:, a]] for a in range(n)] for run in texts]  # [k][N][P * J]
    actions = [[text for runs in pairings for text in chosen[runs[a]][a]] for a in range(n)]
    result = world.step([state for _ in pairings for state in states for _ in joint], actions, rng).result
    rewards = result.rewards.reshape(*(len(teams),) * n, len(items), len(joint), n)
    return CrossPlay(tuple(names), rewards, texts, next(iter(result.faults.values()), ""), result.num_raised)


def check_prompts(prompts: Sequence[Sequence[str | None]], num_agents: int) -> None:
    """Raise ValueError if prompts [N][P] are for another number of agents, or if not all agents act."""
    if len(prompts) != num_agents:
        raise ValueError(
            f"the environment writes prompts for {len(prompts)} agents and the teams have {num_agents}: use teams and an "
            "environment with the same number of agents"
        )
    if any(text is None for row in prompts for text in row):
        raise ValueError(
            "cross-play needs an environment in which all agents act in one turn, and in this one some prompts are None"
        )


class Player(NamedTuple):
    """An agent of one of the runs."""

    agent: Agent
    number: int  # in its own team
    stack: int  # number of its stack in that team


def sample_texts(
    teams: Sequence[Sequence[Agent]],
    names: Sequence[str],
    prompts: Sequence[Sequence[str]],
    cfg: TrainConfig,
    shown: Sequence[str] = (),
) -> tuple[Texts, ...]:
    """Return the texts [k][N][P][G] of all agents for prompts [N][P]. Each agent's prompts are sampled once.

    shown: special tokens that the texts have in any case.
    """
    settings, chat, group = cfg.eval_sampling(), cfg.episodes.chat_settings, cfg.run.eval_generations
    long = cfg.run.long_context
    teams = [[agent._replace(config=agent.config.in_context(long)) for agent in agents] for agents in teams]
    players = [player for agents in teams for player in players_of(agents)]
    agents = [player.agent for player in players]

    def limits(player: Player) -> tuple[int, int]:
        return player.agent.config.context, settings.max_new_tokens

    for i, player in enumerate(players):
        check_template(player.agent.tokenizer, bool(chat.of(player.number)), player.number, names[i // len(prompts)])
    rows = [
        encode_prompts(p.agent.tokenizer, prompts[p.number], *limits(p), chat.of(p.number), stop=p.agent.stop) for p in players
    ]
    stacks = stacks_of(players)
    specs = [stack_of(players, i) for i in stacks]
    team, done = on_mesh(Team(tuple(specs)), cfg.run), []
    for spec, indices, encoded in zip(team.stacks, stacks, pad(team, rows), strict=True):
        (params,) = stack_agents([spec], agents)
        numbers = np.array([[players[i].number] for i in indices])  # [A, 1]
        stack = np.array([players[i].stack for i in indices])
        keys = RowIds(cfg.run.seed, 0, EVAL, stack, numbers, np.arange(len(prompts[0])))
        program = SampleProgram.of(spec, settings, group, params)
        known = vocabulary(spec, settings.stop_texts)
        done.append(sample_stack(params, encoded, keys, spec.stops, vocabulary=known, program=program))
    tokens = tokens_of(team, done, len(prompts[0]))
    skip = cfg.episodes.skip_special_tokens
    texts = [[decode(p.agent.tokenizer, item, skip, shown) for item in ids] for p, ids in zip(players, tokens, strict=True)]
    return tuple(texts[i : i + len(prompts)] for i in range(0, len(texts), len(prompts)))


def stacks_of(players: Sequence[Player]) -> list[list[int]]:
    """Return which players are sampled by one program: those of one architecture and vocabulary."""
    return list(agents_by_model([player.agent for player in players]).values())


def stack_of(players: Sequence[Player], indices: Sequence[int]) -> StackSpec:
    """Return the description of a stack of some players, numbered by their index."""
    agents = [players[i].agent for i in indices]
    tokenizers, generation_configs = zip(*((agent.tokenizer, agent.generation_config) for agent in agents), strict=True)
    members = tuple((i,) for i in indices)
    return StackSpec(agents[0].config, agents[0].tokenizer, members, tokenizers, generation_configs)


def players_of(agents: Sequence[Agent]) -> list[Player]:
    """Return the agents of one run with their places in the team that `make_team` makes of them."""
    stacks = {i: stack for stack, indices in enumerate(agents_by_model(agents).values()) for i in indices}
    return [Player(agent, i, stacks[i]) for i, agent in enumerate(agents)]


def check_runs(names: Sequence[str], sizes: Sequence[int], max_pairings: int = MAX_PAIRINGS) -> None:
    """Raise ValueError for runs that have no pairings, or too many. sizes: number of agents of each run."""
    k, sizes_text = len(sizes), ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=False))
    if k < 2:
        raise ValueError(f"cross-play pairs agents of different runs, got {k} ({sizes_text}): give at least 2")
    if len(names) != k or len(set(names)) != k:
        raise ValueError(f"{k} runs need as many different names, got {list(names)}")
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the runs have different numbers of agents ({sizes_text}): agent n of one replaces agent n of another"
        )
    if sizes[0] < 2:
        raise ValueError("teams of 1 agent have no partners to exchange: cross-play needs at least 2 agents a team")
    if k ** sizes[0] > max_pairings:
        raise ValueError(
            f"{k} runs of {sizes[0]} agents make {k}^{sizes[0]} = {k ** sizes[0]} pairings, more than "
            f"max_pairings={max_pairings}: give fewer runs, or raise max_pairings (each is judged on every item)"
        )


def check_template(tokenizer: Any, chat: bool, agent: int, run: str) -> None:
    """Raise ValueError if prompts are chats and the tokenizer has no chat template."""
    if chat and tokenizer.chat_template is None:
        raise ValueError(f"agent {agent} of {run} has no chat template: use chat=False, or set tokenizer.chat_template")


def load_runs(
    directories: Sequence[str | Path], *, chat: bool, num_agents: int | None = None, max_pairings: int = MAX_PAIRINGS
) -> tuple[list[str], list[list[Agent]]]:
    """Return the names and agents of finished runs.

    All checks are made before the first model is read.

    Args:
        directories: output directories with `models/agent_0/`, ..., or directories with `agent_0/`, ... as `save_team` writes.
        chat: whether prompts are put into chat templates, which all tokenizers must then have.
        num_agents: how many agents the task needs; None: any number.
        max_pairings: the largest number of pairings.
    """
    check_argument("directories", directories, list | tuple, "a list with the directory of each run")
    names = run_names(directories)
    runs = [agents_in(Path(directory).resolve()) for directory in directories]
    check_runs(names, [len(agents) for agents in runs], max_pairings)
    if num_agents is not None and len(runs[0]) != num_agents:
        raise ValueError(f"the runs have {len(runs[0])} agents, the task has {num_agents}: give runs of this task")
    for name, agents in zip(names, runs, strict=True):
        for i, path in enumerate(agents):
            check_template(load_tokenizer(path), chat, i, name)
    return names, [[open_agent(path) for path in agents] for agents in runs]


def run_names(directories: Sequence[str | Path]) -> list[str]:
    """Return short names of runs, or their paths where those are equal. Raises ValueError if a run is given twice."""
    paths = [Path(directory).resolve() for directory in directories]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given more than once: its pairings with itself would pass for zero-shot ones")
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def agents_in(run: Path) -> list[Path]:
    """Return the directories of a run's agents, in order."""
    root = run / "models" if (run / "models").is_dir() else run
    directories = {path.name: path for path in root.glob("agent_*") if path.is_dir()}
    names = [f"agent_{i}" for i in range(len(directories))]
    if not directories or set(directories) != set(names):
        raise FileNotFoundError(
            f"{root} has no whole team: agent_0, agent_1, … are needed, it has {', '.join(sorted(directories)) or 'none'}; a "
            "run writes them into models/ when it has finished, save_team writes them anywhere"
        )
    return [directories[name] for name in names]
