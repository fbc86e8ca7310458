"""Plausible mistakes of a new user and the sentence that each gets: what was given, what is allowed, what to do, and where."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

import jmarl
from jmarl.cli.main import main
from jmarl.models.hub.agents import load_agent, save_pretrained
from jmarl.runs.first_words import short_number

MODULE = """
from jmarl import Step, TextEnvironment

def letters(texts):
    return [float(text.count("e")) for text in texts]

def misspelled(texts, batch_items):
    return [float(item["citty"] in text) for text, item in zip(texts, batch_items)]

def of_column(texts, citty):
    return [float(len(name)) for name in citty]

def too_few(texts):
    return [1.0]

def words(texts):
    return ["good"] * len(texts)

def ask(item):
    return "What is " + item["citty"]

def forgets(item):
    item["city"].upper()

class Doors(TextEnvironment):
    roles, max_turns = ("opener",), 2
    def tasks(self, split="train", count=100, seed=0):
        return [{"door": i} for i in range(4)]
    def reset(self, task, rng):
        return {"door": task["door"], "turn": 0}, ["Open the door"]
    def step(self, state, messages, rng):
        state["turn"] += 1
        if state["turn"] == 2:
            raise RuntimeError("door jammed")
        return Step(state, ["It is shut"], 0.0, False)

class Silent(Doors):
    max_turns = 1
    def step(self, state, messages, rng):
        return 1.0
