"""What clients are told of the errors of environments. The log gets all of it: they may hold paths, answers and secrets."""

from __future__ import annotations

import builtins
import re

from jmarl.envs.vector import Fault
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.catalog import Built
from jmarl.remote.gate import Caller, Code, GrpcRefusal, log, shortened
from jmarl.remote.options import is_of_files

PLACE = re.compile(r"[/\\]\w|\bErrno\b")  # in a sentence that names a path, an address or an error of the system


def refusal_of(error: Exception, built: Built, method: str, caller: Caller) -> GrpcRefusal:
    """Return what a client is told of an error that an environment raised."""
    if isinstance(error, GrpcRefusal):
        return error.alone()
    if isinstance(error, NotImplementedError) and method == "tasks":
        return GrpcRefusal(Code.UNIMPLEMENTED, f"{built.name} has no tasks of its own: pass items to train(...)")
    log.error("request %s: %s.%s raised an error", caller.number, built.name, method, exc_info=error)
    error.__traceback__ = None  # as in `GrpcRefusal.alone`
    if isinstance(error, ValueError) and method != "step":
        is_told = built.trusts_errors and not is_of_files(error)
        why = str(error) if is_told else f"{built.name} refused it; the server's log says why"
        return GrpcRefusal(Code.INVALID_ARGUMENT, f"a malformed {'task' if method == 'reset' else 'request'}: {why}")
    return GrpcRefusal(Code.INTERNAL, f"{built.name} raised {type_name(error)} in {method}; the server's log says more")


def fault_of(fault: Fault, built: Built, caller: Caller) -> pb.Fault:
    """Return what a client is told where there is no result: the reason, unless it seems to name a file or an address."""
    reason = fault.reason
    if PLACE.search(reason):
        log.warning("request %s: %s gave no result: %s", caller.number, built.name, reason)
        reason = f"{built.name} gave no result; the server's log says why (request {caller.number})"
    return pb.Fault(reason=shortened(reason))


def type_name(error: Exception) -> str:
    """Return the type of an error: a built-in one by its name, since names of others may say too much."""
    name = type(error).__name__
    return f"a {name}" if hasattr(builtins, name) else "an error"
