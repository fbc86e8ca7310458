"""Reward functions of the user: how they are called, weighted and processed (host code, no jax).

A reward is a plain function of one list of completions per agent:

    def reward(completions1, completions2, batch_items=None):
        return [score(a, b) for a, b in zip(completions1, completions2)]

What each parameter gets, by place or by name, is written in `calls.arguments`. An `async def` is awaited, for all joint
actions at once (`calls.awaiting`). Rewards are called in the thread that trains, also beside the sampling of the next part
(`sample_parts`), because some libraries work in the main thread only. `make_reward` wraps one or several of them into a
`RewardFunction`. For joint action j and agent n it returns

    rewards[j, n] = p( sum_f  w_f * p_f( r_f[j, n] ) )

with raw values r_f (one number for a joint action goes to every agent), weights w_f, processors p_f and p. The part of a
function in the reward is w_f * p_f(r_f), its mean over agents; r_f is a measure of the same name where it differs. With a
processor p there are no parts, because they would not add up to the reward.

A value that is not a usable number masks its whole joint action: `invalid[j]` is True, `total[j]` and `rewards[j]` are NaN,
never 0, and `faults[j]` says why (see `reward_values`). The options `on_error`, `timeout` and `max_error_share` handle
functions that raise or hang. Left out: stopping a call that hangs in C, which needs a process of its own (see `sandbox`), and
protection against a call that ends this process.
"""

import copy
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jmarl.columns import MEASURES, REWARD, check_names
from jmarl.envs.calls.arguments import BoundReward, unique_names
from jmarl.envs.calls.awaiting import is_async, needs_waiting, wait_for_all
from jmarl.envs.calls.time_limit import call_within
from jmarl.envs.calls.user_code import defined_text, excerpt, named, place_of
from jmarl.envs.reward_values import (
    BoundProcessor,
    Faults,
    Processor,
    RewardError,
    RewardResult,
    first_faults,
    mean_over_agents,
    process_rewards,
    reward_result,
    reward_values,
    value_list,
    with_text_length,
)
from jmarl.envs.vector import Engine
from jmarl.lazy import Table
from jmarl.processes.ending import Interrupted

IN_POOL = Table[Callable[..., Any]]({"functions": "jmarl.envs.pool:Rewards", "call": "jmarl.envs.pool:call_rewards"})
GRACE_S = 0.5  # awaitables may take this much longer than `timeout` together
RAISED = " raised "  # in faults of calls that did, or were too slow
ERROR_WINDOW = 5  # `max_error_share` looks at this many batches of joint actions


class RewardProcessors:
    """Transformations of a reward x. Each method returns a function for floats and, elementwise, numpy arrays."""

    @staticmethod
    def identity() -> Processor:
        """x"""
        return lambda x: x

    @staticmethod
    def scale(factor: float = 1.0) -> Processor:
        """factor * x"""
        return lambda x: x * factor

    @staticmethod
    def shift(value: float = 0.0) -> Processor:
        """x + value"""
        return lambda x: x + value

    @staticmethod
    def clamp(min_val: float = -10.0, max_val: float = 10.0) -> Processor:
        """min(max(x, min_val), max_val)"""
        if min_val > max_val:
            raise ValueError(f"clamp needs min_val <= max_val, got min_val={min_val}, max_val={max_val}")
        return lambda x: np.clip(x, min_val, max_val)

    @staticmethod
    def sigmoid_scale() -> Processor:
        """1 / (1 + e^-x), computed as (1 + tanh(x / 2)) / 2, which never overflows."""
        return lambda x: 0.5 * (1.0 + np.tanh(0.5 * x))

    @staticmethod
    def normalize_by_length(max_len: int = 1000) -> Processor:
        """x * min(1, text_length / max_len). `RewardFunction` passes the characters of the joint action, all agents
        together, as `text_length`; called by hand without it, x comes back unchanged.
        """
        if max_len <= 0:
            raise ValueError(f"normalize_by_length needs max_len > 0, got {max_len}")
        return lambda x, text_length=None: x if text_length is None else x * np.minimum(1.0, text_length / max_len)

    @staticmethod
    def exponential_scale(factor: float = 1.0) -> Processor:
        """sign(x) * (e^(factor * |x|) - 1). Where that overflows it is infinite, which masks the joint action."""
        return lambda x: np.sign(x) * np.expm1(factor * np.abs(x))

    @staticmethod
    def chain(processors: Sequence[Processor]) -> Processor:
        """x -> p_k(... p_2(p_1(x))): the first of the list is applied first; an empty list is the identity."""
        steps = [with_text_length(p) for p in processors]
        return lambda x, text_length=None: functools.reduce(lambda value, step: step(value, text_length), steps, x)


