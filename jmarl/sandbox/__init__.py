"""Runs programs that a model wrote, and says whether they pass their tests."""

from jmarl.sandbox.client import Sandbox, default_sandbox, levels, run_program, run_programs
from jmarl.sandbox.types import ExecutionResult, Limits, SandboxUnavailable, TestResult, Tests, asserts, calls, pairs, unittests

__all__ = [
    "ExecutionResult", "Limits", "Sandbox", "SandboxUnavailable", "TestResult", "Tests", "asserts", "calls", "default_sandbox",
    "levels", "pairs", "run_program", "run_programs", "unittests",
]  # fmt: skip
