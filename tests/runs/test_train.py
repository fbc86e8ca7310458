"""The training loop: resuming bit for bit after a kill, its logs, order of tasks, and what it refuses."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import ALGORITHMS, AlgorithmRow, resolve
from jmarl.config import Optimizer, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardError, make_reward
from jmarl.evaluation.evaluate import Evaluation
from jmarl.files.checkpoint import Checkpointer
from jmarl.files.manifest import write_manifest
from jmarl.files.saving import Saves
from jmarl.learning.optimizer import init_state, steps_done
from jmarl.models.hub import agents as weights
from jmarl.randomness import tasks_of
from jmarl.rl import advantages, losses
from jmarl.runs.train import train
from jmarl.team import Team, make_team, without_gradients
from jmarl.types import TRACES

ROOT = Path(__file__).resolve().parents[2]
# What a resumed run measures anew: times, rates, and how much this process has compiled.
NOT_COMPARED = ("time/", "tokens_per_s", "compiles")

# A whole run in its own process. It kills itself without warning in the reward of step `kill`, as soon as the checkpoint
# of step 10 is complete on disk.
SCRIPT = """
import json, os, signal, sys, time
from jmarl.models.hub import agents as weights
from jmarl.config import TrainConfig
from jmarl.envs.rewards import make_reward
from jmarl.team import Team, make_team
from jmarl.files.checkpoint import Checkpointer
from jmarl.runs.train import train

directories, fields, kill = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
calls = 0

def reward(a, b, rng):
    global calls
    calls += 1
    if calls == kill:
        with Checkpointer(fields["output_dir"] + "/checkpoints", read_only=True) as saved:
            while saved.latest_step() != 10:
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.1 * len(x) - 0.05 * len(y) + rng.random() for x, y in zip(a, b)]

