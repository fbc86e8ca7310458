"""What `jmarl train --dry-run` shows: everything that a run checks before its first step, the settings that differ from the
defaults, prompts and data, and an episode of the first task: what the agents write, what reward and environment return, and
what the agents read next. Of a run that resumes it reads the checkpoint, so what the run would refuse is refused.

All is checked before anything is shown, so that an error, also one of a reward, stands alone. It loads the models and prepares
the initial state, which takes as long and as much memory as the start of the run, and plays whole episodes of two tasks with
short completions, two of each. Left out: compiling the programs of the run, and counterfactual replay.

Exit codes: 0 where all checks passed, 2 for settings and files that are wrong, 1 where what is prepared and played fails
(`CheckFailed`): a context that is too short, a reward without numbers, an output directory that cannot be made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jmarl.cli.main import USER_ERRORS, CheckFailed, check_output, plural, sentence_of, to_stderr
from jmarl.cli.play import WIDTH, reward_lines
from jmarl.cli.sweep import Point
from jmarl.config import ExperimentConfig
from jmarl.config.yaml_file import dump_yaml
from jmarl.envs.base import close, describe
from jmarl.envs.calls.copies import copies
from jmarl.files.run_directory import read_state, resolve_resume
from jmarl.files.saved_arrays import nbytes
from jmarl.files.saving import line_of_sizes
from jmarl.learning.setup import Setup
from jmarl.logs.failed_update import read_failed_update
from jmarl.logs.samples import block
from jmarl.models.hub.special_tokens import special_tokens
from jmarl.models.hub.tokenize import decode, encode_prompts
from jmarl.preferences import fit_rows, prompts_of
from jmarl.randomness import TRAIN, Randomness
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.runs.checks import check_data, check_fit, check_seeds, check_settings
from jmarl.runs.experiment import examples_of, learns_from_completions, task_of, team_of
from jmarl.runs.kinds.given import AgentTokens, encode_tokens
from jmarl.runs.kinds.rollouts import sampler_of
from jmarl.runs.kinds.seeds import several
from jmarl.runs.prepare import prepare
from jmarl.runs.run import PreparedRun, Task
from jmarl.runs.seeds_files import common_step
from jmarl.sampling.generate import NO_LIMIT, SampleRequest
from jmarl.team import Team, to_agents, to_checkpoint
from jmarl.types import TeamState

SHOWN = 3  # prompts and examples
PLAYED = 2  # tasks, and completions of each agent for each of them
FIRST_TOKENS = 64  # largest number of tokens of the completions that are rewarded
SETTINGS = "# settings that differ from the defaults; `jmarl configs settings` and the config.yaml of the run have all of them"
LEGEND = "special tokens are in ⟨ ⟩; everything else is text, whatever it spells"


def checked_run(cfg: ExperimentConfig) -> list[str]:
    """Check a run and return what it would do, as lines. Raises what the run would raise before its first step."""
    cfg = cfg.with_seeds()
    cfg = cfg.replace(resume=resolve_resume(cfg.train, cfg.seeds).run.resume)
    lines, size = checked_prompts(cfg) if learns_from_completions(cfg) else checked_data(cfg)
    end = "dry run: all checks passed, nothing was trained or written"
    with failing():
        room = disk_line(cfg, size)
    return [
        SETTINGS,
        dump_yaml(cfg.changed_dict()),
        *lines,
        room,
        f"{end}; the run would write to {cfg.train.run.output_dir}",
    ]


def checked_sweep(points: Sequence[Point]) -> list[str]:
    """Check all runs of a sweep. Returns lines with the settings of the first one, and the directories of all."""
    one_of_each = {point.label: point for point in reversed(points)}  # the first seed of each combination
    *_, first = [checked_run(point.cfg) for point in one_of_each.values()]
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
    with failing():
        run, state = prepare(quiet, team, task, kind=several(cfg.seeds) if cfg.seeds else None)
        states, cfgs = (state, [*map(run.cfg.for_seed, cfg.seeds)]) if cfg.seeds else ([state], [run.cfg])
        task, lines = run.task, prompt_lines(team, run)
    if cfg.train.run.replay_rollout:
        read_failed_update(cfg.train)
    resumed: list[str] = []
    if cfg.train.run.resume:
        step = common_step(cfgs) if cfg.seeds else None
        read = [read_state(run_cfg, state, run.identity, step) for run_cfg, state in zip(cfgs, states, strict=True)]
        states = [state for state, _ in read]
        resumed = resume_lines(int(states[0].step), cfg.train.run.num_updates, read[0][1])
    to_stderr("checking: playing episodes of two tasks; they wait for the compiler")
    with failing():
        lines += episodes_of(run.setup, states[0], task.items, task.env)
    close(task.env)
    return lines + resumed, nbytes(to_checkpoint(states[0]))


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Raise `CheckFailed` in place of an error that the command line takes for wrong settings."""
    try:
        yield
    except USER_ERRORS as error:
        raise CheckFailed(sentence_of(error, verbose=True)) from error


def prompt_lines(team: Team, run: PreparedRun) -> list[str]:
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


