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

from jmarl.checkpoint import Checkpointer
from jmarl.config import TrainConfig
from jmarl.metrics import MetricsWriter, say
from jmarl.team import bases, to_checkpoint
from jmarl.types import TeamState

logger = logging.getLogger(__name__)

# Fields that a resumed run may set anew; any other difference is an error.
MAY_CHANGE = frozenset(
    [
        "resume",
        "num_updates",
        "learning_rate",
        "critic_learning_rate",
        "save_every",
        "save_total_limit",
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


def checkpoints_of(cfg: TrainConfig) -> Path:
    return Path(cfg.output_dir) / "checkpoints"


def check_directory(cfg: TrainConfig) -> None:
    """Refuse to resume where nothing is saved, and to start anew where checkpoints are, which the next resume would take for
    this run's. Reads only."""
    if not cfg.output_dir:
        return
    where, last = checkpoints_of(cfg), None
    if where.is_dir():
        with Checkpointer(where, read_only=True) as saved:
            last = saved.latest_step()
    if cfg.resume:
        if last is None:
            raise ValueError(
                f"there is nothing to resume: no complete checkpoint in {where}. Runs make them with save_every; check "
                "output_dir, or start without resume"
            )
        if cfg.num_updates < last:
            raise ValueError(
                f"num_updates={cfg.num_updates} is not allowed: the run in {cfg.output_dir} has made {last} already"
            )
    elif last is not None:
        raise ValueError(
            f"output_dir={cfg.output_dir!r} already holds checkpoints up to step {last}: "
            "go on there with resume, or choose another output_dir"
        )


def set_aside(directory: str) -> None:
    """Move what an earlier run wrote there (metrics, TensorBoard events, models, pairs, reward models) into its folder
    `earlier_1`, `earlier_2`, …"""
    root = Path(directory)
    names = ("metrics.jsonl", "events*", "models", "pairs", "history", "reward_model*")
    found = [path for name in names for path in sorted(root.glob(name))]
    if not found:
        return
    target = next(root / f"earlier_{n}" for n in itertools.count(1) if not (root / f"earlier_{n}").exists())
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    logger.warning("%s held an earlier run; its metrics and models are now in %s", directory, target)


@contextlib.contextmanager
def open_run(
    cfg: TrainConfig, state: TeamState, about: dict[str, Any], wandb_config: dict | None, step: int | None = None
) -> Iterator[tuple[TeamState, Checkpointer | None, dict[str, Any], MetricsWriter | None]]:
    """What a run begins with: the state (where it resumes, the newest checkpoint's), its checkpoints, what each says beside the
    state, and its logs; None where it keeps none. Checkpoints and logs are closed with it. about: team, critics and
    environment, which must not change where a run goes on; step: of the checkpoint to resume, if not the newest."""
    meta = {"config": dataclasses.asdict(cfg), **about}
    with contextlib.ExitStack() as opened:
        saver = writer = None
        if cfg.save_every:
            saver = opened.enter_context(Checkpointer(checkpoints_of(cfg), cfg.save_every, cfg.save_total_limit))
        if saver or cfg.resume:
            meta["bases"] = bases(state)
        if cfg.resume:
            state = resume(cfg, state, meta, step)
        elif cfg.output_dir:
            set_aside(cfg.output_dir)
        if cfg.output_dir:
            how: dict[str, Any] = dict(total_steps=cfg.num_updates, start_step=int(state.step), progress=cfg.progress)
            hparams = meta["config"] | {"environment": meta.get("environment", {})}
            writer = opened.enter_context(MetricsWriter(cfg.output_dir, hparams, wandb_config=wandb_config, **how))
        yield state, saver, meta, writer


def resume(cfg: TrainConfig, state: TeamState, meta: dict, step: int | None = None) -> TeamState:
    """The checkpoint of a step (None: the newest), on the devices and in the shapes of `state`, whose arrays are freed; refused
    where it was made by another run."""
    with Checkpointer(checkpoints_of(cfg), read_only=True) as saved:
        old, step = saved.read_meta(step)
        new = json.loads(json.dumps(meta["config"]))  # as the other one was saved, tuples as lists
        defaults = {f.name: f.default for f in dataclasses.fields(cfg) if f.name not in old["config"]}  # it may be older
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
        if differs:
            what = "".join(f"\n  {d}" for d in differs)
            raise ValueError(f"cannot resume from step {step} in {cfg.output_dir}: it was made with other settings{what}")
        replaced = to_checkpoint(state)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None), replaced
        )
        for leaf in jax.tree.leaves(replaced):  # makes room: two states at once may not fit
            leaf.delete()
        restored = saved.restore(like, step)[0]
    if cfg.progress:
        told = "".join(f", {text}" for name, text in changed.items() if name != "resume")
        say(f"resuming {cfg.output_dir} from step {step} of {cfg.num_updates}{told}")
    pairs = ((restored.stacks, state.stacks), (restored.critics, state.critics))
    stacks, critics = (
        tuple(new._replace(grads=old.grads, base=old.base) for new, old in zip(*pair, strict=True)) for pair in pairs
    )
    return restored._replace(stacks=stacks, critics=critics)
