"""Every command of the README and of the guides runs here, one after the other, with a tiny model in place of the real one.

Commands are read from the texts: the lines of shell blocks, then code in sentences that begins as a command. A new command is
run as it stands. It needs a line below only if it cannot run here (NOT_HERE), takes long (SLOW), needs flags that make it
small (SMALLER), serves until it is stopped (INSTEAD), or names a file that no command before it writes (FILES). The name of
a command alone (`jmarl plan`, or `jmarl plan ...`) runs with --help. Commands in the code of the guides run in
`test_notebooks.py`.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from jmarl.cli.configs import shipped_configs
from jmarl.cli.main import main
from jmarl.config.yaml_file import read_yaml
from jmarl.models.gpu import has_cuda

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODEL = "smollm2-135m-instruct"
STARTS = re.compile(r"(python3? -m|pip|tensorboard|pdoc|pre-commit|scontrol|jmarl) +(?!=)")

NOT_HERE = {  # pattern of a command -> why it does not run here
    r"(sudo |sh -c )*'?apt-get ": "installs packages of the system: .ci/run does",
    r"python3? -m venv |\. \.venv/": "makes an environment: .ci/run does",
    r"pip install ": "installs packages: .ci/run does",
    r"pre-commit install": "changes the hooks of this checkout",
    r"python -m pytest": "these are the tests: .ci/run runs them",
    r"scontrol ": "needs Slurm",
}
SLOW = (  # pattern of a command that compiles programs of its own for seconds, or starts a process
    r"python -m experiments\.(story_length|offline|probes|examples\.\w+)(?!.* --help)",
    r"jmarl plan .*--device cpu",
    r"jmarl serve .*--models",
    r"tensorboard|pdoc",
)
SMALLER = {  # beginning of a command -> flags that are added
    "python -m experiments.story_length": "--model {model} --num-updates 1 --num-generations 2 --max-new-tokens 4 --held-out 0",
    "python -m experiments.offline": "--model {model} --num-updates 2 --batch-size 4",
    "python -m experiments.probes": "--probes emit --seeds 0",
    "python -m experiments.code_team": "--help",  # 120 updates with programs in a sandbox: tests/envs/test_code_training.py
}
INSTEAD = {  # command -> what reads the same files and ends
    "tensorboard --logdir runs": "python -m tensorboard.main --inspect --logdir runs",
    "pdoc jmarl '!.+_pb2'": "python -m pdoc jmarl '!.+_pb2' -o reference",
}
# Goes on until Ctrl+C, which comes after some seconds.
STOPPED = re.compile(r"jmarl (play|report)\b.* --watch|jmarl serve .*--(environments|models)")
PLACEHOLDERS = {"NAME": ["mareinforce"], "DIR": ["dir"], "WORD": ["lora"], "RUN": ["runs/first", "runs/second"]}
PLACEHOLDER = re.compile(rf"\[?\b({'|'.join(PLACEHOLDERS)})\b\]?")
SIZES = {"num_updates": 4, "max_new_tokens": 6, "held_out": 4, "num_prompts": 2}  # what YAML files say of them


def tiny_yaml(path: Path, model: str) -> None:
    """Name the tiny model in a YAML file, and small sizes."""
    text = path.read_text().replace(MODEL, model)
    for name, size in SIZES.items():
        text = re.sub(rf"(?m)^(\s*{name}: *)[\d.e]+", rf"\g<1>{size}", text)
    path.write_text(text)


def write_magrpo(path: Path) -> None:
    path.write_text(shipped_configs()["magrpo"].read_text())


def write_pairs(path: Path) -> None:
    rows = [{"prompt": f"{n} and", "chosen": "seven apples", "rejected": "the market"} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def copy_run(path: Path) -> None:
    shutil.copytree("runs/mine", path)


FILES: dict[str, Callable[[Path], object]] = {  # what a reader has whom a command is for
    "fits.yaml": write_magrpo,
    "pairs.jsonl": write_pairs,
    "runs/first": copy_run,
    "runs/other": copy_run,
    "runs/second": copy_run,
}


# --- reading --------------------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command of a text, without what a shell does with it."""

    words: tuple[str, ...]
    target: str = ""  # the file that its output goes to

    @property
    def name(self) -> str:
        return shlex.join(self.words).replace("'*'", "*")

    def matches(self, pattern: str) -> bool:
        return re.match(pattern, self.name) is not None


