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

from jmarl.cli.main import plural, to_stderr
from jmarl.cli.play import WIDTH, reward_lines
from jmarl.cli.sweep import Point
from jmarl.config import ExperimentConfig
from jmarl.config.yaml_file import dump_yaml
from jmarl.envs.base import close, describe
from jmarl.envs.calls.copies import copies
from jmarl.files.checkpoint import nbytes
from jmarl.files.run_directory import read_state, resolve_resume
from jmarl.learning.setup import Setup
from jmarl.logs.failed_update import read_failed_update
from jmarl.logs.samples import block
from jmarl.models.hub.special_tokens import special_tokens
from jmarl.models.hub.tokenize import decode, encode_prompts
from jmarl.preferences.data_source import encode_tokens
from jmarl.preferences.encoding import AgentTokens
from jmarl.preferences.long_rows import fit_rows, prompts_of
from jmarl.randomness import TRAIN, Randomness
from jmarl.rollout.play import Game, continued_actions, first_nodes, next_nodes, play_turn
from jmarl.runs.checks import check_data, check_fit, check_settings
from jmarl.runs.experiment import examples_of, learns_from_completions, task_of, team_of
from jmarl.runs.prepare import prepare
from jmarl.runs.rollouts import sampler_of
from jmarl.runs.run import Run, Task
from jmarl.runs.seeds import check_seeds, common_step, prepare_seeds
from jmarl.sampling.generate import NO_LIMIT
from jmarl.team import Team, to_checkpoint
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
    team, quiet = load_team(cfg), cfg.train.replace(progress=False)
    if cfg.seeds:
        run, runs, states = prepare_seeds(quiet, team, task, cfg.seeds)
        cfgs, setup = runs.cfgs, runs.setup
    else:
        run, state = prepare(quiet, team, task)
        cfgs, states, setup = [run.cfg], [state], run.setup
    task, lines = run.task, prompt_lines(team, run)
    if cfg.train.run.replay_rollout:
        read_failed_update(cfg.train)
    resumed: list[str] = []
    if cfg.train.run.resume:
        step = common_step(cfgs) if cfg.seeds else None
        read = [read_state(run_cfg, state, run.identity, step) for run_cfg, state in zip(cfgs, states, strict=True)]
        states = [state for state, _ in read]
        resumed = resume_lines(int(states[0].step), cfg.train.run.num_updates, read[0][1])
    to_stderr("checking: playing one turn of the first task; it waits for the compiler")
    lines += first_turn(setup, states[0], task.items[0], task.env)
    close(task.env)
    return lines + resumed, nbytes(to_checkpoint(states[0]))


def prompt_lines(team: Team, run: Run) -> list[str]:
    """Return lines with the number of tasks and the first prompts."""
    items, cfg = run.task.items, run.cfg
    lines = [f"{plural(len(items), 'task')} to train on, {len(run.task.held_out)} held out; {agents_line(run.team)}"]
    lines += [run.task.overlap] if run.task.overlap else []
    if level := sandbox_level(describe(run.task.env)):
        lines.append(f"sandbox level {level}")
    lines.append(LEGEND)
    _, prompts = run.task.env.reset(copies(items[:SHOWN]), Randomness(cfg.run.seed, 0, TRAIN).environment_rng())
    for number in range(min(SHOWN, len(items))):
        for agent, spec in enumerate(team.agent_specs):
            if (prompt := prompts[agent][number]) is None:
                lines.append(f"--- task {number}, agent {agent}: does not act in the first turn")
                continue
            chat = cfg.episodes.chat_settings.of(agent)
            [ids] = encode_prompts(spec.tokenizer, [prompt], NO_LIMIT, 0, chat, stop=spec.stop)
            text = shown(spec.tokenizer, ids)
            lines.append(f"--- task {number}, agent {agent}: {plural(len(ids), 'token')}\n{text}")
    return lines


def first_turn(setup: Setup, state: TeamState, item: dict, env: Any) -> list[str]:
    """Play one turn of an item with short completions, as the run does. Returns lines with the completions, what reward and
    environment return, and what the agents read next. Raises what the reward or the environment raises."""
    team, cfg = setup.team, setup.cfg
    tokens = min(FIRST_TOKENS, cfg.sampling.max_new_tokens)
    fewest = min(tokens, cfg.sampling.min_new_tokens)
    sampling = dataclasses.replace(cfg.sampling, max_new_tokens=tokens, min_new_tokens=fewest)
    randomness, episodes = Randomness(cfg.run.seed, 0), cfg.eval_episodes()
    game = Game(sampler_of(setup, state), team, env, sampling, episodes, randomness, randomness.environment_rng())
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


def resume_lines(step: int, num_updates: int, changes: Sequence[str]) -> list[str]:
    """Return lines about the checkpoint that a run resumes from, and what has changed since then."""
    return [f"would resume from step {step} of {num_updates}", *(f"changed: {change}" for change in changes)]


def checked_data(cfg: ExperimentConfig) -> tuple[list[str], int]:
    """Check a run on given data. Returns lines with its first examples, and the bytes of a checkpoint."""
    check_fit(cfg.train, None)
    data, held_out = examples_of(cfg)
    check_data(data, cfg.train)
    team = load_team(cfg)
    run, state = prepare(cfg.train.replace(progress=False), team, Task(None, data, held_out))
    algorithm, train = run.setup.algorithm, run.cfg
    texts = algorithm.row.data == "texts"
    kind = "text" if texts else "pair"
    items, first = run.task.items, run.task.items[:SHOWN]
    tokens = fit_rows(run.team, [*map(prompts_of, first)], encode_tokens(run.team, first, train), train.episodes).values()
    lines = [f"{plural(len(items), kind)} to train on, {len(run.task.held_out)} held out; {agents_line(run.team)}"]
    lines += [run.task.overlap] if run.task.overlap else []
    lines.append("trained tokens are in ⟦ ⟧, separated by |; " + LEGEND)
    weights = {1: algorithm.bc_weight, 2: algorithm.world_model_weight} if texts else {}
    for number, example in enumerate(tokens):
        for agent, part in enumerate(example):
            lines.append(f"--- {kind} {number}, agent {agent}: {len(part.prompt)} + {sum(map(len, part.rows))} tokens")
            lines += marked(team.agent_specs[agent].tokenizer, part, weights)
    if train.run.replay_rollout:
        read_failed_update(train)
    size = nbytes(to_checkpoint(state))
    if train.run.resume:
        state, changes = read_state(train, state, run.identity)
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
    contexts = sorted({spec.config.context for spec in team.stacks})
    return f"{plural(team.num_agents, 'agent')}, context of {' or '.join(map(str, contexts))} tokens"


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
