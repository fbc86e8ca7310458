"""`jmarl eval`, `collect` and `play`: what they print and write is what was played, of every kind of model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jmarl
from jmarl import (
    ExperimentConfig,
    Team,
    TrainConfig,
    load_pairs,
    load_trajectories,
    run_experiment,
    save_pretrained,
    train,
)
from jmarl.cli.dry_run import checked_run
from jmarl.cli.main import main
from jmarl.cli.teams.match import split_batches
from jmarl.cli.teams.sources import load_source
from jmarl.config import Sampling
from jmarl.preferences.encoding import encode_trajectory
from jmarl.preferences.pairs import read_rows
from jmarl.sampling.generate import tokenize
from tests.cli.test_trajectory_formats import check_atif
from tests.house import HOUSE

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
WORDS, UNSCORED, STOPS, WAITS = (f"cli_environments:{name}" for name in ("Words", "Unscored", "StopsOnce", "Waits"))
IN_TWOS = ("--batch-size", HOUSE["num_prompts"])  # with 1 completion of a prompt or 3, so that there are few programs
SHORT = ("--max-new-tokens", HOUSE["max_new_tokens"], *IN_TWOS)


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory, tiny_config, tiny_tokenizer, random_agent):
    """The current directory, with two models, a run with both and a run with LoRA on the first."""
    root, before = tmp_path_factory.mktemp("cli"), os.getcwd()
    os.chdir(root)
    for seed in (0, 1):
        agent = random_agent(tiny_config(), tiny_tokenizer, seed)
        save_pretrained(f"m{seed}", agent.config, agent.params, tiny_tokenizer)
    common = dict(environment=WORDS, options={"word": "pears"}, held_out=2, eval_generations=3, save_every=1, **HOUSE)
    run_experiment(ExperimentConfig.of(models=["m0", "m1"], output_dir="full", **common))
    run_experiment(ExperimentConfig.of(models=["m0"], num_agents=2, lora_rank=2, output_dir="lora", **common))
    for name in ("full", "lora"):
        shutil.copytree(name, f"{name}_checkpoint")
        shutil.rmtree(f"{name}_checkpoint/models")
    yield root
    os.chdir(before)


def same_agents(a, b) -> bool:
    import jax

    leaves = [jax.tree.leaves([agent.params for agent in agents]) for agents in (a, b)]
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def command(*arguments: object) -> int:
    return main([str(x) for x in arguments])


def play(name: str, output: object, *more: object, model: str = "m0", environment: str = WORDS) -> int:
    return command(name, "--model", model, "--environment", environment, *SHORT, "-o", output, *more)


def read(path: object) -> dict:
    return json.loads(Path(str(path)).read_text())


# --- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["full", "lora"])
def test_a_checkpoint_gives_the_agents_that_the_run_saved(run):
    finished, checkpoint = load_source([run]), load_source([f"{run}_checkpoint"])
    assert same_agents(finished.agents, checkpoint.agents) and not same_agents(finished.agents, load_source(["m0"] * 2).agents)
    assert checkpoint.text == f"the checkpoint of step 2 in {run}_checkpoint" and checkpoint.cfg == finished.cfg


def test_the_newest_weights_of_a_run_that_goes_on_are_those_of_its_checkpoint(tmp_path):
    """It has the models of an earlier end."""
    shutil.copytree("full", tmp_path / "run")
    meta = tmp_path / "run" / "checkpoints" / "2" / "meta.json"
    meta.write_text(meta.read_text().replace('"num_updates": 2', '"num_updates": 9'))
    (meta.parent / "manifest.json").write_text("damaged")
    assert load_source([str(tmp_path / "run")]).text.startswith("the checkpoint of step 1")


def test_a_run_without_config_yaml_needs_its_base_models(tmp_path, capsys):
    shutil.copytree("lora_checkpoint", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(ValueError, match="name them with --base-model"):
        load_source([str(tmp_path / "run")])
    assert same_agents(load_source([str(tmp_path / "run")], ["m0"]).agents, load_source(["lora"]).agents)
    with pytest.raises(ValueError, match="the models differ from those that the adapters were trained on"):
        load_source([str(tmp_path / "run")], ["m1"])


def test_a_run_begun_in_python_says_so_and_is_played_with_its_agents_and_settings(tmp_path, capsys):
    env = jmarl.make(WORDS)
    train(Team.load(["m0", "m1"]), env, env.tasks(), TrainConfig.of(output_dir=str(tmp_path), save_every=1, **HOUSE))
    text = (tmp_path / "config.yaml").read_text()
    assert "begun in Python and was given the environment Words and 6 items" in text and "\ntask:" not in text
    assert command("play", "--model", tmp_path) == 2 and "(begun in Python)" in capsys.readouterr().err
    assert command("eval", "--model", tmp_path, "--environment", WORDS, "-n", 2, "-o", tmp_path / "e.json") == 0
    assert read(tmp_path / "e.json")["max_new_tokens"] == HOUSE["max_new_tokens"]
    shutil.rmtree(tmp_path / "models")
    assert load_source([str(tmp_path)]).text.startswith("the checkpoint"), "whose models the file names"


def test_a_run_of_one_of_several_seeds_is_played_in_its_own_environment(tmp_path):
    """Its settings are in the directory above. Without its models it is read from its checkpoint."""
    settings = dict(models=["m0", "m1"], environment=WORDS, options={"word": "figs"}, seeds=(3, 4))
    run_experiment(ExperimentConfig.of(output_dir=str(tmp_path), **HOUSE | settings | dict(num_updates=1)))
    results = []
    for begin in ("the models", "the checkpoint"):
        source = load_source([str(tmp_path / "seed_4")])
        assert source.experiment is not None and source.cfg is not None and source.text.startswith(begin)
        assert (source.experiment.seeds, source.cfg.run.seed, source.cfg.sampling.max_new_tokens) == ((), 4, 4)
        assert command("eval", "--model", tmp_path / "seed_4", "-n", 2, "-o", tmp_path / "e.json") == 0
        results.append(read(tmp_path / "e.json"))
        assert results[-1]["options"] == {"word": "figs"} and results[-1]["max_new_tokens"] == 4
        shutil.rmtree(tmp_path / "seed_4" / "models", ignore_errors=True)
    assert results[0]["mean"] == results[1]["mean"]


IN_WORDS = ("--environment", WORDS, "--model")
COLLECT = ("collect", *IN_WORDS, "m0", *SHORT)
REFUSED = [
    (("play", *IN_WORDS, "m0", "m0", "m1"), "has 2 roles (first, second), and --model gives 3 agents"),
    (("play", *IN_WORDS, "full", "m0"), "full is a team: give it alone, or its agent_0"),
    (("play", *IN_WORDS, "."), "holds several runs: give one of them, such as full"),
    (("play", *IN_WORDS, "nothing"), "'nothing' does not exist here and is no hub id"),
    (("play", "--model", "m0"), "--environment is needed, none is known of m0"),
    (("play", "--model", "m0"), "--data FILE --reward MODULE:FUNCTION"),
    (("eval",), "--model is needed; or --config FILE, which plays the models of a YAML file before training"),
    (("eval", "--model", "m0", "--data", "x.jsonl"), "--data needs --reward module:function"),
    (("eval", "--model", "m0", "--reward", "x:y"), "--reward is for --data"),
    (
        ("eval", "--model", "m0", "--data", "x", "--reward", "x:y", "--environment", "math"),
        "--data and --environment exclude each",
    ),
    (("eval", "--model", "m0", "--data", "no.jsonl", "--reward", "cli_environments:worth"), "no.jsonl does not exist"),
    (("eval", "--config", "full/config.yaml", "--base-model", "m0"), "--base-model is for the directory of a run"),
    (
        ("eval", "--model", "m0", "m0", "m0", "--config", "full/config.yaml"),
        "has 2 roles (first, second), and --model gives 3",
    ),
    (
        (*COLLECT, "-o", "t.json", "-n", 5, "--num-generations", 2),
        "--num-episodes 5 is no multiple of --num-generations 2: give 6",
    ),
    ((*COLLECT, "-o", "t.json", "-n", 4, "--pairs", "p.jsonl"), "--pairs needs several completions of each prompt"),
    (
        (*COLLECT, "-o", "t.json", "-n", 4, "--agents", "2"),
        "--agents 2 is not allowed: choose some of 0 (first), 1 (second)",
    ),
    ((*COLLECT, "-o", "t.json", "-n", 4, "--option", "wrd=x"), "its options are turns, word, fails"),
    (
        (*COLLECT, "-o", "t.json", "-n", 4, "--num-generations", 2, "--pairs", "p", "--option", "turns=2"),
        "--pairs is for episodes of one turn",
    ),
    ((*COLLECT, "-o", "t.csv", "-n", 4), "must end in .json or .jsonl"),
    ((*COLLECT, "-o", "t.json", "-n", 4, "--format", "atif"), "--output t.json must end in .jsonl"),
    (
        (*COLLECT, "-o", "t.jsonl", "-n", 4, "--format", "messages", "--num-generations", 2, "--pairs", "p"),
        "--pairs reads trajectories: remove it, or --format",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(arguments, message, capsys):
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# --- eval --------------------------------------------------------------------------------------------------------------


def test_eval_and_collect_play_the_same_episodes(tmp_path, capsys):
    """The mean of eval is that of the trajectories, with the run's own settings; its checkpoint gives the same."""
    assert command("eval", "--model", "full", "-n", 6, *IN_TWOS, "-o", tmp_path / "e.json") == 0
    out, err = capsys.readouterr()
    command("eval", "--model", "full_checkpoint", "-n", 6, *IN_TWOS, "--trust", "-o", tmp_path / "c.json")
    command("collect", "--model", "full", "--split", "eval", "-n", 6, *IN_TWOS, "-o", tmp_path / "t.json")
    result, rows = read(tmp_path / "e.json"), read(tmp_path / "t.json")["trajectories"]
    returns = np.array([row["metadata"]["return"] for row in rows if row["metadata"]["agent"] == 0])
    assert len(returns) == 6 and result["mean"] == pytest.approx(returns.mean())
    assert result["ci95"] == pytest.approx(2.5706 * returns.std(ddof=1) / 6**0.5, rel=1e-4)
    solved = [row["rewards"][0]["info"]["solved"] for row in rows if row["metadata"]["agent"] == 0]
    assert result["success_rate"] == result["measures"]["solved"]["mean"] == np.mean(solved)
    assert result["max_new_tokens"] == 4 and "pears eval 0 5" in rows[-1]["observations"][0]
    assert {**read(tmp_path / "c.json"), "seconds": 0, "model": ""} == {**result, "seconds": 0, "model": ""}
    assert "mean return over tasks" in out and "success rate" in out and "seed 0: 4/6 episodes" in err


