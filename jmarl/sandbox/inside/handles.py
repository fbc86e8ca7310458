"""Objects that live in the program, as the tests see them, and what of Python the tests have in a version that knows of them.

What decides a verdict is not asked of the program: an object of its own is equal to a plain value only if its plain contents
are (`wire`). Where nothing else is possible than to ask (two of its objects are compared, one takes part in a calculation with
a value of the tests, is said to contain one, or compares itself with one by a method that builtin types have), it is asked, and
the test is marked as weak. What an object says about itself (`f(x).is_valid()`) is taken as a function's answer is.
"""

from __future__ import annotations

import itertools
import operator
import types
import unittest
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from .wire import named

if TYPE_CHECKING:
    from .remote import Judge

MOST_WALKED = 10_000
TESTS = "tests"  # the module that the tests are
ASKABLE = ("__name__", "__qualname__", "__doc__", "__module__", "__dict__", "__class__", "__wrapped__", "__annotations__")
COMPARING = {
    "startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count", "equals",
    "issubset", "issuperset", "isdisjoint", "difference", "intersection", "symmetric_difference", "union",
}  # fmt: skip
NOTHING = object()


class Remote:
    """An object of the program's."""

    __slots__ = ("_jmarl_judge", "_jmarl_id", "_jmarl_plain")
    _jmarl_judge: Judge
    _jmarl_id: int
    _jmarl_plain: Any  # what it holds as a value of a builtin type, if it compares as that does

    def __init__(self, judge: Judge, number: int, plain: Any):
        for name, x in (("_jmarl_judge", judge), ("_jmarl_id", number), ("_jmarl_plain", plain)):
            object.__setattr__(self, name, x)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ASKABLE:
            raise AttributeError(name)  # libraries look these up on their own, and believe what they find (numpy: an address)
        judge = self._jmarl_judge
        found = judge.ask("getattr", self, name)
        if name in COMPARING and self._jmarl_id not in judge.tested and callable(found):
            judge.weak = True  # where a text or a set was expected, it is told what with, and says what comes of it
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self._jmarl_judge.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._jmarl_judge.ask("delattr", self, name)

    def __call__(self, /, *arguments: Any, **named_arguments: Any) -> Any:
        judge = self._jmarl_judge
        found = judge.ask("call", self, *arguments, **named_arguments)
        if type(found) is Remote and self._jmarl_id in judge.tested:
            judge.tested.add(found._jmarl_id)
        return found

    def __iter__(self) -> Iterator[Any]:
        walk = self._jmarl_judge.ask("iter", self)
        while True:
            try:
                found = self._jmarl_judge.ask("next", walk)
            except StopIteration:
                return
            yield found

    def __next__(self) -> Any:
        return self._jmarl_judge.ask("next", self)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._jmarl_judge.ask("await", self)
        yield

    def __contains__(self, x: Any) -> bool:
        return _contains(self, x)

    def __eq__(self, other: Any) -> bool:
        return _compare(self, operator.eq, other, False)

    def __ne__(self, other: Any) -> bool:
        return _compare(self, operator.ne, other, True)

    def __hash__(self) -> int:
        return hash(self._jmarl_plain) if self._jmarl_plain is not NOTHING else self._jmarl_judge.ask("hash", self)

    def __instancecheck__(self, x: Any) -> bool:
        return type(x) is Remote and self._jmarl_judge.ask("isinstance", x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        known = type(x) is Remote or x in self._jmarl_judge.numbers
        return known and self._jmarl_judge.ask("issubclass", x, self)

    def __mro_entries__(self, bases: tuple) -> tuple:
        raise self._jmarl_judge.untold("a class of the tests cannot come from one of the program's")

    def __enter__(self) -> Any:
        return self._jmarl_judge.ask("enter", self)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        return _exit(self, error)

    def __copy__(self) -> Any:
        return self._jmarl_judge.ask("copy", self)

    def __deepcopy__(self, memo: dict) -> Any:
        return self._jmarl_judge.ask("deepcopy", self)


# Not methods of `Remote`, where they would stand in front of the program's attributes.


def _left_to_it(remote: Remote, operation: str, *arguments: Any) -> Any:
    """Ask what a verdict may hang on."""
    remote._jmarl_judge.weak = True
    return remote._jmarl_judge.ask(operation, *arguments)


def _exit(self: Remote, error: BaseException | None) -> Any:
    """The end of a `with` block. It is not told of what the tests found wrong, and cannot make it go away."""
    if error is None:
        return self._jmarl_judge.ask("exit", self, None)
    if not isinstance(error, Exception):
        return False
    if isinstance(error, AssertionError) and "_jmarl_raised" not in error.__dict__:
        self._jmarl_judge.ask("exit", self, None)
        return False
    said = bool(self._jmarl_judge.ask("exit", self, error))
    self._jmarl_judge.weak |= said  # the tests go on where they would have ended
    return said


def _contains(self: Remote, x: Any) -> bool:
    """What a walk through it finds, which is as good as a list of its contents; if it says something else, that."""
    if self._jmarl_plain is not NOTHING:
        return x in self._jmarl_plain
    try:
        found = any(y is x or y == x for y in itertools.islice(iter(self), MOST_WALKED))
    except TypeError:  # it has no iterator
        found = None
    said = self._jmarl_judge.ask("contains", self, x)
    if said is not found:
        self._jmarl_judge.weak = True
    return said


def _compare(self: Remote, how: Any, other: Any, unlike: Any) -> Any:
    mine = self._jmarl_plain
    if type(other) is not Remote:
        return unlike if mine is NOTHING else how(mine, other)
    self._jmarl_judge.weak = True  # both are the program's
    if mine is not NOTHING and other._jmarl_plain is not NOTHING:
        return how(mine, other._jmarl_plain)
    return self._jmarl_judge.ask(how.__name__, self, other)


def _calculate(self: Remote, operation: str, other: Any, reflected: bool) -> Any:
    pair = (other, self) if reflected else (self, other)
    if type(other) is Remote:
        return self._jmarl_judge.ask(operation, *pair)
    return _left_to_it(self, operation, *pair)


def _set(name: str, method: Any) -> None:
    setattr(Remote, name, method)


_ABOUT = "len str repr bool int float complex abs round reversed getitem setitem delitem index neg pos invert format"
_WITH = "add sub mul truediv floordiv mod matmul and or xor lshift rshift pow"
for _name in _ABOUT.split(" "):
    _set(f"__{_name}__", lambda self, *more, _how=_name: self._jmarl_judge.ask(_how, self, *more))
for _name in ["divmod", *_WITH.split(" ")]:
    _set(f"__{_name}__", lambda self, other, _how=_name: _calculate(self, _how, other, False))
    _set(f"__r{_name}__", lambda self, other, _how=_name: _calculate(self, _how, other, True))
for _name in _WITH.split(" "):
    _set(f"__i{_name}__", lambda self, other, _how=f"i{_name}": _calculate(self, _how, other, False))
for _order in (operator.lt, operator.le, operator.gt, operator.ge):
    _set(f"__{_order.__name__}__", lambda self, other, _how=_order: _compare(self, _how, other, NotImplemented))
_set("__doc__", property(lambda self: self._jmarl_judge.ask("getattr", self, "__doc__")))


# What the tests have in place of Python's own.


def same(a: Any, b: Any) -> bool:
    """`a is b`. Of two objects of the program's, only the program can say."""
    if type(a) is not Remote or type(b) is not Remote:
        return a is b
    a._jmarl_judge.weak = True
    return a._jmarl_id == b._jmarl_id


def is_instance(x: Any, kinds: Any) -> bool:
    """Python would find the methods that every `Remote` has."""
    if type(x) is not Remote:
        return isinstance(x, kinds)
    if isinstance(kinds, tuple | types.UnionType):
        return any(is_instance(x, kind) for kind in (kinds if isinstance(kinds, tuple) else kinds.__args__))
    if x._jmarl_plain is not NOTHING and isinstance(x._jmarl_plain, kinds):
        return True
    if not isinstance(kinds, type) or kinds in x._jmarl_judge.numbers:
        return x._jmarl_judge.ask("isinstance", x, kinds)
    return isinstance(x, kinds) if named(kinds) is None else _left_to_it(x, "isinstance", x, kinds)


def is_callable(x: Any) -> bool:
    return _left_to_it(x, "callable", x) if type(x) is Remote else callable(x)


def has_attribute(x: Any, name: str) -> bool:
    """Those that Python itself goes by are asked for too, since every `Remote` has them."""
    asked = type(x) is Remote and name.startswith("__") and name not in ASKABLE
    return _left_to_it(x, "hasattr", x, name) if asked else hasattr(x, name)


FOR_TESTS = {"__same__": same, "isinstance": is_instance, "callable": is_callable, "hasattr": has_attribute}


def prepare_unittest() -> None:
    """Its methods ask what the tests would, and none of them tells an object what it is compared with."""

    def assert_set_equal(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        if first != second:
            self.fail(self._formatMessage(msg, "the sets differ"))

    def assert_is(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        if not same(first, second):
            self.fail(self._formatMessage(msg, "another object"))

    def assert_is_not(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        if same(first, second):
            self.fail(self._formatMessage(msg, "one and the same object"))

    for name, method in (("SetEqual", assert_set_equal), ("Is", assert_is), ("IsNot", assert_is_not)):
        setattr(unittest.TestCase, f"assert{name}", method)
    unittest.case.isinstance = is_instance  # type: ignore[attr-defined]


def prepare_asyncio() -> None:
    """It runs nothing but coroutines of this process."""
    import asyncio

    async def awaited(x: Any) -> Any:
        return await x

    def taking(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda main, **named: run(awaited(main) if type(main) is Remote else main, **named)

    asyncio.run, asyncio.create_task = taking(asyncio.run), taking(asyncio.create_task)