def episodes_of(setup: Setup, state: TeamState, items: Sequence[dict], env: Any) -> list[str]:
    """Play whole episodes of two items as the run does, but for short completions. Returns lines with the first episode: the
    completions, what reward and environment return, and what the agents read next.

    Raises what the reward or the environment raises, and ValueError where the run would go on without learning from a joint
    action, or would find a context too short."""
    team, cfg = setup.team, setup.cfg
    tokens = min(FIRST_TOKENS, cfg.sampling.max_new_tokens)
    short = dict(max_new_tokens=tokens, min_new_tokens=min(tokens, cfg.sampling.min_new_tokens))
    sampler, episodes = sampler_of(setup, state), dataclasses.replace(cfg.eval_episodes(), early_termination_threshold=None)

    def sample(request: SampleRequest) -> Any:
        return sampler(request._replace(settings=dataclasses.replace(request.settings, **short)))

    tasks = [*items[:PLAYED]] * PLAYED
    randomness = Randomness(cfg.run.seed, 0)
    rollout = play(sample, team, tasks[:PLAYED], env, cfg.sampling, episodes, PLAYED, randomness)
    check_numbers(rollout)
    if episodes.history == "append" and episodes.long_prompts == "error":
        check_history(team, rollout, cfg.sampling.max_new_tokens, cfg.sampling.max_new_tokens - tokens)
    text = f"completions of up to {plural(tokens, 'token')}, sampled by the models as they are now"
    roles = agent_labels(team.num_agents, getattr(env, "roles", ()))
    return [f"--- task 0, an episode: {text}", *episode_lines(rollout, roles), *equal_lines(rollout)]


def check_numbers(rollout: Rollout) -> None:
    """Raise ValueError if a joint action has no reward."""
    for t, turn in enumerate(rollout.turns):
        if turn.invalid:
            count = turn.rewards[..., 0].size
            raise ValueError(
                f"{turn.fault}; {turn.invalid} of {plural(count, 'joint action')} of turn {t} have no reward, and a run "
                "learns nothing from those: return a number for each (of several functions one may return None)"
            )


def check_history(team: Team, rollout: Rollout, max_new_tokens: int, cut: int) -> None:
    """Raise ValueError if conversations fill a context when completions that were cut here are as long as the run allows.

    cut: tokens that such a completion lacks."""
    contexts = np.array([[spec.config.context] for spec in team.agent_specs])
    missing = np.zeros((team.num_agents, len(rollout.turns[0].items)), int)  # [N, P]
    for t, turn in enumerate(rollout.turns):
        arrays = [length for _, length in turn.encoded], [completion.ended for completion in turn.completions]
        lengths, ended = (np.array(to_agents(team, x))[:, : len(turn.items)] for x in arrays)  # [N, P], [N, P, G]
        missing = missing[:, turn.parents]
        lengths = lengths + missing
        if (lengths + max_new_tokens > contexts).any():
            raise ValueError(
                f"in turn {t} the conversation may have {lengths.max()} tokens, with max_new_tokens={max_new_tokens} that "
                f"is {lengths.max() + max_new_tokens}, and the context is {contexts.min()}: set "
                "long_prompts='truncate_left' or 'drop', lower max_new_tokens or num_turns, or set history='none'"
            )
        missing = (missing[..., None] + cut * ~ended).reshape(team.num_agents, -1)  # aligned: G are the joint actions


def agent_labels(num_agents: int, roles: Sequence[str]) -> tuple[str, ...]:
    """Return what lines call the agents. roles: of their environment, if it has several."""
    named = num_agents > 1 and len(roles) == num_agents
    return tuple(f"agent {agent}" + (f" ({roles[agent]})" if named else "") for agent in range(num_agents))


def episode_lines(rollout: Rollout, roles: tuple[str, ...]) -> list[str]:
    """Return the first episode as lines, and which agents did not act in any episode."""
    lines: list[str] = []
    for t, turn in enumerate(rollout.turns):
        if t and turn.parents[0]:
            break  # the first episode ended before
        acting = [agent for agent in range(len(roles)) if turn.acts[agent, 0]]
        for agent in acting if t else ():
            lines += [f"{roles[agent]} reads next:", *block(turn.prompts[agent][0], WIDTH)]
        for agent in acting:
            lines += [f"{roles[agent]} writes:", *block(turn.texts[agent][0][0], WIDTH)]
        lines += reward_lines(turn, roles, WIDTH)
    idle = [role for n, role in enumerate(roles) if not any(turn.acts[n].any() for turn in rollout.turns)]
    lines += ["the episode is over"] if rollout.num_turns > 1 else []
    return lines + [f"{role} did not act in any of the episodes that were played" for role in idle]


def equal_lines(rollout: Rollout) -> list[str]:
    """Return a line if all episodes have the same return."""
    returns = rollout.joint_returns[0]
    if (returns != returns.flat[0]).any():
        return []
    return [
        f"all {returns[..., 0].size} episodes have the return {returns.flat[0]:.4g}: a team learns from returns that differ"
    ]


def resume_lines(step: int, num_updates: int, changes: Sequence[str]) -> list[str]:
    """Return lines about the checkpoint that a run resumes from, and what has changed since then."""
    return [f"would resume from step {step} of {num_updates}", *(f"changed: {change}" for change in changes)]


def checked_data(cfg: ExperimentConfig) -> tuple[list[str], int]:
    """Check a run on given data. Returns lines with its first examples, and the bytes of a checkpoint."""
    check_fit(cfg.train, None)
    data, held_out = examples_of(cfg)
    check_data(data, cfg.train)
    team = load_team(cfg)
    with failing():
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
    """Return a line about the room for checkpoints. Raises ValueError if two do not fit, or if there can be no directory."""
    run, count = cfg.train.run, max(len(cfg.seeds), 1)
    existing = check_output(run.output_dir)
    free = shutil.disk_usage(existing).free
    unit, name = (2**30, "GiB") if size * count >= 2**30 else (2**20, "MiB")
    text = f"a checkpoint takes {size * count / unit:.3g} {name}, {free / 2**30:.3g} GiB are free in {existing}"
    if run.saves and free < 2 * size * count:
        raise ValueError(f"{text}: two of them do not fit; free some space, choose another --output, or set save_every=0")
    return f"{text}; {line_of_sizes(run, size * count)}" if run.keep_every else text
