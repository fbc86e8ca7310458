"""The tools themselves: the calculator, search, what messages say, what schemas refuse, and the sandbox's two."""

from __future__ import annotations

import ast
import json
import math
import pickle
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.base import Unanswered
from jmarl.envs.tools import sandbox as tool_sandbox
from jmarl.envs.tools.calculator import CALCULATOR, CONSTANTS, FUNCTIONS, calculate
from jmarl.envs.tools.calls import MAX_CALL, MAX_MESSAGE, read
from jmarl.envs.tools.corpus import KINDS, Document, corpus, entries
from jmarl.envs.tools.registry import Tool, ToolError, ToolRegistry
from jmarl.envs.tools.sandbox import FILE_SYSTEM, LIMITS, PYTHON_REPL, Workspace
from jmarl.envs.tools.search import BM25, search_corpus, web_search
from jmarl.envs.tools.use import create_default_tool_registry
from jmarl.sandbox import Limits, Reply, SandboxUnavailable, default_sandbox

# The calculator

VALUES = {
    "(3 + 4) * 2^5": "224", "2^3^2": "512", "-2^2": "-4", "2**-1": "0.5", "10/4": "2.5", "10/5": "2", "7//2": "3", "7 % 3": "1",
    "-7 % 3": "2", "((((((((1))))))))": "1", "1/3": "0.333333333333", "sqrt(144)": "12", "sqrt(2)": "1.41421356237", "log(100, 10)": "2", "ln(e)": "1",
    "sin(0)": "0", "max(1, 2.5, 2)": "2.5", "min(3, 2)": "2", "round(2.567, 2)": "2.57", "round(2.5)": "2", "abs(-3)": "3",
    "factorial(5)": "120", "comb(5, 2)": "10", "gcd(12, 18)": "6", "lcm(4, 6)": "12", "floor(-2.5)": "-3", "ceil(2.1)": "3",
    "2 × 3 ÷ 4 − 1": "0.5", " 1\n+ 1 ": "2", "1e3": "1000", "-0.0": "0", "0^0": "1", "(-2)^3": "-8", "2^1000 - 2^1000": "0",
    "123456789 * 987654321": "121932631112635269", "round(pi, 4)": "3.1416", ".5 + 1.": "1.5", "abs(-2^900) % 10": "6",
}  # fmt: skip
REFUSED = {
    "9**9**9": "too large", "9^9^9^9": "too large", "2^1025": "too large", "2^1024": "too large", "10^400": "too large", "2.0^2000": "too large",
    "(2^1000)*(2^1000)": "too large", "factorial(171)": "from 0 to 170", "factorial(10^9)": "from 0 to 170", "factorial(2.5)": "whole",
    "comb(10^9, 5*10^8)": "from 0 to 1000", "comb(5, -1)": "from 0", "round(5, -10^9)": "digits", "round(5, 0.5)": "digits",
    "1e999": "too large", "exp(1000)": "too large", "exp(exp(exp(9)))": "too large", "2^1000 + 0.5 + exp(709) * 10^5": "too large",
    "1/0": "division by zero", "0^-1": "division by zero", "5 % 0": "division by zero", "log(0)": "no value", "sqrt(-1)": "no value",
    "asin(2)": "no value", "(-8)^(1/3)": "not whole", "gcd(1.5, 2)": "integer", "lcm(2^600+1, 2^600-1)": "too large",
    "": "cannot read", "2 +": "cannot read", "(" * 150 + "1" + ")" * 150: "at most 300", "-" * 100 + "1": "nested more than 40",
    "1+" * 120 + "1": "nested more than 40", "1" * 301: "at most 300", "9" * 5000: "at most 300", "1,000": "write 1000", "[1]": "does not belong",
    "2pi": "2 [*] pi", "0x10": "operator", "1_000": "operator", "1if 1else 2": "operator", "1 if 1 else 2": "only numbers", "x": "no constant",
    "foo(1)": "is no function", "sqrt()": "takes 1 arguments, not 0", "max(1)": "takes 2 to 100", "sqrt(x=1)": "does not belong", "1 < 2": "does not belong",
    "__import__('os')": "does not belong", "().__class__": "only numbers", "True": "no constant|only numbers", "a.b(1)": "only numbers", "max(*e)": "only numbers",
    "2 ** 3j": "operator", "1 and 2": "only numbers", "\x00": "does not belong", "\ud800": "does not belong", "١": "does not belong", "lambda": "cannot read",
}  # fmt: skip


