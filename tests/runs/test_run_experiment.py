"""`run_experiment`: each setting of a team and a task has its effect on a run of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import jax
import numpy as np
import pandas as pd
import pytest

from jmarl import ExperimentConfig, Step, TextEnvironment, run_experiment
from jmarl.runs.experiment import examples_of, formatters_of, is_file, task_of, team_of
from jmarl.runs.records import FitResult
from tests.house import HOUSE

SHORT = HOUSE | dict(num_updates=1, eval_generations=3)
ROWS = [{"prompt": f"Item {i} is"} for i in range(6)]


class Words(TextEnvironment):
    """Two agents read a word; the reward is the number of letters they write."""

    roles = ("a", "b")

    def __init__(self, word: str = "apples"):
        self.word = word

    def tasks(self, split="train", count=100, seed=0):
        return [{"text": f"{self.word} {split} {seed} {i}"} for i in range(count)]

    def reset(self, task, rng):
        return None, [task["text"]] * 2

    def step(self, state, messages, rng):
        return Step(state, [None, None], float(sum(map(len, messages))), done=True)


class OneAgent(Words):
    roles = ("a",)


def letters(a, b):
    """A reward."""
    return [float(len(x) + len(y)) for x, y in zip(a, b, strict=True)]


def letters_of_one(a):
    return [float(len(x)) for x in a]


def loud(item):
    """A formatter."""
    return item["prompt"].upper()


def second_turn(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    """An external transition."""
    return [f"{prompt} next"] * num_agents


def name(thing) -> str:
    return f"{__name__}:{thing.__name__}"


@pytest.fixture(scope="module")
def model(tiny_dir) -> str:
    return str(tiny_dir("llama"))


@pytest.fixture
def data(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def configure(model: str, **settings) -> ExperimentConfig:
    return ExperimentConfig.of(**dict(models=[model], num_agents=2, **SHORT) | settings)


def prompts(result, agent: int = 0) -> list[str]:
    """What an agent reads in the first turn of the evaluation before training."""
    return list(result.before.rollout.turns[0].prompts[agent])


# --- environments -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_environment_with_options_is_trained_in_and_evaluated_on_held_out_tasks(model):
    """The settings of `train` reach the run: a learning rate that moves nothing is that of agent 0."""
    rates = (1e-30, 1e-2)
    cfg = configure(
        model, environment=name(Words), options={"word": "pears"}, held_out=2, seed=5, num_updates=2, learning_rate=rates
    )
    result = run_experiment(cfg)
    assert len(result.rewards) == 2 and int(result.state.step) == 2
    assert prompts(result) == [f"pears eval 5 {i}" for i in range(2)]
    start = jax.tree.leaves(team_of(cfg.team).agents[0].params)
    new = jax.tree.leaves(result.state.stacks[0].params)
    changed = [[bool((np.asarray(y[agent]) != x).any()) for x, y in zip(start, new, strict=True)] for agent in range(2)]
    assert not any(changed[0]) and any(changed[1])
    assert run_experiment(cfg.replace(held_out=0, options={})).before is None


def test_num_tasks_limits_the_tasks(model, data):
    cfg = configure(model, environment=name(Words))
    assert len(task_of(cfg.task, cfg.team).items) == 1000
    assert len(task_of(cfg.replace(num_tasks=7).task, cfg.team).items) == 7
    cfg = configure(model, data=data, reward=name(letters))
    assert task_of(cfg.task, cfg.team).items == ROWS
    assert task_of(cfg.replace(num_tasks=4).task, cfg.team).items == ROWS[:4]


@pytest.mark.long
def test_eval_envs_alone_are_a_mixture_that_is_trained_in(model):
    envs = [{"name": name(Words), "options": {"word": word}} for word in ("pears", "plums")]
    cfg = configure(model, eval_envs=envs, held_out=2, num_tasks=2)
    task = task_of(cfg.task, cfg.team)
    words = [sorted(item["task"]["text"].split()[0] for item in items) for items in (task.items, task.held_out)]
    assert words == [["pears", "plums"]] * 2
    assert {text.split()[0] for text in prompts(run_experiment(cfg))} == {"pears", "plums"}
    same = configure(model, eval_envs=[name(Words), name(Words)])
    assert type(task_of(same.task, same.team).env).__name__ == "LockStep"


def test_eval_envs_beside_an_environment_are_only_evaluated_in(model):
    cfg = configure(model, environment=name(Words), eval_envs=[{"name": name(Words), "options": {"word": "pears"}}], held_out=2)
    task = task_of(cfg.task, cfg.team)
    assert {item["task"]["text"].split()[0] for item in task.items} == {"apples"}
    assert [text.split()[0] for text in prompts(run_experiment(cfg))] == ["pears"] * 2


def test_a_saved_data_set_is_data_and_its_split_is_a_setting(tmp_path):
    splits = {split: datasets.Dataset.from_list([{"prompt": split}]) for split in ("train", "test", "dev")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    cfg = ExperimentConfig.of(models=["m"], data=path, reward=name(letters_of_one), held_out=path)
    assert task_of(cfg.task, cfg.team)[1:3] == ([{"prompt": "train"}], [{"prompt": "test"}])
    cfg = cfg.replace(split="dev")
    assert task_of(cfg.task, cfg.team).items == [{"prompt": "dev"}]
    for wrong, message in (({"split": "x"}, "no split 'x'"), ({"subset": "x"}, "subset='x' has no effect on the directory")):
        with pytest.raises(ValueError, match=message):
            task_of(cfg.replace(**wrong).task, cfg.team)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".jsonl.gz"])
def test_data_may_be_a_table(tmp_path, suffix):
    path, frame = tmp_path / f"rows{suffix}", pd.DataFrame([{"prompt": "a"}, {"prompt": "b"}])
    if suffix == ".parquet":
        frame.to_parquet(path)
    elif suffix == ".jsonl.gz":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    cfg = ExperimentConfig.of(models=["m"], data=str(path), reward=name(letters_of_one), held_out=1)
    assert task_of(cfg.task, cfg.team)[1:3] == ([{"prompt": "a"}], [{"prompt": "b"}])
    assert is_file(f"missing{suffix}")


def test_held_out_tasks_of_an_environment_can_be_a_file(model, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"text": "from a file"}, {"text": "too"}]))
    assert prompts(run_experiment(configure(model, environment=name(Words), held_out=str(path)))) == ["from a file", "too"]


# --- prompts and a reward ---------------------------------------------------------------------------------------------


def test_prompts_are_rewarded_and_the_last_are_held_out(model, data):
    cfg = configure(model, data=data, reward=name(letters), held_out=2)
    result = run_experiment(cfg)
    assert prompts(result) == [row["prompt"] for row in ROWS[4:]] and len(result.rewards) == 1
    assert task_of(cfg.task, cfg.team).items == ROWS[:4]


def test_held_out_prompts_can_be_a_file(model, data, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps([{"prompt": "held out"}, {"prompt": "too"}]))
    cfg = configure(model, data=data, reward=name(letters), held_out=str(path))
    assert prompts(run_experiment(cfg)) == ["held out", "too"] and task_of(cfg.task, cfg.team).items == ROWS


def test_formatters_roles_and_an_external_transition_write_the_prompts(data):
    """Roles come before the prompts of all turns."""
    settings = dict(data=data, reward=name(letters), held_out=1)
    roles = ["Be brief.", "Be long."]
    for given, expected in ((roles, ["Be brief.\n\nITEM 5 IS", "Be long.\n\nITEM 5 IS"]), ((), ["ITEM 5 IS"] * 2)):
        cfg = configure("m", **settings, roles=given, formatters=[name(loud)])
        task = task_of(cfg.task, cfg.team)
        assert task.env.first_prompts(task.held_out) == [[text] for text in expected]
    cfg = configure("m", **settings, roles=roles, external_transition=name(second_turn), num_turns=2, branching="chain")
    task, rng = task_of(cfg.task, cfg.team), np.random.default_rng(0)
    states, _ = task.env.reset(task.held_out, rng)
    _, later = task.env.observe(task.env.step(states, [["a"], ["b"]], rng).after)
    assert later[1] == ["Be long.\n\nItem 5 is next"]
    cfg = cfg.replace(roles=())
    assert formatters_of(cfg.task, cfg.team)[0](ROWS[0]) == "Item 0 is"


def test_data_sets_have_subsets_and_splits(tmp_path):
    """A directory of files stands for a data set of the Hub."""
    files = {"train": ["a"], "test": ["b"], "more": ["c", "d"]}
    for stem, texts in files.items():
        (tmp_path / f"{stem}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    card = "configs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n"
    card += "  - {split: test, path: test.jsonl}\n- config_name: more\n  data_files:\n  - {split: train, path: more.jsonl}\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    settings = dict(models=["m"], data=str(tmp_path), reward=name(letters_of_one), held_out=str(tmp_path))
    cfg = ExperimentConfig.of(**settings, subset="main")
    task = task_of(cfg.task, cfg.team)
    assert (task.items, task.held_out) == ([{"prompt": "a"}], [{"prompt": "b"}])
    more = cfg.replace(subset="more", held_out=1)
    assert task_of(more.task, more.team).items == [{"prompt": "c"}]
    swapped = cfg.replace(split="test", held_out_split="train")
    assert task_of(swapped.task, swapped.team)[1:3] == ([{"prompt": "b"}], [{"prompt": "a"}])


# --- teams ------------------------------------------------------------------------------------------------------------


def test_agents_may_share_weights_or_be_different_models(model, tiny_dir):
    for share, members in ((False, ((0,), (1,))), (True, ((0, 1),))):
        team = team_of(configure(model, environment=name(Words), shared_weights=share).team)
        assert team.stacks[0].members == members and team.num_agents == 2
    cfg = configure(model, models=[model, str(tiny_dir("qwen2"))], num_agents=None, environment=name(Words))
    assert [agent.config.family for agent in team_of(cfg.team).agents] == ["llama", "qwen2"]


@pytest.mark.long
def test_seeds_are_trained_together(model):
    results = run_experiment(configure(model, environment=name(Words), seeds=(3, 4)))
    assert len(results) == 2 and results[0].rewards != results[1].rewards


# --- given data -------------------------------------------------------------------------------------------------------


def fit_config(model: str, data: str, **settings) -> ExperimentConfig:
    return ExperimentConfig.of(**dict(models=[model], data=data, num_updates=1, progress=False) | settings)


@pytest.mark.long
def test_given_pairs_are_learned_from(model, tmp_path):
    path = tmp_path / "pairs.json"

    def write(repeats):
        rows = [{"prompt": f"{i}", "chosen": repeats("yes"), "rejected": repeats("no")} for i in range(5)]
        path.write_text(json.dumps(rows))

    write(lambda text: [text] * 2)
    result = run_experiment(fit_config(model, str(path), algorithm="madpo", num_agents=2, held_out=1))
    assert isinstance(result, FitResult) and len(result.losses) == 1 and set(result.before) >= {"loss", "accuracy"}
    assert result.team.num_agents == 2
    write(str)
    cfg = fit_config(model, str(path), algorithm="dpo", held_out=1)
    assert [[pair.chosen for pair in pairs] for pairs in examples_of(cfg)] == [[("yes",)] * 4, [("yes",)]]
    with pytest.raises(ValueError, match="min_reward=1.0 has no effect for algorithm='dpo': it is for sft"):
        run_experiment(cfg.replace(min_reward=1.0))


def test_given_texts_are_filtered_by_their_reward(model, tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"prompt": "a", "completion": "seven apples", "reward": r} for r in (0.0, 1.0, 1.0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = fit_config(model, str(path), algorithm="sft", min_reward=0.5)
    assert len(run_experiment(cfg).losses) == 1
    with pytest.raises(ValueError, match="held_out=2 leaves nothing to train on: data has 2 rows"):
        run_experiment(cfg.replace(held_out=2))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(environment=name(OneAgent)), r"has 1 role \(a\), and the team has 2: give one model$"),
        (dict(environment="no_env"), "unknown environment 'no_env'"),
        (dict(environment=name(Words), options={"wrd": "x"}), "its options are word"),
        (dict(environment=name(Words), algorithm="dpo"), "'dpo' learns from given pairs: set data, and no reward"),
        (dict(data="rows.jsonl", algorithm="magrpo"), "'magrpo' learns from completions .* set reward to module:function"),
        (dict(data="rows.jsonl", reward="letters"), "reward must be module:function"),
        (
            dict(data="rows.jsonl", reward=f"{__name__}:leters"),
            "module .* has no 'leters'; did you mean 'letters'",
        ),
        (
            dict(data="rows.jsonl", reward="no_module:f"),
            "there is no module 'no_module' in /.*, nor is it installed",
        ),
        (dict(data="rows.jsonl", reward=f"{__name__}:letters", held_out=6), "held_out=6 leaves nothing to train on"),
        (
            dict(data="rows.jsonl", reward=f"{__name__}:letters", min_reward=1.0),
            "min_reward=1.0 has no effect for algorithm='magrpo': it is for sft",
        ),
        (dict(data="rows.jsonl", reward=f"{__name__}:letters", subset="main"), "subset='main' has no effect on the file data="),
        (dict(data="rows.jsonl", reward=f"{__name__}:letters", split="test"), "split='test' has no effect on the file data="),
        (
            dict(data="rows.jsonl", reward=f"{__name__}:letters", held_out="rows.jsonl", held_out_split="dev"),
            "held_out_split='dev' has no effect on the file held_out=",
        ),
        (dict(data="rows.jsonl", algorithm="dpo", seeds=(1, 2)), r"seeds=\(1, 2\) is for completions with a reward"),
        (
            dict(data="rows.jsonl", algorithm="sft", held_out=1, eval_metrics="m:f"),
            "eval_metrics='m:f' is for completions with a reward",
        ),
        (
            dict(environment=name(Words), held_out=1, seeds=(1, 2), eval_metrics="m:f"),
            "eval_metrics='m:f' is not for several seeds",
        ),
        (dict(data="rows.jsonl", algorithm="reward_model"), "'reward_model' trains no team"),
        (dict(data="none.jsonl", reward=f"{__name__}:letters"), "none.jsonl does not exist"),
        (dict(environment=name(Words), frozen_agents=(5,)), "frozen_agents"),
    ],
)
def test_mistakes_raise_before_a_model_is_loaded(data, settings, message, monkeypatch):
    monkeypatch.chdir(Path(data).parent)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_experiment(configure("no such model", **settings))


def test_a_data_set_that_the_hub_does_not_give_is_named_with_what_to_do(model, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    cfg = fit_config(model, "no-one/nothing", algorithm="dpo")
    with pytest.raises(FileNotFoundError, match="data set 'no-one/nothing' cannot be loaded .* or give a file"):
        run_experiment(cfg)


def test_data_are_a_file_or_a_data_set(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("")
    assert is_file(str(path)) and is_file("missing.json") and not is_file(str(tmp_path)) and not is_file("user/data-set")
