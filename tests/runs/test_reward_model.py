"""Reward models and teams trained on their scores: texts, scale, saving, learning, rounds, exact resume."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.algorithms.resolve import policy_config
from jmarl.config import TrainConfig, flat
from jmarl.envs.base import Answer
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardResult, make_reward
from jmarl.models import decoder
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.preferences.encoding import encode_pairs
from jmarl.preferences.pairs import Pair, split_by_prompt
from jmarl.preferences.reward_model import (
    LearnedReward,
    RewardModel,
    fit_reward_model,
    joint_pair,
    load_reward_model,
    save_reward_model,
)
from jmarl.runs.checks import check_settings
from jmarl.runs.kinds.learned import LearnedRounds, reward_config
from jmarl.runs.kinds.rounds import Round, load_round
from jmarl.runs.records import FitResult
from jmarl.runs.train import fit, train
from jmarl.team import make_team

ITEMS = [{"prompt": text} for text in ("the answer", "is in a", "basket", "of fruit", "def add", "seven", "42", "walked")]
HELD_OUT = [{"prompt": text} for text in ("apples", "or pears", "so they", "the market", "with", "two", "agents", "return")]
CONFIG = TrainConfig.of(
    algorithm="marlhf", num_updates=20, num_prompts=8, num_generations=8, max_new_tokens=6, min_new_tokens=6,
    learning_rate=2e-2, per_agent="vmap", eval_generations=8, batch_size=16, pairs_per_prompt=0, reward_updates=60,
    reward_learning_rate=3e-3, progress=False,
)  # fmt: skip
ITER = dict(algorithm="marlhf_iter", round_updates=2, num_updates=4, reward_updates=5, replay="all")
LORA = dict(lora_rank=4, lora_targets="q_proj,down_proj")


def vowels(text):
    return sum(text.count(v) for v in "aeiou") / max(len(text), 1)


def both(a, b):
    return [(vowels(x) + vowels(y)) / 2 for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer):
    """They have the weights of initialization, which learn faster than `random_agent`."""
    init_params = jax.jit(decoder.init_params, static_argnums=0)
    cfg = tiny_config(max_positions=256)
    params = [jax.device_get(init_params(cfg, jax.random.key(seed))) for seed in (0, 10)]
    return [Agent("random", cfg, x, tiny_tokenizer) for x in params]


def trained(agents, eval_items=None, **changes):
    team, params = make_team(agents)
    cfg = CONFIG.replace(**changes)
    return train(team, make_reward(both, num_agents=2), ITEMS, cfg, params=params, eval_items=eval_items)


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def reward_settings(**changes):
    """Return settings of a reward model that shares the programs of updates with those of a run by `CONFIG`."""
    cfg = CONFIG.replace(**dict(reward_updates=20) | changes)
    return reward_config(cfg, resolve(cfg), 0)


def thrice(*texts):
    """Return texts as long as those that are sampled: their programs are the same."""
    return [" ".join([text] * 3) for text in texts]


@pytest.fixture(scope="module")
def pairs():
    """Pairs in which the text with more vowels was preferred."""
    words = thrice("aeiou", "ea io", "oua e", "uuu a", "xyz q", "rst w", "bcdfg", "wxy z")
    return [Pair(("the", "a"), (x, y), (z, w)) for x in words[:4] for y in words[:2] for z in words[4:] for w in words[4:6]]


@pytest.fixture(scope="module")
def model(agents, pairs):
    """A reward model trained on these pairs, and its result."""
    return fit_reward_model(agents[0], pairs, reward_settings(), fit=fit)


def of_pairs(model, joint):
    return model.values(encode_pairs(model.team, joint, False))


SOME = [["the", "a"] * 2, ["a", "seven"] * 2], [thrice("aeiou", "xyz", "aaeei", "b"), thrice("oua e", "wxy z", "c d e", "f")]


@pytest.mark.long
def test_a_reward_model_reads_all_agents_and_ranks_new_texts(model, pairs):
    """Scores have mean 0 and std 1 over the training pairs."""
    fitted, result = model
    assert joint_pair(Pair(("the", "a"), ("x", "y"), ("z", "w"))) == Pair(
        ("[Agent 0] the\n[Agent 1] a",), ("\n[Agent 0] x\n[Agent 1] y",), ("\n[Agent 0] z\n[Agent 1] w",)
    )
    assert result.after["accuracy"] > 0.9 > result.before["accuracy"] == 0.5
    first, second = (
        fitted.score([["the"], ["a"]], [thrice(x), thrice(y)]) for x, y in (("aaeei", "ioua "), ("xzzzq", "rrr w"))
    )
    assert first > second
    learned, _ = split_by_prompt([joint_pair(pair) for pair in pairs], 5)
    scores = (of_pairs(fitted, learned) - fitted.mean) / fitted.std
    np.testing.assert_allclose([scores.mean(), scores.std()], [0, 1], atol=1e-4)


@pytest.mark.long
def test_a_joint_action_has_the_same_score_alone_in_a_batch_and_in_a_pair(model, pairs):
    """20 joint actions are more than one batch."""
    fitted, some = model[0], pairs[:20]
    scores = (of_pairs(fitted, [joint_pair(pair) for pair in some]) - fitted.mean) / fitted.std
    read = list(zip(*(pair.prompts for pair in some), strict=True))
    for k, side in enumerate(("chosen", "rejected")):
        wrote = list(zip(*(getattr(pair, side) for pair in some), strict=True))
        np.testing.assert_allclose(fitted.score(read, wrote), scores[:, k], rtol=1e-4, atol=1e-4)
        alone = fitted.score([x[:1] for x in read], [x[:1] for x in wrote])
        np.testing.assert_allclose(alone, scores[:1, k], rtol=1e-4, atol=1e-4)


def test_chat_messages_are_lines_for_a_reward_model():
    chat = tuple({"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "How many?")))
    assert joint_pair(Pair((chat, "a"), ("x", "y"), ("z", "w"))).prompts == (
        "[Agent 0] [system] Be brief.\n[user] How many?\n[Agent 1] a",
    )


@pytest.mark.long
def test_a_reward_model_is_saved_and_loaded(model, tmp_path, monkeypatch):
    """It scores the same bit for bit. A directory without a value head, or one written incompletely, is refused."""
    fitted = model[0]
    save_reward_model(tmp_path / "saved", fitted)
    assert len({path.stat().st_mode for path in (tmp_path / "saved").iterdir()}) == 1
    loaded = load_reward_model(tmp_path / "saved")
    assert (loaded.mean, loaded.std) == (fitted.mean, fitted.std) and fitted.mean != 0 and fitted.std != 1
    in_one_program = loaded._replace(algorithm=fitted.algorithm)
    np.testing.assert_array_equal(in_one_program.score(*SOME), fitted.score(*SOME))
    np.testing.assert_allclose(loaded.score(*SOME), fitted.score(*SOME), rtol=1e-4, atol=1e-5)
    one_more = SOME[0], [[*SOME[1][0], "x"], SOME[1][1]]
    for read, wrote in (("Say", ["a", "b"]), ([("Say", "Say")], [["a", "b"], ["c", "d"]]), (["the"], [["a"], ["b"]]), one_more):
        with pytest.raises(ValueError, match=r"\[N\]\[B\]|of all agents"):
            loaded.score(read, wrote)
    assert load_agent(tmp_path / "saved").config == fitted.team.stacks[0].config
    exact = fitted._replace(algorithm=dataclasses.replace(fitted.algorithm, compute_dtype="bfloat16"))
    save_reward_model(tmp_path / "saved", exact)
    assert load_reward_model(tmp_path / "saved").algorithm.compute_dtype == "bfloat16"
    monkeypatch.setattr("jmarl.preferences.reward_model.save_pretrained", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_reward_model(tmp_path / "saved", fitted)
    with pytest.raises(FileNotFoundError, match="saved has no value_head.safetensors, the value head of a reward model"):
        load_reward_model(tmp_path / "saved")


@pytest.mark.long
def test_a_reward_model_with_adapters_ranks_held_out_pairs_and_is_saved_with_them_merged(pairs, agents, tmp_path):
    cfg = reward_settings(**LORA, reward_learning_rate=3e-2)
    fitted, result = fit_reward_model(agents[0], pairs, cfg, fit=fit)
    assert result.after["accuracy"] > 0.9, result.after
    save_reward_model(tmp_path, fitted)
    np.testing.assert_allclose(load_reward_model(tmp_path).score(*SOME), fitted.score(*SOME), rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_chat_and_a_text_beyond_the_context_are_refused(agents, model, pairs):
    with pytest.raises(ValueError, match="chat=True is not there for a reward model"):
        fit_reward_model(agents[0], pairs, TrainConfig.of(algorithm="reward_model", chat=True), fit=fit)
    long = [["the"] * 2, ["a"] * 2], [["x", "xyz " * 200], ["b", "c"]]
    with pytest.raises(
        ValueError, match=r"1 of 2 joint actions .* number 1 .*'\[Agent 0\] the.* context is 256: lower max_new"
    ):
        model[0].score(*long)
    drops, first = model[0]._replace(long_prompts="drop"), [[x[:1] for x in texts] for texts in long]
    np.testing.assert_allclose(drops.score(*long), [*model[0].score(*first), np.nan], rtol=1e-4, atol=1e-5)
    assert np.isnan(drops.score(*[[x[1:] for x in texts] for texts in long])).all()
    env = LearnedReward(RewardEnvironment(make_reward(both, num_agents=2), [default_formatter] * 2))
    env.model = drops
    states, _ = env.reset([{"prompt": "the"}] * 2, np.random.default_rng(0))
    result = env.step(states, long[1], np.random.default_rng(0)).result
    assert result.invalid.tolist() == [False, True] and "too long for its context" in result.faults[1]


@pytest.mark.long
def test_a_reward_model_cuts_or_leaves_out_long_pairs(agents, pairs, tmp_path):
    """Its scores have mean 0 and std 1 over what it reads of the training pairs. It is saved with the choice."""
    long = [pair._replace(prompts=(f"{'xyz ' * 80}{i}", "a")) for i, pair in enumerate(pairs[:3])]
    for choice, warning in (("drop", "3 of 64 pairs .* left out"), ("truncate_left", "the prompts of 3 are cut on the left")):
        with pytest.warns(UserWarning, match=warning):
            fitted, _ = fit_reward_model(
                agents[0], [*pairs[3:], *long], reward_settings(long_prompts=choice), eval_pairs=pairs[:3], fit=fit
            )
        read = pairs[3:] if choice == "drop" else [*pairs[3:], *long]
        scores = [
            fitted.score(*(list(zip(*(getattr(pair, name) for pair in read), strict=True)) for name in ("prompts", side)))
            for side in ("chosen", "rejected")
        ]
        np.testing.assert_allclose([np.mean(scores), np.std(scores)], [0, 1], atol=1e-4)
    save_reward_model(tmp_path, fitted)
    assert load_reward_model(tmp_path).long_prompts == "truncate_left"


@pytest.mark.long
def test_the_reward_is_the_score_and_the_tasks_own_is_a_measure(model):
    """An invalid reward of the task masks the joint action."""

    def last_invalid(a, b):
        return [*both(a, b)[:3], float("nan")]

    task = RewardEnvironment(make_reward(last_invalid, num_agents=2), [default_formatter] * 2)
    env, rng = LearnedReward(task), np.random.default_rng(0)
    env.model = model[0]
    states, prompts = env.reset(ITEMS[:4], rng)
    assert prompts == task.reset(ITEMS[:4], rng)[1]
    result = env.step(states, SOME[1], rng).result
    expected = [*model[0].score(prompts, SOME[1])[:3], np.nan]
    np.testing.assert_allclose(result.total, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.measures["task"], last_invalid(*SOME[1]))
    np.testing.assert_array_equal(result.rewards, np.stack([result.total] * 2, 1))
    assert result.invalid.tolist() == [False] * 3 + [True]


@pytest.mark.long
def test_a_team_learns_the_task_from_a_learned_reward(agents, tmp_path):
    """The task's reward on held-out prompts, which the team never sees, ends above the untrained team's 95 % interval. The
    reward model is saved."""
    result = trained(agents, HELD_OUT, output_dir=str(tmp_path))
    assert result.after.mean - result.after.interval > result.before.mean + result.before.interval
    logged = [row for row in rows(tmp_path) if "measures/task" in row]
    assert logged[0]["pairs"] > 100 and logged[0]["reward_model/accuracy"] > 0.55, "on pairs of held-out prompts"
    pairs, saved = load_round(tmp_path / "pairs", 0), load_reward_model(tmp_path / "reward_model")
    sides = [list(zip(*(getattr(pair, side) for pair in pairs), strict=True)) for side in ("prompts", "chosen", "rejected")]
    right = saved.score(sides[0], sides[1]) > saved.score(sides[0], sides[2])
    assert right.mean() > 0.65, "on its training pairs"
    assert np.mean([r["measures/task"] for r in logged[-4:]]) > np.mean([r["measures/task"] for r in logged[:4]])


@pytest.mark.long
def test_parts_faults_and_states_of_the_task_are_passed_on(model):
    total, done = np.array([1.0, np.nan] * 2), np.array([True, False] * 2)
    result = RewardResult(total, {"length": np.ones(4)}, np.isnan(total), np.stack([total] * 2, 1), {1: "no number"}, 3)
    env = LearnedReward(SimpleNamespace(step=lambda *_: Answer(result, done, ["one", "two"] * 2)))
    env.model = model[0]
    got = env.step([(None, ("the", "a"))] * 4, SOME[1], np.random.default_rng(0))
    assert (got.result.faults, got.result.num_raised, got.after) == ({1: "no number"}, 3, ["one", "two"] * 2)
    assert (got.done == done).all() and list(got.result.measures) == ["task", "length"] and not got.result.parts


def test_each_rounds_reward_model_starts_from_the_last(monkeypatch):
    """It is trained on the replayed pairs. The log has the number of new pairs and the accuracy after training."""
    calls = []

    def fit(agent, pairs, cfg, params, fit):
        calls.append((pairs, params))
        before = {"accuracy": 0.5} if params else None
        return RewardModel(None, [len(calls)], None), FitResult(None, None, [], before, {"accuracy": 0.9})

    monkeypatch.setattr("jmarl.runs.kinds.learned.fit_reward_model", fit)
    new_round = lambda step, _: None if step % 2 else Round([None] * 7, {"pairs": 7.0})  # noqa: E731
    rounds = SimpleNamespace(updates=2, env=None, new_round=new_round, replayed=lambda round_: f"those of round {round_}")
    cfg = CONFIG.replace(**ITER)
    learned = LearnedRounds(rounds, None, resolve(cfg), cfg, None)
    notes = {"pairs": 7.0, "reward_model/accuracy": 0.9}
    assert [learned.new_round(step, None) for step in range(4)] == [notes, {}, notes, {}]
    assert calls == [("those of round 0", None), ("those of round 1", [1])]


@pytest.mark.long
def test_every_round_trains_a_reward_model_and_resumed_rounds_are_bit_equal(agents, tmp_path):
    """Within a round (after 3 updates) its reward model is read back; between rounds (after 2) the next one starts from the
    last. A complete run reads no reward model."""

    def run(where, **more):
        return trained(agents, **ITER | dict(output_dir=str(tmp_path / where), save_every=1) | more)

    whole = run("whole")
    begun = [row["step"] for row in rows(tmp_path / "whole") if "pairs" in row]
    assert begun == [1, 3] and len(whole.rewards) == 4
    assert "of the run in the directory above, with" in (tmp_path / "whole/reward_model_1/config.yaml").read_text()
    assert (tmp_path / "whole/reward_model_1/metrics.jsonl").exists() and (tmp_path / "whole/pairs/round_0001.jsonl").exists()
    for stop in (2, 3):
        run(f"stop {stop}", num_updates=stop)
        jax.tree.map(np.testing.assert_array_equal, run(f"stop {stop}", resume=True).state, whole.state)
    shutil.rmtree(tmp_path / "stop 3" / "reward_model_1")
    jax.tree.map(np.testing.assert_array_equal, run("stop 3", resume=True).state, whole.state)


@pytest.mark.long
def test_a_resumed_run_of_one_round_is_bit_equal_and_a_new_run_uses_no_files_of_an_earlier_one(agents, tmp_path):
    """Its reward model is read back. For a new run files in the directory are moved aside, reward models too, even if the
    earlier run finished no step. Without its reward model a run cannot be resumed."""
    where = tmp_path / "parts"

    def run(where, **more):
        return trained(agents, **dict(num_updates=3, reward_updates=5, output_dir=str(where), save_every=1) | more)

    whole = run(tmp_path / "whole")
    run(where, num_updates=2)
    jax.tree.map(np.testing.assert_array_equal, run(where, resume=True).state, whole.state)
    for left in ("metrics.jsonl", "checkpoints"):  # as after a run that ended before its first step
        shutil.rmtree(where / left) if (where / left).is_dir() else (where / left).unlink()
    jax.tree.map(np.testing.assert_array_equal, run(where).state, whole.state)
    assert all((where / "earlier_1" / name).is_dir() for name in ("reward_model_0", "reward_model", "pairs"))
    assert len(rows(where / "reward_model_0")) == len(rows(tmp_path / "whole" / "reward_model_0")) > 0
    shutil.rmtree(where / "reward_model_0" / "checkpoints")
    with pytest.raises(ValueError, match="cannot resume: the reward model of round 0 is not in"):
        run(where, num_updates=4, resume=True)


def test_the_next_round_cannot_begin_without_the_reward_model_that_its_own_starts_from(agents):
    rounds = SimpleNamespace(updates=2, env=None, resume=lambda step: None, replayed=lambda round_: [])
    cfg = CONFIG.replace(**ITER)
    between = LearnedRounds(rounds, agents[0], resolve(cfg), cfg, fit)
    with pytest.raises(ValueError, match="cannot resume: the reward model of round 0 is not in"):
        between.new_round(2, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_generations=1, rl_algorithm="mareinforce"), "num_generations=1 is too small for algorithm='marlhf'"),
        (dict(rl_algorithm="madpo"), "rl_algorithm='madpo' does not learn from rollouts"),
        (dict(rl_algorithm="magrp"), "algorithm='magrp' is unknown; did you mean 'magrpo'"),
        (dict(comparator="initial"), "comparator='initial' has no effect for algorithm='marlhf'"),
        (dict(num_turns=2), "algorithm='marlhf' needs num_turns=1 .* got num_turns=2"),
        (dict(clip_eps_low=0.1), "clip_eps_low=0.1 has no effect for algorithm='magrpo'"),
        (dict(algorithm="magrpo"), "batch_size=16 has no effect for algorithm='magrpo'"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_settings(CONFIG.replace(**changes))


def test_the_policy_is_trained_by_rl_algorithm():
    cfg = policy_config(CONFIG.replace(rl_algorithm="grpo", clip_eps_low=0.1, kl_coef=0.05))
    assert (
        cfg.algorithm == "grpo"
        and cfg.loss.clip_eps_low == 0.1
        and cfg.loss.kl_coef == 0.05
        and cfg.preference.batch_size is None
    )
    check_settings(CONFIG.replace(rl_algorithm="grpo", clip_eps_low=0.1, kl_coef=0.05))


def test_label_smoothing_is_for_the_reward_model_only():
    cfg = CONFIG.replace(label_smoothing=0.1)
    assert reward_config(cfg, resolve(cfg), 0).preference.label_smoothing == 0.1
    assert policy_config(cfg).preference.label_smoothing is None


def test_a_reward_model_has_its_own_settings_and_inherits_others():
    """It has as many micro-batches as the run, but not more than pairs."""
    inherited = dict(
        compute_dtype="bfloat16", remat="full", lora_rank=2, lora_alpha=3.0, lora_dropout=0.1, lora_targets="q_proj"
    )
    cfg = CONFIG.replace(micro_batches=64, **inherited)
    settings = flat(reward_config(cfg, resolve(cfg), 0))
    own = dict(num_updates=60, learning_rate=3e-3, batch_size=16, micro_batches=16, per_agent="vmap", progress=False)
    assert {name: settings[name] for name in own | inherited} == own | inherited


def test_every_rounds_reward_model_has_its_own_seed():
    """It follows from (seed, round) alone, so that a resumed run has the same."""

    def seeds():
        cfgs = [CONFIG.replace(seed=seed) for seed in (0, 1)]
        return [reward_config(cfg, resolve(cfg), k).run.seed for cfg in cfgs for k in range(3)]

    assert len({0, 1, *seeds()}) == 8 and seeds() == seeds()


@pytest.mark.long
def test_rounds_with_adapters_in_team_and_reward_model(agents):
    """Each round continues with the adapters and the value head of the reward model before."""
    team, params = make_team([agents[0]] * 2, lora=True)
    cfg = CONFIG.replace(**ITER, **LORA, reward_learning_rate=3e-2)
    result = train(team, make_reward(both, num_agents=2), ITEMS, cfg, params=params)
    assert len(result.rewards) == 4 and np.isfinite(result.rewards).all()


@pytest.mark.long
def test_continued_training_of_a_reward_model_keeps_its_head(model, pairs, agents):
    """Without an update a second training leaves the scores as they are. Given other pairs to be judged by, it has learned from
    all; a new head, whose scores are equal, divides them by no 0."""
    fitted, cfg = model[0], reward_settings(reward_updates=1, reward_learning_rate=1e-12)
    start = jax.tree.map(lambda x: x.copy(), fitted.params)
    again, _ = fit_reward_model(agents[0], pairs, cfg, start, eval_pairs=pairs[:3], fit=fit)
    scores = of_pairs(again, joint := [joint_pair(pair) for pair in pairs])
    np.testing.assert_allclose(scores, of_pairs(fitted, joint), atol=1e-4)
    np.testing.assert_allclose([again.mean, again.std], [scores.mean(), scores.std()], rtol=1e-5)
    assert fit_reward_model(agents[0], pairs, cfg, fit=fit)[0].std == 1e-6