@pytest.mark.parametrize("expression", VALUES)
def test_the_calculator_works_out(expression):
    assert calculate(expression) == VALUES[expression]


@pytest.mark.parametrize("expression", REFUSED, ids=lambda text: repr(text)[:30])
def test_the_calculator_refuses(expression):
    began = time.process_time()
    with pytest.raises(ToolError, match=REFUSED[expression]) as error:
        calculate(expression)
    assert time.process_time() - began < 0.2 and len(str(error.value)) < 400


def test_every_function_and_constant_can_be_used():
    for name, function in FUNCTIONS.items():
        assert math.isfinite(float(calculate(f"{name}({', '.join(['1'] * function.least)})" if name != "log" else "log(2)")))
    assert [float(calculate(name)) for name in CONSTANTS] == pytest.approx([math.pi, math.e, math.tau])


whole = st.recursive(
    st.integers(0, 10**6).map(str),
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from(["+", "-", "*", "//", "%"]), x).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        x.map(lambda a: f"(-{a})"),
        st.tuples(x, st.integers(0, 3)).map(lambda t: f"({t[0]})^{t[1]}"),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(whole)
def test_whole_numbers_are_those_of_python(expression):
    try:
        expected = str(eval(expression.replace("^", "**")))
    except ZeroDivisionError:
        expected = "division by zero"
    try:
        found = calculate(expression)
    except ToolError as error:
        found = str(error)
    assert found == expected or "too large" in found or "at most 300" in found


positive = st.recursive(
    st.integers(1, 999).map(lambda n: (str(n), Fraction(n))),
    lambda x: st.one_of(
        st.tuples(x, x).map(lambda t: (f"({t[0][0]} + {t[1][0]})", t[0][1] + t[1][1])),
        st.tuples(x, x).map(lambda t: (f"({t[0][0]} * {t[1][0]})", t[0][1] * t[1][1])),
        st.tuples(x, x).map(lambda t: (f"({t[0][0]} / {t[1][0]})", t[0][1] / t[1][1])),
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=300)
@given(positive)
def test_fractions_are_exact_to_eleven_digits(case):
    expression, expected = case
    found = calculate(expression)
    assert float(Fraction(found)) == pytest.approx(float(expected), rel=1e-11)
    if expected.denominator == 1 and "/" not in expression:
        assert found == str(expected)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=60), st.text("0123456789.+-*/%^(), esqrtlogabmpi", max_size=60)))
def test_any_text_is_worked_out_or_refused(text):
    try:
        assert math.isfinite(float(calculate(text)))
    except ToolError as error:
        assert str(error)


# Search


def test_the_corpus_is_large_and_has_distractors():
    assert len(corpus()) == len({document.title for document in corpus()}) == 560 and len(KINDS) == 10
    assert len({document.text for document in corpus()}) == 560
    for entry in entries():
        named = [e for e in entries() if e.kind == entry.kind and set(e.name.split()) & set(entry.name.split())]
        assert len(named) >= 2, "each name is shared in its parts"


def test_one_document_answers_a_question():
    """Its title is in the question; other documents of its kind say something else of other things."""
    for entry in entries():
        for fact in KINDS[entry.kind].questions:
            question = entry.question(fact)
            about = [e for e in entries() if e.kind == entry.kind and e.name in question]
            assert about == [entry] and entry.facts[fact] in entry.document().text
            assert entry.facts[fact] not in question.replace(entry.name, "")


def test_search_finds_the_document_of_every_question():
    """Seen: all of 2,240 within three, 99.8 % first. The other places go to documents with a part of the name."""
    asked = [(e, e.question(fact)) for e in entries() for fact in KINDS[e.kind].questions]
    found = [[d.title for d in search_corpus(question, 3)] for _, question in asked]
    within = np.mean([e.name in titles for (e, _), titles in zip(asked, found, strict=True)])
    first = np.mean([e.name == titles[0] for (e, _), titles in zip(asked, found, strict=True)])
    assert len(asked) == 2240 and within == 1.0 and first >= 0.99
    assert all(len(titles) == 3 for titles in found)


