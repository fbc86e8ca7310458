"""What `jmarl train --dry-run` shows: everything that a run checks before its first step, the settings that differ from the
defaults, prompts and data, and one turn of the first task: what the agents write, what reward and environment return, and what
the agents read next. Of a run that resumes it reads the checkpoint, so what the run would refuse is refused.

All is checked before anything is shown, so that an error, also one of a reward, stands alone. It loads the models and prepares
the initial state, which takes as long and as much memory as the start of the run, and compiles a program that samples one short
completion. Left out: compiling the programs of the run, and later turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmarl.algorithms import find_row
from jmarl.cli.main import plural, to_stderr
from jmarl.cli.play import WIDTH, reward_lines
from jmarl.cli.sweep import Point
from jmarl.config import ExperimentConfig, TrainConfig
from jmarl.config.yaml_file import dump_yaml
from jmarl.envs.base import describe
from jmarl.files.checkpoint import nbytes
from jmarl.files.run_directory import read_state, resolve_auto, resolve_resume
from jmarl.learning.per_agent import initial_state, with_adapters
from jmarl.logs.failed_update import read_failed_update
from jmarl.logs.samples import block
from jmarl.models import sharding
from jmarl.models.hub.special_tokens import special_tokens
from jmarl.models.hub.tokenize import decode, encode_prompts
from jmarl.preferences.encoding import AgentTokens, encode_pairs, encode_trajectories
from jmarl.preferences.pairs import shared_examples
from jmarl.preferences.reward_model import policy_config
from jmarl.randomness import TRAIN, Randomness
from jmarl.rollout.play import Game, continued_actions, first_nodes, next_nodes, play_turn
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.runs.checks import check_data, check_fit, check_settings, check_team, environment_of
from jmarl.runs.experiment import Task, examples_of, learns_from_completions, task_of, team_of
from jmarl.runs.fit import prepare_fit
from jmarl.runs.rollouts import sampler_of
from jmarl.runs.seeds import check_seeds, common_step, prepare_seeds
from jmarl.runs.start import start
from jmarl.runs.train import prepare
from jmarl.sampling.generate import NO_LIMIT
from jmarl.team import Team, initial_params, to_checkpoint
from jmarl.types import TeamState

SHOWN = 3  # prompts and examples
FIRST_TOKENS = 64  # largest number of tokens of the completions that are rewarded
SETTINGS = "# settings that differ from the defaults; `jmarl configs settings` and the config.yaml of the run have all of them"
LEGEND = "special tokens are in ⟨ ⟩; everything else is text, whatever it spells"


def checked_run(cfg: ExperimentConfig) -> list[str]:
    """Check a run and return what it would do, as lines. Raises what the run would raise before its first step."""
    cfg = cfg.replace(resume=resolve_resume(cfg.train, cfg.seeds).run.resume)
    lines, size = checked_prompts(cfg) if learns_from_completions(cfg) else checked_data(cfg)
    end = "dry run: all checks passed, nothing was trained or written"
    return [
        SETTINGS,
        dump_yaml(cfg.changed_dict()),
        *lines,
        disk_line(cfg, size),
        f"{end}; the run would write to {cfg.train.run.output_dir}",
    ]


def checked_sweep(points: Sequence[Point]) -> list[str]:
    """Check all runs of a sweep. Returns lines with the settings of the first one, and the directories of all."""
    first, *_ = [checked_run(point.cfg) for point in points]
    directories = [str(directory) for point in points for directory in point.directories]
    end = "dry run: all checks passed, nothing was trained or written; above is the first run, and the sweep would write to"
    return [*first[:-1], end, *directories]


def checked_prompts(cfg: ExperimentConfig) -> tuple[list[str], int]:
    """Check a run on completions. Returns lines with its first prompts, and the bytes of a checkpoint."""
    if cfg.seeds:
        check_seeds(cfg.seeds, cfg.train)
    else:
        check_settings(cfg.train)
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    team = load_team(cfg)
    env = environment_of(team, task.env, cfg.train)
    check_team(team, cfg.train)
    items, held_out, shared = items_that_fit(team, env, task.items, task.held_out, cfg.train)
    lines = [f"{plural(len(items), 'task')} to train on, {len(held_out)} held out; {agents_line(team)}"]
    lines += [shared] if shared else []
    if level := sandbox_level(describe(env)):
        lines.append(f"sandbox level {level}")
    lines.append(LEGEND)
    resolved = resolve_auto(cfg.train, cfg.train.for_seed(int(cfg.seeds[0])) if cfg.seeds else None)
    chats = resolved.episodes.chat_settings
    _, prompts = env.reset(items[:SHOWN], Randomness(cfg.train.run.seed, 0, TRAIN).environment_rng())
    for number in range(min(SHOWN, len(items))):
        for agent, spec in enumerate(team.agent_specs):
            if (prompt := prompts[agent][number]) is None:
                lines.append(f"--- task {number}, agent {agent}: does not act in the first turn")
                continue
            [ids] = encode_prompts(spec.tokenizer, [prompt], NO_LIMIT, 0, chats.of(agent), stop=spec.stop)
            text = shown(spec.tokenizer, ids)
            lines.append(f"--- task {number}, agent {agent}: {plural(len(ids), 'token')}\n{text}")
    if cfg.train.run.replay_rollout:
        read_failed_update(cfg.train)
    if cfg.train.run.resume:
        resumed, state = checked_resume(cfg, team, task)
    else:
        resumed = []
        state = first_state(team, policy_config(cfg.train) if find_row(cfg.train.algorithm).learned else cfg.train)
    to_stderr("checking: playing one turn of the first task; it waits for the compiler")
    lines += first_turn(team, state, items[0], env, resolved)
    return lines + resumed, nbytes(to_checkpoint(state))


def first_turn(team: Team, state: TeamState, item: dict, env: Any, cfg: TrainConfig) -> list[str]:
    """Play one turn of an item with short completions, as the run does. Returns lines with the completions, what reward and
    environment return, and what the agents read next. Raises what the reward or the environment raises."""
    tokens = min(FIRST_TOKENS, cfg.sampling.max_new_tokens)
    fewest = min(tokens, cfg.sampling.min_new_tokens)
    sampling = dataclasses.replace(cfg.sampling, max_new_tokens=tokens, min_new_tokens=fewest)
    randomness, episodes = Randomness(cfg.run.seed, 0), cfg.eval_episodes()
    game = Game(sampler_of(team, state), team, env, sampling, episodes, randomness, randomness.environment_rng())
    nodes = first_nodes(game, [item])
    played = play_turn(game, nodes, 0, 1)
    lines = [
        f"--- task 0, one turn: completions of up to {plural(tokens, 'token')}, sampled by the models as they are now; "
        "other tasks and turns are not played"
    ]
    turn, roles = played.turn, tuple(f"agent {agent}" for agent in range(team.num_agents))
    for agent, role in enumerate(roles):
        if turn.acts[agent, 0]:
            lines += [f"{role} writes:", *block(turn.texts[agent][0][0], WIDTH)]
    lines += reward_lines(turn, roles, WIDTH)
    continuing = continued_actions(played.answer, turn.rewards, episodes)
    if episodes.num_turns == 1 or not continuing.size:
        return lines + (["the episode is over"] if episodes.num_turns > 1 else [])
    for role, prompts in zip(roles, next_nodes(game, nodes, played, continuing).prompts, strict=True):
        lines += [f"{role} reads next:", *block(prompts[0], WIDTH)] if prompts and prompts[0] is not None else []
    return lines


def checked_resume(cfg: ExperimentConfig, team: Team, task: Task) -> tuple[list[str], TeamState]:
    """Resume a run on completions, or several seeds, up to the first step. Returns lines with what has changed since the
    checkpoint, and the state, of several seeds that of the first. Nothing is written."""
    quiet = cfg.train.replace(progress=False)
    if cfg.seeds:
        seeds = prepare_seeds(team, task.env, task.items, quiet, cfg.seeds, None, task.held_out)
        step, runs = common_step(seeds.runs.cfgs), zip(seeds.runs.cfgs, seeds.states, strict=True)
        state, changes = [read_state(run_cfg, initial, seeds.identity, step) for run_cfg, initial in runs][0]
    else:
        run = prepare(team, task.env, task.items, quiet, None, task.held_out)
        state, changes = read_state(run.cfg, run.state, run.identity)
        step = int(state.step)
    return resume_lines(step, cfg.train.run.num_updates, changes), state


def resume_lines(step: int, num_updates: int, changes: Sequence[str]) -> list[str]:
    """Return lines about the checkpoint that a run resumes from, and what has changed since then."""
    return [f"would resume from step {step} of {num_updates}", *(f"changed: {change}" for change in changes)]


def checked_data(cfg: ExperimentConfig) -> tuple[list[str], int]:
    """Check a run on given data. Returns lines with its first examples, and the bytes of a checkpoint."""
    check_fit(cfg.train, None)
    data, held_out = examples_of(cfg)
    check_data(data, cfg.train)
    team = load_team(cfg)
    train = resolve_auto(cfg.train.replace(progress=False))
    setup, params, identity = prepare_fit(team, data, train, None, held_out)
    algorithm = setup.algorithm
    texts = algorithm.row.data == "texts"
    encode, kind = (encode_trajectories, "text") if texts else (encode_pairs, "pair")
    tokens = encode(team, data, train.episodes.chat_settings)
    encode(team, held_out, train.episodes.chat_settings)
    lines = [f"{plural(len(data), kind)} to train on, {len(held_out)} held out; {agents_line(team)}"]
    lines += [shared] if (shared := shared_examples(data, held_out)) else []
    lines.append("trained tokens are in ⟦ ⟧, separated by |; " + LEGEND)
    weights = {1: algorithm.bc_weight, 2: algorithm.world_model_weight} if texts else {}
    for number, example in enumerate(tokens[:SHOWN]):
        for agent, part in enumerate(example):
            lines.append(f"--- {kind} {number}, agent {agent}: {len(part.prompt)} + {sum(map(len, part.rows))} tokens")
            lines += marked(team.agent_specs[agent].tokenizer, part, weights)
    if train.run.replay_rollout:
        read_failed_update(train)
    mesh = sharding.mesh_for(train.run.mesh, [len(spec.members) for spec in team.stacks])
    state = initial_state(team, params, algorithm, train.run, mesh)
    size = nbytes(to_checkpoint(state))
    if train.run.resume:
        state, changes = read_state(train, state, identity)
        lines += resume_lines(int(state.step), train.run.num_updates, changes)
    return lines, size


def load_team(cfg: ExperimentConfig) -> Team:
    """Load the team, which may take a while, after what needs no model is checked."""
    to_stderr(f"checking: loading {', '.join(dict.fromkeys(cfg.team.models))}")
    return team_of(cfg.team)


def shown(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids, with special tokens in ⟨ ⟩; brackets of the text itself have a backslash."""
    names = {i: text for text, i in special_tokens(tokenizer).ids.items()}
    parts = []
    for special, run in itertools.groupby(ids, lambda i: i in names):
        if special:
            parts += [f"⟨{names[i]}⟩" for i in run]
        else:
            parts.append(decode(tokenizer, [[*run]])[0].replace("⟨", r"\⟨").replace("⟩", r"\⟩"))
    return "".join(parts)