def story_length_ratio(
    completions1: Sequence[str], completions2: Sequence[str], target_min: float = 2.0, target_max: float = 3.0
) -> list[float]:
    """e^-(distance of len2 / len1 to [target_min, target_max]), in characters; 0 where the first text is empty."""
    rewards = []
    for first, second in zip(completions1, completions2, strict=True):
        rho = len(second) / max(len(first), 1)
        rewards.append(math.exp(-max(target_min - rho, rho - target_max, 0.0)) if first else 0.0)
    return rewards


class Term(NamedTuple):
    """One reward function of the weighted sum."""

    name: str
    call: BoundReward
    own_draws: bool  # each call draws from a generator of its own, because calls run at once or may be ended
    weight: float
    processor: BoundProcessor | None


class RewardFunction:
    """The reward of a team for a batch of joint actions. Functions with a wrong signature are refused here, before training.

        def same_length(completions1, completions2):
            return [-float(abs(len(a) - len(b))) for a, b in zip(completions1, completions2)]

        reward = make_reward(same_length, num_agents=2, on_error="mask")  # without options the function alone is a reward too

    Args:
        reward_funcs: one function or several; each returns numbers [J], or [J, N] (per agent), or one if J is 1. Of several
            one may return None for a joint action that it does not judge: the others count then, as in TRL.
        num_agents: N, the number of completion lists each function gets.
        weights: one per function, used as they are; default 1 / (number of functions). With weight 0 a function is still
            called, logged and masks.
        processors: one callable for the weighted sum, or a list with one entry per function (a processor or None).
        batched: True calls each function once with all joint actions; False once per joint action, with lists of one.
        on_error: what to do when a function raises: "raise", "mask" the joint actions of that call, or a number that replaces
            their raw value. In every case, values that are no numbers mask, and a wrong number of values raises.
        timeout: seconds that one call may take (None: no limit); a slower call is an error as if it had raised, and is ended
            (see `calls.time_limit`). Calls then draw from their own generators.
        pool: `Pool` or `RayPool`, or a partial of one with other arguments: calls run at once in its workers, which have copies
            of the functions; a lost call is repeated, and then an error as if it had raised. Needs `timeout`.
        max_error_share: with on_error "mask" or a number, raise when more than this share of the joint actions of the last
            ERROR_WINDOW batches had an error; 1 never raises.
    """

    def __init__(
        self,
        reward_funcs: Callable | Sequence[Callable],
        *,
        num_agents: int,
        weights: Sequence[float] | None = None,
        processors: Processor | Sequence[Processor | None] | None = None,
        batched: bool = True,
        on_error: Literal["raise", "mask"] | float = "raise",
        timeout: float | None = None,
        pool: Callable[..., Engine] | None = None,
        max_error_share: float = 0.5,
    ):
        funcs = [reward_funcs] if callable(reward_funcs) or not isinstance(reward_funcs, Iterable) else list(reward_funcs)
        self.weights = [1.0 / len(funcs) for _ in funcs] if weights is None else list(weights)
        per_func = [None] * len(funcs) if processors is None or callable(processors) else list(processors)
        if not funcs or num_agents < 1:
            raise ValueError(f"at least one reward function and agent are needed, got {len(funcs)} and {num_agents}")
        if len(self.weights) != len(funcs) or not np.isfinite(self.weights).all():
            raise ValueError(f"{len(funcs)} reward functions need as many finite weights, got {self.weights}")
        if len(per_func) != len(funcs):
            raise ValueError(f"{len(per_func)} processors for {len(funcs)} reward functions; chain() joins several into one")
        if on_error not in ("raise", "mask") and (type(on_error) not in (int, float) or not math.isfinite(on_error)):
            raise ValueError(f"on_error is 'raise', 'mask' or a finite number, got {on_error!r}")
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds > 0, or None (no limit), got {timeout!r}")
        if pool is not None and timeout is None:
            raise ValueError("rewards in a pool need timeout: seconds that one call may take, such as timeout=60")
        if not 0 <= max_error_share <= 1:
            raise ValueError(f"max_error_share is in [0, 1], got {max_error_share!r}")
        self.num_agents, self.batched, self.on_error = num_agents, batched, on_error
        self.timeout, self.max_error_share = timeout, max_error_share
        self._errors: deque[tuple[int, int]] = deque(maxlen=ERROR_WINDOW)  # per batch: joint actions with an error, and all
        self._sum_processor = with_text_length(processors) if callable(processors) else None
        self._terms = [
            Term(
                name,
                BoundReward(func, name, num_agents),
                timeout is not None or is_async(func),
                weight,
                processor and with_text_length(processor),
            )
            for func, name, weight, processor in zip(funcs, unique_names(funcs), self.weights, per_func, strict=True)
        ]
        self._workers = pool and pool(IN_POOL["functions"]([term.call for term in self._terms]), timeout=timeout)

    def close(self) -> None:
        """End the workers of the pool."""
        if self._workers is not None:
            self._workers.close()

    @property
    def names(self) -> list[str]:
        """The names of the reward functions."""
        return [term.name for term in self._terms]

    def __call__(
        self, completions: Sequence[Sequence[str]], prompts: Sequence, batch_items: Sequence, rng: np.random.Generator
    ) -> RewardResult:
        """Score J joint actions: `completions` [N][J] of the `prompts` [J] and `batch_items` [J]."""
        sizes = {"completions": [*map(len, completions)], "prompts": len(prompts), "batch_items": len(batch_items)}
        if sizes["completions"] != [len(prompts)] * self.num_agents or len(batch_items) != len(prompts):
            raise ValueError(f"completions of {self.num_agents} agents and all lists of one length needed, got {sizes}")
        self.check_items(batch_items)
        text_lengths = [sum(map(len, joint)) for joint in zip(*completions, strict=True)]
        optional = {"batch_items": batch_items, "prompts": prompts}
        rewards, parts, measures, faults, failed = np.zeros((len(prompts), self.num_agents)), {}, {}, {}, set()
        unjudged = {*range(len(prompts))}  # by all functions
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is masked
            for term in self._terms:
                raw, call_faults, call_failed, skipped = self._raw_values(term, completions, optional, rng)
                if self._sum_processor or term.processor or term.weight != 1:
                    measures[term.name] = mean_over_agents(raw)
                raw[[*skipped]] = 0.0  # a number, which processors take
                values, value_faults = process_rewards(term.processor, raw, text_lengths, term.name)
                values[[*skipped]] = 0.0
                faults, failed = first_faults(faults, call_faults, value_faults), failed | call_failed
                rewards += term.weight * values
                if not self._sum_processor:
                    parts[term.name] = mean_over_agents(term.weight * values)
                unjudged &= skipped
            rewards[[*unjudged]] = math.nan
            faults |= {j: f"all reward functions returned None on joint action {j}" for j in sorted(unjudged)}
            rewards, sum_faults = process_rewards(self._sum_processor, rewards, text_lengths, "the weighted sum")
        result = reward_result(rewards, parts, first_faults(faults, sum_faults), len(failed), measures)
        self.check_errors(result)
        return result

    def of_part(self) -> "RewardFunction":
        """Return this reward for parts of the joint actions of a step, without `max_error_share`, which is one of all: call
        `check_errors` with their results together."""
        part = copy.copy(self)
        part.max_error_share, part._errors = 1.0, deque(maxlen=ERROR_WINDOW)
        return part

    def check_names(self) -> None:
        """Raise a ValueError if a function has the name of a column of the library."""
        for prefix in (MEASURES,) if self._sum_processor else (MEASURES, REWARD):
            check_names(prefix, self.names, "reward function")

    def check_items(self, items: Sequence[dict]) -> None:
        """Raise a ValueError if a function needs a column that the items lack, or if a name has two meanings."""
        for term in self._terms:
            term.call.check(items)

    def _raw_values(
        self, term: Term, completions: Sequence[Sequence[str]], optional: dict[str, Sequence], rng: np.random.Generator
    ) -> tuple[np.ndarray, Faults, set[int], set[int]]:
        """Return the values [J, N] of one function, NaN where unusable, the faults, the joint actions whose call failed, and
        those that it left to other functions."""
        num_joint = len(optional["prompts"])
        values, faults, failed = np.full((num_joint, self.num_agents), np.nan), {}, set()
        skipped: set[int] = set()
        source, place = f"reward {term.name!r}", defined_text(term.call.func)
        size = max(num_joint, 1) if self.batched else 1
        parts = [range(start, start + size) for start in range(0, num_joint, size)]
        for joint, entries in zip(parts, self._returned(term, parts, completions, optional, rng), strict=False):
            if isinstance(entries, Interrupted):  # no error of the reward: the run is saved, and can be resumed
                raise entries
            if isinstance(entries, BaseException):
                items = [optional["batch_items"][j] for j in joint]
                problem = f"{source}{RAISED}{named(entries)} ({joint_action_text(joint)}){call_text(entries, items)}"
                if self.on_error == "raise":
                    raise RewardError(f"{problem}; on_error='mask' or a number goes on without it") from entries
                values[joint] = math.nan if self.on_error == "mask" else self.on_error
                faults |= dict.fromkeys(joint, problem)
                failed |= set(joint)
                continue
            if len(entries) != size:
                one = len(entries) == 1
                given = excerpt(entries[0], 80) if one else f"{len(entries)} values, {excerpt(entries, 80)},"
                wanted = f"a list of {size} numbers, or [[agent 1, agent 2, ...], ...]"
                wanted = "a number, or [[agent 1, agent 2, ...]]" if size == 1 else wanted
                hint = "; batched=False of make_reward passes one joint action at a time" * one
                text = f"{source} returned {given} for {joint_action_text(joint)}: return {wanted}{hint}{place}"
                raise ValueError(text)
            values[joint], value_faults = reward_values(entries, self.num_agents, source, joint[0], place)
            if len(self._terms) > 1:
                skipped |= {j for j, entry in zip(joint, entries, strict=True) if entry is None}
            faults |= {j: fault for j, fault in value_faults.items() if j not in skipped}
        return values, faults, failed, skipped

    def _returned(
        self,
        term: Term,
        parts: Sequence[range],
        completions: Sequence[Sequence[str]],
        optional: dict[str, Sequence],
        rng: np.random.Generator,
    ) -> list[list | BaseException]:
        """Call a function once for each part of the joint actions. Return the values of each call, or what it raised; with
        on_error "raise" up to the first error.

        Awaitables that the calls return are awaited together.
        """
        returned: list[Any] = []
        calls = (
            (
                [[agent[j] for j in joint] for agent in completions],
                {name: [x[j] for j in joint] for name, x in optional.items()},
            )
            for joint in parts
        )
        if self._workers is not None:
            number = self._terms.index(term)
            return IN_POOL["call"](self._workers, [(number, *call, rng.spawn(1)[0]) for call in calls])
        for texts, arguments in calls:
            draws = rng.spawn(1)[0] if term.own_draws else rng
            try:
                returned.append(
                    call_within(self.timeout, functools.partial(returned_values, term.call, texts, arguments | {"rng": draws}))
                )
            except (Exception, SystemExit) as error:  # a reward that calls exit() must not end the run with status 0
                returned.append(error)
                if self.on_error == "raise":
                    break
        waiting = [i for i, value in enumerate(returned) if needs_waiting(value)]
        for i, value in zip(waiting, self._awaited([returned[i] for i in waiting]), strict=True):
            returned[i] = value if isinstance(value, BaseException) else value_list(value)
        return returned

    def _awaited(self, values: Sequence[Any]) -> list[Any]:
        """Await values together; return their results, or what they raised."""
        limit = self.timeout and self.timeout + GRACE_S  # for code that does not let the event loop go on
        try:
            return call_within(limit, functools.partial(wait_for_all, values, self.timeout, return_exceptions=True))
        except TimeoutError as error:
            return [error] * len(values)

    def check_errors(self, result: RewardResult) -> None:
        """Raise if too many of the last joint actions had an error: a run would learn from the few that remain."""
        self._errors.append((result.num_raised, len(result.total)))
        total_failed, total = map(sum, zip(*self._errors, strict=True))
        if len(self._errors) == ERROR_WINDOW and total_failed > self.max_error_share * total:
            faults = [text for _, text in sorted(result.faults.items()) if RAISED in text]
            last = faults[0] if faults else "none in this one"
            raise RewardError(
                f"a reward failed on {total_failed} of the {total} joint actions of the last {ERROR_WINDOW} batches, more than "
                f"max_error_share={self.max_error_share}; at last: {last}"
            )


make_reward = RewardFunction  # reads better where a reward is built


def returned_values(call: Callable[[list, dict], Any], texts: list, arguments: dict) -> Any:
    """Return the values that a reward function returns as a list, also those of a generator, or what has to be awaited."""
    value = call(texts, arguments)
    return value if needs_waiting(value) else value_list(value)


def call_text(error: BaseException, items: Sequence[Any]) -> str:
    """Return where in the user's code an error was raised, and the items of the call: the first one, and how many others."""
    place, different = place_of(error), {id(item): item for item in items}
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    return (f" in {place}" if place else "") + f", on item {excerpt(items[0], 80)}{more}"


def joint_action_text(joint: range) -> str:
    """Return the numbers of joint actions in words."""
    return f"joint action {joint[0]}" if len(joint) == 1 else f"joint actions {joint[0]} to {joint[-1]}"
