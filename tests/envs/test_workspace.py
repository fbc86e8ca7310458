"""The tool registry, and the tools of the sandbox: a Python session and files."""

from __future__ import annotations

import ast
import pickle

import pytest

from jmarl.envs.tools import workspace as workspace_module
from jmarl.envs.tools.calculator import CALCULATOR
from jmarl.envs.tools.registry import Tool, ToolRegistry
from jmarl.envs.tools.tool_use import create_default_tool_registry
from jmarl.envs.tools.workspace import FILE_SYSTEM, LIMITS, PYTHON_REPL, Workspace
from jmarl.envs.vector import Unanswered
from jmarl.sandbox import Limits, Reply, SandboxUnavailable

REGISTRY = create_default_tool_registry()
WRONG = {
    "missing": ("calculator", {}, "'expression' is a required property. Write calculator(expression: string), as in"),
    "another": ("calculator", {"expression": "1", "x": 2}, "'x' was unexpected"),
    "a number": ("calculator", {"expression": 1}, "expression: 1 is not of type 'string'"),
    "no object": ("calculator", "1 + 1", "'1 + 1' is not of type 'object'"),
    "null": ("calculator", None, "None is not of type 'object'"),
    "empty": ("web_search", {"query": ""}, "query: '' should be non-empty"),
    "long": ("web_search", {"query": "x" * 5000}, "is too long"),
    "an action": ("file_system", {"action": "delete", "path": "a"}, "'delete' is not one of ['read', 'write', 'list']"),
    "write without text": ("file_system", {"action": "write", "path": "a"}, "'text' is a required property"),
    "unknown": ("calculater", {}, "there is no tool 'calculater': did you mean calculator? there are calculator, web_search"),
    "nothing like it": ("x" * 5000, {}, "there are calculator, web_search, python_repl, file_system"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_the_reason(name):
    tool, parameters, reason = WRONG[name]
    outcome = REGISTRY.call(tool, parameters)
    assert not outcome.ok and outcome.text.startswith("error: ") and reason in outcome.text and len(outcome.text) < 600


def test_names_schemas_and_examples_are_checked():
    assert REGISTRY.names == ("calculator", "web_search", "python_repl", "file_system")
    assert create_default_tool_registry(["web_search"]).names == ("web_search",)
    assert pickle.loads(pickle.dumps(REGISTRY)).names == REGISTRY.names
    assert FILE_SYSTEM.signature() == "file_system(action: read|write|list, path: string, text: string, optional)"
    with pytest.raises(ValueError, match="there is no tool abacus: choose some of calculator, web_search"):
        create_default_tool_registry(["abacus"])
    with pytest.raises(ValueError, match="a tool 'calculator' already"):
        REGISTRY.register(CALCULATOR)
    with pytest.raises(ValueError, match="use letters, digits and _"):
        REGISTRY.register(CALCULATOR._replace(name="a tool"))
    with pytest.raises(ValueError, match="example of tool 'other' does not fit"):
        REGISTRY.register(CALCULATOR._replace(name="other", example={}))
    with pytest.raises(TypeError, match="tool 'n' returned int: return a text"):
        ToolRegistry([Tool("n", "", {"type": "object"}, lambda: 1, {})]).call("n", {})


# Python and files


def python(workspace, code):
    return REGISTRY.call("python_repl", {"code": code}, workspace)


def files(workspace, action, path, **text):
    return REGISTRY.call("file_system", {"action": action, "path": path, **text}, workspace)


def test_python_and_files_share_a_directory(needs_sandbox):
    workspace = Workspace({"a/b.txt": "one\n"})
    assert files(workspace, "list", ".") == (True, "a/") and files(workspace, "read", "a/b.txt") == (True, "one\n")
    assert python(workspace, "x = open('a/b.txt').read(); len(x)") == (True, "4")
    assert files(workspace, "write", "c.txt", text="zwei") == (True, "wrote 4 bytes")
    assert python(workspace, "print(open('c.txt').read()); x") == (True, "zwei\n'one\\n'")
    assert python(workspace, "y = 1").text.startswith("(it printed nothing")
    assert files(workspace, "write", "empty", text="").ok and files(workspace, "read", "empty") == (True, "(empty)")
    for failed, reason in ((python(workspace, "1 / 0"), "ZeroDivisionError"), (python(workspace, "def f(:"), "SyntaxError")):
        assert not failed.ok and reason in failed.text
    assert not files(workspace, "read", "nothing").ok
    workspace.release(episode_continues=False)


@pytest.mark.parametrize(
    "path", ["..", "../../etc/passwd", "/etc/passwd", "/", "a/../../x", "link", "up/etc/passwd", "\0", "x" * 5000]
)
def test_paths_outside_the_directory_are_refused(needs_sandbox, path):
    workspace = Workspace({"a/b": "1"})
    python(workspace, "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/', 'up')")
    for outcome in (files(workspace, "read", path), files(workspace, "list", path), files(workspace, "write", path, text="x")):
        assert not outcome.ok or path == "link" and "wrote" in outcome.text
        assert "root:" not in outcome.text
    workspace.release(episode_continues=False)


def test_branches_do_not_see_each_other(needs_sandbox):
    """The first branch takes the live session; for the others the calls are made again."""
    workspace = Workspace({"a.txt": "0"})
    python(workspace, "x = [1]")
    workspace.release(episode_continues=True)
    first, second, third = (Workspace({"a.txt": "0"}, workspace.calls) for _ in range(3))
    assert python(first, "x.append(2); open('a.txt', 'w').write('1'); x").text == "[1, 2]"
    assert python(second, "x.append(3); x").text == "[1, 3]" and files(second, "read", "a.txt").text == "0"
    first.release(episode_continues=True)
    assert python(third, "x").text == "[1]"
    later = Workspace({"a.txt": "0"}, first.calls)
    assert python(later, "x").text == "[1, 2]" and files(later, "read", "a.txt").text == "1"
    for branch in (second, third, later):
        branch.release(episode_continues=False)


def test_at_most_32_sessions_stay_alive_and_all_can_be_continued(needs_sandbox):
    workspaces = []
    for i in range(workspace_module.MAX_LIVE + 4):
        workspaces.append(Workspace({}))
        python(workspaces[-1], f"x = {i}")
        workspaces[-1].release(episode_continues=True)
    assert len(workspace_module._live_sessions) == workspace_module.MAX_LIVE
    for i, workspace in enumerate(workspaces):
        continued = Workspace({}, workspace.calls)
        assert python(continued, "x").text == str(i)
        continued.release(episode_continues=False)


def test_a_call_that_ends_its_session_gets_the_reason_and_a_new_session(needs_sandbox):
    workspace = Workspace({"a": "1"}, limits=Limits(wall_s=0.5, output_kb=4))
    python(workspace, "x = 1; open('a', 'w').write('2')")
    ended = python(workspace, "while True: pass")
    assert not ended.ok and "stopped at a limit" in ended.text and workspace.calls == ()
    assert files(workspace, "read", "a").text == "1" and "NameError" in python(workspace, "x").text
    assert "status 3" in python(workspace, "import os; os._exit(3)").text
    workspace.release(episode_continues=False)


def test_without_a_sandbox_the_joint_action_is_masked(monkeypatch):
    def unavailable():
        raise SandboxUnavailable("not on this machine")

    monkeypatch.setattr(workspace_module, "default_sandbox", unavailable)
    with pytest.raises(Unanswered, match="no sandbox: not on this machine"):
        python(Workspace({}), "1")


def test_a_fault_of_the_machine_masks_the_joint_action(needs_sandbox, monkeypatch):
    workspace = Workspace({})
    python(workspace, "import random; x = random.random()")
    from jmarl.sandbox.session import SILENT, Session

    monkeypatch.setattr(Session, "_exchange", lambda *_: {"output": "", "value": "", "error": "", "lost": SILENT})
    with pytest.raises(Unanswered, match="did not answer, twice"):
        python(workspace, "x")
    assert Reply("", "", "").fault is False


def test_calls_of_a_closed_session_are_made_again(needs_sandbox):
    workspace = Workspace({})
    python(workspace, "import os, time; x = time.time_ns()")
    python(workspace, "if os.path.exists('/tmp/none'): os._exit(1)")
    assert workspace.calls and all(b"python" in call for call in workspace.calls)
    workspace.release(episode_continues=False)
    assert PYTHON_REPL.sandboxed and FILE_SYSTEM.sandboxed and not CALCULATOR.sandboxed and LIMITS.wall_s == 2
    assert ast.literal_eval(python(Workspace({}, workspace.calls), "x > 0").text) is True