def test_episodes_of_one_task_are_one_number_of_the_interval(tmp_path, capsys):
    """There are 6 tasks: three episodes of each give the interval of 6 means."""
    flags = ("-n", 18, "--num-generations", 3)
    assert play("eval", tmp_path / "e.json", *flags, "--seeds", "3,4") == 0
    result = read(tmp_path / "e.json")
    assert [one["seed"] for one in result["per_seed"]] == [3, 4]
    assert result["mean"] == pytest.approx(np.mean([one["mean"] for one in result["per_seed"]]))
    assert result["per_seed"][0]["mean"] != result["per_seed"][1]["mean"]
    assert play("collect", tmp_path / "t.jsonl", *flags, "--seed", 3, "--split", "eval") == 0
    rows = [row["metadata"] for row in read_rows(tmp_path / "t.jsonl") if row["metadata"]["agent"] == 0]
    returns = np.array([[r["return"] for r in rows if r["task_number"] == i] for i in range(6)])
    assert result["per_seed"][0]["ci95"] == pytest.approx(2.5706 * returns.mean(1).std(ddof=1) / 6**0.5, rel=1e-4)
    first = result["per_seed"][0]
    assert (first["best@3"], first["best@3_episodes"]) == (pytest.approx(returns.max(1).mean()), 18)
    assert result["best@3"] == pytest.approx(np.mean([one["best@3"] for one in result["per_seed"]]))
    out = capsys.readouterr().out
    assert {"best@2", "best@3", "majority@2", "majority@3"} <= {line.split()[0] for line in out.splitlines() if line}
    assert result["majority@2_episodes"] == 24 and "(24 of 36 episodes)" in out
    assert 0 <= first["majority@3"] <= 1


