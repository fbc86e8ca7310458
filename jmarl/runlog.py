"""What a training run writes down about each step: one row of numbers, now and then texts and histograms.

A step's row is written one step late (`step` keeps it, the next call or `flush` writes it), so that the device works on
while the host logs. Its `time/step_s` is the time from the rewards of the step before to its own, between which lie an update
and a sampling. The first row has compiling in place of an update.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.batches import fetched
from jmarl.checkpoint import Checkpointer, CheckpointError
from jmarl.config import TrainConfig
from jmarl.evaluate import Evaluation, numbers
from jmarl.metrics import MetricsWriter, joint_actions_table, say
from jmarl.rollout import Rollout, Turn
from jmarl.team import Team, to_checkpoint, without_gradients
from jmarl.types import TRACES, TeamState


class TrainResult(NamedTuple):
    """What a run ends with. `agents_of(team, policies(result.state))` gives its agents as `load_agent` would, and
    `save_team(directory, team, policies(result.state))` writes them."""

    state: TeamState  # without gradients
    rewards: list[float]  # mean return of each update that this process made; with one turn the mean reward
    before: Evaluation | None  # on the held-out items before training; None when resumed or without such items
    after: Evaluation | None  # and after it

    def __repr__(self) -> str:  # without the weights and texts
        about = f"the last of {len(self.rewards)} with reward {self.rewards[-1]:.3f}" if self.rewards else "none of them now"
        held_out = [f"{of.mean:.3f}" if of else None for of in (self.before, self.after)]
        return f"TrainResult({int(self.state.step)} updates, {about}, held out {held_out[0]} -> {held_out[1]})"


Advanced = tuple[TeamState, Callable[[], None]]  # the state after an update, and what keeps it in the log


class StepLog:
    """Rows of steps, each written one step late, and checkpoints; without a writer (no output directory) nothing is written."""

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None):
        self.team, self.cfg, self.writer = team, cfg, writer
        self.failed_saves = 0
        self._pending: tuple | None = None
        self.traced = 0
        self._skipped: list[str] = []
        self._started = time.monotonic()

    def keep(self, *pending: Any) -> None:
        """Keep a step, of which the number is the first, to be written later."""
        self._pending, self.traced = pending, sum(TRACES.values())

    def _row(self, *pending: Any) -> dict[str, float]:
        """What is written of a step that was kept; waits for its update."""
        raise NotImplementedError

    def flush(self) -> dict[str, float] | None:
        """Write the step that is kept, and return its row; None if there is none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        row = self._row(*pending) | {"compiles": self.traced, "failed_saves": self.failed_saves}
        self._tell_skipped(pending[0], row)
        if self.writer is not None:
            self.writer.write(pending[0], row)
            self._more(*pending)
        return row

    def _tell_skipped(self, step: int, row: dict[str, float]) -> None:
        """Warn where an agent's loss or gradient is not finite for the first time."""
        new = [name for name, count in row.items() if name.endswith("skipped") and count and name not in self._skipped]
        if new:
            where = self.cfg.output_dir and f" in {self.cfg.output_dir}"
            what = f"update {step}{where}: a loss or gradient is not finite, so its step was left out"
            warnings.warn(f"{what} (in the log {', '.join(new)} counts such steps; this is told once)", stacklevel=3)
            self._skipped += new

    def _more(self, *pending: Any) -> None:
        """Texts and pictures of a step."""

    def save(self, saver: Checkpointer, step: int, state: Any, meta: dict, last: bool) -> None:
        """Checkpoint the state if it is due; a save that fails (a full disk, say) is counted, and training goes on."""
        calls: list[Callable[[], Any]] = [lambda: saver.save(step, state, meta, force=last)]
        if last or step % saver.every == 0:
            self.flush()  # first the row, then the checkpoint: a resumed run begins with the row after it
            calls.insert(0, saver.wait)  # an earlier save that failed is told of here, and does not cost this one
        for call in [*calls, saver.wait] if last else calls:
            try:
                call()
            except CheckpointError as error:
                self.failed_saves += 1
                warnings.warn(f"checkpoint not saved, training goes on: {error}", stacklevel=2)

    def evaluation(self, updates: int, result: Any, began: float) -> None:
        """Write an evaluation after so many updates, with the row of the last of them, which a resumed run keeps. The time
        since it began (by `time.monotonic`) does not count as training time."""
        raise NotImplementedError


