"""Rewards written by users: calling them, checking what they return, weighting and processing it (host world, no jax).

A reward is a plain function of one list of completions per agent:

    def reward(completions1, completions2, batch_items=None):
        return [score(a, b) for a, b in zip(completions1, completions2)]

`make_reward` wraps one or several of them into a `RewardFunction`. For joint action j and agent a it returns

    rewards[j, a] = p( sum_f  w_f * p_f( r_f[j, a] ) )

with raw values r_f (one number for a joint action goes to every agent), weights w_f, processors p_f and p.

A value that is not a usable number masks its whole joint action: `invalid[j]` is True, `total[j]` and `rewards[j]` are
NaN, never 0, and `faults[j]` says why. A function that raises or hangs is met by `on_error`, `timeout` and `max_error_share`.
Left out: ending a call that hangs, which only a process of its own could (see `sandbox`), and a call that ends this process.
"""

import functools
import inspect
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

OPTIONAL_NAMES = ("batch_items", "prompts", "rng")
ERROR_WINDOW = 5  # batches of joint actions over which `max_error_share` is
MAX_ABS_REWARD = 1e18  # its square is finite in float32, so the std of a group is too

Processor = Callable[..., Any]  # float -> float; gets text_length=... too when its signature has that name


class RewardError(RuntimeError):
    """A user's reward function or processor raised or came late; the message says which one, and on which joint action."""


class RewardResult(NamedTuple):
    """Rewards of one step. J joint actions, N agents; all arrays of numbers are float64."""

    total: np.ndarray  # [J] mean of `rewards` over agents; NaN where invalid
    parts: dict[str, np.ndarray]  # function name -> [J] raw value (mean over agents); NaN where that one is invalid
    invalid: np.ndarray  # [J] bool: mask these joint actions
    rewards: np.ndarray  # [J, N] the reward of each agent; a joint reward is repeated; NaN where invalid
    faults: dict[int, str]  # joint action -> first thing that was wrong with it, also where a value replaced it
    num_raised: int  # joint actions on which a function raised or came late (with on_error "mask" or a value)


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
        steps = [_with_length(p) for p in processors]
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