def marked(tokenizer: Any, part: AgentTokens, weights: dict[int, float]) -> list[str]:
    """Return the prompt and the rows of an example, with trained tokens marked. weights: of the kinds of tokens of a text."""
    lines = [shown(tokenizer, part.prompt)]
    names = ("chosen", "rejected") if len(part.rows) == 2 else ("",)
    for name, row in zip(names, part.rows, strict=True):
        kinds = part.kinds or [1] * len(row)
        trained = [not weights or weights[kind] > 0 for kind in kinds]
        runs: list[tuple[bool, list[int]]] = []
        for token, is_trained in zip(row, trained, strict=True):
            if not runs or runs[-1][0] != is_trained:
                runs.append((is_trained, []))
            runs[-1][1].append(token)
        texts = [f"⟦{'|'.join(tokenizer.convert_ids_to_tokens(ids))}⟧" if on else shown(tokenizer, ids) for on, ids in runs]
        lines.append(f"{name}: {''.join(texts)}" if name else "".join(texts))
    return lines


def sandbox_level(described: dict[str, Any]) -> str | None:
    """Return the level of the sandbox that an environment, or one of a mixture, describes; None without one."""
    levels = [sandbox_level(value) for value in described.values() if isinstance(value, dict)]
    return described.get("sandbox") or next(filter(None, levels), None)


