"""What a run finds in its output directory: the checkpoint to go on from, or an earlier run to leave whole."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jmarl.config import CHANGES, SECTIONS, TrainConfig, flat
from jmarl.team import base_digests, to_checkpoint
from jmarl.training.files.checkpoint import META, Checkpointer, saved_steps
from jmarl.training.files.fingerprint import difference
from jmarl.training.files.lock import check_unlocked, locked
from jmarl.training.logs.metrics_writer import MetricsWriter, say
from jmarl.types import TeamState

logger = logging.getLogger(__name__)

# Fields that a resumed run may set anew; any other difference is an error.
MAY_CHANGE = frozenset(
    [
        "resume",
        "strict_checkpoints",
        "allow_changed",
        "num_updates",
        "learning_rate",
        "critic_learning_rate",
        "save_every",
        "save_minutes",
        "save_total_limit",
        "stop_after_nonfinite",
        "replay_rollout",
        "log_every",
        "eval_every",
        "eval_generations",
        "eval_temperature",
        "save_models",
        "overlap_rewards",
        "mesh",  # weights lie elsewhere, and are the same
        "held_out",  # of experiments that evaluate
        "output_dir",
        "progress",
    ]
)


class CannotGoOn(ValueError):
    """A run cannot be resumed as it was asked for, or begun anew where another one is."""


def checkpoints_of(cfg: TrainConfig) -> Path:
    return Path(cfg.run.output_dir) / "checkpoints"


def check_directory(cfg: TrainConfig) -> None:
    """Refuse a directory that another run writes to, to resume where nothing is saved, and to start anew where a run has not
    ended, which the next resume would take for this run. Reads only."""
    if not cfg.run.output_dir or cfg.run.replay_rollout:
        return
    check_unlocked(cfg.run.output_dir)
    check_contents(cfg)


def check_contents(cfg: TrainConfig) -> None:
    """As `check_directory`, of what lies in the directory."""
    where = checkpoints_of(cfg)
    last = max(saved_steps(where), default=None)
    if cfg.run.resume:
        if last is None:
            raise CannotGoOn(
                f"there is nothing to resume: no complete checkpoint in {where}. Check output_dir, or start without resume"
            )
        if cfg.run.num_updates < last:
            raise CannotGoOn(
                f"num_updates={cfg.run.num_updates} is not allowed: the run in {cfg.run.output_dir} has made {last} already"
            )
    elif last is not None and not is_finished(where, last):
        raise CannotGoOn(
            f"output_dir={cfg.run.output_dir!r} already holds checkpoints up to step {last} of a run that has not ended: "
            "go on there with resume, or choose another output_dir"
        )


def is_finished(checkpoints: Path, step: int) -> bool:
    """Whether a run had no update left to make at a step."""
    try:
        content = json.loads((checkpoints / str(step) / META).read_text(encoding="utf-8"))
        return step >= content["meta"]["config"]["num_updates"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: it may go on from the one before
        return False


def set_aside(directory: str) -> None:
    """Move what an earlier run wrote there (metrics, TensorBoard events, checkpoints, models, pairs, reward models) into its
    folder `earlier_1`, `earlier_2`, …"""
    root = Path(directory)
    names = ("checkpoints", "metrics.jsonl", "events*", "models", "pairs", "history", "reward_model*", "failed_update*")
    found = [path for name in names for path in sorted(root.glob(name))]
    if not found:
        return
    target = next(root / f"earlier_{n}" for n in itertools.count(1) if not (root / f"earlier_{n}").exists())
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    logger.warning("%s held an earlier run; its metrics, checkpoints and models are now in %s", directory, target)


@dataclasses.dataclass
class OpenRun:
    """A run that was opened: what it begins with and writes to."""

    state: TeamState
    meta: dict[str, Any]  # what its checkpoints say beside the state
    saver: Checkpointer | None = None  # None: no checkpoints are made
    writer: MetricsWriter | None = None  # None: nothing is written

    @property
    def savers(self) -> list[tuple[Checkpointer, dict[str, Any]]]:
        return [] if self.saver is None else [(self.saver, self.meta)]


@contextlib.contextmanager
def open_run(
    cfg: TrainConfig, state: TeamState, about: dict[str, Any], wandb_config: dict | None, step: int | None = None
) -> Iterator[OpenRun]:
    """Lock the directory of a run and open what it begins with and writes to: its state (where it resumes, that of the newest
    checkpoint that is whole), checkpoints and logs. All are closed with it. about: team, critics, environment, data and reward,
    which must not change where a run goes on; step: of the checkpoint to resume, if not the newest."""
    run = OpenRun(state, {"config": flat(cfg), **about})
    with contextlib.ExitStack() as opened:
        if cfg.run.output_dir:
            opened.enter_context(locked(cfg.run.output_dir))
            check_contents(cfg)  # once more, now that nobody else can change it
        if cfg.run.saves or cfg.run.resume:
            run.meta["bases"] = base_digests(state)
        if cfg.run.resume:
            run.state = resume(cfg, state, run.meta, step)
        elif cfg.run.output_dir:
            set_aside(cfg.run.output_dir)
        if cfg.run.saves:
            run.saver = opened.enter_context(Checkpointer(checkpoints_of(cfg), cfg.run.save_total_limit))
        if cfg.run.output_dir:
            how: dict[str, Any] = dict(
                total_steps=cfg.run.num_updates, start_step=int(run.state.step), progress=cfg.run.progress
            )
            hparams = run.meta["config"] | {"environment": run.meta.get("environment", {})}
            run.writer = opened.enter_context(MetricsWriter(cfg.run.output_dir, hparams, wandb_config=wandb_config, **how))
        yield run


def resume(cfg: TrainConfig, state: TeamState, meta: dict, step: int | None = None, *, read_only: bool = False) -> TeamState:
    """The checkpoint of a step (None: the newest that is whole), on the devices and in the shapes of `state`, whose arrays are
    freed; refused where it was made by another run. Checkpoints of later steps are set aside, unless it is read_only."""
    with Checkpointer(checkpoints_of(cfg), cfg.run.save_total_limit, read_only=read_only) as saved:
        if step is None and (step := saved.newest_intact(cfg.run.strict_checkpoints)) is None:
            raise CannotGoOn(f"there is nothing to resume: all checkpoints in {saved.directory} are damaged")
        old, step = saved.read_meta(step)
        changed = refuse_changes(cfg, old, meta, step)
        replaced = to_checkpoint(state)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None), replaced
        )
        for leaf in jax.tree.leaves(replaced):  # makes room: two states at once may not fit
            leaf.delete()
        restored = saved.restore(like, step)[0]
        for later in [
            s for s in saved.steps() if s > step and not read_only
        ]:  # of several seeds that go on from the step that all have
            saved.set_aside(later, "later")
    if cfg.run.progress:
        told = "".join(f", {text}" for name, text in changed.items() if name != "resume")
        say(f"resuming {cfg.run.output_dir} from step {step} of {cfg.run.num_updates}{told}")
    pairs = ((restored.stacks, state.stacks), (restored.critics, state.critics))
    stacks, critics = (
        tuple(new._replace(grads=old.grads, base=old.base) for new, old in zip(*pair, strict=True)) for pair in pairs
    )
    return restored._replace(stacks=stacks, critics=critics)


def refuse_changes(cfg: TrainConfig, old: dict, meta: dict, step: int) -> dict[str, str]:
    """Refuse to go on from a checkpoint of another run; old: what it says, meta: what this one would. Returns the settings that
    have changed and may."""
    new = json.loads(json.dumps(meta["config"]))  # as the other one was saved, tuples as lists
    # A checkpoint of an older version has fewer settings.
    defaults = flat(TrainConfig()) | {f.name: f.default for f in dataclasses.fields(cfg) if f.name not in SECTIONS}
    was = json.loads(json.dumps({k: x for k, x in defaults.items() if x is not dataclasses.MISSING})) | old["config"]
    changed = {k: f"{k}: {was.get(k)!r} -> {new[k]!r}" for k in new if was.get(k) != new[k]}
    differs = [text for name, text in changed.items() if name not in MAY_CHANGE]
    if old["team"] != meta["team"]:
        differs.append("team: other models, tokenizers or roles")
    if old.get("critics", []) != meta["critics"]:
        differs.append("critics: other models or tokenizers")
    if old.get("environment", meta.get("environment")) != meta.get("environment"):
        differs.append(f"environment: {old['environment']} -> {meta.get('environment')}")
    if old.get("bases", []) != meta["bases"]:
        differs.append("bases: LoRA's frozen weights are others than those that the adapters were trained on")
    if old.get("initial", meta.get("initial")) != meta.get("initial"):
        differs.append("initial: other weights before training, of which the reference is made")
    allowed = {name: difference(name, old.get(name, meta.get(name, {})), meta.get(name, {})) for name in CHANGES}
    refused = [name for name, text in allowed.items() if text and name not in cfg.run.allowed_changes]
    differs += [allowed[name] for name in refused]
    if differs:
        what = "".join(f"\n  {d}" for d in differs)
        hint = f"\nallow_changed={','.join(refused)} goes on with the new {' and '.join(refused)}" if refused else ""
        raise CannotGoOn(f"cannot resume from step {step} in {cfg.run.output_dir}: it was made with other settings{what}{hint}")
    return changed | {name: text for name, text in allowed.items() if text}
