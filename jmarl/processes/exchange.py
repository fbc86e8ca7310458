"""Exchange what the hosts of a run know: Python objects, and arrays that lie on devices of several processes.

All processes of a run execute the same program (JAX's multi-controller model): each call here is made by all of them, in one
order and in one thread. What a call returns is equal in all, so they decide the same.

Objects go through the key-value store of `jax.distributed`, not through collectives of devices: those of CPUs (gloo) end with
an error if a process is more than 30 s late, and a reward function may take minutes. In a single process each function is as if
it were not there.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError

from jmarl.processes.ending import Interrupted, sentence

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
KNOWN = "_jmarl_is_known"  # attribute of errors of which the other processes know
PART = 2**20  # bytes of a value of the store; its messages may have 4 MiB
WAIT_MS = 1000  # then Python looks for signals

_numbers = itertools.count()  # of the exchanges so far
_written: list[str] = []  # keys of this process that others may still read
_ended = False  # a process has failed between two exchanges
_sent, _seconds = 0, 0.0  # since `take`: bytes that this process gave to the others, and seconds until it had theirs


class FailedProcess(RuntimeError):
    """Another process of the run failed."""


def tell(error: BaseException) -> bool:
    """Tell the other processes of an error here, and return whether all are in step: they may then go on together, to save.

    They are if the error was raised in an exchange, or if all tell of one now. If this process is the only one, or some, the
    others end at their next exchange, and no process exchanges anything any more.
    """
    if count() > 1 and not (_ended or isinstance(error, FailedProcess) or getattr(error, KNOWN, False)):
        setattr(error, KNOWN, True)
        _judge(_exchange(payload_of(error, outside=True)))
    return not _ended


def tells_others(f: F) -> F:
    """Decorate a function that all processes call: if it raises in one of them, the others end too, at their next exchange."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except BaseException as error:
            tell(error)
            raise

    return call  # type: ignore[return-value]


def has_ended() -> bool:
    """Return whether a process has failed by itself, so that nothing can be exchanged any more."""
    return _ended


def require_one(what: str) -> None:
    """Raise RuntimeError in one of several processes. what: can only be done in one, a plural."""
    if count() > 1:
        raise RuntimeError(f"{what} need one process, and this run has {count()}: start a single one")


class Payload(NamedTuple):
    """What a process gives to the others: a pickled object, or why it has none."""

    data: bytes
    error: str = ""  # with its traceback
    reason: str = ""  # the error in one line
    outside: bool = False  # the error was raised between two exchanges
    interrupted: str | None = None  # why the run is interrupted, for all processes


def count() -> int:
    """Return the number of processes of the run."""
    return jax.process_count()


def number() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Return whether this is the process that owns the run's files, or the only one."""
    return jax.process_index() == 0


def take() -> dict[str, float]:
    """Return the columns of what was exchanged since the last call: bytes that this process gave to the others, and the seconds
    until it had theirs, in which it waited for the slowest. Empty in a single process."""
    global _sent, _seconds
    columns = {"exchange/sent_bytes": float(_sent), "exchange/seconds": _seconds} if count() > 1 else {}
    _sent, _seconds = 0, 0.0
    return columns


def own_device() -> Any:
    """Return the first device of this process."""
    return next(device for device in jax.devices() if device.process_index == number())


def gather(make: Callable[[], T], what: str = "the results of a process") -> list[T]:
    """Call a function in each process. Returns the results of all processes, in their order.

    what: the results are, for an error about one that cannot be pickled.

    Raises what it raised here, or `FailedProcess` with the traceback of another process in which it raised. `Interrupted` is
    raised in all, which then save the run together.
    """
    if count() == 1:
        return [make()]
    if _ended:
        raise FailedProcess("a process of this run has failed, so nothing can be exchanged any more")
    mine: Any = None
    try:
        mine = make()
        payload = Payload(_pickled(mine, what))
    except Interrupted as reason:
        payload = Payload(b"", interrupted=str(reason))
    except BaseException as error:
        setattr(error, KNOWN, True)
        _judge(_exchange(payload_of(error)))
        raise
    payloads = _exchange(payload)
    _judge(payloads)
    for i, other in enumerate(payloads):
        if other.error:
            failed = FailedProcess(f"process {i} of {len(payloads)} failed: {other.reason}")
            failed.add_note(f"process {i}: {other.error}")
            raise failed
    if interrupted := [other.interrupted for other in payloads if other.interrupted is not None]:
        raise Interrupted(interrupted[0])
    return [mine if i == number() else pickle.loads(other.data) for i, other in enumerate(payloads)]


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # of any kind: pickle calls methods of the user's classes
        raise TypeError(
            f"{what} cannot be pickled ({type(error).__name__}: {error}), and the processes of a run give them to each other: "
            "let them hold plain data, such as texts, numbers, lists and dicts, or start a single process"
        ) from error


def _judge(payloads: list[Payload]) -> None:
    """Note whether processes have failed by themselves, and are not in step with the others."""
    global _ended
    outside = [payload.outside for payload in payloads]
    _ended = _ended or (any(outside) and not all(outside))


