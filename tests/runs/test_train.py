"""The training loop: its checkpoints and logs, order of tasks, own algorithms, and what it refuses.

That resumed runs are equal bit for bit is in `test_faults` and `test_resume`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
import shutil
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl.algorithms import ALGORITHMS, AlgorithmRow, resolve
from jmarl.config import Optimizer, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardError, make_reward
from jmarl.evaluation.evaluate import Evaluation
from jmarl.files.checkpoint import Checkpointer
from jmarl.files.manifest import write_manifest
from jmarl.files.saving import Saves
from jmarl.learning.optimizer import init_state
from jmarl.models.hub import agents as weights
from jmarl.randomness import tasks_of
from jmarl.rl import advantages, losses
from jmarl.runs.train import train
from jmarl.team import Team, make_team
from jmarl.types import TRACES
from tests.house import HOUSE, ITEMS

EVAL = dict(eval_generations=HOUSE["num_generations"])  # with two items the sampler of training
HELD_OUT = [{"prompt": "held out"}, {"prompt": "three pears and seven apples"}]


def rows_of(output_dir):
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def directories(tiny_dir):
    return [str(tiny_dir("llama", seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def pair(directories):
    return [weights.load_agent(d) for d in directories]


@pytest.fixture(scope="module")
def finished(pair, tmp_path_factory):
    """The directory of a run with checkpoints of both updates, and its result."""
    where = tmp_path_factory.mktemp("finished")
    return where, run(pair, output_dir=str(where), save_every=1)


@pytest.fixture
def begun(finished, tmp_path):
    """A copy of its directory without the second checkpoint and what came after it."""
    where = Path(shutil.copytree(finished[0], tmp_path / "begun"))
    shutil.rmtree(where / "checkpoints" / "2")
    shutil.rmtree(where / "models")
    return where


def test_a_team_is_shown_by_the_names_of_its_agents(directories, pair):
    assert repr(Team.load(directories)) == f"Team({directories[0]}, {directories[1]})"
    assert repr(make_team(pair)[0]) == "Team(2 agents)"


def test_a_changed_configuration_is_refused_with_the_difference(pair, finished):
    """Only what is named in MAY_CHANGE and ADVISED may differ; the error shows old and new."""
    again = dict(output_dir=str(finished[0]), save_every=1, resume=True)
    with pytest.raises(ValueError, match="cannot resume from step 2") as refused:
        run(pair, gamma=0.5, temperature=0.5, num_updates=3, **again | dict(learning_rate=1e-3))
    text = str(refused.value)
    assert "gamma: 1.0 -> 0.5" in text and "temperature: 1.0 -> 0.5" in text and "learning_rate:" not in text
    with pytest.raises(ValueError, match="num_updates=1 is not allowed: the run in .* has made 2 already"):
        run(pair, num_updates=1, **again)


def test_a_changed_team_is_refused(finished, tiny_dir):
    agent = weights.load_agent(tiny_dir("qwen2"))
    with pytest.raises(ValueError, match="team: other models, tokenizers or roles"):
        run([agent, agent], output_dir=str(finished[0]), save_every=1, resume=True)


def test_the_models_of_a_run_can_be_loaded(finished):
    """Each agent's directory holds exactly the trained parameters."""
    where, result = finished
    for a in (0, 1):
        loaded = weights.load_agent(where / "models" / f"agent_{a}")
        expected = jax.tree.map(lambda x, a=a: x[a], params_of(result))
        jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)


@pytest.mark.long
def test_a_run_ends_normally_if_its_last_checkpoint_cannot_be_written(pair, tmp_path, full_disk):
    """The disk is full from the last update until the warning about its checkpoint. The run ends, its models are written, and
    the checkpoint before still exists."""
    calls, warned = [], []

    def reward(a, b):
        calls.append(1)
        if len(calls) == 2:
            with Checkpointer(tmp_path / "checkpoints", read_only=True) as saved:
                while saved.latest_step() != 1:
                    time.sleep(0.02)
            full.enter_context(full_disk(20_000))  # an embedding alone has 60 kB
        return [float(len(x)) for x in a]

    def record(message, *_):
        warned.append(str(message))
        full.close()

    with contextlib.ExitStack() as full, warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = record
        result = run(pair, reward, save_every=1, output_dir=str(tmp_path))
    assert len(warned) == 1 and re.search("not saved, training goes on: .*step 2", warned[0])
    assert int(result.state.step) == 2 and (tmp_path / "models" / "agent_1" / "model.safetensors").exists()
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [1]


