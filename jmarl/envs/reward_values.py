"""Validation of reward values: what a reward function or an environment returned, as float arrays (host code, no jax).

A value that is not a usable number masks its whole joint action: it becomes NaN, never 0, and a fault says what was returned.
J is the number of joint actions, N the number of agents.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.calls.user_code import raised

MAX_ABS_REWARD = 1e18  # its square is finite in float32, so the std of a group is finite too

Processor = Callable[..., Any]  # float -> float; gets text_length=... too if its signature has that name
BoundProcessor = Callable[[Any, Any], Any]  # (value, text_length) -> value; see `with_text_length`
Faults = dict[int, str]  # joint action -> what was wrong with its value


class RewardError(RuntimeError):
    """A reward function or processor raised or was too slow. The message names it and the joint action."""


class RewardResult(NamedTuple):
    """Rewards of one step; arrays of numbers are float64.

    `parts` add up to `total`, so each of them is a share in the reward. All other numbers of a step are `measures`. Logs,
    reports and commands show them apart: as `reward/NAME` and `measures/NAME`.
    """

    total: np.ndarray  # [J] mean of `rewards` over agents; NaN where invalid
    parts: dict[str, np.ndarray]  # name -> [J] terms whose sum is `total` (mean over agents); NaN where that is; {}: unknown
    invalid: np.ndarray  # [J] bool: mask these joint actions
    rewards: np.ndarray  # [J, N] reward of each agent; a joint reward is repeated; NaN where invalid
    faults: Faults  # the first fault of each joint action, also where a number replaced the value
    num_raised: int  # joint actions without an answer: a call raised or was too slow, and was masked or replaced
    measures: dict[str, np.ndarray] = {}  # name -> [J] other numbers; NaN where there is none
    num_truncated: int = 0  # joint actions whose episode ended only because it reached max_turns


def reward_values(
    entries: Sequence[Any], num_agents: int, source: str, first: int = 0, place: str = ""
) -> tuple[np.ndarray, Faults]:
    """Convert the returned values of joint actions to floats.

    Args:
        entries: [J] for each joint action one number, or one per agent. True and False are 1 and 0; text is not a number.
        num_agents: N.
        source: where the values come from, for messages.
        first: number of the first joint action, for messages and faults.
        place: end of messages, which says where the source is defined.

    Returns:
        Values [J, N], NaN where invalid, and the faults.

    Raises:
        ValueError: an entry has more than one value, but not N.
    """
    values = np.full((len(entries), num_agents), np.nan)
    faults: Faults = {}
    for j, entry in enumerate(entries, first):
        row = as_list(entry)
        row = [entry] * num_agents if row is None else row
        if len(row) != num_agents:
            wanted = f"a number, or {num_agents}, one per agent"
            raise ValueError(f"{source} returned {len(row)} values, {row!r:.80}, for joint action {j}: return {wanted}{place}")
        for agent, value in enumerate(row):
            values[j - first, agent] = finite_float(value)
            if math.isnan(values[j - first, agent]):
                faults.setdefault(j, f"{source} returned {value!r:.80} on joint action {j}, not a number{place}")
    return values, faults


def finite_float(value: Any) -> float:
    """Return a value as a float, NaN if it is not a finite number. Accepts what has `float()`, except text."""
    try:
        plain = value.item() if isinstance(value, np.ndarray) else value
        number = math.nan if isinstance(plain, str | bytes) else float(plain)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def as_list(value: Any) -> list[Any] | None:
    """Return the entries of a list, tuple, array or iterator; None for a single value (also text, dicts and sets)."""
    try:
        entries = None if isinstance(value, str | bytes | dict | set) else iter(value)
    except TypeError:  # a number, None, an array without axes
        entries = None
    return None if entries is None else list(entries)


@np.errstate(over="ignore", invalid="ignore")  # what overflows is masked
def process_rewards(
    processor: BoundProcessor | None, values: np.ndarray, text_lengths: Sequence[int], source: str
) -> tuple[np.ndarray, Faults]:
    """Apply a processor to each number of `values` [J, N].

    A joint action with a value that is not finite stays as it is; the processor never sees it.

    Args:
        processor: from `with_text_length`; None changes nothing.
        values: [J, N].
        text_lengths: [J] characters of each joint action, all agents together.
        source: what is processed, for messages.

    Returns:
        Processed values [J, N], NaN where the processor returned no finite number, and the faults.

    Raises:
        RewardError: the processor raised.
    """
    faults: Faults = {}
    if processor is None:
        return values, faults
    processed, name = values.copy(), f"the processor of {source}"
    for j in map(int, np.flatnonzero(np.isfinite(values).all(axis=1))):
        try:
            row = [processor(float(x), text_lengths[j]) for x in values[j]]
        except Exception as error:
            raise RewardError(f"{name} raised {raised(error)}, on {values[j]} (joint action {j})") from error
        processed[j : j + 1], row_faults = reward_values([row], len(row), name, j)
        faults |= row_faults
    return processed, faults


def with_text_length(processor: Processor) -> BoundProcessor:
    """Return the processor as a function of (value, text_length); the length is dropped if its signature does not name it."""
    if inspect.iscoroutinefunction(processor):
        raise TypeError(f"the processor {processor!r} is an async def: give a plain function of a number")
    try:
        named = "text_length" in inspect.signature(processor).parameters
    except ValueError:  # some C functions have no signature
        named = False
    return (lambda x, length: processor(x, text_length=length)) if named else (lambda x, length: processor(x))


def reward_result(
    rewards: np.ndarray,
    parts: dict[str, np.ndarray],
    faults: Faults,
    num_raised: int,
    measures: dict[str, np.ndarray] | None = None,
) -> RewardResult:
    """Mask the joint actions of `rewards` [J, N] that have a NaN or a number beyond MAX_ABS_REWARD, and average over agents."""
    invalid = np.any(~(np.abs(rewards) <= MAX_ABS_REWARD), axis=1)
    too_large = {
        j: f"reward {rewards[j]} of joint action {j} is beyond {MAX_ABS_REWARD:g}" for j in map(int, np.flatnonzero(invalid))
    }
    rewards = np.where(invalid[:, None], np.nan, rewards)
    parts = {name: np.where(invalid, np.nan, values) for name, values in parts.items()}
    faults = first_faults(faults, too_large)
    return RewardResult(mean_over_agents(rewards), parts, invalid, rewards, faults, num_raised, measures or {})


def value_list(value: Any) -> list[Any]:
    """Return the values of a call as a list; a single value is that of a single joint action."""
    entries = as_list(value)
    return [value] if entries is None else entries


def first_faults(*faults: Mapping[int, str]) -> Faults:
    """Merge faults; the first one of each joint action counts."""
    merged: Faults = {}
    for source_faults in faults:
        for j, text in source_faults.items():
            merged.setdefault(j, text)
    return merged


@np.errstate(over="ignore", invalid="ignore")
def mean_over_agents(values: np.ndarray) -> np.ndarray:
    """Average [J, N] over agents to [J]; exactly the common value where all agents have the same."""
    same = (values == values[:, :1]).all(axis=1)
    return values[:, 0].copy() if same.all() else np.where(same, values[:, 0], values.mean(axis=1))
