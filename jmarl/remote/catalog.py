"""What a server offers: environments and rewards by name, and the options that clients may set (host code, no jax).

Only what the server was started with has a name here, so no client makes it import a module. Which options clients may set, see
`options`. Whoever serves sets the others, in the file of --config:

    easy_math: {env: math, difficulty_range: [1, 2]}
    guess: {env: my_module:Guess, workers: 4, client_options: [numbers]}
    length: {reward: my_module:length}

`workers` are processes of an environment (default: those of --workers). `client_options` are the options that clients may set;
default: all that `options` allows. Those of a class of your own that are texts must be listed here.
"""

import asyncio
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from jmarl.config.validation import did_you_mean
from jmarl.config.yaml_file import read_yaml
from jmarl.envs import import_object, make, place_of
from jmarl.envs.base import class_name, describe, special_tokens
from jmarl.envs.calls.awaiting import is_async
from jmarl.envs.options import WithOptions
from jmarl.envs.tools.tool_use import ToolUse
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.engines import EnvironmentPlayer, Lane, Turns, declares_turns, engine_of, plays_one_episode
from jmarl.remote.gate import Code, GrpcRefusal, log
from jmarl.remote.options import is_of_files, may_read_files, problem_of
from jmarl.remote.values import to_map
from jmarl.sandbox import default_sandbox

MAX_BUILT, MAX_POOLS = 64, 8  # environments that a server has at once, each with its options: in threads, in processes
WRONG = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)  # what wrong options raise
KEYS = ("env", "reward", "workers", "client_options")


class CatalogEntry(NamedTuple):
    """An environment that a server offers."""

    env: str  # as for `make`
    options: Mapping[str, Any] = {}
    workers: int | None = None  # None: those of the server
    client_options: Sequence[str] | None = None  # that clients may set; None: all


class Offer(NamedTuple):
    """What a server was told to offer, by name."""

    environments: dict[str, CatalogEntry]
    rewards: dict[str, str]  # name -> module:function


@dataclasses.dataclass
class Built:
    """An environment with its options, ready to be played."""

    name: str
    env: Any  # as `make` returned it
    player: EnvironmentPlayer
    facts: pb.DescribeReply
    trusts_errors: bool  # errors of `reset` are sentences of jmarl, which name no secret
    workers: int  # processes
    users: int = 0  # sessions and calls that need it now
    tasks: tuple[Any, list[pb.Map]] | None = None  # the last request of tasks, without `first`, and its tasks

    def __enter__(self) -> None:
        self.users += 1

    def __exit__(self, *error: object) -> None:
        self.users -= 1


class CatalogReward(NamedTuple):
    """A reward function that a server offers."""

    function: Callable
    lane: Lane
    facts: pb.ServedReward


def read_offer(environments: str = "", rewards: str = "", config: str | Path | None = None) -> Offer:
    """Return what flags and a file say. environments, rewards: names with commas between them.

    Raises:
        ValueError: nothing is offered, a name occurs twice, or an entry of the file is wrong.
    """
    offer = Offer({}, {})
    for text in filter(None, map(str.strip, environments.split(","))):
        _add(offer, text.rpartition("/")[2], CatalogEntry(text), "--environments")
    for text in filter(None, map(str.strip, rewards.split(","))):
        _add(offer, text.rpartition("/")[2], text, "--rewards")
    if config is not None:
        file = read_yaml(config)
        for name, entry in file.tree.items():
            _add(offer, str(name), _entry(entry, file.place((name,))), file.place((name,)))
    if not offer.environments and not offer.rewards:
        raise ValueError(
            "there is nothing to serve: give --environments math,debate, --rewards module:function or --config FILE"
        )
    return offer


def _add(offer: Offer, name: str, entry: CatalogEntry | str, place: str) -> None:
    if name in offer.environments or name in offer.rewards:
        raise ValueError(f"{place}: {name!r} is offered twice: give one of them another name in the file of --config")
    if isinstance(entry, CatalogEntry):
        offer.environments[name] = entry
    else:
        offer.rewards[name] = entry


def _entry(entry: Any, place: str) -> CatalogEntry | str:
    """Return an entry of the file; the text of a reward."""
    if not isinstance(entry, dict) or ("env" in entry) == ("reward" in entry):
        raise ValueError(f"{place}: give {{env: math, ...}} or {{reward: module:function}}, got {entry!r:.80}")
    if "reward" in entry:
        if len(entry) > 1:
            raise ValueError(f"{place}: a reward has no other settings, got {', '.join(map(str, entry))}")
        return str(entry["reward"])
    workers, allowed = entry.get("workers"), entry.get("client_options")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 0):
        raise ValueError(f"{place}: workers={workers!r} is a number of processes, or 0 for none")
    if allowed is not None and not (isinstance(allowed, list) and all(isinstance(name, str) for name in allowed)):
        raise ValueError(f"{place}: client_options={allowed!r} is a list of options, such as [max_turns], or [] for none")
    return CatalogEntry(str(entry["env"]), {key: x for key, x in entry.items() if key not in KEYS}, workers, allowed)