def test_a_failed_save_does_not_prevent_the_next_one(pair, tmp_path, full_disk):
    """The disk is full during the first of two saves, whose result is not checked before the second starts."""
    state, cfg = init_state(make_team(pair)[1], resolve(TrainConfig.of(**HOUSE))), TrainConfig.of(output_dir=str(tmp_path))
    with Checkpointer(tmp_path / "checkpoints") as saver:
        saves = Saves(cfg.run, [(saver, {})])
        with full_disk(20_000):
            saves.save(1, state)
            while saver._thread.is_alive():
                time.sleep(0.01)
        with pytest.warns(UserWarning, match="step 1 was not saved"):
            saves.save(2, state)
        assert saves.finish(2) == "" and saver.steps() == [2] and saves.failed == 1


# --- the order of tasks --------------------------------------------------------------------------------------------------


def test_task_order_follows_from_seed_and_step():
    """Every epoch visits all items once, in its own order; a step's items need no step before it."""
    steps = [tasks_of(step, 5, 2, seed=3) for step in range(10)]
    visited = sum(steps, [])
    epochs = [visited[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len({tuple(e) for e in epochs}) > 1
    assert tasks_of(7, 5, 2, seed=3) == steps[7]
    assert [tasks_of(step, 5, 2, seed=4) for step in range(10)] != steps
    assert sorted(tasks_of(0, 3, 7, seed=0)[:3]) == [0, 1, 2], "more prompts a step than items"


# --- rewards and updates -------------------------------------------------------------------------------------------------


def share_of_e(a, b):
    """Share of the letter e in both texts together."""
    return [(x + y).count("e") / max(len(x + y), 1) for x, y in zip(a, b, strict=True)]


def run(pair, reward=share_of_e, eval_items=(), **changes):
    team, params = make_team(pair)
    cfg = TrainConfig.of(**HOUSE | changes)
    return train(team, make_reward(reward, num_agents=2), ITEMS, cfg, params=params, eval_items=eval_items)


def params_of(result):
    return jax.device_get(result.state.stacks[0].params)


def test_invalid_rewards_are_masked_and_counted(pair, tmp_path):
    """NaN, None and a text for three of six joint actions: counted in every row, no parameter becomes NaN, both learn."""
    with pytest.warns(UserWarning, match="3 of 6 joint actions have no valid reward; .* returned nan"):
        result = run(pair, lambda a, b: [float("nan"), 1.0, None, 2.0, "five", 0.5], output_dir=str(tmp_path))
    rows = rows_of(tmp_path)
    assert [row["reward/invalid"] for row in rows] == [3, 3]
    assert [row["reward/mean"] for row in rows] == [pytest.approx(3.5 / 3)] * 2
    assert all(row[f"agent_{a}/skipped"] == 0 and row[f"agent_{a}/grad_norm"] > 0 for row in rows for a in (0, 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params_of(result)))


@pytest.mark.long
def test_agents_whose_completions_are_all_cut_and_left_out_are_named(pair):
    """`dapo` leaves out what is cut at max_new_tokens: with short answers nothing is left, and no column says so."""
    with pytest.warns(UserWarning, match="of agent 0, 1 in the first .*max_new_tokens=4, .* or set mask_overlong=False"):
        result = run(pair, lambda a, b: [len(x) for x in a], algorithm="dapo", num_updates=1)
    assert int(result.state.step) == 1


def test_an_update_without_valid_rewards_changes_nothing(pair):
    """In the first update they are an error, with the reason; later ones pass."""
    with pytest.raises(ValueError, match="no joint action of the first update has a valid reward.* returned None"):
        run(pair, lambda a, b: [None] * len(a))
    calls = []

    def fails_later(a, b):
        calls.append(len(a))
        return [0.1 if len(calls) == 1 else None] * len(a)

    with pytest.warns(UserWarning, match="6 of 6 joint actions have no valid reward"):
        result = run(pair, fails_later)
    assert calls == [6, 6]
    jax.tree.map(np.testing.assert_array_equal, params_of(result), jax.device_get(make_team(pair)[1][0]))


def test_a_plain_function_is_a_reward_and_true_is_one(pair):
    def longer(a, b):
        return [len(x) > len(y) for x, y in zip(a, b, strict=True)]

    cfg = TrainConfig.of(**HOUSE | dict(num_updates=1))
    wrapped = make_reward(lambda a, b: [float(x) for x in longer(a, b)], num_agents=2)
    plain, other = (train(Team.of(pair), reward, ITEMS, cfg) for reward in (longer, wrapped))
    assert plain.rewards == other.rewards and 0 <= plain.rewards[0] <= 1
    last = f"the last of 1 with reward {plain.rewards[0]:.3f}"
    assert repr(plain) == f"TrainResult(1 updates, {last})"
    held_out = Evaluation(0.5, 0.1, None)
    assert repr(plain._replace(before=held_out, after=held_out)).endswith("held out 0.500 -> 0.500)")
    assert repr(plain._replace(after=held_out)).endswith("held out 0.500 after)"), "of a run that resumed"


@pytest.mark.parametrize(
    ("items", "formatters", "message"),
    [
        ([{"text": "apples"}], [default_formatter] * 2, r"an item has no prompt, but \['text'\]"),
        (["apples"], [default_formatter] * 2, "row 0 is a str, not a dict"),
        (
            [{"prompt": 3}],
            [default_formatter] * 2,
            "agent 0's prompt must be a text .*; got 3 of item 0, {'prompt': 3}",
        ),
        (
            [{"prompt": "apples"}],
            [lambda item: None] * 2,
            "agent 0's prompt is None .of item 0, {'prompt': 'apples'}.: give the row a prompt",
        ),
        (
            [{"prompt": "apples"}],
            [lambda item: "a", lambda item: b""],
            "agent 1's prompt must be a text .*; got b''",
        ),
    ],
)
def test_invalid_prompts_are_refused(pair, items, formatters, message):
    cfg = TrainConfig.of(**HOUSE | dict(num_updates=1))
    with pytest.raises((ValueError, TypeError), match=message):
        train(Team.of(pair), RewardEnvironment(share_of_e, formatters), items, cfg)


def test_a_team_of_names_is_refused(pair):
    for agents, got in ((["a model"], "'a model'"), ("a model", "'a model'"), (pair[0], "one agent alone")):
        with pytest.raises(TypeError, match=f"made of a list of agents, such as .*; got {got}"):
            make_team(agents)


def test_a_public_function_says_what_argument_is_of_another_type(pair, tmp_path):
    team, params = make_team(pair)
    cfg = TrainConfig.of(**HOUSE)
    calls = {
        "train": lambda team, cfg, params: jmarl.train(team, share_of_e, ITEMS, cfg, params=params),
        "seeds": lambda team, cfg, params: jmarl.train_seeds(team, share_of_e, ITEMS, cfg, seeds=[0, 1], params=params),
        "evaluate": lambda team, cfg, params: jmarl.evaluate(team, params, ITEMS, share_of_e, cfg),
        "generate": lambda team, cfg, params: inspect.unwrap(jmarl.generate)(team, [["a"], ["b"]], cfg, params=params),
        "fit": lambda team, cfg, params: jmarl.fit(team, [], cfg, params=params),
        "agents_of": lambda team, _, params: jmarl.agents_of(team, params),
        "save_team": lambda team, _, params: jmarl.save_team(tmp_path, team, params),
    }
    whole = jmarl.ExperimentConfig(team=jmarl.TeamConfig(models=("m",)), task=jmarl.TaskConfig(environment="math"))
    settings = {
        "of type dict": {},
        "of type list": [],
        "None": None,
        "of type ExperimentConfig": whole,
        "the class": TrainConfig,
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=r"^team is of type list: give a team, such as jmarl.Team.load"):
            call([*pair], cfg, params)
        for given, other in settings.items() if name not in ("agents_of", "save_team") else ():
            if (name, other) != ("generate", None):
                with pytest.raises(TypeError, match=f"^cfg is {given}.*: give a TrainConfig, such as TrainConfig.of"):
                    call(team, other, params)
        if name == "fit":
            continue
        with pytest.raises(ValueError, match="^params is None, and the team brings none: make it with Team.load .* make_team"):
            call(team, cfg, None)
        for wrong, given in ((params * 2, "a list of 2"), (params[0], "of type dict"), (pair, "of type list")):
            with pytest.raises(TypeError, match=f"^params is {given}: give a list of 1"):
                call(team, cfg, wrong)
    for call, message in (
        (lambda: jmarl.train(team, None, ITEMS, cfg), "^reward is None: give a reward function or an environment"),
        (lambda: jmarl.train_seeds(team, share_of_e, ITEMS, cfg, seeds=3), r"^seeds is of type int: give a list .* \[0, 1, 2"),
        (lambda: jmarl.run_experiment(cfg), "^cfg is of type TrainConfig: give an ExperimentConfig"),
        (lambda: jmarl.cross_play([team, team], ITEMS, share_of_e, cfg), "^a team is made of a list of agents, .* got Team"),
        (lambda: jmarl.policies(params), "^state is of type list: give the state of a result, result.state"),
        (lambda: jmarl.make(RewardEnvironment), "^name is the class RewardEnvironment, no object of it: give the name of an"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(ValueError, match="^there are no items to evaluate"):
        jmarl.evaluate(team, params, [], share_of_e, cfg)


def own_row(monkeypatch, **parts):
    row = dict(estimator=advantages.group_mean, loss=losses.policy_gradient) | parts
    monkeypatch.setitem(ALGORITHMS, "mine", AlgorithmRow(**row))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict(estimator="group_mean"), "the estimator of 'mine' cannot be computed: TypeError"),
        (dict(aggregation="tokenmean"), "aggregation='tokenmean' is not allowed: aggregation must be one of .*'token_mean'"),
        (dict(scale="variance"), "scale='variance' is not allowed: scale must be one of"),
        (dict(critic="both"), "critic='both' is not allowed: critic must be one of"),
        (dict(baseline="mean"), "baseline='mean' is not allowed: baseline must be one of"),
        (dict(loss="bounded"), "the loss of 'mine' cannot be computed: TypeError"),
        (dict(loss=lambda logp: (logp.sum(), {})), "the loss of 'mine' cannot be computed: TypeError: .*4 were given"),
        (dict(loss=lambda logp, *_: (logp, {})), "the loss of 'mine' must return a scalar .*dict of metrics"),
        (
            dict(loss=lambda logp, *_: logp.sum()),
            r"the loss of 'mine' must return a scalar .*dict of metrics.* float32\[\]\. It",
        ),
        (
            dict(loss=lambda logp, *_: (logp.sum(), {1: 2.0})),
            "must return a scalar .*metrics by name; it returned .*{1: 'float32",
        ),
        (dict(loss=lambda logp, *_: ((logp > 0).sum(), {})), r"must return a scalar .*; it returned \('int32\[\]', {}\)"),
        *(
            (
                dict(loss=loss),
                "the loss of 'mine' cannot be compiled: it reads values of an array .*: use jax.numpy in place",
            )
            for loss in (
                lambda logp, *_: (np.mean(np.exp(logp)), {}),
                lambda logp, *_: (logp.sum() if logp.sum() > 0 else -logp.sum(), {}),
                lambda logp, *_: (logp.sum(), {"a": float(logp.sum())}),
                lambda logp, *_: (logp[logp > 0].sum(), {}),
                lambda logp, *_: (sum(logp[0] for _ in range(logp.sum().astype(int))), {}),
            )
        ),
        (
            dict(loss=lambda logp, *_: (logp.sum(), {"kl": logp})),
            "'kl' is not allowed as the name of a metric of the loss",
        ),
        (dict(options={"bound": "my_bound"}), "options of 'mine' name 'my_bound', which is no setting of loss"),
    ],
)
def test_a_user_defined_row_is_checked_before_it_runs(pair, monkeypatch, parts, message):
    with pytest.raises(ValueError, match=message):
        own_row(monkeypatch, **parts)
        run(pair, algorithm="mine")


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (lambda returns, valid: returns.mean(), "the estimator of 'mine' must return an advantage for each return"),
        (lambda returns: returns, "the estimator of 'mine' cannot be computed: TypeError"),
    ],
)
def test_a_user_defined_estimator_is_checked_before_it_runs(pair, monkeypatch, estimator, message):
    own_row(monkeypatch, estimator=estimator)
    with pytest.raises(ValueError, match=message):
        run(pair, algorithm="mine")