def simple_commands(line: str) -> list[Command]:
    """Return the commands of a line of a shell, without comments and settings of the environment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word == ">" or word.strip("();|&"):
            commands[-1].append(word)
        else:
            commands.append([])
    found = []
    for words in commands:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        target = words[words.index(">") + 1] if ">" in words else ""
        words = words[: words.index(">")] if target else words
        words = [word for word in words if word not in ("...", "…")]
        if words:
            found.append(Command(tuple(words), target))
    return found


def texts() -> list[str]:
    """Return the README, and the text cells of each guide."""
    guides = [json.loads(path.read_text())["cells"] for path in GUIDES]
    cells = [["".join(cell["source"]) for cell in guide if cell["cell_type"] == "markdown"] for guide in guides]
    return [(ROOT / "README.md").read_text(), *map("\n\n".join, cells)]


def lines_of(text: str) -> list[str]:
    """Return the lines of the shell blocks of a text; a backslash at its end continues a line."""
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, flags=re.S)
    return [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def spans_of(text: str) -> list[str]:
    """Return the code in the sentences of a text that begins as a command."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [span for span in (" ".join(span.split()) for span in spans) if STARTS.match(span)]


def with_help(command: Command) -> Command:
    """Return the name of a command alone with --help, any other command as it is."""
    alone = command.words[0] == "jmarl" and len(command.words) == 2 and not command.words[1].startswith("-")
    return command._replace(words=(*command.words, "--help")) if alone else command


def all_commands() -> list[Command]:
    """Return each command once, in the order in which they run."""
    blocks = [command for text in texts() for line in lines_of(text) for command in simple_commands(line)]
    spans = [command for text in texts() for span in spans_of(text) for command in simple_commands(span)]
    return list(dict.fromkeys([*blocks, *(command if command in blocks else with_help(command) for command in spans)]))


COMMANDS = all_commands()
HERE = [command for command in COMMANDS if not any(map(command.matches, NOT_HERE))]
FAST = [command for command in HERE if not any(map(command.matches, SLOW))]


# --- running --------------------------------------------------------------------------------------------------------------


def filled(words: Iterable[str]) -> list[str]:
    """Return words with values in place of RUN, DIR, [WORD] and so on: one after the other, then the last one again."""
    left = {name: list(values) for name, values in PLACEHOLDERS.items()}

    def value(match: re.Match) -> str:
        values = left[match[1]]
        return values.pop(0) if len(values) > 1 else values[0]

    return [PLACEHOLDER.sub(value, word) for word in words]


def words_here(command: Command, model: str) -> list[str]:
    """Return the words of a command as it runs here; write the files that it needs."""
    smaller = next((flags for begin, flags in SMALLER.items() if command.name.startswith(begin)), "")
    words = shlex.split(INSTEAD.get(command.name, "")) or filled(command.words)
    if "--help" not in words:
        words += shlex.split(smaller.format(model=model))
    words = [path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    for word in words:
        if word in FILES and not Path(word).exists():
            FILES[word](Path(word))
        if word.endswith(".yaml") and Path(word).is_file():
            tiny_yaml(Path(word), model)
    return [model if word == MODEL else word for word in words]


def call(words: list[str]) -> int:
    """Run a command in this process and return its exit code."""
    try:
        with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", words[2:]), warnings.catch_warnings():
            if words[0] == "jmarl":
                return main(words[1:])
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # another test has imported it
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def run(command: Command, model: str) -> tuple[int, str]:
    """Run a command in the working directory. Return its exit code, and what it printed."""
    words = words_here(command, model)
    if words[:2] == ["python", "-m"] and not words[2].startswith("experiments."):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words[1:]], env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr
    stop = threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            if STOPPED.match(command.name):
                stop.start()
            code = call(words)
        finally:
            stop.cancel()
    if command.target:
        Path(command.target).write_text(out.getvalue())
    return code, out.getvalue() + err.getvalue()


@pytest.fixture(scope="module")
def model(tiny_dir) -> str:
    return str(tiny_dir("llama", max_position_embeddings=512))


@pytest.fixture(scope="module")
def played(model, tmp_path_factory) -> tuple[Path, dict[Command, tuple[int, str]]]:
    """Run the fast commands in an empty directory. Return the directory, and of each command its exit code and its output."""
    directory = tmp_path_factory.mktemp("readme")
    with contextlib.chdir(directory):
        return directory, {command: run(command, model) for command in FAST}