"""
FILES = {
    "town_rewards_of_tests.py": MODULE,
    "broken_rewards_of_tests.py": "import math\n\ndef letters(texts)\n    return [1.0]\n",
    "lazy_rewards_of_tests.py": "import no_such_package_of_tests\n",
    "towns.jsonl": "".join(json.dumps({"prompt": f"Town {i} is", "city": f"c{i}"}) + "\n" for i in range(4)),
    "empty.json": "[]",
    "only_names.csv": "prompt,answer\n",
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": "b",}\n',
    "ragged.csv": "prompt,answer\na,b\nc\n",
    "questions.csv": "question,answer\na,b\n",
    "promts.csv": "promt,answer\na,b\n",
    "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b"}\n',
    "tab.yaml": "models: [model]\noptimizer:\n\tlearning_rate: 1e-5\n",
    "colon.yaml": "models: [model]\nlearning_rate 1e-5\nseed: 1\n",
    "quote.yaml": "models: [model]\ndata: 'towns.jsonl\nseed: 1\n\n",
    "bracket.yaml": "seed: 1\nmodels: [model\ndata: towns.jsonl\n",
    "bell.yaml": 'models: [model]\ndata: "\a"\n',
    "twice.yaml": "models: [model]\nseed: 1\nseed: 2\n",
    "wrong_key.yaml": "models: [model]\ndata: towns.jsonl\nlearning_rat: 1e-5\n",
    "wrong_value.yaml": "models: [model]\nenvironment: math\nlearning_rate: fast\n",
    "a_file": "",
}
SMALL = dict(
    algorithm="grpo", num_updates=1, num_generations=2, max_new_tokens=4, models=["model"], progress=False, tensorboard=False,
    save_every=0,
)  # fmt: skip
TOWNS = "town_rewards_of_tests"


@pytest.fixture(scope="module")
def root(tmp_path_factory, random_agent, tiny_config, tiny_tokenizer):
    """A directory with a tiny model, data, rewards and YAML files, right and wrong ones."""
    root = tmp_path_factory.mktemp("mistakes")
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    save_pretrained(root / "model", agent.config, agent.params, agent.tokenizer)
    save_pretrained(root / "no_tokenizer", agent.config, agent.params)
    (root / "conf").mkdir()
    for name, text in FILES.items():
        (root / name).write_text(text)
    (root / "latin.jsonl").write_bytes('{"prompt": "Zürich"}\n'.encode("latin-1"))
    run = SMALL | dict(data="towns.jsonl", reward=f"{TOWNS}:letters")
    (root / "run.yaml").write_text(json.dumps(run, indent=1))
    (root / "doors.yaml").write_text(json.dumps(SMALL | dict(environment=f"{TOWNS}:Doors"), indent=1))
    (root / "dpo.yaml").write_text(json.dumps(dict(algorithm="dpo", models=["model"], data="pairs.jsonl"), indent=1))
    return root


@pytest.fixture(autouse=True)
def in_root(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])


def line_of(text: str) -> str:
    """The place of the line of MODULE that has a text."""
    return f"{TOWNS}.py, line {[text in line for line in MODULE.splitlines()].index(True) + 1}"


def sentence(capsys, *arguments: str) -> tuple[int | str | None, str]:
    """The exit code of a command, and the only line that it prints as an error."""
    try:
        code: int | str | None = main(arguments)
    except SystemExit as error:
        code = error.code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("jmarl: reading ")]
    assert len(lines) == 1, lines
    return code, lines[0]


def setting(*settings: str) -> list[str]:
    return ["train", "--config", "run.yaml", "--set", *settings]


MISTAKES = {
    # settings
    "misspelled key": (
        ["train", "--config", "wrong_key.yaml"],
        "wrong_key.yaml, line 3: learning_rat: unknown key; did you mean 'learning_rate'?",
    ),
    "wrong type": (
        ["train", "--config", "wrong_value.yaml"],
        "wrong_value.yaml, line 3: learning_rate: learning_rate='fast' is not allowed: learning_rate must be of type float | "
        "tuple[float, ...]",
    ),
    "negative learning rate": (
        setting("learning_rate=-1"),
        "--set learning_rate: learning_rate=-1 is not allowed: learning_rate must be > 0",
    ),
    "misspelled file of settings": (
        ["train", "--config", "wrong_kee.yaml"],
        "wrong_kee.yaml does not exist: give a YAML file; `jmarl configs list` shows the shipped ones; did you mean "
        "'wrong_key.yaml'?",
    ),
    "tab": (
        ["train", "--config", "tab.yaml"],
        r"tab.yaml, line 3, column 1 is not YAML: found character '\t' that cannot start any token; indent with spaces, not "
        "with tabs",
    ),
    "no colon": (["train", "--config", "colon.yaml"], "colon.yaml, line 2, column 1 is not YAML: could not find expected ':'"),
    "open quote": (
        ["train", "--config", "quote.yaml"],
        "quote.yaml, line 2, column 7 is not YAML: found unexpected end of stream",
    ),
    "open bracket": (
        ["train", "--config", "bracket.yaml"],
        "bracket.yaml, line 3, column 5 is not YAML: expected ',' or ']', but got ':', in the brackets that begin in line 2",
    ),
    "control character": (
        ["train", "--config", "bell.yaml"],
        "bell.yaml, line 2 is not YAML: remove the character '\\x07'",
    ),
    "key twice": (["train", "--config", "twice.yaml"], "twice.yaml, line 3: seed is set twice, before in line 2: give it once"),
    "section as a setting": (
        setting("dataset=towns.jsonl"),
        "--set dataset: it is a section with keys such as type, path, name, subset, split, eval_split, max_samples: write "
        "dataset.KEY",
    ),
    "misspelled flag": (
        ["train", "--confg", "run.yaml"],
        "train: there is no flag --confg; did you mean '--config'?; see jmarl train --help",
    ),
    "setting as a flag": (
        ["train", "--learning-rate", "1e-5", "--config", "run.yaml"],
        "train: there is no flag --learning-rate; it is a setting: write --set learning_rate=VALUE; see jmarl train --help",
    ),
    "group of one": (
        setting("num_generations=1"),
        "--set num_generations: num_generations=1 is too small for algorithm='grpo': its baseline needs at least 2 completions "
        "of a prompt; set num_generations higher",
    ),
    "parts that do not divide": (
        setting("num_minibatches=3"),
        "--set num_minibatches: num_minibatches=3 does not divide 1 prompts of 2 completions evenly: use a divisor of 1, or "
        "that times a divisor of 2; they follow from num_prompts, num_generations and num_minibatches",
    ),
    "joint mode of another baseline": (
        setting("joint_mode=counterfactual", "algorithm=maac"),
        "--set joint_mode: joint_mode='counterfactual' does not go with algorithm='maac': its groups are alternatives to "
        "single completions",
    ),
    "critic without critic": (
        setting("value_coef=0.5"),
        "--set value_coef: value_coef=0.5 has no effect for algorithm='grpo'; it is for iac, ppo, ippo",
    ),
    "dpo with a reward": (
        setting("algorithm=dpo"),
        "--set algorithm: algorithm='dpo' learns from given pairs: set data, and no reward or environment",
    ),
    "no reward": (
        setting("reward=null"),
        "run.yaml, line 2: algorithm: algorithm='grpo' learns from completions of the prompts in data, which need a reward: "
        "set reward to module:function",
    ),
    "environment beside data": (
        setting("environment=math"),
        "run.yaml, line 12: data: data='towns.jsonl' is not allowed: data must be set, or one of environment and eval_envs, "
        "but not both",
    ),
    "turns without transition": (
        setting("num_turns=2"),
        "--set num_turns: num_turns=2 needs external_transition, which writes the prompts of the next turn; in Python it is "
        "RewardEnvironment(reward, formatters, transition)",
    ),
    "roles of another team": (
        setting("roles=[a, b]"),
        "--set roles: roles=('a', 'b') is not allowed: roles must be one text per agent, 1, or none",
    ),
    "weights of other rewards": (
        setting("reward_weights=[1, 2]"),
        "--set reward_weights: reward_weights=(1, 2) is not allowed: reward_weights must be one number for each of the 1 "
        "rewards, or empty",
    ),
    "misspelled choice": (
        setting("on_error=msk"),
        "--set on_error: on_error='msk' is not allowed: on_error must be one of ('raise', 'mask'), or a number",
    ),
    "reward settings of an environment": (
        ["train", "--config", "doors.yaml", "--set", "timeout=3"],
        "--set timeout: timeout=3 is not allowed: timeout must be None without reward or pool",
    ),
    # names of modules
    "dot for a colon": (
        setting("reward=town_rewards_of_tests.letters"),
        "--set reward: reward='town_rewards_of_tests.letters' is not allowed: reward must be module:function; did you mean "
        "'town_rewards_of_tests:letters'?",
    ),
    "misspelled file of a reward": (
        setting("reward=town_reward_of_tests.py:letters"),
        "--set reward: reward='town_reward_of_tests.py:letters' cannot be imported: there is no file town_reward_of_tests.py "
        "in {root}; did you mean 'town_rewards_of_tests.py'?",
    ),
    "file without a name": (
        setting("reward=town_rewards_of_tests.py"),
        "--set reward: reward='town_rewards_of_tests.py' is not allowed: reward must be module:function; write "
        "town_rewards_of_tests.py:NAME, with a name in this file",
    ),
    "algorithm without a name": (
        setting("algorithm=town_rewards_of_tests.py"),
        "--set algorithm: algorithm='town_rewards_of_tests.py' is not allowed: algorithm must be module:function; write "
        "town_rewards_of_tests.py:NAME, with a name in this file",
    ),
    "environment for an algorithm": (
        setting("algorithm=town_rewards_of_tests.py:Doors"),
        "--set algorithm: algorithm='town_rewards_of_tests.py:Doors' is a type: give an AlgorithmRow, or a function, the loss",
    ),
    "misspelled function": (
        setting("reward=town_rewards_of_tests:leters"),
        "--set reward: reward='town_rewards_of_tests:leters' cannot be imported: module 'town_rewards_of_tests' has no "
        "'leters'; did you mean 'letters'?",
    ),
    "broken module": (
        setting("reward=broken_rewards_of_tests:letters"),
        "--set reward: reward='broken_rewards_of_tests:letters' cannot be imported: SyntaxError: expected ':', in "
        "broken_rewards_of_tests.py, line 3",
    ),
    "missing package": (
        setting("reward=lazy_rewards_of_tests:letters"),
        "--set reward: reward='lazy_rewards_of_tests:letters' cannot be imported: ModuleNotFoundError: No module named "
        "'no_such_package_of_tests', in lazy_rewards_of_tests.py, line 1",
    ),
    "environment for a reward": (
        setting("reward=town_rewards_of_tests:Doors"),
        "--set reward: reward='town_rewards_of_tests:Doors' is not allowed: it is an environment; set environment to it, and "
        "no data",
    ),
    "function for an environment": (
        ["train", "--config", "doors.yaml", "--set", "environment=town_rewards_of_tests:letters"],
        "--set environment: environment 'town_rewards_of_tests:letters' is a function: give a class, such as a TextEnvironment",
    ),
    # data
    "empty data": (setting("data=empty.json"), "empty.json: there are no rows in it: give a file with at least one"),
    "names alone": (setting("data=only_names.csv"), "only_names.csv: there are no rows in it: give a file with at least one"),
    "broken line": (
        setting("data=broken.jsonl"),
        "broken.jsonl, line 2, column 16: not valid JSON: Expecting property name enclosed in double quotes. Give a .json "
        "file, or a .jsonl file with one dict per line",
    ),
    "latin-1": (
        setting("data=latin.jsonl"),
        "latin.jsonl, line 1, column 14: the byte 0xfc ('ü' in Latin-1) is not UTF-8; save the file as UTF-8, such as with "
        "iconv -f latin1 -t utf8 latin.jsonl",
    ),
    "missing cell": (setting("data=ragged.csv"), "ragged.csv, line 3: 1 cells, and 2 columns (prompt, answer)"),
    "misspelled file": (
        setting("data=town.jsonl"),
        "--set data: data='town.jsonl' is not allowed: town.jsonl does not exist in the working directory {root}; did you mean "
        "'towns.jsonl'?",
    ),
    "pair without a part": (
        ["train", "--config", "dpo.yaml"],
        "pairs.jsonl: row 1 has no rejected: pairs need prompt, chosen and rejected; it has ['prompt', 'chosen']",
    ),
    "all held out": (
        setting("held_out=4"),
        "--set held_out: held_out=4 leaves nothing to train on: data has 4 rows; set held_out (eval_episodes) lower",
    ),
    # models and directories
    "misspelled model": (
        setting("models=[modell]"),
        "'modell' does not exist here and is no hub id (owner/name): give 'smollm2-135m-instruct', a Hugging Face directory, a "
        ".gguf file or a hub id; did you mean 'model'?",
    ),
    "misspelled path of a model": (
        setting("models=[modle/models/agent_0]"),
        "'modle/models/agent_0' does not exist here and is no hub id (owner/name): give 'smollm2-135m-instruct', a Hugging "
        "Face directory, a .gguf file or a hub id; did you mean 'model'?",
    ),
    "no tokenizer": (
        setting("models=[no_tokenizer]"),
        "no_tokenizer has no tokenizer.json: write one with transformers' "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...), or pass tokenizer= to "
        "jmarl.models.hub.agents.save_pretrained",
    ),
    "two models for a role": (
        ["train", "--config", "doors.yaml", "--set", "models=[model, model]"],
        "environment 'town_rewards_of_tests:Doors' has 1 role (opener), and the team has 2: give one model",
    ),
    "output is a file": (
        ["train", "--config", "run.yaml", "--output", "a_file"],
        "the output directory a_file cannot be made, file exists: a_file; choose another output_dir (--output)",
    ),
    "export to a file": (
        ["export", "--model", "model", "-o", "a_file"],
        "--output a_file exists and is not empty: give a new directory",
    ),
    "export below a file": (
        ["export", "--model", "model", "-o", "a_file/x"],
        "--output a_file/x cannot be made, {root}/a_file is a file: choose another directory",
    ),
    "export to a directory with files": (
        ["export", "--model", "model", "-o", "model"],
        "--output model exists and is not empty: give a new directory",
    ),
    "eval to a directory": (
        ["eval", "--model", "model", "--environment", "math", "-o", "conf"],
        "--output conf is a directory: give a file",
    ),
    "collect below a file": (
        ["collect", "--model", "model", "-n", "1", "-o", "a_file/x.json"],
        "--output a_file/x.json cannot be made, {root}/a_file is a file: choose another directory",
    ),
    "report to a directory": (["report", "nowhere", "-o", "conf"], "--output conf is a directory: give a file"),
    "project in place of a file": (
        ["init", "a_file"],
        "DIR a_file cannot be made, {root}/a_file is a file: choose another directory",
    ),
    "nothing to resume": (
        ["train", "--config", "run.yaml", "--output", "nowhere", "--resume"],
        "there is nothing to resume: nowhere/checkpoints has no complete checkpoint. Is that the output directory? Without "
        "--resume (resume=True) the run starts anew; with --resume auto it does whichever is possible",
    ),
    "no run": (["report", "nowhere"], "there is no run in nowhere: give the output_dir of a run, which has a metrics.jsonl"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_its_sentence(mistake, root, capsys):
    arguments, expected = MISTAKES[mistake]
    code, line = sentence(capsys, *arguments)
    assert (
        line == ("jmarl " if "there is no flag" in expected else "jmarl: ") + expected.replace("{root}", str(root))
        and code == 2
    )


CITY = "{'prompt': 'Town 0 is', 'city': 'c0'}"
OF_THE_USER = {
    "a formatter": (
        setting(f"formatters=[{TOWNS}:ask]"),
        f"KeyError: 'citty', in {line_of('What is')}, in ask (the formatter of agent 0; item 0, {CITY}); -v shows the "
        f"traceback",
    ),
    "a formatter that returns nothing": (
        setting(f"formatters=[{TOWNS}:forgets]"),
        f"agent 0's prompt is None (of item 0, {CITY}): give the row a prompt, or let the formatter return a text; it is "
        f"defined in {line_of('def forgets')}. If None means that the agent does not act in this turn, allow it: in_turns: "
        "true in YAML, RewardEnvironment(reward, formatters, transition, in_turns=True) in Python",
    ),
    "data without a prompt": (  # which shows before the model is looked for
        setting("data=questions.csv", "models=[modell]"),
        "an item has no prompt, but ['question', 'answer']: add a column prompt, or set functions that write the prompt of an "
        "item: formatters: [module:function] in YAML, RewardEnvironment(reward, formatters) in Python (row 0, {'question': "
        "'a', 'answer': 'b'})",
    ),
    "a misspelled column": (
        setting("data=promts.csv"),
        "an item has no prompt, but ['promt', 'answer']; did you mean 'promt'?: add a column prompt, or set functions that "
        "write the prompt of an item: formatters: [module:function] in YAML, RewardEnvironment(reward, formatters) in Python "
        "(row 0, {'promt': 'a', 'answer': 'b'})",
    ),
    "a misspelled column of a reward": (
        setting(f"reward={TOWNS}:of_column"),
        "reward of_column(texts, citty) needs a column 'citty', and item 0 has none, of the columns ['city', 'prompt']; did "
        "you mean 'city'?: the first 1 parameters without a default get the completions of the agents, those named "
        "batch_items, prompts, rng get these, and all others a column of the items; add the column or a default; it is defined "
        f"in {line_of('def of_column')}",
    ),
    "a reward of another team": (
        setting("num_agents=2"),
        "reward letters(texts) takes 1 completion lists; needed: 2 positional parameters without a default, one for each "
        "agent, or *completions; only ('batch_items', 'prompts', 'rng') and columns of the items are passed by name; it is "
        f"defined in {line_of('def letters')}",
    ),
    "prompts longer than the context": (
        setting("max_new_tokens=126"),
        r"4 of 4 items have a prompt too long for the context: .* set long_prompts='truncate_left' or 'drop', lower "
        "max_new_tokens, or shorten the prompts",
    ),
    "a reward": (
        setting(f"reward={TOWNS}:misspelled"),
        r"reward 'misspelled' raised KeyError: 'citty' \(joint actions 0 to 1\) in "
        + line_of('"citty"] in text')
        + r", in misspelled, on item \{'prompt': 'Town \d is', 'city': 'c\d'\}; on_error='mask' or a number goes on without it "
        r"\(turn 0; update 1\); -v shows the traceback",
    ),
    "a reward that returns too few values": (
        setting(f"reward={TOWNS}:too_few"),
        r"reward 'too_few' returned .* for joint actions 0 to 1: return a list of 2 numbers, .*; it is "
        rf"defined in {line_of('def too_few')} \(turn 0; update 1\)",
    ),
    "a reward that returns words": (
        setting(f"reward={TOWNS}:words"),
        "no joint action of the first update has a valid reward: reward 'words' returned 'good' on joint action 0, not a "
        f"number; it is defined in {line_of('def words')}",
    ),
    "an environment": (
        ["train", "--config", "doors.yaml"],
        rf"RuntimeError: door jammed, in {line_of('door jammed')}, in step \(Doors.step, messages \[.*\], state "
        r"\{'door': \d, 'turn': 1\}; turn 1; update 1\); -v shows the traceback",
    ),
    "an environment that returns something else": (
        ["train", "--config", "doors.yaml", "--set", f"environment={TOWNS}:Silent"],
        r"Silent.step returned 1.0: return Step\(state, observations, reward, done, info\) \(Silent.step, messages \[.*\], "
        rf"state \{{'door': \d, 'turn': 0\}}; defined in {TOWNS}.py, line \d\d; turn 0; update 1\)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", OF_THE_USER)
def test_an_error_in_the_users_code_names_line_item_and_turn(mistake, capsys):
    arguments, expected = OF_THE_USER[mistake]
    _, line = sentence(capsys, *arguments)
    assert line == f"jmarl: {expected}" or re.fullmatch(f"jmarl: {expected}", line)


def test_v_shows_the_traceback_with_the_notes(capsys):
    assert main([*setting(f"formatters=[{TOWNS}:ask]"), "-v"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and 'return "What is " + item["citty"]' in error and "\nthe formatter of agent 0\n" in error
    assert error.splitlines()[-1].startswith("jmarl: KeyError: 'citty'") and "-v shows" not in error


def contents(directory: str) -> dict[Path, bytes]:
    """The files of a run without its lock, which names its newest process."""
    return {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.long
def test_a_failed_start_changes_nothing_of_an_earlier_run(capsys):
    flags = ["--output", "out/failing"]
    for _ in range(2):  # before the run begins, and in its first update
        assert main([*setting(f"formatters=[{TOWNS}:ask]"), *flags]) == 1
        assert [path.name for path in Path("out/failing").iterdir()] == ["lock"]
    for _ in range(2):
        assert main([*setting(f"reward={TOWNS}:misspelled"), *flags]) == 1
    assert main(["train", "--config", "run.yaml", *flags]) == 0
    attempts = {path.name for path in Path("out/failing/attempts").iterdir()}
    assert not [*Path("out/failing").glob("earlier_*")] and attempts == {"1", "2", "3"}
    before = contents("out/failing")
    assert main([*setting(f"formatters=[{TOWNS}:ask]", "temperature=0.5"), *flags]) == 1
    assert contents("out/failing") == before
    assert main(["train", "--config", "run.yaml", *flags]) == 0
    assert [path.name for path in Path("out/failing").glob("earlier_*")] == ["earlier_1"]
    assert {path.name for path in Path("out/failing/earlier_1").iterdir()} >= {"attempts", "config.yaml", "metrics.jsonl"}


def test_a_model_without_read_permission_says_so(root):
    """As a user without rights: root may read everything."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        for file in (root / "model").iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        os.chmod(directory, 0o755)
        user = os.geteuid()
        for path, mode in ((model / "model.safetensors", 0), (model, 0o600)):
            before = path.stat().st_mode
            path.chmod(mode)
            try:
                if user == 0:
                    os.seteuid(65534)
                with pytest.raises(PermissionError, match=f"has no permission to read {path}; let its owner run chmod -R a"):
                    load_agent(model)
            finally:
                os.seteuid(user)
                path.chmod(before)


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # the command shows them as lines
def test_rewards_have_weights_limits_and_settings_for_errors(capsys):
    rewards = f"reward=[{TOWNS}:letters, {TOWNS}:misspelled]"
    assert main(setting(rewards, "reward_weights=[2, 1]", "on_error=-1", "timeout=5", "max_error_share=1")) == 0
    assert (
        f"reward 'misspelled' raised KeyError: 'citty' (joint actions 0 to 1) in {line_of('] in text')}"
        in capsys.readouterr().err
    )
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["reward/mean"] == pytest.approx(2 * rows[0]["reward/letters"] - 1)