@pytest.mark.long
def test_a_redefined_row_replaces_the_old_one(pair, monkeypatch):
    """As in a notebook: the same name with another estimator, and then with another loss. Each gets tokens in one row."""
    seen, zero = [], lambda returns, valid: 0 * returns
    for parts in (
        dict(loss=lambda logp, old, adv, w: [-jnp.dot(w, adv * jnp.exp(logp - old)), {}]),
        dict(loss=lambda logp, old, adv, w: [-jnp.dot(w, adv * jnp.exp(logp - old)), {}], estimator=zero),
        dict(loss=lambda logp, old, adv, w: (-jnp.dot(w, logp), {}), estimator=zero),
    ):
        own_row(monkeypatch, **parts)
        seen.append(params_of(run(pair, algorithm="mine"))["embed"])
    before = jax.device_get(make_team(pair)[1][0])["embed"]
    assert [bool((x == before).all()) for x in seen] == [False, True, False]


def breaking(update, error):
    """A reward that raises in an update, counted from 1, and nothing before."""
    calls = []

    def reward(a, b):
        calls.append(1)
        if len(calls) == update:
            raise error
        return share_of_e(a, b)

    return reward


def test_an_error_of_the_log_keeps_the_update(pair, tmp_path):
    """For example a warning that is turned into an error: the update is saved."""
    calls = []

    def reward(a, b):
        calls.append(1)
        return [math.nan if len(calls) == 3 else 1.0, *share_of_e(a, b)[1:]]

    with pytest.raises(UserWarning, match="update 3: 1 of 6 joint actions have no valid reward"):
        run(pair, reward, num_updates=4, save_every=100, output_dir=str(tmp_path))
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [3]


