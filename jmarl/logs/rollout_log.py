"""Write rows, texts and histograms of runs on rollouts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.columns import MEASURES, REWARD, own_columns
from jmarl.evaluation.evaluate import Evaluation, numbers
from jmarl.logs import samples
from jmarl.logs.completions_file import EVAL, TRAIN, finite
from jmarl.logs.diversity import diversity
from jmarl.logs.step_log import ADVANTAGES, QueuedStep, StepLog, update_metrics
from jmarl.logs.tables import joint_actions_table
from jmarl.models.hub.tokenize import decode
from jmarl.models.stack import to_host
from jmarl.rollout.make_batches import to_turns
from jmarl.rollout.turns import Rollout, Turn
from jmarl.team import Team, to_agents


class RolloutLog(StepLog):
    """The log of a run whose experience is a `Rollout`."""

    def add(self, step: QueuedStep) -> None:
        rollout = step.experience
        self.rewards.append(mean_return(rollout))
        super().add(step)
        for turn in rollout.turns:
            if turn.fault:
                count = turn.rewards[..., 0].size
                place = f"update {step.number + 1}: {turn.invalid} of {count} joint actions"
                warnings.warn(f"{place} have no valid reward; {turn.fault}", stacklevel=3)

    def row(self, step: QueuedStep, seconds: float) -> dict[str, float]:
        row = rollout_metrics(self.team, step.experience) | update_metrics(self.team, step.metrics)
        return row | {"tokens_per_s": row["tokens"] / seconds}

    def fault(self, experience: Rollout) -> str:
        if np.isfinite(experience.joint_returns[0]).any():
            return ""
        return f"no joint action had a valid reward ({next((turn.fault for turn in experience.turns if turn.fault), '')})"

    def record(self, experience: Rollout) -> tuple[Any, dict[str, Any]]:
        turns = [
            {"prompts": turn.prompts, "completions": turn.texts, "rewards": repr(turn.rewards.tolist()), "fault": turn.fault}
            for turn in experience.turns
        ]
        return experience, {"items": list(experience.tasks), "turns": turns}

    def after_row(self, step: QueuedStep, row: dict[str, float]) -> None:
        # In all processes, over which advantages may be spread.
        advantages = trained_advantages(self.team, step) if self.keeps_completions else None
        if self.writer is not None and (self.keeps_completions or samples.are_on()):
            record = completions_record(self.team, step.experience, advantages, self.cfg.run.log_tokens)
            self.writer.completions(step.number + 1, TRAIN, record)
        super().after_row(step, row)

    def texts(self, step: QueuedStep) -> None:
        assert self.writer is not None
        number = step.number + 1
        for name, turn in named_turns(step.experience):
            self.writer.histogram(number, f"{name}reward", turn.rewards[np.isfinite(turn.rewards)])
            for agent, lengths in enumerate(token_counts(self.team, turn)):
                if turn.acts[agent].any():
                    self.writer.histogram(number, f"{name}agent_{agent}/length", lengths[turn.acts[agent]].ravel())
            self.writer.text(number, f"{name}joint_actions", self.table(number, turn))
        for name, text in step.experience.texts.items():
            self.writer.text(number, name, text)

    def evaluation_row(self, result: Evaluation) -> dict[str, float]:
        return numbers(result)

    def evaluation_texts(self, updates: int, result: Evaluation) -> None:
        assert self.writer is not None
        for name, turn in named_turns(result.rollout):
            self.writer.text(updates, f"eval/{name}joint_actions", self.table(updates, turn))
        if self.keeps_completions:
            turns = turn_records(self.team, result.rollout)
            self.writer.completions(updates, EVAL, {"updates": updates, "tasks": [], "turns": turns})

    @property
    def keeps_completions(self) -> bool:
        """Whether the run directory gets a file of completions."""
        return bool(self.cfg.run.output_dir and self.cfg.run.max_completions_mb)

    def table(self, step: int, turn: Turn) -> str:
        """Return the best, the worst and random joint actions of a turn as Markdown."""
        first = [next((p for p in node if p), "") for node in zip(*turn.prompts, strict=True)]  # of the first active agent
        prompts = [p for p in first for _ in turn.joint]
        texts = [[row[g] for row in turn.texts[n] for g in turn.joint[:, n]] for n in range(self.team.num_agents)]
        rng = np.random.default_rng((self.cfg.run.seed, step))
        return joint_actions_table(prompts, texts, turn.rewards.mean(-1).ravel().tolist(), 6, rng)


def named_turns(rollout: Rollout) -> list[tuple[str, Turn]]:
    """Return the turns with the prefixes of their columns. The prefix is empty in runs of one turn."""
    return [(f"turn_{t}/" if rollout.num_turns > 1 else "", turn) for t, turn in enumerate(rollout.turns)]


def trained_advantages(team: Team, step: QueuedStep) -> list[np.ndarray]:
    """Return the advantages per turn [N, P, G] that an update has trained on; NaN of completions that it has not."""
    names, stacks = (ADVANTAGES, "frozen"), list[np.ndarray | None]()
    own = [{name: x for name, x in metrics.items() if name in names} for metrics in step.metrics[: len(team.stacks)]]
    for metrics in to_host(own):
        values, frozen = metrics.get(ADVANTAGES), metrics.get("frozen", False)
        is_used = np.isfinite(0 if values is None else values) & ~np.reshape(frozen, (-1, 1, 1))
        stacks.append(None if values is None else np.where(is_used, values, np.nan))
    return to_turns(team, step.experience.turns, stacks)


def completions_record(
    team: Team, rollout: Rollout, advantages: Sequence[np.ndarray] | None = None, log_tokens: int = 0
) -> dict[str, Any]:
    """Return what `completions_file` has of a step. advantages: see `turn_records`."""
    replaced = rollout.notes.get("dynamic/replaced")  # by other tasks, which are not at hand
    tasks, turns = [] if replaced else list(rollout.tasks), turn_records(team, rollout, advantages)
    if log_tokens:
        for own, turn in zip(turns, rollout.turns, strict=True):
            own["tokens"] = token_records(team, turn, log_tokens)
    return {"tasks": finite(tasks), "turns": turns}


def turn_records(team: Team, rollout: Rollout, advantages: Sequence[np.ndarray] | None = None) -> list[dict[str, Any]]:
    """Return the turns of a rollout as JSON values, see `completions_file`.

    advantages: per turn [N, P, G], see `trained_advantages`; None: the rollout was not trained on, or is not yet."""

    def numbers_of(turn: Turn, table: Mapping[str, np.ndarray]) -> dict[str, Any]:
        shape = (len(turn.items), -1)
        return {name: rounded(np.reshape(x, shape)) for name, x in table.items()}

    return [
        {
            "prompts": turn.prompts,
            "acts": turn.acts.tolist(),
            "completions": turn.texts,
            "joint": turn.joint.tolist(),
            "rewards": rounded(turn.rewards),
            "parts": numbers_of(turn, turn.parts),
            "measures": numbers_of(turn, turn.measures),
            "parents": turn.parents.tolist(),
            "items": turn.items.tolist(),
            **numbers_of_completions(team, turn, returns, own),
        }
        for turn, returns, own in zip(rollout.turns, rollout.returns, advantages or [None] * len(rollout.turns), strict=True)
    ]


def numbers_of_completions(team: Team, turn: Turn, returns: np.ndarray, advantages: np.ndarray | None) -> dict[str, Any]:
    """Return what `completions_file` has of each completion of a turn. returns, advantages: [N, P, G]."""
    acts, ended = turn.acts[..., None], to_agents(team, [np.asarray(done.ended) for done in turn.completions])
    cut = acts & ~np.array([x[: len(turn.items)] for x in ended])
    record = {"returns": rounded(returns), "lengths": np.array(token_counts(team, turn)).tolist()}
    record |= {"cut": cut.tolist()} if cut.any() else {}
    if advantages is not None:
        masked = np.isnan(advantages)
        record |= {} if masked.all() else {"advantages": rounded(advantages)}
        record |= {} if (masked != acts).all() else {"masked": masked.tolist()}  # those of inactive agents are, anyway
    return record | ({"fault": turn.fault} if turn.fault else {})


def token_records(team: Team, turn: Turn, most: int) -> list[list[list[dict[str, Any] | None]]]:
    """Return the tokens of the first `most` completions of each agent, see `completions_file`; None of the others."""
    agents = to_agents(team, [tuple(map(np.asarray, (x.tokens, x.action_mask, x.logprobs))) for x in turn.completions])
    records = []
    for spec, acts, (tokens, mask, logprobs) in zip(team.agent_specs, turn.acts, agents, strict=True):
        own: list[list[dict[str, Any] | None]] = [[None] * turn.group_size for _ in turn.items]
        for p, g in itertools.islice(itertools.product(acts.nonzero()[0], range(turn.group_size)), most):
            ids: list[int] = tokens[p, g][mask[p, g]].tolist()
            own[p][g] = {"ids": ids, "texts": token_texts(spec.tokenizer, ids), "logprobs": rounded(logprobs[p, g][mask[p, g]])}
        records.append(own)
    return records


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. Tokens that are parts of characters together have that of the last of them."""
    texts = decode(tokenizer, [[token] for token in ids], skip=False)
    for is_part, run in itertools.groupby(range(len(ids)), lambda i: "\ufffd" in texts[i]):
        if is_part:
            places = [*run]
            [text] = decode(tokenizer, [[ids[i] for i in places]], skip=False)
            texts[places[0] : places[-1] + 1] = [*[""] * (len(places) - 1), text]
    return texts


