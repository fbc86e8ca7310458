"""Proxies of objects that live in the program, and replacements for the parts of Python that must know proxies.

A verdict must not hang on what the program says. So an object of the program equals a plain value only if its plain contents do
(see `wire`). Where asking the program is the only possibility, it is asked, and the test is marked as weak: when two of its
objects are compared, when one takes part in a calculation with a value of the tests or is said to contain one, and when one
compares itself with a value by a method that builtin types have. What an object says about itself (`f(x).is_valid()`) is taken
like the return value of a function.
"""

from __future__ import annotations

import itertools
import operator
import types
import unittest
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from .wire import standard_name

if TYPE_CHECKING:
    from .program_client import ProgramClient

MAX_ITERATED = 10_000
TESTS_MODULE = "tests"  # the name of the module that the tests run as
FORWARDED_DUNDERS = (
    "__name__", "__qualname__", "__doc__", "__module__", "__dict__", "__class__", "__wrapped__", "__annotations__",
)  # fmt: skip
COMPARING_METHODS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count", "equals",
    "issubset", "issuperset", "isdisjoint", "difference", "intersection", "symmetric_difference", "union",
}  # fmt: skip
NOTHING = object()


class Proxy:
    """Stands for an object of the program. Its operations ask the program, with the exceptions that the module names."""

    __slots__ = ("_jmarl_client", "_jmarl_id", "_jmarl_plain")
    _jmarl_client: ProgramClient
    _jmarl_id: int
    _jmarl_plain: Any  # its value as a builtin type if it compares as that type does, else NOTHING

    def __init__(self, client: ProgramClient, number: int, plain: Any):
        for name, x in (("_jmarl_client", client), ("_jmarl_id", number), ("_jmarl_plain", plain)):
            object.__setattr__(self, name, x)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in FORWARDED_DUNDERS:
            raise AttributeError(name)  # libraries look these up unasked and believe the answer (numpy: a memory address)
        client = self._jmarl_client
        value = client.ask("getattr", self, name)
        if name in COMPARING_METHODS and self._jmarl_id not in client.tested_ids and callable(value):
            client.weak = True  # where the tests expect a text or a set, the program would be told what it is compared with
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._jmarl_client.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._jmarl_client.ask("delattr", self, name)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        client = self._jmarl_client
        value = client.ask("call", self, *arguments, **keywords)
        if type(value) is Proxy and self._jmarl_id in client.tested_ids:
            client.tested_ids.add(value._jmarl_id)
        return value

    def __iter__(self) -> Iterator[Any]:
        iterator = self._jmarl_client.ask("iter", self)
        while True:
            try:
                value = self._jmarl_client.ask("next", iterator)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._jmarl_client.ask("next", self)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._jmarl_client.ask("await", self)
        yield

    def __contains__(self, x: Any) -> bool:
        return _contains(self, x)

    def __eq__(self, other: Any) -> bool:
        return _compare(self, operator.eq, other, False)

    def __ne__(self, other: Any) -> bool:
        return _compare(self, operator.ne, other, True)

    def __hash__(self) -> int:
        return hash(self._jmarl_plain) if self._jmarl_plain is not NOTHING else self._jmarl_client.ask("hash", self)

    def __instancecheck__(self, x: Any) -> bool:
        return type(x) is Proxy and self._jmarl_client.ask("isinstance", x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        is_programs_class = type(x) is Proxy or x in self._jmarl_client.error_class_numbers
        return is_programs_class and self._jmarl_client.ask("issubclass", x, self)

    def __mro_entries__(self, bases: tuple) -> tuple:
        raise self._jmarl_client.unsupported("a class of the tests cannot derive from a class of the program")

    def __enter__(self) -> Any:
        return self._jmarl_client.ask("enter", self)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        return _exit(self, error)

    def __copy__(self) -> Any:
        return self._jmarl_client.ask("copy", self)

    def __deepcopy__(self, memo: dict) -> Any:
        return self._jmarl_client.ask("deepcopy", self)


# Functions and not methods of `Proxy`, where they would hide attributes of the program's object.


def _ask_weakly(proxy: Proxy, operation: str, *arguments: Any) -> Any:
    """Ask the program something that a verdict may hang on."""
    proxy._jmarl_client.weak = True
    return proxy._jmarl_client.ask(operation, *arguments)


def _exit(proxy: Proxy, error: BaseException | None) -> Any:
    """End a `with` block. The program is not told of failed assertions, and cannot suppress them."""
    client = proxy._jmarl_client
    if error is None:
        return client.ask("exit", proxy, None)
    if not isinstance(error, Exception):
        return False
    if isinstance(error, AssertionError) and "_jmarl_raised" not in error.__dict__:
        client.ask("exit", proxy, None)
        return False
    suppressed = bool(client.ask("exit", proxy, error))
    client.weak |= suppressed  # the tests go on where they would have ended
    return suppressed


def _contains(proxy: Proxy, x: Any) -> bool:
    """Return what the program says; the test becomes weak if that is not what iterating over the object shows, because an
    iteration is as good as a returned list."""
    if proxy._jmarl_plain is not NOTHING:
        return x in proxy._jmarl_plain
    try:
        in_iteration = any(y is x or y == x for y in itertools.islice(iter(proxy), MAX_ITERATED))
    except TypeError:  # it has no iterator
        in_iteration = None
    answer = proxy._jmarl_client.ask("contains", proxy, x)
    if answer is not in_iteration:
        proxy._jmarl_client.weak = True
    return answer


def _compare(proxy: Proxy, compare: Callable[[Any, Any], Any], other: Any, if_no_plain_value: Any) -> Any:
    plain = proxy._jmarl_plain
    if type(other) is not Proxy:
        return if_no_plain_value if plain is NOTHING else compare(plain, other)
    proxy._jmarl_client.weak = True  # both objects are the program's
    if plain is not NOTHING and other._jmarl_plain is not NOTHING:
        return compare(plain, other._jmarl_plain)
    return proxy._jmarl_client.ask(compare.__name__, proxy, other)


def _calculate(proxy: Proxy, operation: str, other: Any, reflected: bool) -> Any:
    operands = (other, proxy) if reflected else (proxy, other)
    if type(other) is Proxy:
        return proxy._jmarl_client.ask(operation, *operands)
    return _ask_weakly(proxy, operation, *operands)


def _define(name: str, method: Any) -> None:
    setattr(Proxy, name, method)


_UNARY = "len str repr bool int float complex abs round reversed getitem setitem delitem index neg pos invert format"
_BINARY = "add sub mul truediv floordiv mod matmul and or xor lshift rshift pow"
for _name in _UNARY.split(" "):
    _define(f"__{_name}__", lambda self, *arguments, _op=_name: self._jmarl_client.ask(_op, self, *arguments))
for _name in ["divmod", *_BINARY.split(" ")]:
    _define(f"__{_name}__", lambda self, other, _op=_name: _calculate(self, _op, other, False))
    _define(f"__r{_name}__", lambda self, other, _op=_name: _calculate(self, _op, other, True))
for _name in _BINARY.split(" "):
    _define(f"__i{_name}__", lambda self, other, _op=f"i{_name}": _calculate(self, _op, other, False))
for _order in (operator.lt, operator.le, operator.gt, operator.ge):
    _define(f"__{_order.__name__}__", lambda self, other, _op=_order: _compare(self, _op, other, NotImplemented))
_define("__doc__", property(lambda self: self._jmarl_client.ask("getattr", self, "__doc__")))


# Replacements for builtins and for methods of unittest and asyncio, on the side of the tests.


def is_same(a: Any, b: Any) -> bool:
    """Return `a is b`. A proxy is a new one each time, so for two proxies the objects' numbers decide, weakly."""
    if type(a) is not Proxy or type(b) is not Proxy:
        return a is b
    a._jmarl_client.weak = True
    return a._jmarl_id == b._jmarl_id


def is_instance(x: Any, classes: Any) -> bool:
    """Return `isinstance(x, classes)`, without mistaking the methods that every `Proxy` has for the object's own."""
    if type(x) is not Proxy:
        return isinstance(x, classes)
    if isinstance(classes, tuple | types.UnionType):
        return any(is_instance(x, c) for c in (classes if isinstance(classes, tuple) else classes.__args__))
    if x._jmarl_plain is not NOTHING and isinstance(x._jmarl_plain, classes):
        return True
    if not isinstance(classes, type) or classes in x._jmarl_client.error_class_numbers:
        return x._jmarl_client.ask("isinstance", x, classes)
    return isinstance(x, classes) if standard_name(classes) is None else _ask_weakly(x, "isinstance", x, classes)


def is_callable(x: Any) -> bool:
    """Return `callable(x)`; for a proxy only the program can say."""
    return _ask_weakly(x, "callable", x) if type(x) is Proxy else callable(x)


def has_attribute(x: Any, name: str) -> bool:
    """Return `hasattr(x, name)`. The program is asked for special methods too, because every `Proxy` has some."""
    is_special = type(x) is Proxy and name.startswith("__") and name not in FORWARDED_DUNDERS
    return _ask_weakly(x, "hasattr", x, name) if is_special else hasattr(x, name)


REPLACED_NAMES = {"__same__": is_same, "isinstance": is_instance, "callable": is_callable, "hasattr": has_attribute}


def prepare_unittest() -> None:
    """Replace the assert methods that use `is` or `isinstance`, and one that would tell an object what it is compared with."""

    def assert_set_equal(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        if first != second:
            self.fail(self._formatMessage(msg, "the sets differ"))

    def assert_is(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        if not is_same(first, second):
            self.fail(self._formatMessage(msg, "not the same object"))

    def assert_is_not(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        if is_same(first, second):
            self.fail(self._formatMessage(msg, "the same object"))

    for name, method in (("SetEqual", assert_set_equal), ("Is", assert_is), ("IsNot", assert_is_not)):
        setattr(unittest.TestCase, f"assert{name}", method)
    unittest.case.isinstance = is_instance  # type: ignore[attr-defined]


def prepare_asyncio() -> None:
    """Let `asyncio.run` and `asyncio.create_task` take proxies of coroutines."""
    import asyncio

    async def await_proxy(x: Any) -> Any:
        return await x

    def accepting_proxies(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda main, **keywords: run(await_proxy(main) if type(main) is Proxy else main, **keywords)

    asyncio.run, asyncio.create_task = accepting_proxies(asyncio.run), accepting_proxies(asyncio.create_task)
