"""`jmarl`: help, errors in one line, exit codes and completion, without starting JAX."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from jmarl.cli.main import COMMANDS, main
from jmarl.logs import samples


def error_of(capsys, *arguments: str) -> str:
    """The line that a wrong command line prints before it exits with 2."""
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    assert exit_code.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ([], [f"    {name} " for name in COMMANDS]),
        (["train"], ["--config", "--set", "--output", "--resume", "--seed", "--device", "--dry-run"]),
    ],
)
def test_help_lists_all_names_and_answers_at_once(command, names):
    """Within half a second, of this process's own time: other processes may keep the machine busy. It imports no JAX."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jmarl", *command, "--help"], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and [name for name in names if name not in done.stdout] == []
    assert " jmarl.cli.main" in done.stderr and " jax" not in done.stderr and " numpy" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("name", ["init", "train", "eval", "cross-play", "collect", "play", "info", "export"])
def test_help_of_a_command_fits_a_screen(name, capsys):
    with pytest.raises(SystemExit) as exit_code:
        main([name, "--help"])
    assert exit_code.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) <= (50 if name == "train" else 72)


def test_help_is_a_command_too(capsys):
    for words in (["help"], ["help", "export"]):
        pages = []
        for arguments in (words, [*words[1:], "--help"]):
            with pytest.raises(SystemExit) as end:
                main(arguments)
            assert end.value.code == 0
            pages.append(capsys.readouterr().out)
        assert pages[0] == pages[1] and pages[0].startswith(f"usage: {' '.join(['jmarl', *words[1:]])} ")
    assert "there is no command 'exprt'; did you mean 'export'?" in error_of(capsys, "help", "exprt")


def test_unknown_names_get_the_nearest_known_one(capsys):
    assert "there is no command 'evl'; did you mean 'eval'?; choose init, train, launch, eval," in error_of(capsys, "evl")
    assert "jmarl eval: there is no flag --modle; did you mean '--model'?" in error_of(capsys, "eval", "--modle", "m0")
    assert "(choose from 'train', 'eval')" in error_of(capsys, "play", "--model", "m", "--split", "x")
    assert "jmarl configs: there is no flag --x; see jmarl configs" in error_of(capsys, "configs", "--x", "list")
    assert "jmarl export: the following arguments are required: --model" in error_of(capsys, "export")
    assert "required: COMMAND" in error_of(capsys)


def test_errors_are_one_line_and_v_shows_the_traceback(capsys):
    assert main(["configs", "show", "no_such_file"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jmarl: no_such_file is neither a file nor")
    assert main(["configs", "-v", "show", "no_such_file"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_v_shows_joint_actions_of_a_run_and_its_help_says_so(capsys):
    for flags in (["-v"], []):
        assert main(["train", *flags, "--config", "no_such_file"]) == 2
        assert samples.are_on() == bool(flags)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "print a joint action a minute" in " ".join(capsys.readouterr().out.split())


def test_a_reader_that_leaves_is_no_error_message():
    """As in `jmarl configs settings | head -1`."""
    line = f"{sys.executable} -m jmarl configs settings | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout and not done.stderr


def test_bash_completes_commands_flags_choices_and_files(capsys, tmp_path, monkeypatch):
    assert main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "run_of_mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, expected in {
        "jmarl coll": "collect",
        "jmarl cross-play run_": "run_of_mine",
        "jmarl export --dt": "--dtype",
        "jmarl export --dtype bf": "bfloat16",
        "jmarl eval --model run_": "run_of_mine",
    }.items():
        count = len(words.split()) - 1
        ask = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={count}; _shtab_jmarl; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
        assert expected in done.stdout.split(), (words, done)
    assert main(["--print-completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef jmarl")
    assert "--print-completion fish: choose bash or zsh" in error_of(capsys, "--print-completion", "fish")