def rounded(numbers: np.ndarray) -> Any:
    """Return numbers with six digits behind the point as lists, with null where they are not finite."""
    numbers = np.round(np.asarray(numbers, float), 6)
    return numbers.tolist() if np.isfinite(numbers).all() else finite(numbers.tolist())  # which looks at one after the other


def mean_return(rollout: Rollout) -> float:
    """Return the mean return of the first turn's joint actions; with one turn it is the mean reward."""
    returns = rollout.joint_returns[0]
    return mean_of(returns[np.isfinite(returns)])


def mean_of(x: np.ndarray) -> float:
    """Return the mean; NaN without numbers. np.mean takes twice the time for the few numbers of a step."""
    return float(x.sum() / x.size) if x.size else float("nan")


def token_counts(team: Team, turn: Turn) -> list[np.ndarray]:
    """Return the number of tokens of each completion, per agent [P, G]; 0 where the agent is inactive."""
    lengths = to_agents(team, [np.asarray(done.action_mask).sum(-1) for done in turn.completions])
    return [x[: len(turn.items)] * acts[:, None] for x, acts in zip(lengths, turn.acts, strict=True)]


def rollout_metrics(team: Team, rollout: Rollout) -> dict[str, float]:
    """Return the metrics of each turn. With several turns `reward/mean` is the mean return, and `env_steps` counts joint
    actions."""
    row: dict[str, float] = {}
    for (name, turn), returns in zip(named_turns(rollout), rollout.returns, strict=True):
        row |= {name + key: float(x) for key, x in turn_metrics(team, turn, returns).items()}
    tokens = sum(row.pop(f"{name}tokens") for name, _ in named_turns(rollout))
    if rollout.num_turns > 1:
        row |= {"reward/mean": mean_return(rollout), "env_steps": float(sum(t.rewards[..., 0].size for t in rollout.turns))}
    return {**row, "tokens": tokens, **rollout.notes}