def loop(
    state: TeamState,
    cfg: TrainConfig,
    log: StepLog,
    saver: Any,
    meta: Any,
    advance: Callable[[int, TeamState], Advanced],
    evaluate: Callable[[TeamState], Any] | None,
) -> tuple[TeamState, Any, Any]:
    """The loop from `state` on, of which each kind of run makes its own. saver, meta: what `log.save` takes; without a saver
    there are no checkpoints. advance: one update, and what keeps it in the log; evaluate: on what is held out, if anything is.
    Returns the state without gradients and the evaluations before training (None where it was resumed) and after it."""

    def evaluated(step: int) -> Any:
        due = cfg.eval_every and step % cfg.eval_every == 0
        if evaluate is None or not (due or step in (0, cfg.num_updates)):
            return None
        log.flush()  # the row before the evaluation's; waits for the update, which is training time
        began = time.monotonic()
        result = evaluate(state)
        log.evaluation(step, result, began)
        return result

    first, ready = int(state.step), True  # ready: no evaluation of the state is missing, which a resumed run would not make
    before = after = evaluated(0) if first == 0 else None
    try:
        for step in range(first, cfg.num_updates):
            state, keep = advance(step, state)
            keep()
            ready = False
            after = evaluated(step + 1) or after
            ready = True
            if saver:
                log.save(saver, step + 1, to_checkpoint(state), meta, last=step + 1 == cfg.num_updates)
    except BaseException:  # also Ctrl+C
        if saver and ready:
            save_broken(log, saver, state, meta, first)
        raise
    finally:  # of a run that breaks off, too, the last update is in the log
        log.flush()
    if first == cfg.num_updates:  # a finished run that was resumed
        after = evaluated(first)
    return without_gradients(state), before, after


def save_broken(log: StepLog, saver: Any, state: TeamState, meta: Any, first: int) -> None:
    """Keep what a run that breaks off has learned since its last checkpoint, unless it is in the middle of an update."""
    kept = to_checkpoint(state)
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(kept)):
        return
    try:
        made = int(state.step)
        if made > first:
            log.save(saver, made, kept, meta, last=True)
            if log.cfg.progress:
                say(f"broken off after update {made} in {log.cfg.output_dir}: resume goes on from there")
    except Exception as error:  # of what broke the run off, say: that is raised
        warnings.warn(f"the last updates of the run that broke off are not saved: {error!r}", stacklevel=3)


class RunLog(StepLog):
    """Logs of a run of rollouts; also keeps the mean rewards."""

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None):
        super().__init__(team, cfg, writer)
        self.rewards: list[float] = []
        self._about: dict[str, float] = {}

    def step(self, step: int, played: Rollout, learned: list[dict[str, jax.Array]], at: float) -> None:
        """Keep a step to be written later. learned: each stack's update metrics, still on the device; at: when it had its
        rewards, by `time.monotonic`."""
        self.flush()
        self.rewards.append(mean_return(played))
        self.keep(step, played, learned, at - self._started)
        self._started = at
        for turn in played.turns:
            if turn.fault:
                count = turn.rewards.shape[0] * turn.rewards.shape[1]
                message = f"update {step}: {turn.invalid} of {count} joint actions have no valid reward; {turn.fault}"
                warnings.warn(message, stacklevel=2)

    def about(self, more: dict[str, float]) -> None:
        """Keep more numbers for the row of the next step."""
        if more:
            self.flush()
            self._about = more
            self._started = time.monotonic()  # what was made is no part of the step

    def _row(self, step: int, played: Rollout, learned: list[dict[str, jax.Array]], seconds: float) -> dict[str, float]:
        row = rollout_metrics(self.team, played) | update_metrics(self.team, fetched(learned))
        more, self._about = self._about, {}
        return row | more | {"time/step_s": seconds, "tokens_per_s": row["tokens"] / seconds}

    def _more(self, step: int, played: Rollout, *_: Any) -> None:
        if step % self.cfg.log_every == 0:
            self._pictures(step, played)

    def evaluation(self, updates: int, result: Evaluation, began: float) -> None:
        step = max(updates - 1, 0)
        if self.writer is not None:
            self.writer.write(step, {"eval/updates": updates} | numbers(result))
            for name, turn in named_turns(result.rollout):
                self.writer.text(step, f"eval/{name}joint_actions", self._table(step, turn))
        self._started += time.monotonic() - began

    def _pictures(self, step: int, played: Rollout) -> None:
        assert self.writer is not None
        for name, turn in named_turns(played):
            self.writer.histogram(step, f"{name}reward", turn.rewards[np.isfinite(turn.rewards)])
            for agent, lengths in enumerate(token_counts(self.team, turn)):
                if turn.acts[agent].any():
                    self.writer.histogram(step, f"{name}agent_{agent}/length", lengths[turn.acts[agent]].ravel())
            self.writer.text(step, f"{name}joint_actions", self._table(step, turn))

    def _table(self, step: int, played: Turn) -> str:
        first = [next((p for p in read if p), "") for read in zip(*played.prompts, strict=True)]  # of an agent that acts
        prompts = [p for p in first for _ in played.joint]
        texts = [[row[g] for row in played.texts[n] for g in played.joint[:, n]] for n in range(self.team.num_agents)]
        rng = np.random.default_rng((self.cfg.seed, step))
        return joint_actions_table(prompts, texts, played.rewards.mean(-1).ravel().tolist(), 6, rng)