def test_scores_are_those_of_bm25s():
    bm25s = pytest.importorskip("bm25s")
    documents = corpus()[::4]
    texts = [f"{d.title} {d.text}".lower() for d in documents]
    split = dict(token_pattern=r"(?u)\b\w+\b", stopwords=None, show_progress=False)
    theirs = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    theirs.index(bm25s.tokenize(texts, **split), show_progress=False)
    mine = BM25(documents)
    for query in ("height of mount ilvar", "Which river does the bridge cross", "crew crew ship", "9 crowns"):
        tokens = bm25s.tokenize([query.lower()], return_ids=False, **split)[0]
        np.testing.assert_allclose(mine.scores(query), theirs.get_scores(tokens), rtol=1e-4, atol=1e-5)


def test_a_hand_worked_score():
    found = BM25([Document("a", "fox fox"), Document("b", "dog")], k1=1.5, b=0.75).scores("fox cat")
    norm = 1.5 * (0.25 + 0.75 * 3 / 2.5)
    assert found == pytest.approx([math.log(1 + 1.5 / 1.5) * 2 / (2 + norm), 0])


def test_search_as_a_tool_with_any_backend():
    asked = []

    def backend(query, k):
        asked.append((query, k))
        return [Document("t", "x" * 1000)] * 5 if query != "nothing" else []

    registry = ToolRegistry([web_search(backend, k=2)])
    text = registry.call("web_search", {"query": "q"}).text
    assert asked == [("q", 2)] and text.splitlines() == [f"{i}. t: {'x' * 300} …" for i in (1, 2)]
    assert registry.call("web_search", {"query": "nothing"}) == (False, "error: no document was found: try other words")
    assert not create_default_tool_registry().call("web_search", {"query": "qwertz ??"}).ok

    def down(query, k):
        raise Unanswered("the service does not answer")

    with pytest.raises(Unanswered):
        ToolRegistry([web_search(down)]).call("web_search", {"query": "q"})
    with pytest.raises(ValueError, match="k=0"):
        web_search(k=0)
    with pytest.raises(ValueError, match="no documents"):
        BM25([])