@pytest.mark.parametrize(("broken_at", "saved_at"), [(2, 2), (3, 4)])
def test_a_failed_evaluation_is_repeated_on_resume(pair, tmp_path, broken_at, saved_at):
    """The run resumes from the checkpoint before the evaluation, after the second update or at the end. Its log has all
    evaluations."""

    def reward(broken):
        def breaks(a, b, batch_items):
            calls.append(batch_items[0]["prompt"])
            if calls.count("held out") == broken:
                raise OSError("no service")
            return share_of_e(a, b)

        calls: list = []
        return breaks

    settings = dict(num_updates=4, eval_every=2, save_every=1, output_dir=str(tmp_path), eval_items=HELD_OUT, **EVAL)
    with pytest.raises(RewardError, match="no service"):
        run(pair, reward(broken_at), **settings)
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as saved:
        assert saved.latest_step() == saved_at
    result = run(pair, reward(0), resume=True, allow_changed="reward", **settings)
    assert result.after is not None and len(result.rewards) == 4 - saved_at
    assert [row["eval/updates"] for row in rows_of(tmp_path) if "eval/reward" in row] == [0, 2, 4]


def test_a_checkpoint_is_started_before_an_evaluation(pair, tmp_path):
    """A kill during the evaluation loses nothing: the checkpoint exists or is being written when the evaluation starts."""
    seen = []

    def reward(a, b, batch_items):
        if batch_items[0]["prompt"] == "held out":
            seen.append(sorted(path.name.removesuffix(".saving") for path in (tmp_path / "checkpoints").glob("*")))
        return share_of_e(a, b)

    run(pair, reward, num_updates=4, eval_every=2, save_every=2, output_dir=str(tmp_path), eval_items=HELD_OUT, **EVAL)
    assert seen == [[], ["2"], ["2", "4"]]