class RewardFunction:
    """The reward of a team for a batch of joint actions. What could not be called is refused here, before training.

    Args:
        reward_funcs: one function or several; each returns numbers [J], or [J, N] (per agent), or one if J is 1.
        num_agents: N, the number of completion lists each function gets.
        weights: one a function, used as given; default 1 / (number of functions). Weight 0 still calls and masks.
        processors: one callable for the weighted sum, or a list with one entry a function (a processor or None).
        batched: True calls each function once with all joint actions; False once per joint action with lists of one.
        on_error: when a function raises: "raise", "mask" the joint actions of that call, or a number that replaces its
            raw value there. In every case, values that are no numbers mask, and a wrong number of them raises.
        timeout: seconds that one call may take (None: any); a later one is an error as if it had raised. Calls then run in
            threads of their own, and draw from generators of their own. A late call is abandoned, not ended: its thread goes on
            beside the training until it returns, though not beyond the end of the process. A call that holds the interpreter's
            lock (in C code) cannot be timed.
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
        max_error_share: float = 0.5,
    ):
        funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        weights = [1.0 / len(funcs) for _ in funcs] if weights is None else list(weights)
        each = [None] * len(funcs) if processors is None or callable(processors) else list(processors)
        if not funcs or num_agents < 1:
            raise ValueError(f"at least one reward function and agent are needed, got {len(funcs)} and {num_agents}")
        if len(weights) != len(funcs) or not np.isfinite(weights).all():
            raise ValueError(f"{len(funcs)} reward functions need as many finite weights, got {weights}")
        if len(each) != len(funcs):
            raise ValueError(f"{len(each)} processors for {len(funcs)} reward functions; chain() joins several into one")
        if on_error not in ("raise", "mask") and (type(on_error) not in (int, float) or not math.isfinite(on_error)):
            raise ValueError(f"on_error is 'raise', 'mask' or a finite number, got {on_error!r}")
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds > 0, or None (no limit), got {timeout!r}")
        if not 0 <= max_error_share <= 1:
            raise ValueError(f"max_error_share is in [0, 1], got {max_error_share!r}")
        self.timeout, self.max_error_share = timeout, max_error_share
        self._errors: deque[tuple[int, int]] = deque(maxlen=ERROR_WINDOW)  # of each batch: with an error, of how many
        self.num_agents, self.batched, self.on_error, self.names = num_agents, batched, on_error, _unique_names(funcs)
        calls = [bind_completions(f, name, num_agents) for f, name in zip(funcs, self.names, strict=True)]
        self._terms = list(zip(self.names, calls, weights, [p and _with_length(p) for p in each], strict=True))
        self._sum_processor = _with_length(processors) if callable(processors) else None

    def __call__(
        self, completions: Sequence[Sequence[str]], prompts: Sequence, batch_items: Sequence, rng: np.random.Generator
    ) -> RewardResult:
        """Score J joint actions: completions [N][J]; prompts [J] and batch_items [J], what each of them answers."""
        sizes = {"completions": [*map(len, completions)], "prompts": len(prompts), "batch_items": len(batch_items)}
        if sizes["completions"] != [len(prompts)] * self.num_agents or len(batch_items) != len(prompts):
            raise ValueError(f"completions of {self.num_agents} agents and all lists of one length needed, got {sizes}")
        num_joint = len(prompts)
        lengths = [sum(map(len, joint)) for joint in zip(*completions, strict=True)]
        faults: dict[int, str] = {}
        raised: set[int] = set()
        parts: dict[str, np.ndarray] = {}
        rewards = np.zeros((num_joint, self.num_agents))
        size = max(num_joint, 1) if self.batched else 1
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is masked below
            for name, call, weight, process in self._terms:
                raw = np.full_like(rewards, np.nan)
                for start in range(0, num_joint, size):
                    chosen = slice(start, start + size)
                    draws = rng.spawn(1)[0] if self.timeout else rng  # a call that was given up may go on drawing
                    extra = {"batch_items": list(batch_items[chosen]), "prompts": list(prompts[chosen]), "rng": draws}
                    attempt = functools.partial(call, [list(agent[chosen]) for agent in completions], extra)
                    raw[chosen] = self._values(name, attempt, start, size, faults, raised)
                parts[name] = _over_agents(raw)
                rewards += weight * _process(process, raw, lengths, name, faults)
            rewards = _process(self._sum_processor, rewards, lengths, "the weighted sum", faults)
            invalid = np.any(~(np.abs(rewards) <= MAX_ABS_REWARD), axis=1)
            for j in map(int, np.flatnonzero(invalid)):
                faults.setdefault(j, f"reward {rewards[j]} of joint action {j} is beyond {MAX_ABS_REWARD:g}")
            rewards[invalid] = np.nan
            self._check_errors(raised, num_joint, faults)
            return RewardResult(_over_agents(rewards), parts, invalid, rewards, faults, len(raised))

    def _values(self, name: str, attempt: Callable, start: int, size: int, faults: dict, raised: set) -> np.ndarray:
        """[size, N] raw values of joint actions start, start + 1, ... from one call; NaN where unusable."""
        source = f"reward {name!r}"
        which = f"joint action {start}" if size == 1 else f"joint actions {start} to {start + size - 1}"
        try:
            result, entries = _within(self.timeout, lambda: ((given := attempt()), _as_list(given)))
        except (Exception, SystemExit) as error:  # a reward that calls exit() must not end the run with status 0
            problem = f"{source} raised {type(error).__name__}: {error} ({which})"
            if self.on_error == "raise":
                raise RewardError(f"{problem}; on_error='mask' or a number goes on without it") from error
            raised.update(range(start, start + size))
            faults.update({j: faults.get(j, problem) for j in range(start, start + size)})
            return np.full((size, self.num_agents), np.nan if self.on_error == "mask" else float(self.on_error))
        entries = [result] if entries is None else entries
        if len(entries) != size:
            hint = "one number a joint action, or [[agent 1, agent 2, ...], ...]; batched=False gives it one at a time"
            raise ValueError(f"{source} returned {len(entries)} values for {size} ({which}); return {hint}")
        return np.array([_numbers(e, self.num_agents, source, j, faults) for j, e in enumerate(entries, start)])

    def _check_errors(self, raised: set[int], num_joint: int, faults: dict[int, str]) -> None:
        """Stop where too many of the last joint actions had an error: a run would learn from the little that is left."""
        self._errors.append((len(raised), num_joint))
        failed, of = map(sum, zip(*self._errors, strict=True))
        if len(self._errors) == ERROR_WINDOW and failed > self.max_error_share * of:
            last = next((faults[j] for j in sorted(raised)), "none in this one")
            raise RewardError(
                f"a reward failed on {failed} of the {of} joint actions of the last {ERROR_WINDOW} batches, more than "
                f"max_error_share={self.max_error_share}; at last: {last}"
            )


make_reward = RewardFunction  # reads better where a reward is built


def bind_completions(func: Callable, name: str, num_agents: int) -> Callable[[list, dict], Any]:
    """A function call(completions [N][J], optional {name: value}) that fills func's parameters by what they are.

    Parameters named in OPTIONAL_NAMES get that value wherever they stand, unless a functools.partial has set them; the
    others without a default are the completion lists, in order (*args takes the rest); the others keep their default.
    """
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError) as error:
        raise TypeError(f"reward {name!r} has no signature: give a function, or wrap it in a lambda") from error
    params = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    kinds = [p.kind for p in signature.parameters.values()]
    variadic = inspect.Parameter.VAR_POSITIONAL in kinds
    slots = [p for p in params if p.default is p.empty and p.name not in OPTIONAL_NAMES]
    by_keyword = [p.name for p in slots if p.kind is p.KEYWORD_ONLY]
    if by_keyword or len(slots) > num_agents or (len(slots) < num_agents and not variadic):
        takes = f"takes {len(slots) - len(by_keyword)}{' or more' * variadic} completion lists"
        takes += f" and requires the keywords {by_keyword}" * bool(by_keyword)
        needs = f"needed: {num_agents} positional parameters without a default, one for each agent, or *completions"
        raise TypeError(f"reward {name}{signature} {takes}; {needs}; only {OPTIONAL_NAMES} are passed by name")
    last = max((i for i, p in enumerate(params) if p in slots or p.kind is p.POSITIONAL_ONLY), default=-1)
    first = [p for i, p in enumerate(params) if p.kind is not p.KEYWORD_ONLY and (variadic or i <= last)]
    given = {p.name for p in first}
    if isinstance(func, functools.partial):
        given |= {*func.keywords, *inspect.signature(func.func).bind_partial(*func.args).arguments}
    accepts = OPTIONAL_NAMES if inspect.Parameter.VAR_KEYWORD in kinds else [p.name for p in params]
    keywords = [key for key in OPTIONAL_NAMES if key in accepts and key not in given]

    def call(completions: list, optional: dict) -> Any:
        rest = iter(completions)
        args = [next(rest) if p in slots else optional.get(p.name, p.default) for p in first]
        return func(*args, *rest, **{key: optional[key] for key in keywords})

    return call


def _within(timeout: float | None, call: Callable[[], Any]) -> Any:
    """What a call returns or raises. With a timeout it runs in a thread, which is left alone where it is late; a daemon, for
    which the process does not wait at its end."""
    if timeout is None:
        return call()
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="reward", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(f"it did not return within timeout={timeout:g} seconds and was abandoned")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _unique_names(funcs: Sequence[Callable]) -> list[str]:
    """f, g, f_2: a partial has the name of its function, a callable object that of its class, a lambda is `lambda`."""
    names: list[str] = []
    for func in funcs:
        inner = func.func if isinstance(func, functools.partial) else func
        name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
        numbered = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
        names.append(next(candidate for candidate in numbered if candidate not in names))
    return names


def _with_length(processor: Processor) -> Callable[[Any, Any], Any]:
    try:
        wants = "text_length" in inspect.signature(processor).parameters
    except ValueError:  # some C functions have no signature
        wants = False
    return (lambda x, length: processor(x, text_length=length)) if wants else (lambda x, length: processor(x))


def _process(processor, values: np.ndarray, lengths: list[int], name: str, faults: dict[int, str]) -> np.ndarray:
    """Apply a processor to each number of [J, N]; what is not finite stays as it is and is never shown to it."""
    out = values.copy()
    for j in np.flatnonzero(np.isfinite(values).all(axis=1)) if processor else ():
        try:
            row = [processor(float(x), lengths[j]) for x in values[j]]
        except Exception as error:
            raise RewardError(f"the processor of {name} raised {error!r} on {values[j]} (joint action {j})") from error
        out[j] = _numbers(row, len(row), f"the processor of {name}", int(j), faults)
    return out


def _numbers(entry: Any, num_agents: int, source: str, joint: int, faults: dict[int, str]) -> list[float]:
    """The value of each agent as a finite float, or NaN with an entry in faults. True and False are 1 and 0, texts none."""
    row = _as_list(entry)
    row = [entry] * num_agents if row is None else row
    if len(row) != num_agents:
        raise ValueError(f"{source} returned {len(row)} values for the {num_agents} agents of joint action {joint}")
    numbers = []
    for value in row:
        try:
            plain = value.item() if isinstance(value, np.ndarray) else value
            number = math.nan if isinstance(plain, str | bytes) else float(plain)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            number = math.nan
            faults.setdefault(joint, f"{source} returned {value!r:.80} on joint action {joint}, not a number")
        numbers.append(number)
    return numbers


def _as_list(value: Any) -> list[Any] | None:
    """The entries of a list, tuple, array or iterator; None for a single value (text, dicts and sets are single)."""
    try:
        entries = None if isinstance(value, str | bytes | dict | set) else iter(value)
    except TypeError:  # a number, None, an array without axes
        entries = None
    return None if entries is None else list(entries)


def _over_agents(values: np.ndarray) -> np.ndarray:
    """[J, N] -> [J]: the mean over agents, and exactly the common value where all agents have the same."""
    same = (values == values[:, :1]).all(axis=1)
    return values[:, 0].copy() if same.all() else np.where(same, values[:, 0], values.mean(axis=1))