def turn_metrics(team: Team, turn: Turn, returns: np.ndarray) -> dict[str, float]:
    """Return statistics of rewards, their parts, measures and lengths, and the share of completions that the agents ended
    themselves.

    returns: [N, P, G].
    """
    rewards = turn.rewards.mean(-1)
    valid = rewards[np.isfinite(rewards)]
    row = {"reward/invalid": float(turn.invalid)}
    if valid.size:
        row |= {"reward/mean": mean_of(valid), "reward/std": valid.std(), "reward/max": valid.max()}
    for prefix, table in ((REWARD, turn.parts), (MEASURES, turn.measures)):
        for name, column in own_columns(prefix, table).items():
            row[column] = mean_of(table[name][np.isfinite(table[name])])
    counts, ended = token_counts(team, turn), to_agents(team, [np.asarray(done.ended) for done in turn.completions])
    for agent, acts in enumerate(turn.acts):
        if acts.any():
            row[f"agent_{agent}/length"] = mean_of(counts[agent][acts])
            row[f"agent_{agent}/ended"] = mean_of(ended[agent][: len(turn.items)][acts])
            groups = [turn.texts[agent][p] for p in np.flatnonzero(acts)]
            row |= {f"agent_{agent}/{name}": x for name, x in diversity(groups).items()}
            row[f"agent_{agent}/return"] = mean_of(returns[agent][np.isfinite(returns[agent])])
    row["tokens"] = sum(c.sum() for c in counts)
    return row