def test_one_formatter_is_for_all_agents():
    env = jmarl.RewardEnvironment(lambda a, b: [1.0] * len(a), lambda item: "Say " + item["word"])
    assert env.for_agents(2).first_prompts([{"word": "a"}, {"word": "b"}]) == [["Say a", "Say b"]] * 2
    made = jmarl.RewardEnvironment(jmarl.make_reward(lambda a, b: [1.0] * len(a), num_agents=2), lambda item: "Say it")
    assert made.first_prompts([{}]) == [["Say it"]] * 2 and made.for_agents(2) is made
    with pytest.raises(ValueError, match=r"the number of agents is not known here: give one formatter per agent"):
        env.first_prompts([{}])


def test_python_keeps_the_type_of_an_error_and_shows_the_notes():
    env = jmarl.RewardEnvironment(lambda a: [1.0] * len(a), [lambda item: item["word"]])
    with pytest.raises(KeyError) as error:
        env.first_prompts([{"word": "a"}, {}])
    assert error.value.__notes__[1:] == ["the formatter of agent 0", "item 1, {}"]


def test_version_and_short_numbers(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"jmarl \d+\.\d+\S*\n", capsys.readouterr().out)
    numbers = {850: "850", 12_345: "12 k", 1_234: "1.2 k", 999_999: "1.0 M", 134_515_008: "135 M"}
    assert {number: short_number(number) for number in numbers} == numbers