def agents_line(team: Team) -> str:
    """Return a line about the agents and their contexts."""
    contexts = sorted({spec.config.max_positions for spec in team.stacks})
    return f"{plural(team.num_agents, 'agent')}, context of {' or '.join(map(str, contexts))} tokens"


def first_state(team: Team, cfg: TrainConfig) -> TeamState:
    """Return the initial state of a run on completions."""
    mesh = sharding.mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks])
    params = with_adapters(team, initial_params(team, None, cfg.lora.lora_rank > 0), cfg, mesh)
    return start(team, params, cfg)[1]


def disk_line(cfg: ExperimentConfig, size: int) -> str:
    """Return a line about the room for checkpoints. Raises ValueError if two do not fit."""
    run, count = cfg.train.run, max(len(cfg.seeds), 1)
    directory = Path(run.output_dir).absolute()
    existing: Sequence[Path] = [path for path in (directory, *directory.parents) if path.is_dir()]
    if not os.access(existing[0], os.W_OK):
        raise ValueError(f"{existing[0]} cannot be written: choose another --output")
    free = shutil.disk_usage(existing[0]).free
    unit, name = (2**30, "GiB") if size * count >= 2**30 else (2**20, "MiB")
    text = f"a checkpoint takes {size * count / unit:.3g} {name}, {free / 2**30:.3g} GiB are free in {existing[0]}"
    if run.saves and free < 2 * size * count:
        raise ValueError(f"{text}: two of them do not fit; free some space, choose another --output, or set save_every=0")
    return text