class Catalog:
    """Builds environments and rewards, when they are first used, and remembers them.

    Args:
        offer: what there is.
        workers: processes of each environment that says nothing else; 0: none.
        timeout: seconds that a call may take.
    """

    def __init__(self, offer: Offer, workers: int, timeout: float):
        self.offer, self.workers, self.timeout = offer, workers, timeout
        self._built: dict[tuple, Built] = {}  # the least recently used first
        self._lane, self._building = Lane("building environments", timeout), asyncio.Lock()  # the loop goes on meanwhile
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()  # by the origin of clients
        self.rewards = {name: self._reward(name, place) for name, place in offer.rewards.items()}

    async def environment(self, name: str, options: dict[str, Any], num_turns: int, origin: str) -> Built:
        """Return an environment with the options of a client. Raises `GrpcRefusal` if there is none, or for a wrong option.

        origin: of the client, see `gate.Caller`."""
        if (entry := self.offer.environments.get(name)) is None:
            hint = did_you_mean(name, self.offer.environments)
            known = ", ".join(self.offer.environments) or "none"
            raise GrpcRefusal(
                Code.INVALID_ARGUMENT, f"there is no environment {name!r:.80} here{hint}; this server has {known}"
            )
        if num_turns < 0:
            raise GrpcRefusal(Code.INVALID_ARGUMENT, f"num_turns={num_turns}: give at least 1, or 0 where it is not known")
        try:
            key = (name, repr(sorted(options.items())), num_turns)
        except ValueError:
            raise GrpcRefusal(Code.INVALID_ARGUMENT, f"{name} does not take a number of so many digits") from None
        while (built := self._find(key)) is None:  # again where it had to make room before this could go on
            self._check_options(name, entry, options)
            await self.turns(origin).run(partial(self._add, key, entry, options))
        return built

    def turns(self, origin: str) -> Turns:
        """Return the turns of what a client lets environments do at length: one after the other, so that others wait little."""
        return self._turns.setdefault(origin, Turns())

    def _find(self, key: tuple[str, str, int]) -> Built | None:
        """Return an environment, which then is the one that was used last; None: it is not built."""
        for known in (key[:2], key):
            if (built := self._built.pop(known, None)) is not None:
                self._built[known] = built
                return built
        return None

    async def _add(self, key: tuple[str, str, int], entry: CatalogEntry, options: dict[str, Any]) -> None:
        """Build an environment, if no other client has had it built meanwhile."""
        async with self._building:
            if self._find(key) is None:
                built = await self._lane.run(lambda: self._build(key[0], entry, options, key[2]))
                self._make_room(built)
                self._built[key[:2] if declares_turns(built.env) else key] = built

    def _check_options(self, name: str, entry: CatalogEntry, options: Mapping[str, Any]) -> None:
        """Raise `GrpcRefusal` for options that a client may not set."""
        for option, value in options.items():
            if entry.client_options is not None and option not in entry.client_options:
                problem = f"clients may set {', '.join(entry.client_options) or 'no option'}"
            else:  # before the server's own value, which nobody shall guess if it is a path
                problem = problem_of(entry.env, option, value, entry.client_options is not None, self.timeout)
            if not problem and option in entry.options and entry.options[option] != value:
                problem = "this server has set it to another value"
            if problem:
                raise GrpcRefusal(
                    Code.INVALID_ARGUMENT, f"{name} does not take the option {option!r:.80} of a client: {problem}"
                )

    def _build(self, name: str, entry: CatalogEntry, options: Mapping[str, Any], num_turns: int = 0) -> Built:
        """Return an environment. Raises `GrpcRefusal` if it does not take the options; other errors are not for clients."""
        merged = {**entry.options, **options}
        try:
            env = make(entry.env, **merged)
            workers = self.workers * plays_one_episode(env) if entry.workers is None else entry.workers
            engine, is_bulk = engine_of(env, workers, self.timeout, num_turns)
            facts = describe_served(env, engine.env, merged)
        except WRONG as error:
            if not options:
                raise
            log.warning("environment %s does not take the options %.200r", name, dict(options), exc_info=True)
            place = place_of(entry.env)
            is_told = place.startswith("jmarl.") and isinstance(error, ValueError)
            is_told = is_told and not may_read_files(merged) and not is_of_files(error)
            sentence = f"environment {name!r} does not take {', '.join(options)} with these values; the server's log says why"
            raise GrpcRefusal(Code.INVALID_ARGUMENT, str(error) if is_told else sentence) from error
        lane = Lane(name, None if workers else self.timeout)  # a pool ends its calls itself
        return Built(name, env, EnvironmentPlayer(engine, is_bulk, lane), facts, type_is_of_jmarl(_inner_type(env)), workers)

    def _make_room(self, new: Built) -> None:
        """Forget environments that nobody uses, if there are too many. Raises `GrpcRefusal` if all are used."""
        alike = {key: built for key, built in self._built.items() if bool(built.workers) == bool(new.workers)}
        limit = MAX_POOLS if new.workers else MAX_BUILT
        for key, built in alike.items():
            if not built.users and len(alike) >= limit:
                self._built.pop(key).player.close()
                return
        if len(alike) >= limit:
            new.player.close()
            raise GrpcRefusal(
                Code.RESOURCE_EXHAUSTED,
                f"this server plays environments with {limit} different options already: use one of them",
            )

    def _reward(self, name: str, place: str) -> CatalogReward:
        function = import_object(place)
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"reward {place!r} is a {type(function).__name__}: give a function, as module:function")
        source = fingerprint(name, [metadata.version("jmarl"), source_of(function)])
        return CatalogReward(function, Lane(f"reward {name}", self.timeout), pb.ServedReward(
            name=name, is_async=is_async(function), fingerprint=source
        ))  # fmt: skip

    def reward(self, name: str, expected: str = "") -> CatalogReward:
        """Return a reward. Raises `GrpcRefusal` if there is none, or if another fingerprint is expected."""
        if name not in self.rewards:
            known = ", ".join(self.rewards) or "none"
            code = Code.FAILED_PRECONDITION if expected else Code.INVALID_ARGUMENT
            raise GrpcRefusal(code, f"there is no reward {name!r:.80} here; this server has {known}")
        check_fingerprint(expected, self.rewards[name].facts.fingerprint, name)
        return self.rewards[name]

    def build_all(self) -> None:
        """Build each environment once without options of clients, so that a wrong name is an error at the start."""
        for name, entry in self.offer.environments.items():
            built = self._build(name, entry, {})
            self._built[(name, "[]") if declares_turns(built.env) else (name, "[]", 0)] = built

    def levels(self) -> dict[str, str]:
        """Return the level of the sandbox of each environment that runs programs."""
        return {built.name: built.facts.sandbox for built in self._built.values() if built.facts.sandbox}

    def close(self) -> None:
        """End all threads and processes."""
        for built in self._built.values():
            built.player.close()
        for reward in self.rewards.values():
            reward.lane.close()
        self._lane.close()