def test_neither_jax_nor_a_sandbox_is_started_without_need():
    code = """
import sys
import numpy as np
from jmarl.envs import make
from jmarl.sandbox import client
for name in ("tools", "tools_sandbox"):
    env = make(name)
    state, _ = env.reset(env.tasks(count=1)[0], np.random.default_rng(0))
    call = '<tool_call>{"name": "web_search", "parameters": {"query": "Tarn"}}</tool_call>'
    assert "Tarn" in env.step(state, [call], None).observations[0]
assert client._default is None and not {"jax", "numba", "torch"} & set(sys.modules), "started"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout + done.stderr == "", done.stderr


# Messages


def call_text(name="calculator", **parameters):
    return f"<tool_call>{json.dumps({'name': name, 'parameters': parameters})}</tool_call>"


def test_several_calls_and_an_answer_are_read():
    said = read(f"first {call_text(expression='1')} then {call_text('other', a=[1])}\n<answer> 42 </answer>", 8)
    assert [tuple(call) for call in said.calls] == [("calculator", {"expression": "1"}, ""), ("other", {"a": [1]}, "")]
    assert said[1:] == (0, "42", False)
    assert read(call_text(expression="1") * 11, 8)[1] == 3 and len(read(call_text(expression="1") * 11, 8).calls) == 8
    assert read('<tool_call>\n{"parameters": {}, "name": "x"}\n</tool_call>', 8).calls == (("x", {}, ""),)


PROBLEMS = {
    "nothing": ("", "no JSON"),
    "words": ("calculator 1 + 1", "no JSON"),
    "Python": ("{'name': 'x', 'parameters': {}}", "no JSON"),
    "a list": ("[]", "nothing else"),
    "no name": ('{"parameters": {}}', "nothing else"),
    "no parameters": ('{"name": "x"}', "nothing else"),
    "another field": ('{"name": "x", "parameters": {}, "result": "42"}', "nothing else"),
    "a name that is no text": ('{"name": ["x"], "parameters": {}}', "nothing else"),
    "NaN": ('{"name": "x", "parameters": {"a": NaN}}', "NaN is no number"),
    "Infinity": ('{"name": "x", "parameters": {"a": -Infinity}}', "-Infinity is no number"),
    "a large float": ('{"name": "x", "parameters": {"a": 1e999}}', "too large"),
    "a long number": ('{"name": "x", "parameters": {"a": ' + "9" * 5000 + "}}", "5000 digits"),
    "a name twice": ('{"name": "x", "name": "y", "parameters": {}}', "'name' stands twice"),
    "a parameter twice": ('{"name": "x", "parameters": {"a": 1, "a": 2}}', "'a' stands twice"),
    "3000 deep": ('{"a":' * 3000 + "1" + "}" * 3000, "at most"),
    "1000 deep": ("[" * 1000 + "]" * 1000, "more than 64 brackets"),
    "brackets in no string": ('"\\"' + "[" * 70, "no JSON"),
    "long": ('{"name": "x", "parameters": {"a": "' + "b" * MAX_CALL + '"}}', "at most 6000"),
    "two objects": ('{"name": "x", "parameters": {}} {}', "no JSON"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_call_that_cannot_be_read_says_why(name):
    text, why = PROBLEMS[name]
    said = read(f"<tool_call>{text}</tool_call><answer>1</answer>", 8)
    assert why in said.calls[0].problem and len(said.calls[0].problem) < 300 and said.answer == "1"


def test_brackets_in_texts_are_fine():
    code = "x = [[[" + "[]," * 200 + "]]]\n" + '"\\\\" + "\\""'
    assert read(call_text("python_repl", code=code), 8).calls[0].parameters == {"code": code}


NESTED = {
    "a call in a call": ("<tool_call><tool_call>{}</tool_call></tool_call>", 1, "", False),
    "a good call in a call": (f"<tool_call>{call_text(expression='1')}</tool_call>", 1, "", False),
    "an answer in a call": (call_text(expression="<answer>1</answer>"), 1, "", False),
    "a call in an answer": (f"<answer>{call_text(expression='1')}</answer>", 1, "", False),
    "an answer in an answer": ("<answer><answer>1</answer></answer>", 0, "1", False),
    "two answers": ("<answer>1</answer><answer>2</answer>", 0, "1", False),
    "an answer that is not closed": ("<answer>1", 0, "", False),
    "closed before it is opened": ("</answer>1<answer>", 0, "", False),
    "empty": ("<answer> \n </answer>", 0, "", False),
    "a call that is not closed": ('<tool_call>{"name": "x"', 0, "", True),
    "an answer after a call that is not closed": ("<tool_call>{} <answer>5</answer>", 0, "5", True),
    "many": ("<answer>" * 2000, 0, "", False),
    "many calls": ("<tool_call>" * 1800, 0, "", True),
    "a result of its own": ("<tool_result>42</tool_result>", 0, "", False),
    "beyond the end": ("x" * MAX_MESSAGE + "<answer>1</answer>", 0, "", False),
}


@pytest.mark.parametrize("name", NESTED)
def test_tags_in_tags(name):
    text, calls, answer, unclosed = NESTED[name]
    said = read(text, 8)
    assert (len(said.calls), said.answer, said.unclosed) == (calls, answer, unclosed)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<answer>", "</answer>", "{", "}", '"', "\\", "[", "name", ":", "1"])
    )
)
def test_any_order_of_tags_can_be_read(parts):
    said = read("".join(parts), 2)
    assert len(said.calls) <= 2 and all(call.problem or call.name for call in said.calls if call.name or call.problem)


@pytest.mark.parametrize(
    "text", ["[" * 9000, '"' * 9000, '"\\' * 4000, "\\" * 9000, '{"a":' * 1500, '{"a":1,' + '"a":1,' * 990 + '"b":1}']
)
def test_reading_takes_no_time(text):
    began = time.process_time()
    for _ in range(5):
        read(f"<tool_call>{text}</tool_call>", 8)
        read(f"<tool_call>{text[:MAX_CALL]}</tool_call>", 8)
    assert time.process_time() - began < 0.2


# Registry

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
def test_wrong_calls_are_told_what_is_wrong(name):
    tool, parameters, why = WRONG[name]
    outcome = REGISTRY.call(tool, parameters)
    assert not outcome.ok and outcome.text.startswith("error: ") and why in outcome.text and len(outcome.text) < 600


def test_registries():
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


@pytest.fixture(scope="module")
def confined():
    try:
        return default_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox: {error}")


def python(workspace, code):
    return REGISTRY.call("python_repl", {"code": code}, workspace)


def files(workspace, action, path, **text):
    return REGISTRY.call("file_system", {"action": action, "path": path, **text}, workspace)


def test_python_and_files_share_a_place(confined):
    place = Workspace({"a/b.txt": "one\n"})
    assert files(place, "list", ".") == (True, "a/") and files(place, "read", "a/b.txt") == (True, "one\n")
    assert python(place, "x = open('a/b.txt').read(); len(x)") == (True, "4")
    assert files(place, "write", "c.txt", text="zwei") == (True, "wrote 4 bytes")
    assert python(place, "print(open('c.txt').read()); x") == (True, "zwei\n'one\\n'")
    assert python(place, "y = 1").text.startswith("(it printed nothing")
    assert files(place, "write", "empty", text="").ok and files(place, "read", "empty") == (True, "(empty)")
    for failed, why in ((python(place, "1 / 0"), "ZeroDivisionError"), (python(place, "def f(:"), "SyntaxError")):
        assert not failed.ok and why in failed.text
    assert not files(place, "read", "nothing").ok
    place.leave(going=False)


@pytest.mark.parametrize(
    "path", ["..", "../../etc/passwd", "/etc/passwd", "/", "a/../../x", "link", "up/etc/passwd", "\0", "x" * 5000]
)
def test_files_lead_nowhere_else(confined, path):
    place = Workspace({"a/b": "1"})
    python(place, "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/', 'up')")
    for outcome in (files(place, "read", path), files(place, "list", path), files(place, "write", path, text="x")):
        assert not outcome.ok or path == "link" and "wrote" in outcome.text
        assert "root:" not in outcome.text
    place.leave(going=False)


def test_branches_do_not_see_each_other(confined):
    """The first takes the process that is alive, for others the calls are made again."""
    place = Workspace({"a.txt": "0"})
    python(place, "x = [1]")
    place.leave(going=True)
    first, second, third = (Workspace({"a.txt": "0"}, place.calls) for _ in range(3))
    assert python(first, "x.append(2); open('a.txt', 'w').write('1'); x").text == "[1, 2]"
    assert python(second, "x.append(3); x").text == "[1, 3]" and files(second, "read", "a.txt").text == "0"
    first.leave(going=True)
    assert python(third, "x").text == "[1]"
    later = Workspace({"a.txt": "0"}, first.calls)
    assert python(later, "x").text == "[1, 2]" and files(later, "read", "a.txt").text == "1"
    for each in (second, third, later):
        each.leave(going=False)


def test_few_sessions_are_kept_and_all_go_on(confined):
    places = []
    for i in range(tool_sandbox.MAX_ALIVE + 4):
        places.append(Workspace({}))
        python(places[-1], f"x = {i}")
        places[-1].leave(going=True)
    assert len(tool_sandbox._alive) == tool_sandbox.MAX_ALIVE
    for i, place in enumerate(places):
        again = Workspace({}, place.calls)
        assert python(again, "x").text == str(i)
        again.leave(going=False)


def test_what_ends_its_session_is_told_and_finds_its_files_again(confined):
    place = Workspace({"a": "1"}, limits=Limits(wall_s=0.5, output_kb=4))
    python(place, "x = 1; open('a', 'w').write('2')")
    ended = python(place, "while True: pass")
    assert not ended.ok and "stopped at a limit" in ended.text and place.calls == ()
    assert files(place, "read", "a").text == "1" and "NameError" in python(place, "x").text
    assert "status 3" in python(place, "import os; os._exit(3)").text
    place.leave(going=False)


def test_without_a_sandbox_the_action_is_masked(monkeypatch):
    def none():
        raise SandboxUnavailable("not on this machine")

    monkeypatch.setattr(tool_sandbox, "default_sandbox", none)
    with pytest.raises(Unanswered, match="no sandbox: not on this machine"):
        python(Workspace({}), "1")


def test_a_fault_of_the_machine_masks_too(confined, monkeypatch):
    place = Workspace({})
    python(place, "import random; x = random.random()")
    from jmarl.sandbox.session import SILENT, Session

    monkeypatch.setattr(Session, "_exchange", lambda *_: {"output": "", "value": "", "error": "", "lost": SILENT})
    with pytest.raises(Unanswered, match="did not answer, twice"):
        python(place, "x")
    assert Reply("", "", "").fault is False


def test_a_call_that_does_not_work_again_is_the_machines_fault(confined):
    """So is one that only works by chance; nothing is learned from it."""
    place = Workspace({})
    python(place, "import os, time; x = time.time_ns()")
    python(place, "if os.path.exists('/tmp/none'): os._exit(1)")
    assert place.calls and all(b"python" in call for call in place.calls)
    place.leave(going=False)
    assert PYTHON_REPL.sandboxed and FILE_SYSTEM.sandboxed and not CALCULATOR.sandboxed and LIMITS.wall_s == 2
    assert ast.literal_eval(python(Workspace({}, place.calls), "x > 0").text) is True