items = [{"prompt": text} for text in ("The answer", "apples", "def add", "two agents", "question")]
team, params = make_team([weights.load_agent(d) for d in directories])
train(team, make_reward(reward, num_agents=2), items, TrainConfig.of(**fields), params=params, eval_items=items[:2])
"""

BASE = dict(num_updates=20, num_prompts=2, num_generations=3, max_new_tokens=4, learning_rate=1e-2, progress=False)


def start(directories, output_dir, kill=0, **changes):
    """Run `SCRIPT`; returns the finished process."""
    fields = BASE | dict(save_every=10, eval_every=5, eval_generations=2, output_dir=str(output_dir)) | changes
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-c", SCRIPT, json.dumps(directories), json.dumps(fields), str(kill)]
    return subprocess.run(args, env=env, capture_output=True, text=True, timeout=400)


def update_count(state):
    return steps_done(state.stacks[0]).tolist()


def rows_of(output_dir):
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def directories(tiny_dir):
    return [str(tiny_dir("llama", seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def runs(directories, tmp_path_factory):
    """An uninterrupted run of 20 steps; and one killed in step 13, after the checkpoint of step 10, and resumed."""
    root = tmp_path_factory.mktemp("runs")
    whole, broken = root / "whole", root / "broken"
    done = start(directories, whole)
    assert done.returncode == 0, done.stderr[-2000:]
    killed = start(directories, broken, kill=13 + 4)  # 13 training steps and the evaluations at 0, 5 and 10 come before
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    left = [row["step"] for row in rows_of(broken)]
    resumed = start(directories, broken, resume=True)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    return whole, broken, left


@pytest.mark.long
def test_the_kill_came_after_the_checkpoint(runs):
    """The rows of steps 10 and 11 were written and are dropped; that of 12 was not, since rows are written one step late."""
    assert max(runs[2]) == 11 and runs[2].count(11) == 1


@pytest.mark.long
def test_a_resumed_run_is_bit_equal(runs, pair):
    """Parameters, optimiser state and counters after 20 steps = 10 + SIGKILL + 10."""
    whole, broken, _ = runs
    like, states = without_gradients(init_state(make_team(pair)[1], resolve(TrainConfig.of(**BASE)))), []
    for run in (whole, broken):
        with Checkpointer(run / "checkpoints", read_only=True) as saved:
            states.append(jax.device_get(saved.restore(like, 20)[0]))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert int(states[1].step) == 20 and update_count(states[1]) == [20, 20]
    for agent in ("agent_0", "agent_1"):
        a, b = ((run / "models" / agent / "model.safetensors").read_bytes() for run in (whole, broken))
        assert a == b


@pytest.mark.long
def test_a_resumed_run_repeats_and_loses_no_row(runs):
    """metrics.jsonl: the same steps in the same order, equal in all columns but times, rates and compiles."""
    whole, broken = (rows_of(run) for run in runs[:2])
    assert [row["step"] for row in broken] == [row["step"] for row in whole]
    for a, b in zip(whole, broken, strict=True):
        assert a.keys() == b.keys()
        assert {k: v for k, v in a.items() if not k.startswith(NOT_COMPARED)} == {
            k: v for k, v in b.items() if not k.startswith(NOT_COMPARED)
        }
    steps = [row["step"] for row in whole if "reward/mean" in row]
    assert steps == list(range(20))
    assert [row["eval/updates"] for row in whole if "eval/reward" in row] == [0, 5, 10, 15, 20]


@pytest.mark.long
def test_a_changed_configuration_is_refused_with_the_difference(runs, directories):
    """Only what is named in MAY_CHANGE and ADVISED may differ; the error shows old and new."""
    done = start(directories, runs[0], resume=True, gamma=0.5, temperature=0.5, num_updates=21, learning_rate=1e-3)
    assert done.returncode != 0
    assert "cannot resume from step 20" in done.stderr and "gamma: 1.0 -> 0.5" in done.stderr
    assert "temperature: 1.0 -> 0.5" in done.stderr and "learning_rate:" not in done.stderr.splitlines()[-1]
    done = start(directories, runs[0], resume=True, num_updates=19)
    assert done.returncode != 0 and "num_updates=19 is not allowed: the run in" in done.stderr
    assert "has made 20 already" in done.stderr


@pytest.mark.long
def test_a_changed_team_is_refused(runs, tiny_dir):
    agent = weights.load_agent(tiny_dir("qwen2"))
    cfg = TrainConfig.of(**BASE, save_every=10, eval_every=5, eval_generations=2, output_dir=str(runs[0]), resume=True)
    with pytest.raises(ValueError, match="team: other models, tokenizers or roles"):
        train(Team.of([agent, agent]), make_reward(share_of_e, num_agents=2), [{"prompt": "a"}], cfg)


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

    cfg = TrainConfig.of(**BASE | dict(num_updates=2, save_every=1, output_dir=str(tmp_path)))
    with contextlib.ExitStack() as full, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        result = train(Team.of(pair), make_reward(reward, num_agents=2), [{"prompt": "apples"}], cfg)
    assert len(warned) == 1 and re.search("not saved, training goes on: .*step 2", warned[0])
    assert int(result.state.step) == 2 and (tmp_path / "models" / "agent_1" / "model.safetensors").exists()
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [1]


def test_a_failed_save_does_not_prevent_the_next_one(pair, tmp_path, full_disk):
    """The disk is full during the first of two saves, whose result is not checked before the second starts."""
    state, cfg = init_state(make_team(pair)[1], resolve(TrainConfig.of(**BASE))), TrainConfig.of(output_dir=str(tmp_path))
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


# --- in this process -----------------------------------------------------------------------------------------------------


def share_of_e(a, b):
    """Share of the letter e in both texts together."""
    return [(x + y).count("e") / max(len(x + y), 1) for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def pair(directories):
    return [weights.load_agent(d) for d in directories]


def run(pair, reward=share_of_e, items=("The answer", "apples", "question"), **changes):
    team, params = make_team(pair)
    cfg = TrainConfig.of(**BASE | dict(num_updates=2) | changes)
    return train(team, make_reward(reward, num_agents=2), [{"prompt": text} for text in items], cfg, params=params), team


def params_of(result):
    return jax.device_get(result.state.stacks[0].params)


def test_invalid_rewards_are_masked_and_counted(pair, tmp_path):
    """NaN, None and a text for three of six joint actions: counted in every row, no parameter becomes NaN, both learn."""
    with pytest.warns(UserWarning, match="3 of 6 joint actions have no valid reward; .* returned nan"):
        result, _ = run(pair, lambda a, b: [float("nan"), 1.0, None, 2.0, "five", 0.5], output_dir=str(tmp_path))
    rows = rows_of(tmp_path)
    assert [row["reward/invalid"] for row in rows] == [3, 3]
    assert [row["reward/mean"] for row in rows] == [pytest.approx(3.5 / 3)] * 2
    assert all(row[f"agent_{a}/skipped"] == 0 and row[f"agent_{a}/grad_norm"] > 0 for row in rows for a in (0, 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params_of(result)))


def test_an_update_without_valid_rewards_changes_nothing(pair):
    """In the first update they are an error, with the reason; later ones pass."""
    with pytest.raises(ValueError, match="no joint action of the first update has a valid reward.* returned None"):
        run(pair, lambda a, b: [None] * len(a))
    calls = []

    def fails_later(a, b):
        calls.append(len(a))
        return [0.1 if len(calls) == 1 else None] * len(a)

    with pytest.warns(UserWarning, match="6 of 6 joint actions have no valid reward"):
        result, _ = run(pair, fails_later)
    assert calls == [6, 6]
    jax.tree.map(np.testing.assert_array_equal, params_of(result), jax.device_get(make_team(pair)[1][0]))


def test_a_plain_function_is_a_reward(pair):
    cfg, items = TrainConfig.of(**BASE | dict(num_updates=1)), [{"prompt": "apples"}]
    plain, wrapped = (train(Team.of(pair), r, items, cfg) for r in (share_of_e, make_reward(share_of_e, num_agents=2)))
    assert plain.rewards == wrapped.rewards
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
    cfg = TrainConfig.of(**BASE | dict(num_updates=1))
    with pytest.raises((ValueError, TypeError), match=message):
        train(Team.of(pair), RewardEnvironment(share_of_e, formatters), items, cfg)


def test_a_team_of_names_is_refused(pair):
    for agents, got in ((["a model"], "'a model'"), ("a model", "'a'"), (pair[0], "one agent alone")):
        with pytest.raises(TypeError, match=f"made of a list of agents, such as .*; got {got}"):
            make_team(agents)


def test_true_is_a_reward_of_one(pair):
    def longer(a, b):
        return [len(x) > len(y) for x, y in zip(a, b, strict=True)]

    cfg = TrainConfig.of(**BASE | dict(num_updates=1))
    result = train(Team.of(pair), longer, [{"prompt": "apples"}], cfg)
    plain = train(Team.of(pair), lambda a, b: [float(x) for x in longer(a, b)], [{"prompt": "apples"}], cfg)
    assert result.rewards == plain.rewards and 0 <= result.rewards[0] <= 1


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
        (dict(loss=lambda logp, *_: logp.sum()), "the loss of 'mine' must return a scalar .*dict of metrics"),
        (dict(loss=lambda logp, *_: (logp.sum(), {"kl": logp})), "the loss of 'mine' returns the metric 'kl', which every"),
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


def test_a_user_defined_loss_gets_tokens_in_one_row(pair, monkeypatch):
    own_row(monkeypatch, loss=lambda logp, old, adv, w: [-jnp.dot(w, adv * jnp.exp(logp - old)), {}])
    assert len(run(pair, algorithm="mine")[0].rewards) == 2


@pytest.mark.long
def test_a_redefined_row_replaces_the_old_one(pair, monkeypatch):
    """As in a notebook: the same name with another loss, or another estimator."""
    seen = []
    for factor in (1.0, 0.0):
        own_row(monkeypatch, loss=lambda logp, old, adv, w, factor=factor: (-jnp.sum(w * adv * logp) * factor, {}))
        seen.append(params_of(run(pair, algorithm="mine", max_grad_norm=1e9)[0])["embed"])
    for estimator in (lambda returns, valid: returns, lambda returns, valid: 0 * returns):
        own_row(monkeypatch, estimator=estimator)
        seen.append(params_of(run(pair, algorithm="mine")[0])["embed"])
    before = jax.device_get(make_team(pair)[1][0])["embed"]
    assert [bool((x == before).all()) for x in seen] == [False, True, False, True]


@pytest.mark.long
def test_a_non_finite_loss_warns_once(pair, monkeypatch, tmp_path):
    own_row(monkeypatch, loss=lambda logp, old, advantages, weights: (jnp.nan * logp.sum(), {}))
    with pytest.warns(
        UserWarning, match="update 0.*: a loss or gradient is not finite, .*agent_0/skipped, agent_1/skipped"
    ) as warned:
        result, _ = run(pair, algorithm="mine", output_dir=str(tmp_path))
    assert len(warned) == 1
    assert rows_of(tmp_path)[-1]["agent_1/skipped"] == 2
    jax.tree.map(np.testing.assert_array_equal, params_of(result), jax.device_get(make_team(pair)[1][0]))


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

    with pytest.raises(UserWarning, match="update 2: 1 of 6 joint actions have no valid reward"):
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
        return make_reward(breaks, num_agents=2)

    items, held_out = [{"prompt": "apples"}], [{"prompt": "held out"}]
    settings = dict(num_updates=4, eval_every=2, eval_generations=2, save_every=1, output_dir=str(tmp_path))
    with pytest.raises(RewardError, match="no service"):
        train(Team.of(pair), reward(broken_at), items, TrainConfig.of(**BASE | settings), eval_items=held_out)
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as saved:
        assert saved.latest_step() == saved_at
    result = train(Team.of(pair), reward(0), items, TrainConfig.of(**BASE | settings, resume=True), eval_items=held_out)
    assert result.after is not None and len(result.rewards) == 4 - saved_at
    assert [row["eval/updates"] for row in rows_of(tmp_path) if "eval/reward" in row] == [0, 2, 4]


def test_a_checkpoint_is_started_before_an_evaluation(pair, tmp_path):
    """A kill during the evaluation loses nothing: the checkpoint exists or is being written when the evaluation starts."""
    seen = []

    def reward(a, b, batch_items):
        if batch_items[0]["prompt"] == "held out":
            seen.append(sorted(path.name.removesuffix(".saving") for path in (tmp_path / "checkpoints").glob("*")))
        return share_of_e(a, b)

    cfg = TrainConfig.of(**BASE | dict(num_updates=4, eval_every=2, eval_generations=2, save_every=2, output_dir=str(tmp_path)))
    train(Team.of(pair), reward, [{"prompt": "apples"}], cfg, eval_items=[{"prompt": "held out"}])
    assert seen == [[], ["2"], ["2", "4"]]


def test_a_failed_run_has_logged_its_last_update(pair, tmp_path):
    with pytest.raises(RewardError, match="no service"):
        run(pair, breaking(3, OSError("no service")), num_updates=4, output_dir=str(tmp_path))
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1]


@pytest.mark.parametrize(("error", "raised"), [(OSError("no service"), RewardError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_failed_run_resumes_from_its_last_update(pair, tmp_path, error, raised):
    """Long before the next checkpoint is due. A run that fails before its first update leaves no checkpoint."""
    saving = dict(num_updates=4, save_every=100)
    whole, _ = run(pair, share_of_e, output_dir=str(tmp_path / "whole"), **saving)
    with pytest.raises(raised):
        run(pair, breaking(3, error), output_dir=str(tmp_path / "broken"), **saving)
    with Checkpointer(tmp_path / "broken" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == [2]
    rest, _ = run(pair, share_of_e, output_dir=str(tmp_path / "broken"), resume=True, allow_changed="reward", **saving)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    assert rest.rewards == whole.rewards[2:] and [row["step"] for row in rows_of(tmp_path / "broken")] == [0, 1, 2, 3]
    with pytest.raises(raised):
        run(pair, breaking(1, error), output_dir=str(tmp_path / "early"), **saving)
    with Checkpointer(tmp_path / "early" / "checkpoints", read_only=True) as saved:
        assert saved.steps() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(learning_rate="1e-5"), "learning_rate='1e-5' .* float | tuple"),
        (dict(frozen_agents=1), "frozen_agents=1 .* tuple"),
        (dict(num_generations=2.5), "num_generations=2.5 .* int"),
        (dict(learning_rate=(1e-5, None)), "learning_rate=.* float"),
        (dict(clip_epsilon=0.2), "TrainConfig has no setting 'clip_epsilon'; did you mean 'clip_eps_low'"),
        (dict(use_bf16=True), r"TrainConfig has no setting 'use_bf16'; help\(TrainConfig\) lists its settings$"),
        (dict(deepspeed=True), r"TrainConfig has no setting 'deepspeed'; help\(TrainConfig\) lists its settings$"),
    ],
)
def test_settings_of_another_type_or_name_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        TrainConfig.of(**changes)
    assert {"algorithm", "optimizer"} <= set(inspect.signature(TrainConfig).parameters), "as help() shows them"
    assert "learning_rate" in inspect.signature(Optimizer).parameters


def test_save_models_false_writes_no_models(pair, tmp_path):
    run(pair, num_updates=1, output_dir=str(tmp_path), save_models=False)
    assert len(rows_of(tmp_path)) == 1 and not (tmp_path / "models").exists()


def test_an_earlier_run_is_set_aside(pair, tmp_path, caplog):
    directory = tmp_path / "run"
    for _ in range(3):
        run(pair, output_dir=str(directory), num_updates=1)
    assert "held an earlier run; its metrics, checkpoints and models are now in" in caplog.text
    assert sorted(p.name for p in directory.glob("earlier_*")) == ["earlier_1", "earlier_2"]
    for place in (directory, directory / "earlier_1", directory / "earlier_2"):
        assert len(rows_of(place)) == 1 and len(list(place.glob("events*"))) == 1
        assert (place / "models" / "agent_1").is_dir() and (place / "checkpoints" / "1").is_dir()


def test_a_resumed_run_prints_its_step_and_the_changed_settings(pair, tmp_path, capsys):
    run(pair, output_dir=str(tmp_path), num_updates=1, save_every=1)
    result, _ = run(pair, output_dir=str(tmp_path), save_every=1, resume=True, progress=True)
    assert len(result.rewards) == 1 and len(rows_of(tmp_path)) == 2
    assert f"resuming {tmp_path} from step 1 of 2, num_updates: 1 -> 2\n" in capsys.readouterr().out


def test_a_run_older_than_a_setting_can_be_resumed(pair, tmp_path):
    """Its checkpoint lacks the setting, which counts as the default. Settings that change no result may differ."""
    run(pair, output_dir=str(tmp_path), num_updates=1, save_every=1)
    folder = tmp_path / "checkpoints" / "1"
    content = json.loads((folder / "meta.json").read_text())
    assert content["meta"]["config"].pop("importance_level") == "token"
    (folder / "meta.json").write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(ValueError, match="importance_level: 'token' -> 'sequence'"):
        run(pair, output_dir=str(tmp_path), save_every=1, resume=True, importance_cap=2.0, importance_level="sequence")
    result, _ = run(pair, output_dir=str(tmp_path), save_every=1, resume=True, overlap_rewards=False)
    assert len(result.rewards) == 1


def test_a_finished_run_that_is_resumed_is_evaluated(pair, tmp_path):
    """The evaluation at its end is repeated; there is none before training."""
    items = [{"prompt": "apples"}]
    cfg = TrainConfig.of(**BASE | dict(num_updates=1, save_every=1, output_dir=str(tmp_path)))

    def trained(cfg):
        return train(Team.of(pair), make_reward(share_of_e, num_agents=2), items, cfg, eval_items=items)

    first, again = trained(cfg), trained(cfg.replace(resume=True))
    assert again.before is None and again.rewards == [] and again.after.mean == first.after.mean


def test_resuming_without_a_checkpoint_is_refused_and_writes_nothing(pair, tmp_path):
    with pytest.raises(ValueError, match="nothing to resume: .*run/checkpoints has no complete checkpoint"):
        run(pair, output_dir=str(tmp_path / "run"), resume=True, save_every=1)
    assert not (tmp_path / "run").exists()


def test_constant_rewards_change_nothing(pair):
    """A reward of 0.1 for all: exactly the untrained parameters."""
    result, _ = run(pair, lambda a, b: [0.1] * len(a))
    jax.tree.map(np.testing.assert_array_equal, params_of(result), jax.device_get(make_team(pair)[1][0]))


def test_the_same_run_again_is_equal(pair):
    """From parameters made anew; training consumes those it is given (it updates them in place) and says so."""
    first, second = run(pair)[0], run(pair)[0]
    jax.tree.map(np.testing.assert_array_equal, params_of(first), params_of(second))
    assert first.rewards == second.rewards
    team, params = make_team(pair)
    cfg, reward = TrainConfig.of(**BASE | dict(num_updates=1)), make_reward(share_of_e, num_agents=2)
    train(team, reward, [{"prompt": "apples"}], cfg, params=params)
    with pytest.raises(ValueError, match=r"parameters of stack 0 .*make_team"):
        train(team, reward, [{"prompt": "apples"}], cfg, params=params)


def test_evaluation_does_not_depend_on_the_training_step(pair, tmp_path):
    """A reward without signal leaves the parameters alone, so all evaluations are the same; and evaluating changes nothing
    about training."""
    calls = []

    def reward(a, b, batch_items):
        calls.append((batch_items[0]["prompt"], a))
        return [1.0] * len(a)

    held_out = [{"prompt": "held out"}, {"prompt": "other"}]
    team, params = make_team(pair)
    cfg = TrainConfig.of(**BASE | dict(num_updates=3, eval_every=1, eval_generations=3))
    result = train(team, make_reward(reward, num_agents=2), [{"prompt": "apples"}] * 2, cfg, params=params, eval_items=held_out)
    evaluations = [texts for prompt, texts in calls if prompt == "held out"]
    assert len(evaluations) == 4 and all(texts == evaluations[0] for texts in evaluations)
    assert result.before.mean == result.after.mean == 1.0
    trained = [texts for prompt, texts in calls if prompt == "apples"]
    assert len({tuple(texts) for texts in trained}) == 3
    calls.clear()
    train(team, make_reward(reward, num_agents=2), [{"prompt": "apples"}] * 2, cfg, params=make_team(pair)[1])
    assert [texts for _, texts in calls] == trained


@pytest.mark.long
def test_a_row_holds_the_time_of_its_step(pair, tmp_path):
    """Every row, including the last, contains the time of its reward, and none contains the time of an evaluation."""

    def reward(a, b, batch_items):
        time.sleep(3.0 if batch_items[0]["prompt"] == "held out" else 0.3)
        return share_of_e(a, b)

    cfg = TrainConfig.of(**BASE | dict(num_updates=3, eval_every=1, output_dir=str(tmp_path)))
    items, held_out = [{"prompt": "apples"}], [{"prompt": "held out"}]
    train(Team.of(pair), make_reward(reward, num_agents=2), items, cfg, eval_items=held_out)
    rows = [row for row in rows_of(tmp_path) if "time/step_s" in row]
    assert len(rows) == 3 and all(row["time/step_s"] > 0.3 for row in rows)
    assert all(row["time/step_s"] < 3.0 for row in rows[1:]), "the first row has the compiling"
    assert all(row["tokens_per_s"] == pytest.approx(row["tokens"] / row["time/step_s"]) for row in rows)


@pytest.mark.long
def test_programs_compile_once_and_before_the_first_step(pair):
    """The samplers of training and evaluation and the update are compiled before any reward is asked for, and not again."""
    happened = []

    def listen(event, _, **of):
        if event == "/jax/core/compile/backend_compile_duration" and of["fun_name"] in ("jit(sample_stack)", "jit(_update)"):
            happened.append(of["fun_name"])

    def reward(a, b):
        happened.append("reward")
        return share_of_e(a, b)

    cfg = TrainConfig.of(**BASE | dict(num_updates=2, max_new_tokens=5, min_new_tokens=5, eval_generations=2))
    items, held_out = [{"prompt": "apples"}] * 2, [{"prompt": "held out"}]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(Team.of(pair), make_reward(reward, num_agents=2), items, cfg, eval_items=held_out)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sorted(happened[:3]) == ["jit(_update)", "jit(sample_stack)", "jit(sample_stack)"]
    assert happened[3:] == ["reward"] * 4


@pytest.mark.long
def test_compiles_are_bounded(pair):
    """Sixteen steps of two seeds: one program to sample, and one to update for each quarter of max_new_tokens that was the
    longest completion. A run of another length makes none."""
    before = TRACES.copy()
    for seed in (0, 1):
        run(pair, num_updates=8, seed=seed, max_new_tokens=8)
    assert TRACES["sample"] - before["sample"] == 1
    assert 1 <= TRACES["update"] - before["update"] <= 4
    before = TRACES.copy()
    run(pair, num_updates=3, max_new_tokens=8)
    assert before == TRACES


def test_the_models_of_a_run_can_be_loaded(pair, tmp_path):
    """Each agent's directory holds exactly the trained parameters."""
    result, _ = run(pair, output_dir=str(tmp_path))
    for a in (0, 1):
        loaded = weights.load_agent(tmp_path / "models" / f"agent_{a}")
        expected = jax.tree.map(lambda x, a=a: x[a], params_of(result))
        jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_generations=1), r"num_generations=1 is too small for algorithm='magrpo'.*at least 2"),
        (dict(algorithm="magrop"), r"did you mean 'magrpo'"),
        (dict(resume=True), r"resume=True is not allowed: resume must be off without output_dir"),
        (dict(mesh="agent=64"), r"needs 64 devices"),
        (dict(joint_mode="both"), r"joint_mode='both' is not allowed"),
        (dict(seed=-1), r"seed=-1 is not allowed"),
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

    result, _ = run(pair, reward, joint_mode="crossed", num_updates=1)
    assert sizes == [2 * 9] and np.isfinite(result.rewards).all()