def describe_served(env: Any, played: Any, options: Mapping[str, Any]) -> pb.DescribeReply:
    """Return what a client must know. env: as `make` returned it; played: the environment inside; options: all, also those of
    the server, since servers with others are not equal."""
    processed = isinstance(env, WithOptions) and env.reward_options or getattr(played, "processor", None) is not None
    low, high = (-float("inf"), float("inf")) if processed else played.reward_range
    description, level = describe(env), sandbox_level(played)
    own = [metadata.version("jmarl"), json.dumps(description, sort_keys=True), repr(sorted(options.items()))]
    return pb.DescribeReply(
        roles=played.roles,
        lowest_reward=low,
        highest_reward=high,
        max_turns=played.max_turns,
        data_sets=getattr(played, "data_sets", ()),
        special_tokens=special_tokens(played),
        class_name=class_name(played),
        description=to_map(description, f"the description of {class_name(played)}"),
        fingerprint=fingerprint(class_name(played), [*own, *sources_of(_inner_type(env))]),
        sandbox=level,
    )


def sandbox_level(env: Any) -> str:
    """Return how the programs of an environment are confined, such as S3; empty if it runs none."""
    if isinstance(env, ToolUse):
        return default_sandbox().level if any(tool.sandboxed for tool in env.registry.tools.values()) else ""
    return str(describe(env).get("sandbox", ""))


def check_fingerprint(expected: str, own: str, name: str) -> None:
    """Raise `GrpcRefusal` for another fingerprint than a client expects: there was another server at this address before."""
    if expected not in ("", own):
        raise GrpcRefusal(
            Code.FAILED_PRECONDITION,
            f"{name} is another one here (fingerprint {own}, and the client's has {expected:.80}): describe it again",
        )


def fingerprint(name: str, texts: Sequence[str]) -> str:
    """Return a digest that is the same on servers that can replace each other."""
    return hashlib.sha256(json.dumps([name, *texts]).encode("utf-8", "backslashreplace")).hexdigest()[:16]


@cache  # parsing in several threads at once is an error of some versions of Python
def sources_of(cls: type) -> list[str]:
    """Return the sources of a class and of those above it, without those of jmarl."""
    return [source_of(base) for base in cls.__mro__ if not type_is_of_jmarl(base) and base is not object]


def source_of(value: Any) -> str:
    """Return the source of a function or class, or its name where Python does not have it."""
    try:
        return inspect.getsource(inspect.unwrap(value))
    except (OSError, TypeError):
        return f"{type(value).__module__}.{type(value).__qualname__}"


def type_is_of_jmarl(cls: Any) -> bool:
    """Return whether a class is one of jmarl, whose errors are sentences for users."""
    return (getattr(cls, "__module__", None) or "").startswith("jmarl.")


def _inner_type(env: Any) -> type:
    return type(env.env if isinstance(env, WithOptions) else env)