def payload_of(error: BaseException, outside: bool = False) -> Payload:
    """Return what a process gives to the others when it fails."""
    return Payload(b"", "".join(traceback.format_exception(error)), sentence(error), outside)


def from_first(make: Callable[[], T]) -> T:
    """Call a function in the first process only, and return its result in all."""
    return gather(make if is_first() else lambda: None)[0]  # type: ignore[return-value]


def write_in_first(write: Callable[[], Any]) -> None:
    """Call a function that writes files in the first process. A lack of room raises OSError in all."""

    def call() -> str:
        try:
            write()
        except (OSError, SafetensorError) as error:
            return str(error) or repr(error)
        return ""

    if count() == 1:
        write()
    elif why := from_first(call):
        raise OSError(why)


def any_of(flag: bool) -> bool:
    """Return whether a flag is set in one of the processes."""
    return any(gather(lambda: flag))


def wait_for_all() -> None:
    """Wait until all processes are here. Call it before a collective of devices that work of the host may have delayed."""
    gather(lambda: None)


def share(count_of_all: int) -> slice:
    """Return which of some things, such as episodes, are those of this process: equal parts in the order of the processes."""
    bounds = [i * count_of_all // count() for i in (number(), number() + 1)]
    return slice(*bounds)


def to_host(arrays: Any) -> Any:
    """Copy a pytree of arrays to the host; those that lie on devices of several processes whole to each of them."""
    if count() == 1:
        return jax.device_get(arrays)
    leaves, tree = jax.tree.flatten(arrays)
    spread = [x for x in leaves if _is_spread(x)]
    whole = iter(_replicated(spread))
    on_host = [np.asarray(next(whole) if _is_spread(x) else x) if isinstance(x, jax.Array) else x for x in leaves]
    return jax.tree.unflatten(tree, on_host)


def to_devices(arrays: Any, shardings: Any) -> Any:
    """Place a pytree of arrays by shardings, or by one for all. Arrays of the host and of single devices are equal in all
    processes, and each process takes its part of them; nothing is exchanged then.
    """

    def move(x: Any, sharding: Any) -> jax.Array:
        if count() == 1 or sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if _is_spread(x):
            return jax.jit(_same, out_shardings=(sharding,))(x)[0]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(move(jax.random.key_data(x), sharding))
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda x: move(x, shardings), arrays)
    return jax.tree.map(move, arrays, shardings)


def sharding_of_small() -> jax.sharding.Sharding:
    """Return where arrays lie that are not placed: on the first device, or whole on those of all processes."""
    if count() == 1:
        return jax.sharding.SingleDeviceSharding(own_device())
    return NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P())


def of_all(x: Any) -> Any:
    """Return an array that is equal in all processes as one of all their devices, as Orbax saves it."""
    return x if count() == 1 or (isinstance(x, jax.Array) and _is_spread(x)) else to_devices(x, sharding_of_small())


def _is_spread(x: Any) -> bool:
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def _replicated(arrays: list[jax.Array]) -> list[jax.Array]:
    if not arrays:
        return []
    targets = [NamedSharding(x.sharding.mesh, P()) for x in arrays]  # type: ignore[attr-defined]
    return jax.jit(_same, out_shardings=tuple(targets))(*arrays)


def _same(*arrays: Any) -> Any:  # a function of the module, for which jax.jit keeps programs
    return arrays


def _client() -> Any:
    from jax._src import distributed  # JAX has no public name for the store

    return distributed.global_state.client


def _give(payload: Payload) -> int:
    """Write a payload to the store. Returns the number of the exchange."""
    global _sent
    exchange, data = next(_numbers), pickle.dumps(payload)
    _sent += len(data)
    parts = [data[start : start + PART] for start in range(0, len(data), PART)]
    prefix = f"jmarl/{exchange}/{number()}"
    for i, part in enumerate(parts):
        _client().key_value_set_bytes(f"{prefix}/{i}", part)
    _client().key_value_set_bytes(f"{prefix}/parts", str(len(parts)).encode())
    _written.append(prefix)
    return exchange


def _exchange(payload: Payload) -> list[Payload]:
    global _seconds
    start = time.monotonic()
    exchange = _give(payload)
    payloads = [payload if i == number() else pickle.loads(_read(f"jmarl/{exchange}/{i}")) for i in range(count())]
    while len(_written) > 1:  # all have read what came before this exchange, because all have written to this one
        _client().key_value_delete(f"{_written.pop(0)}/")
    _seconds += time.monotonic() - start
    return payloads


def _read(prefix: str) -> bytes:
    parts = int(_wait_for(f"{prefix}/parts"))
    return b"".join(_wait_for(f"{prefix}/{i}") for i in range(parts))


def _wait_for(key: str) -> bytes:
    """Return a value of the store, when it is there: a process that has ended ends this one, too (`jax.distributed`)."""
    while True:
        try:
            return _client().blocking_key_value_get_bytes(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