@pytest.mark.parametrize(("error", "raised"), [(OSError("no service"), RewardError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_failed_run_resumes_from_its_last_update(pair, tmp_path, error, raised):
    """Long before the next checkpoint is due. A run that fails before its first update leaves no checkpoint."""
    saving = dict(num_updates=4, save_every=100)
    whole = run(pair, share_of_e, output_dir=str(tmp_path / "whole"), **saving)
    with pytest.raises(raised):
        run(pair, breaking(3, error), output_dir=str(tmp_path / "broken"), **saving)
    with Checkpointer(tmp_path / "broken" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [2]
    assert [row["step"] for row in rows_of(tmp_path / "broken")] == [1, 2], "of its last update, too"
    rest = run(pair, share_of_e, output_dir=str(tmp_path / "broken"), resume=True, allow_changed="reward", **saving)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    assert rest.rewards == whole.rewards[2:] and [row["step"] for row in rows_of(tmp_path / "broken")] == [1, 2, 3, 4]
    with pytest.raises(raised):
        run(pair, breaking(1, error), output_dir=str(tmp_path / "early"), **saving)
    with Checkpointer(tmp_path / "early" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == []


def test_help_shows_the_settings():
    assert {"algorithm", "optimizer"} <= set(inspect.signature(TrainConfig).parameters)
    assert "learning_rate" in inspect.signature(Optimizer).parameters


def test_an_earlier_run_is_set_aside(pair, tmp_path, caplog):
    directory = tmp_path / "run"
    for _ in range(3):
        run(pair, output_dir=str(directory), num_updates=1)
    assert "held an earlier run; its metrics, checkpoints and models are now in" in caplog.text
    assert sorted(p.name for p in directory.glob("earlier_*")) == ["earlier_1", "earlier_2"]
    for place in (directory, directory / "earlier_1", directory / "earlier_2"):
        assert len(rows_of(place)) == 1 and len(list(place.glob("events*"))) == 1
        assert (place / "models" / "agent_1").is_dir() and (place / "checkpoints" / "1").is_dir()


def test_a_resumed_run_prints_its_step_and_the_changed_settings(pair, begun, capsys):
    """`save_models=False` writes no models."""
    settings = dict(save_every=1, resume=True, progress=True, num_updates=3, save_models=False)
    result = run(pair, output_dir=str(begun), **settings)
    assert len(result.rewards) == 2 and [row["step"] for row in rows_of(begun)] == [1, 2, 3]
    assert f"resuming {begun} from step 1 of 3; num_updates: 2 -> 3" in capsys.readouterr().out
    assert not (begun / "models").exists()


def test_a_run_older_than_a_setting_can_be_resumed(pair, begun):
    """Its checkpoint lacks the setting, which counts as the default. Settings that change no result may differ."""
    folder, again = begun / "checkpoints" / "1", dict(output_dir=str(begun), save_every=1, resume=True)
    content = json.loads((folder / "meta.json").read_text())
    assert content["meta"]["config"].pop("importance_level") == "token"
    (folder / "meta.json").write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(ValueError, match="importance_level: 'token' -> 'sequence'"):
        run(pair, importance_cap=2.0, importance_level="sequence", **again)
    assert len(run(pair, overlap_rewards=False, **again).rewards) == 1


def test_a_finished_run_that_is_resumed_is_evaluated(pair, tmp_path):
    """The evaluation at its end is repeated; there is none before training."""
    settings = dict(num_updates=1, save_every=1, output_dir=str(tmp_path), eval_items=HELD_OUT, **EVAL)
    first, again = (run(pair, resume=resume, **settings) for resume in (False, True))
    assert again.before is None and again.rewards == [] and again.after.mean == first.after.mean


def test_resuming_without_a_checkpoint_is_refused_and_writes_nothing(pair, tmp_path):
    with pytest.raises(ValueError, match="nothing to resume: .*run/checkpoints has no complete checkpoint"):
        run(pair, output_dir=str(tmp_path / "run"), resume=True, save_every=1)
    assert not (tmp_path / "run").exists()


def test_constant_rewards_change_nothing(pair):
    """A reward of 0.1 for all: exactly the untrained parameters."""
    result = run(pair, lambda a, b: [0.1] * len(a))
    jax.tree.map(np.testing.assert_array_equal, params_of(result), jax.device_get(make_team(pair)[1][0]))


def test_the_same_run_again_is_equal(pair):
    """From parameters made anew; training consumes those it is given (it updates them in place) and says so."""
    first, second = run(pair), run(pair)
    jax.tree.map(np.testing.assert_array_equal, params_of(first), params_of(second))
    assert first.rewards == second.rewards
    team, params = make_team(pair)
    cfg, reward = TrainConfig.of(**HOUSE), make_reward(share_of_e, num_agents=2)
    train(team, reward, ITEMS, cfg, params=params)
    with pytest.raises(ValueError, match=r"parameters of stack 0 .*make_team"):
        train(team, reward, ITEMS, cfg, params=params)


def test_evaluation_does_not_depend_on_the_training_step(pair, tmp_path):
    """A reward without signal leaves the parameters alone, so all evaluations are the same; and evaluating changes nothing
    about training."""
    calls = []

    def reward(a, b, batch_items):
        calls.append((batch_items[0] in HELD_OUT, a))
        return [1.0] * len(a)

    settings = dict(num_updates=3, eval_every=1, **EVAL)
    result = run(pair, reward, eval_items=HELD_OUT, **settings)
    evaluations = [texts for held_out, texts in calls if held_out]
    assert len(evaluations) == 4 and all(texts == evaluations[0] for texts in evaluations)
    assert result.before.mean == result.after.mean == 1.0
    trained = [texts for held_out, texts in calls if not held_out]
    assert len({tuple(texts) for texts in trained}) == 3
    calls.clear()
    run(pair, reward, **settings)
    assert [texts for _, texts in calls] == trained


@pytest.mark.long
def test_a_row_holds_the_time_of_its_step(pair, tmp_path):
    """Every row, including the last, contains the time of its reward, and none contains the time of an evaluation."""

    def reward(a, b, batch_items):
        time.sleep(1.5 if batch_items[0] in HELD_OUT else 0.2)
        return share_of_e(a, b)

    run(pair, reward, eval_every=1, output_dir=str(tmp_path), eval_items=HELD_OUT, **EVAL)
    rows = [row for row in rows_of(tmp_path) if "time/step_s" in row]
    assert len(rows) == 2 and all(row["time/step_s"] > 0.2 for row in rows)
    assert rows[1]["time/step_s"] < 1.5, "the first row may have the compiling"
    assert all(row["tokens_per_s"] == pytest.approx(row["tokens"] / row["time/step_s"]) for row in rows)


@pytest.mark.long
def test_programs_compile_once_and_before_the_first_step(pair):
    """The samplers of training and evaluation and the update are compiled before any reward is asked for, and not again; but an
    update for each quarter of max_new_tokens that was the longest completion. A run of another length makes none."""
    happened, before = [], TRACES.copy()

    def listen(event, _, **of):
        if event == "/jax/core/compile/backend_compile_duration" and of["fun_name"] in ("jit(sample_stack)", "jit(_update)"):
            happened.append(of["fun_name"])

    def reward(a, b):
        happened.append("reward")
        return share_of_e(a, b)

    settings = dict(max_new_tokens=8, temperature=0.9, eval_items=HELD_OUT, eval_generations=2)  # of no other test
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for seed in (0, 1):
            run(pair, reward, num_updates=8, seed=seed, **settings)
        first, traced = happened.copy(), TRACES - before
        run(pair, reward, num_updates=3, **settings)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sorted(first[:3]) == ["jit(_update)", "jit(sample_stack)", "jit(sample_stack)"]
    later = [name for name in first[3:] if name != "reward"]
    assert first[3] == "reward" and len(later) <= 3 and {*later} <= {"jit(_update)"}
    assert traced == {"sample": 2, "update": 1 + len(later)}
    assert happened[len(first) :] == ["reward"] * 5


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(algorithm="magrop"), r"did you mean 'magrpo'"),
        (dict(mesh="agent=64"), r"needs 64 devices"),
        (dict(joint_mode="both"), r"joint_mode='both' is not allowed"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(pair, changes, message):
    before = TRACES.copy()
    with pytest.raises(ValueError, match=message):
        run(pair, lambda a, b: 1 / 0, **changes)
    assert TRACES.copy() == before


def test_cross_mode_trains(pair):
    """Nine rewards a prompt for three completions of each agent; the returns are their means."""
    sizes = []

    def reward(a, b):
        sizes.append(len(a))
        return share_of_e(a, b)

    result = run(pair, reward, joint_mode="crossed", num_updates=1)
    assert sizes == [2 * 9] and np.isfinite(result.rewards).all()