def test_progress_shows_the_mean_that_the_table_has(capsys):
    """Also where the 6 tasks are played unequally often: two of them twice."""
    assert command("eval", "--model", "m0", "--environment", WORDS, *SHORT, "-n", 8) == 0
    out, err = capsys.readouterr()
    mean = out.splitlines()[0].split()[4]
    assert out.startswith("mean return over tasks ") and f"seed 0: 8/8 episodes, mean {mean}," in err


def test_a_run_on_prompts_with_a_reward_is_evaluated_on_its_held_out_rows(tmp_path, capsys):
    """Its prompts are those of the run, with the texts of its roles."""
    items = [{"prompt": f"Item {i} is"} for i in range(5)] + [{"prompt": [{"role": "user", "content": "Item 5 is"}]}]
    Path("rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    settings = dict(
        models=["m0", "m1"], data="rows.jsonl", reward="jmarl.envs.rewards:story_length_ratio", roles=["Be brief.", "Be long."],
        held_out=2, eval_generations=1,
    )  # fmt: skip
    run_experiment(ExperimentConfig.of(output_dir=str(tmp_path / "run"), **HOUSE | settings))
    assert command("collect", "--model", tmp_path / "run", "-n", 2, "--split", "eval", "-o", tmp_path / "t.json") == 0
    rows = read(tmp_path / "t.json")["trajectories"]
    assert [row["observations"][0] for row in rows[:2]] == ["Be brief.\n\nItem 4 is", "Be long.\n\nItem 4 is"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Item 5 is"}]
    assert rows[2]["observations"][0]["messages"] == chat, "chat messages stay what they are"
    assert command("eval", "--model", tmp_path / "run", "-n", 2, "-o", tmp_path / "e.json") == 0
    assert read(tmp_path / "e.json")["mean"] == pytest.approx(np.mean([row["metadata"]["return"] for row in rows]))
    assert command("eval", "--model", tmp_path / "run", "--option", "x=1") == 2
    assert "--option x is for one environment" in capsys.readouterr().err


def test_the_models_of_a_yaml_file_are_evaluated_before_training(tmp_path):
    """As those of a run, with its settings and its held-out tasks; also those of other agents, in its task."""
    config = Path("full") / "config.yaml"
    assert command("eval", "--config", config, "-n", 6, *IN_TWOS, "-o", tmp_path / "before.json") == 0
    before = read(tmp_path / "before.json")
    assert before["model"] == f"m0, m1 before training, as in {config}"
    assert (before["options"], before["max_new_tokens"]) == ({"word": "pears"}, 4)
    for models in (("m0", "m1"), ("full",)):
        assert command("eval", "--model", *models, "--config", config, "-n", 6, *IN_TWOS, "-o", tmp_path / "e.json") == 0
        result = read(tmp_path / "e.json")
        same = all(result[name] == before[name] for name in ("mean", "ci95", "measures"))
        assert same == (models != ("full",))


def test_any_models_are_evaluated_on_data_with_a_reward(tmp_path):
    """All rows are played, in one turn, whatever the models were trained on."""
    items = [{"prompt": f"Item {i} of the seven apples is", "worth": i} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    data = ("--data", tmp_path / "rows.jsonl", "--reward", "cli_environments:worth")
    formatters = ("--formatters", "cli_environments:asks", "cli_environments:asks")
    for models, more in {("m0",): (), ("m0", "m1"): (), ("full",): formatters}.items():
        output = (*SHORT, "-o", tmp_path / "t.jsonl")
        (tmp_path / "t.jsonl").unlink(missing_ok=True)
        assert command("collect", "--model", *models, *data, *more, "-n", 2, "--split", "eval", *output) == 0
        rows = read_rows(tmp_path / "t.jsonl")
        ask = "What? " if more else ""
        assert [row["observations"][0] for row in rows] == [
            f"{ask}{item['prompt']}" for item in items for _ in range(1 if models == ("m0",) else 2)
        ]
        assert [row["metadata"]["return"] for row in rows][:: len(rows) // 2] == [0, 1]


def test_an_environment_without_solved_has_no_success_rate(tmp_path, capsys):
    assert play("eval", tmp_path / "e.json", "-n", 6, environment=UNSCORED) == 0
    result, out = read(tmp_path / "e.json"), capsys.readouterr().out
    assert "success_rate" not in result and "no part of the reward is called solved" in out
    assert 0 < result["invalid_episodes"] < 6 and f"{result['invalid_episodes']} episodes had no valid reward" in out
    assert result["episodes"] == 6 - result["invalid_episodes"] and f"({result['episodes']} of 6 episodes)" in out


def test_batches_are_as_equal_as_they_can_be():
    assert [len(x) for x in split_batches(range(10), 4)] == [4, 4, 2] and [len(x) for x in split_batches(range(6), 4)] == [3, 3]


# --- cross-play ---------------------------------------------------------------------------------------------------------


def test_cross_play_pairs_the_agents_of_runs_and_a_run_alone_earns_what_eval_says(tmp_path, capsys):
    """Runs and checkpoints of different models, in the task of the runs or in that of a YAML file."""
    flags = ("-n", 2, "--num-generations", 3, "--json", tmp_path / "x.json")
    assert command("cross-play", "full", "lora_checkpoint", *flags) == 0
    out, result = capsys.readouterr().out, read(tmp_path / "x.json")
    assert "| agent 0 of \\ agent 1 of | full | lora_checkpoint |" in out and "\nself-play " in out
    assert (result["runs"], result["items"]) == (["full", "lora_checkpoint"], 2)
    assert result["settings"]["options"] == {"word": "pears"}
    for i, run in enumerate(("full", "lora")):
        assert command("eval", "--model", run, "-n", 6, "--num-generations", 3, "-o", tmp_path / "e.json") == 0
        mean, interval = (read(tmp_path / "e.json")[name] for name in ("mean", "ci95"))
        assert result["mean"][i][i] == pytest.approx(mean) and result["interval"][i][i] == pytest.approx(interval)
        assert f"{mean:.3f} ± {interval:.3f}" in out
    assert command("cross-play", "full", "lora", "--config", "lora/config.yaml", *flags) == 0
    assert read(tmp_path / "x.json")["mean"] == result["mean"]


def changed_copy(run, to, changes):
    """Copy a run and change its config.yaml."""
    shutil.copytree(run, to)
    file = to / "config.yaml"
    for old, new in changes.items():
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))


def test_cross_play_over_turns_has_the_returns_of_eval_on_its_diagonal_and_strangers_in_any_seat(tmp_path, capsys):
    """The stranger writes what it reads, whose letters are the reward of the first agent. Agents have rewards of their own."""
    for name in ("full", "lora"):
        changed_copy(name, tmp_path / name, {"num_turns: 1": "num_turns: 2", "word: pears": "{word: pears, turns: 2}"})
    runs, flags = (tmp_path / "full", tmp_path / "lora"), ("-n", 2, "--num-generations", 3, "--trust")
    assert command("cross-play", *runs, "cli_environments:echo", *flags, "--json", tmp_path / "x.json") == 0
    out, result = capsys.readouterr().out, read(tmp_path / "x.json")
    assert result["runs"] == ["full", "lora", "echo"] and result["strangers"] == ["cli_environments:echo"]
    assert "own reward of agent 0:" in out and "own reward of agent 1:" in out
    for i, run in enumerate(runs):
        flags = ("-n", 6, "--num-generations", 3, "--trust")
        assert command("eval", "--model", run, *flags, "-o", tmp_path / "e.json") == 0
        assert result["mean"][i][i] == pytest.approx(read(tmp_path / "e.json")["mean"])
    first, _ = result["own"]["mean"]
    letters = [sum(c.isalpha() for c in f"{again}in the market pears eval 0 0") / 10 for again in ("", "again ")]
    assert np.array(first)[2] == pytest.approx(sum(letters)) and (np.array(first)[:2] < sum(letters)).all()
    assert command("cross-play", *runs, *flags, "--history", "append") == 2
    assert "history='append' is not allowed: history must be none: players who do not sit" in capsys.readouterr().err


def test_runs_that_do_not_fit_are_not_paired(tmp_path, capsys):
    """Refused before a model is read."""
    changed_copy("full", tmp_path / "other", {"word: pears": "word: figs"})
    shutil.copytree("full/models", tmp_path / "agents")
    for runs, message in {
        ("full",): "cross-play pairs agents of different runs, got 1 (full: 2): give at least 2",
        ("full", "full"): "is given more than once",
        ("full", "m0"): "m0 is no run: give directories that `jmarl train` wrote",
        (
            "full",
            tmp_path / "other",
        ): "different tasks (options: {'word': 'pears'} and {'word': 'figs'}): give runs of one task",
        ("full", tmp_path / "agents"): "agents has no config.yaml, which says what it played: give --config FILE",
        ("full", "lora", "-n", 0): "--num-tasks 0 must be at least 1",
        ("cli_environments:echo",): "strangers play with the agents of runs: give the directory of a run in front",
    }.items():
        assert command("cross-play", *runs) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


# --- collect -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_training_reads_the_prompts_that_were_sampled_from(chat, tmp_path, tiny_tokenizer):
    """What sft encodes of a row begins with the token ids of the prompt that was played."""
    flag = "--chat" if chat else "--no-chat"
    assert play("collect", tmp_path / "t.json", "-n", 2, flag) == 0
    team = Team.load(["m0"])
    for row, trajectory in zip(read_rows(tmp_path / "t.json"), load_trajectories(tmp_path / "t.json"), strict=True):
        text = row["metadata"]["task"]["text"] if row["metadata"]["agent"] == 0 else f"the {row['metadata']['task']['text']}"
        prompt = tokenize(team, [[text]], Sampling(max_new_tokens=1), chat)[0][0]
        encoded = encode_trajectory(team.stacks[0], trajectory, chat, "a row")
        assert encoded.prompt == prompt
        assert trajectory.actions == (row["actions"][0]["content"],)
        assert trajectory.reward == row["rewards"][0]["value"]


def test_a_file_has_all_turns_and_agents(tmp_path):
    """With history append an agent's episode is one row, with history none each turn is."""
    option = ("--option", "turns=2")
    assert play("collect", tmp_path / "a.json", "-n", 4, "--history", "append", *option) == 0
    assert play("collect", tmp_path / "n.json", "-n", 4, "--history", "none", *option, "--agents", 1) == 0
    rows = read(tmp_path / "a.json")["trajectories"]
    assert [(row["metadata"]["episode"], row["metadata"]["role"]) for row in rows] == [
        (i, role) for i in range(4) for role in ("first", "second")
    ]
    for row in rows:
        assert [text.split()[0] for text in row["observations"]][1] == "again" and len(row["actions"]) == 2
        assert row["metadata"]["turns"] == [0, 1] and len(row["metadata"]["ended"]) == 2
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        values = [[reward["value"] for reward in row["rewards"]] for row in (first, second)]
        assert first["metadata"]["return"] == pytest.approx(np.sum(values) / 2)
        letters = [sum(c.isalpha() for c in action["content"]) / 10 for action in first["actions"]]
        assert values[0] == letters == [reward["info"]["first_letters"] for reward in first["rewards"]]
    turns = [(row["metadata"]["turns"], row["metadata"]["agent"]) for row in read(tmp_path / "n.json")["trajectories"]]
    assert turns == [([0], 1), ([1], 1)] * 4


def test_all_formats_have_the_same_episodes(tmp_path, capsys):
    """A collection does not go on in another format. Returns of an agent are the sums of its rewards from there on."""
    flags = ("-n", 4, "--history", "append", "--option", "turns=2")
    files = {name: tmp_path / f"{name}.jsonl" for name in ("trajectories", "messages", "atif")}
    for name, path in files.items():
        assert play("collect", path, *flags, "--format", name) == 0
    rows, messages, trajectories = (read_rows(path) for path in files.values())
    lines = files["atif"].read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(messages) == len([check_atif(line) for line in lines]) == 8
    assert len({x["session_id"] for x in trajectories}) == 4 and len({x["trajectory_id"] for x in trajectories}) == 8
    for row, chat, trajectory in zip(rows, messages, trajectories, strict=True):
        texts = [x for pair in zip(row["observations"], (a["content"] for a in row["actions"]), strict=True) for x in pair]
        assert texts == [m["content"] for m in chat["messages"]] == [step["message"] for step in trajectory["steps"]]
        values = [reward["value"] for reward in row["rewards"]]
        assert row["metadata"]["returns"] == pytest.approx([sum(values), values[1]]) and chat["reward"] == sum(values)
        assert [step["extra"]["reward"]["value"] for step in trajectory["steps"][1::2]] == values
    assert [x.actions for x in load_trajectories(files["messages"])] == [x.actions for x in load_trajectories(rows)]
    progress = files["atif"].with_name("atif.jsonl.progress")
    progress.write_text('{"settings": {"format": "atif"}, "batches": 1}', encoding="utf-8")
    assert play("collect", files["atif"], *flags, "--format", "messages") == 2
    assert "format: 'atif' -> 'messages'" in capsys.readouterr().err


def test_the_components_of_a_reward_add_up_to_it_and_measures_stand_beside_them(tmp_path):
    assert play("collect", tmp_path / "p.json", "-n", 2, environment=WORDS.replace("Words", "WithParts")) == 0
    rows = read(tmp_path / "p.json")["trajectories"]
    for pair in zip(rows[::2], rows[1::2], strict=True):
        rewards = [row["rewards"][0] for row in pair]
        total = sum(rewards[0]["components"].values())
        assert {*rewards[0]["components"]} == {"letters", "cost"} and {*rewards[0]["info"]} == {"first_letters", "solved"}
        assert total == pytest.approx(sum(reward["value"] for reward in rewards) / 2)


def test_a_filter_leaves_out_episodes_and_a_row_without_a_valid_reward_says_so(tmp_path):
    assert play("collect", tmp_path / "all.jsonl", "-n", 6, environment=UNSCORED) == 0
    rows = read_rows(tmp_path / "all.jsonl")
    invalid = [row for row in rows if "rewards" not in row]
    assert invalid and all(row["metadata"]["invalid_rewards"][0]["value"] is None for row in invalid)
    returns = sorted(row["metadata"]["return"] for row in rows if "rewards" in row and row["metadata"]["agent"] == 0)
    assert play("collect", tmp_path / "best.jsonl", "-n", 6, "--filter-reward", returns[-1], environment=UNSCORED) == 0
    assert read_rows(tmp_path / "best.jsonl") == [row for row in rows if row["metadata"]["return"] == returns[-1]]


@pytest.mark.parametrize("name", ["t.json", "t.jsonl"])
def test_a_collection_that_was_stopped_continues_with_the_same_result(name, tmp_path, capsys):
    """The last batch is stopped by Ctrl+C, after which a part of a row is in the file, as after a kill."""
    option = ("-n", 6, "--option", f"file={tmp_path / 'stop'}")
    assert play("collect", tmp_path / "whole.jsonl", *option, environment=STOPS) == 0
    (tmp_path / "stop").touch()
    assert play("collect", tmp_path / name, *option, environment=STOPS) == 75
    assert "interrupted: the same command continues" in capsys.readouterr().err
    path = tmp_path / name
    assert len(read_rows(path)) == 8  # two batches of two episodes of two agents
    with open(path, "ab") as file:
        file.write(b'{"observations": ["' + 9999 * b"x")
    assert play("collect", path, *option, "--seed", 1, environment=STOPS) == 2
    assert "was begun with other settings (seed: 0 -> 1)" in capsys.readouterr().err
    assert play("collect", path, *option, environment=STOPS) == 0
    assert "continuing after 2 of 3 batches" in capsys.readouterr().err
    assert read_rows(path) == read_rows(tmp_path / "whole.jsonl")
    if name == "t.json":
        assert read(path)["num_trajectories"] == 12
    assert not path.with_name(f"{name}.progress").exists()
    assert play("collect", path, *option, environment=STOPS) == 2
    assert "exists and is complete" in capsys.readouterr().err


def test_what_was_collected_is_learned_from(tmp_path):
    """By sft and, from several completions of a prompt, by madpo, of which all is checked up to its first step."""
    pairs, rows = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    flags = ("-n", 12, "--num-generations", 3, "--pairs", pairs)
    assert play("collect", rows, *flags) == 0
    by_task: dict = {}
    for row in read_rows(rows):
        by_task.setdefault(row["metadata"]["task"]["text"], {})[row["metadata"]["episode"]] = row["metadata"]["return"]
    for pair in load_pairs(pairs, num_agents=2):
        returns = by_task[pair.prompts[0]].values()
        assert pair.rewards == (max(returns), min(returns)) and pair.prompts[1] == f"the {pair.prompts[0]}"
    assert len(load_pairs(pairs, 2)) == 4
    assert play("collect", tmp_path / "more.jsonl", *flags) == 2
    common = dict(num_updates=1, batch_size=2, progress=False)
    sft = run_experiment(ExperimentConfig.of(models=["m0"], data=str(rows), algorithm="sft", **common))
    assert np.isfinite(sft.losses).all()
    madpo = ExperimentConfig.of(models=["m0"], num_agents=2, data=str(pairs), algorithm="madpo", **common)
    assert "4 pairs to train on" in "\n".join(checked_run(madpo))


# --- play --------------------------------------------------------------------------------------------------------------


def test_play_prints_what_every_agent_reads_and_writes_and_the_rewards(tmp_path, capsys):
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"text": "no"}, {"text": "a long text " * 9 + "\x1b[31m"}]))
    arguments = ("--tasks", tasks, "--task", 1, "--option", "turns=2", "--max-new-tokens", 4)
    assert command("play", "--model", "m0", "m1", "--environment", WORDS, *arguments) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100 and "\x1b" not in out and "\\x1b[31m" in out
    words = ("turn 0", "agent 0 (first) reads:", "agent 1 (second) writes", "again a long", "first_letters", "return ")
    assert [word for word in words if word not in out] == [] and out.count(" reads:") == 4


# --- exit codes of real processes --------------------------------------------------------------------------------------


def test_a_process_that_is_terminated_exits_with_75_and_what_fails_with_1(tmp_path, capsys):
    """The same command continues: what it wrote is the beginning of the whole."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    flags = [*map(str, ("--model", "m0", "--environment", WAITS, *SHORT, "-n", 6, "-o", tmp_path / "t.jsonl"))]
    line = [sys.executable, "-m", "jmarl", "collect", *flags]
    waiting = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment)
    assert waiting.stderr is not None
    while "2/6 episodes" not in (line := waiting.stderr.readline()):
        assert line, "the command ended"
    waiting.send_signal(signal.SIGTERM)
    assert "interrupted: the same command continues" in waiting.communicate()[1] and waiting.returncode == 75
    assert len(read_rows(tmp_path / "t.jsonl")) == 4
    assert play("collect", tmp_path / "f.jsonl", "-n", 2, "--option", "fails=true") == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("jmarl: RuntimeError: the judge is broken, in ")
