"""Play held-out items without learning."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jmarl.columns import EPISODES, EVALUATION, INTERVAL, MEASURES, MEMBERS, REWARD, check_names, own_columns
from jmarl.config import TrainConfig
from jmarl.envs.base import Environment
from jmarl.envs.calls.copies import copied, copies
from jmarl.envs.calls.user_code import calling
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rows import Rows, read_rows
from jmarl.evaluation.environment import Reward, as_environment
from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.models.lora import model_of
from jmarl.processes import exchange
from jmarl.randomness import EVAL, Randomness
from jmarl.rl.returns import best_at_k, majority_at_k, pass_at_k
from jmarl.rollout.chunks import divided
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout, check_columns
from jmarl.sampling.generate import Sampler, sample_team
from jmarl.team import Team, check_arguments, moved
from jmarl.types import TeamState

COUNTS = ("reward/raised", "reward/truncated", "long_prompts")  # of a rollout's notes
EvalMetrics = Callable[[Sequence[dict], Rollout], Mapping[str, float]]  # (held-out items, their rollout) -> metrics


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    mean: float  # return (with one turn the reward) over valid joint actions
    interval: float  # half of the 95 % interval of the mean, over prompts
    rollout: Rollout  # without turns if the numbers were read from a log
    notes: Mapping[str, float] = {}  # further metrics
    episodes: int = 0
    invalid: int = 0  # episodes without a valid return, which are in no mean of it

    def __repr__(self) -> str:  # without the rollout
        return f"Evaluation(mean={self.mean:.4g}, interval={self.interval:.2g}{', ' * bool(self.invalid)}{self.share})"

    @property
    def mean_text(self) -> str:
        """The mean, and of how many episodes it is if not of all."""
        return f"{self.mean:.3f}" + (f" ({self.share})" if self.invalid else "")

    @property
    def share(self) -> str:
        """Of how many episodes the mean is, as text; empty if it is of all."""
        return f"{self.episodes - self.invalid} of {self.episodes} episodes" if self.invalid else ""


def evaluate(
    team: Team, params: Sequence[Any] | None, items: Rows, env: Reward, cfg: TrainConfig, *, part: int = 0
) -> Evaluation:
    """Return the mean return on items, of `eval_generations` completions each at `eval_temperature`.

    Episodes do not branch. The random keys do not depend on the training step, so two evaluations differ only by what was
    learned.

        team, params = jmarl.make_team([jmarl.load_agent("out/agent_0"), jmarl.load_agent("out/agent_1")])
        jmarl.evaluate(team, params, items, reward, cfg)
        jmarl.evaluate(result.team, jmarl.policies(result.state), items, reward, cfg)  # result = jmarl.train(...)

    Args:
        team: from `make_team`, `Team.load` or `Team.of`, or the team of a result.
        params: parameters [A, ...] of each stack, from `make_team` or `policies`; None: those of the team's agents.
        items: what the episodes are about, in anything that `jmarl.envs.rows.read_rows` reads.
        env: a reward or an environment, as for `jmarl.train`.
        cfg: the settings.
        part: number of the items' part, if they are evaluated in several calls, which differ in their random numbers.
    """
    check_arguments(team, cfg, env)
    if not (rows := read_rows(items)):
        raise ValueError("there are no items to evaluate: items is empty")
    team, params = moved(team, params, cfg.run)
    world = as_environment(team, env, cfg.episodes.num_turns)
    if (turns := getattr(world, "max_turns", 1)) > (limit := cfg.episodes.num_turns):
        warnings.warn(f"episodes of up to {turns} turns end after {limit}: set num_turns={turns} for whole ones", stacklevel=2)
    return summarize(play_held_out(partial(sample_team, team, params), team, rows, world, cfg, part=part))


def evaluation_of(
    team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig, metrics: EvalMetrics | None = None
) -> Callable[[TeamState], Evaluation] | None:
    """Return a function that evaluates a state on held-out items; None without items.

    metrics: further ones, for its notes. Of several processes the first one calls it."""

    def evaluate_state(state: TeamState) -> Evaluation:
        result = evaluate(team, [model_of(stack) for stack in state.stacks], items, env, cfg)
        if metrics is not None:
            result = result._replace(notes=exchange.from_first(partial(call_metrics, metrics, items, result.rollout)))
        if not int(state.step):
            check_result(result)
        return result

    return evaluate_state if items else None


def call_metrics(metrics: EvalMetrics, items: Sequence[dict], rollout: Rollout) -> dict[str, float]:
    """Call metrics of the user, on copies of items and rollout."""
    with calling("eval_metrics"):
        return dict(metrics(copies(items), copied(rollout)))


def check_result(first: Evaluation) -> None:
    """Raise a ValueError if a number of the first evaluation has the name of a column of the library."""
    check_columns(first.rollout)
    check_names(EVALUATION, first.notes, "metric of an evaluation")


def play_held_out(
    sample: Sampler, team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig, *, part: int = 0
) -> Rollout:
    """Play episodes on held-out items with the settings of evaluations; see `play` for `sample`, `evaluate` for `part`."""
    env = env.for_agents(team.num_agents) if isinstance(env, RewardEnvironment) else env
    env = divided(env, cfg.episodes.rewards_divided)
    settings, episodes, randomness = cfg.eval_sampling(), cfg.eval_episodes(), Randomness(cfg.run.seed, part, EVAL)
    return play(sample, team, items, env, settings, episodes, cfg.run.eval_generations, randomness)


def summarize(rollout: Rollout) -> Evaluation:
    """Return the mean return of a rollout and its 95 % interval over prompts."""
    returns = returns_of(rollout)
    # An invalid joint action counts nowhere. A prompt with no valid one is left out; with no prompt left the mean is NaN.
    mean, interval = mean_and_interval(valid_mean(returns))
    if invalid := int(returns.size - np.isfinite(returns).sum()):
        fault = next((turn.fault for turn in rollout.turns if turn.fault), "")
        warnings.warn(
            f"{invalid} of {returns.size} held-out episodes have no valid reward and are in no mean of it"
            + (f"; {fault}" if fault else ""),
            stacklevel=3,
        )
    return Evaluation(float(mean), float(interval), rollout, episodes=returns.size, invalid=invalid)


def logged(row: Mapping[str, Any]) -> Evaluation:
    """Return an evaluation from its row in a log, the inverse of `numbers`: without the rollout, and with all other columns as
    notes."""
    notes = logged_numbers(row)
    mean, interval = (notes.pop(name, math.nan) for name in ("reward", "reward_ci95"))
    episodes, invalid = (int(notes.pop(name, 0)) for name in ("episodes", "reward/invalid"))
    return Evaluation(mean, interval, Rollout(0, (), (), ()), notes, episodes, invalid)


def logged_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation from its row in a log, without the prefix of their columns."""
    names = {name: name.removeprefix(EVALUATION) for name in row if name.startswith(EVALUATION) and name != "eval/updates"}
    return {short: float(row[name]) for name, short in names.items()}


