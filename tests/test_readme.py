"""Every command of the README and of the guides runs here, one after the other, with a tiny model in place of the real one.

Commands are read from the texts: the lines of shell blocks, then code in sentences that begins as a command. A new command is
run as it stands. It needs a line below only if it cannot run here (NOT_HERE), needs flags that make it small (SMALLER), serves
until it is stopped (INSTEAD, STOPPED), or names a file that no command before it writes (FILES). The name of a command alone
(`jmarl plan`, or `jmarl plan ...`) runs with --help. Commands in the code of the guides run in `test_notebooks.py`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

import jmarl
from jmarl import algorithms
from jmarl.cli.configs import shipped_configs
from jmarl.config.yaml_file import read_yaml
from jmarl.models.gpu import has_cuda
from tests.running import REAL, ROOT, SERVES, Done, call, changed, rewards, small, start, tiny_model
from tests.test_examples import RESULT

GUIDES = sorted((ROOT / "notebooks").glob("*.ipynb"))
STARTS = re.compile(r"(python3? -m|pip|tensorboard|pdoc|pre-commit|scontrol|jmarl) +(?!=)")

NOT_HERE = {  # pattern of a command -> why it does not run here
    r"(sudo |sh -c )*'?apt-get ": "installs packages of the system: .ci/run does",
    r"python3? -m venv |\. \.venv/": "makes an environment: .ci/run does",
    r"pip install ": "installs packages: .ci/run does",
    r"pre-commit install": "changes the hooks of this checkout",
    r"python -m pytest": "these are the tests: .ci/run runs them",
    r"scontrol ": "needs Slurm",
}
STORY = "python -m experiments.story_length"
OFFLINE = "python -m experiments.offline"
SMALLER = {  # beginning of a command -> flags that are added
    STORY: "--model {model} --num-updates 1 --num-generations 3 --max-new-tokens 4 --held-out 0 --save-every 1",
    OFFLINE: "--output-dir offline --model {model} --num-updates 3 --batch-size 8 --learning-rate 1e-2",
    "python -m experiments.probes": "--probes emit --seeds 0",
    "python -m experiments.code_team": "--help",  # 120 updates with programs in a sandbox: tests/envs/test_code_training.py
    "jmarl launch": "--set num_updates=1 held_out=0",
    "jmarl eval": "--num-episodes 2",
    "jmarl collect": "-n 2",
}
PDOC = "pdoc jmarl '!.+_pb2'"
INSTEAD = {  # command -> what reads the same files and ends
    "tensorboard --logdir runs": "python -m tensorboard.main --inspect --logdir runs",
    PDOC: "python -m pdoc jmarl.types jmarl.rl jmarl.learning jmarl.sampling --no-search -o reference",  # all: nightly
}
STOPPED = re.compile(r"jmarl (play|report)\b.* --watch|jmarl serve .*--(environments|models)")  # goes on until Ctrl+C
PLACEHOLDERS = {"NAME": ["mareinforce"], "DIR": ["dir"], "WORD": ["lora"], "RUN": ["runs/first", "runs/second"]}
PLACEHOLDER = re.compile(rf"\[?\b({'|'.join(PLACEHOLDERS)})\b\]?")


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
            Path(word).write_text(small(Path(word).read_text(), model))
    return [model if word == REAL else word for word in words]


def run(command: Command, model: str) -> Done:
    """Run a command in the working directory."""
    words = words_here(command, model)
    own = words[0] == "jmarl" or words[2].startswith("experiments.")
    done = call(words, stops=bool(STOPPED.match(command.name))) if own else start(words)
    if command.target:
        Path(command.target).write_text(done.text)
    return done


@pytest.fixture(scope="module")
def model(tiny_dir) -> str:
    return tiny_model(tiny_dir)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The directory, empty at first, in which the commands run."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def play(model, directory) -> Callable[[Command], Done]:
    """`play(command)`: how a command ended. It runs after all that come before it, each of them once."""
    ended: dict[Command, Done] = {}

    def until(command: Command) -> Done:
        with contextlib.chdir(directory):
            for next_one in HERE[len(ended) : HERE.index(command) + 1]:
                ended[next_one] = run(next_one, model)
        return ended[command]

    return until


def command_of(begin: str) -> Command:
    """Return the command that begins so and has other words than --help."""
    [found] = [command for command in HERE if command.name.startswith(begin) and "--help" not in command.words]
    return found


@pytest.mark.long
@pytest.mark.parametrize("command", HERE, ids=lambda command: command.name)
def test_a_command_runs(play, command):
    """A plan for a GPU needs wheels, and says so where there are none."""
    code, printed = play(command)
    if "--device" in command.words and "cpu" not in command.words and not has_cuda():
        assert code == 2 and "pip install 'jmarl[cuda12]'" in printed, printed
    else:
        assert code in ((0, 130) if STOPPED.match(command.name) else (0,)), printed
    assert printed or command.words[0] == "pdoc", "it says something"
    assert not STOPPED.match(command.name) or SERVES.search(printed), "it served before it was stopped"
    if command.name == PDOC:
        check_reference(printed)
    if "experiments.examples" in command.name:
        assert RESULT.search(printed), "a result before training and after it"


def check_reference(printed: str) -> None:
    """`from __future__ import annotations` makes texts of the fields of a NamedTuple."""
    assert "Warn" not in printed, f"leave out the import in modules with NamedTuples: {printed}"


@pytest.mark.nightly
def test_the_reference_of_all_modules_is_written(tmp_path):
    code, printed = start(["python", "-m", *shlex.split(PDOC), "-o", str(tmp_path)])
    assert code == 0
    check_reference(printed)


@pytest.mark.long
def test_the_commands_of_the_readme_write_what_they_say(play, directory):
    play(HERE[-1])
    words = {command.words[1]: command.words for command in HERE if command.words[0] == "jmarl" and len(command.words) > 3}
    assert len(rewards(directory / "runs/mine")) == 4
    assert (directory / words["export"][-1] / "agent_1/model.safetensors").is_file()
    assert len((directory / words["collect"][-1]).read_text().splitlines()) == 2 * 2, "one trajectory per agent and episode"
    assert "<html" in (directory / "report.html").read_text()


@pytest.mark.long
def test_offline_learns_the_preferences_of_a_file(play, directory):
    """Before training, the policy equals its reference, so accuracy is one half. A model is written."""
    before, after = (line for line in play(command_of(OFFLINE)).text.splitlines() if line.startswith("held out"))
    assert "before: loss 0.693, accuracy 0.500" in before and "accuracy 1.000" in after
    assert (directory / "offline/models/agent_0/model.safetensors").exists()


@pytest.mark.long
def test_a_run_in_the_default_directory_can_be_resumed(play, directory, model):
    """A checkpoint is compared with the settings of the flags."""
    play(command_of(STORY))
    words = shlex.split(f"{STORY} {SMALLER[STORY].format(model=model)} --num-updates 2 --resume")
    with contextlib.chdir(directory):
        done = call(words)
    assert done.code == 0 and len(rewards(directory / "runs/story_length")) == 2, done.text


@pytest.mark.long
def test_the_scripts_of_the_readme_run(tmp_path, monkeypatch, model):
    """The first script and the example of an own algorithm run unchanged, except for the model and sizes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(algorithms.ALGORITHMS, "mine", None)  # removed after the test
    sizes = {REAL: model, "num_updates=30": "num_updates=1, num_prompts=2, num_generations=3", "_tokens=24": "_tokens=4"}
    names: dict = {}
    exec(changed(blocks[0], sizes), names)
    assert (tmp_path / "runs" / "first" / "models" / "agent_1" / "model.safetensors").exists()
    (own,) = (block for block in blocks if "def median_baseline" in block)
    exec(own, names)
    cfg = names["cfg"].replace(algorithm="mine", output_dir="own")
    assert len(jmarl.train(names["team"], names["reward"], names["items"], cfg).rewards) == 1


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
    patterns = [pattern for pattern in NOT_HERE if not any(command.matches(pattern) for command in COMMANDS)]
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