def check(command: Command, code: int, printed: str) -> None:
    """Check that a command ended well. A plan for a GPU needs wheels, and says so where there are none."""
    if "--device" in command.words and "cpu" not in command.words and not has_cuda():
        assert code == 2 and "pip install 'jmarl[cuda12]'" in printed, printed
    else:
        assert code in ((0, 130) if STOPPED.match(command.name) else (0,)), printed


@pytest.mark.long
@pytest.mark.parametrize("command", FAST, ids=lambda command: command.name)
def test_a_command_runs(played, command):
    code, printed = played[1][command]
    check(command, code, printed)
    assert printed, "it says something"


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in HERE if command not in FAST], ids=lambda command: command.name)
def test_a_long_command_runs(played, model, command):
    with contextlib.chdir(played[0]):
        code, printed = run(command, model)
    check(command, code, printed)
    if command.words[0] == "pdoc":  # `from __future__ import annotations` makes texts of the fields of a NamedTuple
        assert "Warn" not in printed, f"leave out the import in modules with NamedTuples: {printed}"


@pytest.mark.long
def test_the_commands_of_the_readme_write_what_they_say(played):
    directory, printed = played
    words = {command.words[1]: command.words for command in printed if command.words[0] == "jmarl" and len(command.words) > 3}
    rows = (directory / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert len([row for row in rows if "reward/mean" in row]) == 4
    assert (directory / words["export"][-1] / "agent_1/model.safetensors").is_file()
    episodes = int(words["collect"][words["collect"].index("-n") + 1])
    assert len((directory / words["collect"][-1]).read_text().splitlines()) == 2 * episodes, (
        "one trajectory per agent and episode"
    )
    assert "<html" in (directory / "report.html").read_text()


# --- the README -----------------------------------------------------------------------------------------------------------

MAX_LINES = 250
SECTIONS = [  # in the order in which a reader decides; what comes later has its place among them
    "Install", "Beside CoMLRL, TRL and verl", "Speed", "Sizes that fit", "From the command line", "Looking at a run",
    "Algorithms", "Environments", "One training step", "Where things are", "What is promised under faults", "Limitations",
    "Guides and other front ends", "Contributing and citation",
]  # fmt: skip


def test_the_readme_is_short_and_begins_with_what_a_reader_decides_by():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == SECTIONS
    first = lines[: lines.index("## Install")]
    claim, script, picture = (next(i for i, line in enumerate(first) if line.startswith(s)) for s in ("**", "```python", "!["))
    assert claim < script < picture


# --- the tables -----------------------------------------------------------------------------------------------------------


def test_sft_reads_the_file_that_is_collected_here():
    [collect] = [command for command in COMMANDS if command.name.startswith("jmarl collect ")]
    assert collect.name.endswith(f" -o {read_yaml(shipped_configs()['sft']).tree['dataset']['path']}")


def test_the_tables_have_no_line_without_a_command():
    patterns = [pattern for pattern in (*NOT_HERE, *SLOW) if not any(command.matches(pattern) for command in COMMANDS)]
    names = [name for name in (*SMALLER, *INSTEAD) if not any(command.name.startswith(name) for command in COMMANDS)]
    files = [name for name in FILES if not any(name in command.words for command in COMMANDS)]
    assert patterns + names + files == []


def test_commands_are_read_from_lines_of_a_shell():
    line = "(a -y || sudo sh -c 'b && c'); X=1 jmarl plan --set 'a=[1,2]' > my.yaml && pip install 'j[x]'  # why"
    names = [(command.name, command.target) for command in simple_commands(line)]
    assert names == [
        ("a -y", ""), ("sudo sh -c 'b && c'", ""), ("jmarl plan --set 'a=[1,2]'", "my.yaml"), ("pip install 'j[x]'", ""),
    ]  # fmt: skip
    assert spans_of("`jmarl = 3`, `jmarl.train`, `jmarl\nplan ...`") == ["jmarl plan ..."]
    assert [with_help(command).name for command in simple_commands("jmarl cross-play ...")] == ["jmarl cross-play --help"]
    words = filled(["jmarl", "cross-play", "RUN", "RUN", "--config", "DIR/run.yaml", "[WORD]"])
    assert words == ["jmarl", "cross-play", "runs/first", "runs/second", "--config", "dir/run.yaml", "lora"]