def returns_of(rollout: Rollout) -> np.ndarray:
    """Return the return of each episode [P, J], a joint one or the mean over agents; NaN where invalid."""
    return rollout.joint_returns[0].mean(-1)


def counts_all(result: Evaluation) -> bool:
    """Return whether all episodes of an evaluation have a valid return, so that its mean is of all of them."""
    return bool(np.isfinite(returns_of(result.rollout)).all())


def in_last_turn(rollout: Rollout, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the value in the last turn of each episode [P, J]. The episodes do not branch. values: per turn [P * J]."""
    last = [np.array(x, float) for x in values]
    for t in range(len(last) - 1, 0, -1):
        last[t - 1][rollout.turns[t].parents] = last[t]
    return last[0].reshape(rollout.turns[0].rewards.shape[:2])


def episode_parts(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return the sum over its turns of each part of the reward of each episode [P, J]: parts add up to its return.

    A turn without the part adds nothing; NaN where no turn has it, or where the return is invalid."""
    valid = np.isfinite(returns_of(rollout))
    totals = {}
    for name in names_of([turn.parts for turn in rollout.turns]):
        values = turn_values(rollout, [turn.parts for turn in rollout.turns], name)
        for t in range(len(values) - 1, 0, -1):
            before, after = values[t - 1][rollout.turns[t].parents], values[t]
            values[t - 1][rollout.turns[t].parents] = np.where(np.isnan(before), after, before + np.nan_to_num(after))
        totals[name] = np.where(valid, values[0].reshape(valid.shape), np.nan)
    return totals


def last_measures(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return each measure in the last turn of each episode that has it [P, J]; NaN where no turn has it."""
    tables = [turn.measures for turn in rollout.turns]
    return {name: last_known(rollout, turn_values(rollout, tables, name)) for name in names_of(tables)}


def last_solved(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return what is called `solved`, also in a mixture (`math/solved`), in the last turn of each episode [P, J]."""
    tables = [{**turn.parts, **turn.measures} for turn in rollout.turns]
    names = [name for name in names_of(tables) if name.split("/")[-1] == "solved"]
    return {name: in_last_turn(rollout, turn_values(rollout, tables, name)) for name in names}


def choices_of(rollout: Rollout) -> np.ndarray:
    """Return a number for all that was written in each episode [P, J]: equal ones where all agents wrote the same in all turns,
    but for blanks around it. The episodes do not branch."""
    numbers, later = dict[Any, int](), np.zeros(0, int)
    parents = np.zeros(0, int)
    for turn in reversed(rollout.turns):
        texts = [
            tuple(agent[p][g].strip() for agent, g in zip(turn.texts, joint, strict=True))
            for p in range(len(turn.items))
            for joint in turn.joint
        ]
        after = np.full(len(texts), -1)  # what follows
        after[parents] = later
        later = np.array([numbers.setdefault(written, len(numbers)) for written in zip(texts, after.tolist(), strict=True)])
        parents = turn.parents
    return later.reshape(rollout.turns[0].rewards.shape[:2])


def samples_of(rollout: Rollout) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Return the returns of independent episodes, what is called `solved` in them, and `choices_of` them: of cross joint
    actions those of completions with equal numbers."""
    joint = rollout.turns[0].joint
    alone = (joint == joint[:, :1]).all(1)
    solved = {name: values[:, alone] for name, values in last_solved(rollout).items()}
    return returns_of(rollout)[:, alone], solved, choices_of(rollout)[:, alone]


def last_known(rollout: Rollout, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the value in the last turn of each episode that has one [P, J]. values: per turn [P * J]."""
    last = list(values)
    for t in range(len(last) - 1, 0, -1):
        parents = rollout.turns[t].parents
        last[t - 1][parents] = np.where(np.isnan(last[t]), last[t - 1][parents], last[t])
    return last[0].reshape(rollout.turns[0].rewards.shape[:2])


def names_of(tables: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
    """Return the names of all tables, each once."""
    return list(dict.fromkeys(name for table in tables for name in table))


def turn_values(rollout: Rollout, tables: Sequence[Mapping[str, np.ndarray]], name: str) -> list[np.ndarray]:
    """Return a copy of a number per turn [P * J], NaN in turns without it. tables: of each turn, name -> [P * J]."""
    sizes = [turn.rewards[..., 0].size for turn in rollout.turns]
    return [np.array(table.get(name, np.full(size, np.nan)), float) for table, size in zip(tables, sizes, strict=True)]


def is_success(solved: np.ndarray) -> bool:
    """Return whether what is called `solved` says that episodes succeeded or not: it is 0 or 1 wherever it is known."""
    return set(solved[np.isfinite(solved)]) <= {0.0, 1.0}


def figures_at_k(
    returns: np.ndarray, solved: Mapping[str, np.ndarray], choices: np.ndarray
) -> dict[str, tuple[np.ndarray, int]]:
    """Return figures of k samples of a prompt, for k = 1, 2, 4, ... and all samples, with the number of episodes they are of.

    `best@k` of the returns [P, J] for k > 1; and for each that is called `solved` and is 0 or 1, `pass@k` and, for k > 1,
    `majority@k`. Arguments: see `samples_of`."""
    samples, figures = returns.shape[1], dict[str, tuple[np.ndarray, int]]()
    sizes = sorted({1 << i for i in range(samples.bit_length())} | {samples})
    known = np.isfinite(returns).sum(-1)
    figures |= {f"best@{k}": (best_at_k(returns, k), known[known >= k].sum()) for k in sizes[1:]}
    for name, last in solved.items():
        if not is_success(last):
            continue
        prefix, known = name.removesuffix("solved"), np.isfinite(last).sum(-1)
        figures |= {f"{prefix}pass@{k}": (pass_at_k(last, k), known[known >= k].sum()) for k in sizes}
        figures |= {f"{prefix}majority@{k}": (majority_at_k(last, choices, k), (known // k * k).sum()) for k in sizes[1:]}
    return figures


def numbers(result: Evaluation) -> dict[str, float]:
    """Return what is logged of an evaluation.

    The return, the number of episodes, and how many of them have no valid return and are in no mean of it; the mean of each
    part of the reward, summed over the turns of an episode, and of each measure in the last turn that has it; figures of k
    episodes of a prompt, with 95 % intervals over prompts, see `figures_at_k`; and its notes. A figure of another number of
    episodes than the return has that number beside it, as `eval/NAME_episodes`.
    """
    rollout, valid = result.rollout, result.episodes - result.invalid
    row = {"eval/reward": result.mean, "eval/reward_ci95": result.interval}
    row |= {"eval/episodes": float(result.episodes), "eval/reward/invalid": float(result.invalid)}
    row |= {f"eval/{name}": x for name, x in rollout.notes.items() if name in COUNTS or re.fullmatch(MEMBERS, name)}

    def add(name: str, mean: Any, known: Any) -> None:
        row[f"eval/{name}"] = float(mean)
        if known != valid:
            row[f"eval/{name}{EPISODES}"] = float(known)

    for prefix, table in ((REWARD, episode_parts(rollout)), (MEASURES, last_measures(rollout))):
        for name, column in own_columns(prefix, table).items():
            add(column, valid_mean(table[name].reshape(-1)), np.isfinite(table[name]).sum())
    for name, (values, known) in figures_at_k(*samples_of(rollout)).items():
        mean, interval = mean_and_interval(values)
        add(name, mean, known)
        row[f"eval/{name}{INTERVAL}"] = float(interval)
    return row | {column: result.notes[name] for name, column in own_columns(EVALUATION, result.notes).items()}
