"""What a training run writes down about each step: one row of numbers, now and then texts and histograms.

A step's row is written one step late (`step` keeps it, the next call or `flush` writes it), so that the device works on
while the host logs. Its `time/step_s` is the time from the rewards of the step before to its own, between which lie an update
and a sampling. The first row has compiling in place of an update.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.config import TrainConfig
from jmarl.evaluation.evaluate import Evaluation, numbers
from jmarl.models.hub.agents import Agent
from jmarl.models.stack import fetched
from jmarl.rollout.play import Rollout, Turn
from jmarl.team import Team, agents_of, policies, save_team
from jmarl.training.files.failed_update import FailedUpdate, NonFiniteError, write_failed_update
from jmarl.training.logs.metrics_writer import MetricsWriter
from jmarl.training.logs.tables import joint_actions_table
from jmarl.types import TRACES, TeamState


class TrainResult(NamedTuple):
    """The result of a run. `save` writes its agents, `agents` returns them as `load_agent` would."""

    team: Team
    state: TeamState  # without gradients
    rewards: list[float]  # mean return of each update that this process made; with one turn the mean reward
    before: Evaluation | None  # on the held-out items before training; None when resumed or without such items
    after: Evaluation | None  # and after it
    interrupted: bool = False  # by Ctrl+C or SIGTERM before the last update; what was learned is in the state
    unsaved: str = ""  # why the last checkpoint or the models could not be written; empty: they were, or none were wanted

    @property
    def agents(self) -> list[Agent]:
        """The trained agents, on the host; adapters are merged."""
        return agents_of(self.team, policies(self.state))

    def save(self, directory: str | Path) -> None:
        """Write the trained agents as Hugging Face directories `agent_0/`, `agent_1/`, ..."""
        save_team(directory, self.team, policies(self.state))

    def __repr__(self) -> str:  # without the weights and texts
        about = f"the last of {len(self.rewards)} with reward {self.rewards[-1]:.3f}" if self.rewards else "none of them now"
        held_out = [f"{of.mean:.3f}" if of else None for of in (self.before, self.after)]
        stopped = ", interrupted" * self.interrupted
        return f"TrainResult({int(self.state.step)} updates, {about}, held out {held_out[0]} -> {held_out[1]}{stopped})"


class StepLog:
    """Rows of steps, each written one step late; without a writer (no output directory) nothing is written."""

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None):
        self.team, self.cfg, self.writer = team, cfg, writer
        self.failed_saves = 0
        self._waiting: list[tuple[int, tuple]] = []  # steps whose rows are to be written, each with the programs traced so far
        self.last_step: int | None = None  # of the newest row that this process has written
        self._skipped: dict[str, float] = {}  # of each agent and critic the steps left out so far, as the last row has them
        self._told: set[str] = set()
        self._not_finite = 0  # updates in a row
        self._failed: tuple = ()  # the last of them
        self._why = ""
        self._started = time.monotonic()

    @property
    def waiting_step(self) -> int | None:
        """The newest step whose row is still to be written."""
        return self._waiting[-1][1][0] if self._waiting else None

    def keep(self, *about: Any, traced: int | None = None) -> None:
        """Keep a step, of which the number is the first, and write the one before. traced: programs so far, None: as known."""
        self._waiting.append((sum(TRACES.values()) if traced is None else traced, about))
        self.flush(leave=1)

    def _row(self, *about: Any) -> dict[str, float]:
        """What is written of a step that was kept; waits for its update."""
        raise NotImplementedError

    def flush(self, leave: int = 0) -> dict[str, float] | None:
        """Write the steps that are kept, but for the newest `leave`, and return the last row; None if there is none. What
        interrupts it loses no row: the next call writes it."""
        row = None
        while len(self._waiting) > leave:
            traced, about = self._waiting[0]
            row = self._write(traced, *about)
            self.last_step = about[0]
            self._waiting.pop(0)
            self._written(row, *about)
        return row

    def _write(self, traced: int, *about: Any) -> dict[str, float]:
        row = self._row(*about) | {"compiles": traced, "failed_saves": self.failed_saves}
        if self.writer is not None:
            self.writer.write(about[0], row)
        return row

    def _written(self, row: dict[str, float], *about: Any) -> None:
        """What follows a row: texts and pictures, and a look at whether all is finite."""
        if self.writer is not None:
            self._more(*about)
        self._count_not_finite(row, *about)

    def _count_not_finite(self, row: dict[str, float], step: int, *pending: Any) -> None:
        """Count updates in a row in which a loss or gradient was not finite, or nothing was there to learn from; warn of the
        first of each agent."""
        counts = {name: count for name, count in row.items() if name.endswith("skipped")}
        before = {name: self._skipped.get(name, 0 if step == 0 else count) for name, count in counts.items()}
        new = [name for name, count in counts.items() if count > before[name]]
        self._skipped |= counts
        untold = [name for name in new if name not in self._told]
        if untold:
            where = self.cfg.run.output_dir and f" in {self.cfg.run.output_dir}"
            what = f"update {step}{where}: a loss or gradient is not finite, so its step was left out"
            warnings.warn(f"{what} (in the log {', '.join(untold)} counts such steps; this is told once)", stacklevel=4)
            self._told |= set(untold)
        self._why = f"a loss or gradient was not finite ({', '.join(new)})" if new else self._nothing_valid(*pending)
        self._not_finite = self._not_finite + 1 if self._why else 0
        self._failed = (step, *pending) if self._why else ()

    def _nothing_valid(self, *pending: Any) -> str:
        """Why an update had nothing to learn from; empty: it had."""
        return ""

    def _learned_from(self, *pending: Any) -> tuple[Any, dict[str, Any]]:
        """What the update of a step that was kept learned from, and what a person reads of it."""
        raise NotImplementedError

    def stop_if_not_finite(self) -> None:
        """Raise `NonFiniteError` after too many updates in a row that were not finite, and write the last of them to a file."""
        limit, cfg = self.cfg.run.stop_after_nonfinite, self.cfg
        if not limit or self._not_finite < limit:
            return
        step, where = self._failed[0], ""
        if cfg.run.output_dir:
            data, about = self._learned_from(*self._failed)
            failed = FailedUpdate(step, cfg.run.seed, cfg.algorithm, data, self._why)
            try:
                path = write_failed_update(failed, about, cfg.run.output_dir)
                where = f" What it learned from is in {path}; --replay-rollout {path} makes that update alone."
            except Exception as error:  # a full disk, items that cannot be pickled: told, and no reason to hide why it stops
                where = f" What it learned from could not be written: {error!r}."
        raise NonFiniteError(
            f"stopped at step {step} of the run in {cfg.run.output_dir or 'memory'}: in the last {self._not_finite} updates "
            f"{self._why}. Optimizer steps with such numbers were left out.{where} stop_after_nonfinite={limit} sets when"
        )

    def _more(self, *pending: Any) -> None:
        """Texts and pictures of a step."""

    def sync(self) -> None:
        """Put the rows on the disk, before a checkpoint that is ahead of them otherwise after a power cut."""
        if self.writer is not None:
            self.writer.sync()

    def was_evaluated(self, updates: int) -> bool:
        """Whether the log of a run that goes on has the evaluation after so many updates."""
        return self.writer is not None and updates in self.writer.evaluated

    def evaluation(self, updates: int, result: Any, began: float) -> None:
        """Write an evaluation after so many updates, with the row of the last of them, which a resumed run keeps. The time
        since it began (by `time.monotonic`) does not count as training time."""
        raise NotImplementedError


class RunLog(StepLog):
    """Logs of a run of rollouts; also keeps the mean rewards."""

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None):
        super().__init__(team, cfg, writer)
        self.rewards: list[float] = []
        self._about: dict[str, float] = {}  # for the row of the next step

    def step(
        self,
        step: int,
        played: Rollout,
        learned: list[dict[str, jax.Array]],
        at: float,
        tasks: Sequence[dict] = (),
        traced: int | None = None,
    ) -> None:
        """Keep a step to be written later. learned: each stack's update metrics, still on the device; at: when it had its
        rewards, by `time.monotonic`; tasks: that were played."""
        self.rewards.append(mean_return(played))
        more, self._about = self._about, {}
        self.keep(step, played, learned, at - self._started, tasks, more, traced=traced)
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

    def _row(
        self, step: int, played: Rollout, learned: list, seconds: float, tasks: Sequence[dict], more: dict[str, float]
    ) -> dict[str, float]:
        row = rollout_metrics(self.team, played) | update_metrics(self.team, fetched(learned))
        return row | more | {"time/step_s": seconds, "tokens_per_s": row["tokens"] / seconds}

    def _nothing_valid(self, played: Rollout, *_: Any) -> str:
        if np.isfinite(played.joint_returns[0]).any():
            return ""
        return f"no joint action had a valid reward ({next((turn.fault for turn in played.turns if turn.fault), '')})"

    def _learned_from(self, step: int, played: Rollout, learned: Any, seconds: float, tasks: Sequence[dict], *_: Any) -> tuple:
        turns = [
            {"prompts": turn.prompts, "completions": turn.texts, "rewards": repr(turn.rewards.tolist()), "fault": turn.fault}
            for turn in played.turns
        ]
        return played, {"items": list(tasks), "turns": turns}

    def _more(self, step: int, played: Rollout, *_: Any) -> None:
        if step % self.cfg.run.log_every == 0:
            self._pictures(step, played)

    def evaluation(self, updates: int, result: Evaluation, began: float) -> None:
        step = max(updates - 1, 0)
        if self.writer is not None and not self.was_evaluated(updates):
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
        rng = np.random.default_rng((self.cfg.run.seed, step))
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
        row[f"reward/{name}"] = mean_of(finite)
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