def named_turns(played: Rollout) -> list[tuple[str, Turn]]:
    """Turns and what their metrics' names begin with: nothing in runs of one turn."""
    return [(f"turn_{t}/" if played.num_turns > 1 else "", turn) for t, turn in enumerate(played.turns)]


def mean_return(played: Rollout) -> float:
    """Of the first turn's joint actions; with one turn the mean reward."""
    valid = played.joint_returns[0][np.isfinite(played.joint_returns[0])]
    return mean_of(valid)


def mean_of(x: np.ndarray) -> float:
    """The mean; NaN of nothing. numpy's own takes twice the time for the few numbers of a step."""
    return float(x.sum() / x.size) if x.size else float("nan")


def token_counts(team: Team, played: Turn) -> list[np.ndarray]:
    """Tokens of each completion [P, G], for every agent; 0 where it did not act."""
    counts: list[Any] = [None] * team.num_agents
    for spec, done in zip(team.stacks, played.completions, strict=True):
        lengths = np.asarray(done.action_mask).sum(-1)
        for agent, of_agent in zip(spec.order, lengths.reshape(len(spec.order), -1, lengths.shape[-1]), strict=True):
            counts[agent] = of_agent[: len(played.items)] * played.acts[agent][:, None]
    return counts


def rollout_metrics(team: Team, played: Rollout) -> dict[str, float]:
    """Of each turn; with several also the mean return, which then is `reward/mean`, and the joint actions made, `env_steps`."""
    row: dict[str, float] = {}
    for (name, turn), returns in zip(named_turns(played), played.returns, strict=True):
        row |= {name + key: float(x) for key, x in turn_metrics(team, turn, returns).items()}
    tokens = sum(row.pop(f"{name}tokens") for name, _ in named_turns(played))
    if played.num_turns > 1:
        row |= {"reward/mean": mean_return(played), "env_steps": float(sum(t.rewards[..., 0].size for t in played.turns))}
    return {**row, "tokens": tokens, **played.notes}


def turn_metrics(team: Team, played: Turn, credited: np.ndarray) -> dict[str, float]:
    """Rewards, their parts, lengths and the share of completions that ended by themselves; credited: returns [N, P, G]."""
    rewards = played.rewards.mean(-1)
    valid = rewards[np.isfinite(rewards)]
    row = {"reward/invalid": float(played.invalid)}
    if valid.size:
        row |= {"reward/mean": mean_of(valid), "reward/std": valid.std(), "reward/max": valid.max()}
    for name, values in played.parts.items():
        finite = values[np.isfinite(values)]
        row[f"reward/{name.strip('<>')}"] = mean_of(finite)
    counts = token_counts(team, played)
    for spec, done in zip(team.stacks, played.completions, strict=True):
        ended = np.asarray(done.ended).reshape(len(spec.order), -1, done.ended.shape[-1])
        for i, agent in enumerate(spec.order):
            acts = played.acts[agent]
            if not acts.any():
                continue
            row[f"agent_{agent}/length"] = mean_of(counts[agent][acts])
            row[f"agent_{agent}/ended"] = mean_of(ended[i, : len(played.items)][acts])
            returns = credited[agent][np.isfinite(credited[agent])]
            row[f"agent_{agent}/return"] = mean_of(returns)
    row["tokens"] = sum(c.sum() for c in counts)
    return row


def update_metrics(team: Team, learned: list[dict[str, Any]]) -> dict[str, float]:
    """Each agent's loss, gradient norm and so on (roles of shared weights have the same), and behind the stacks' a central
    critic's."""
    row = {}
    for spec, metrics in zip(team.stacks, learned, strict=False):
        for a, roles in enumerate(spec.members):
            if "held" in metrics and metrics["held"][a]:  # it made no update to tell of
                row |= {f"agent_{agent}/held": 1.0 for agent in roles}
                continue
            row |= {f"agent_{agent}/{name}": float(values[a]) for agent in roles for name, values in metrics.items()}
    for metrics in learned[len(team.stacks) :]:
        row |= {f"critic/{name}": float(values[0]) for name, values in metrics.items()}
    return row
