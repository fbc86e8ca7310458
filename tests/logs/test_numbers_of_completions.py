"""Returns, advantages, lengths and marks of completions in completions.jsonl.gz agree with rewards and with metrics.jsonl."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.logs.completions_file import EVAL, TRAIN, read_completions
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.house import HOUSE
from tests.league.test_league import LEAGUE, Duel
from tests.runs.training_process import ITEMS, tiny_agents, transition

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.* no valid reward")]
GAMMA = 0.5
TURNS = dict(num_turns=2, history="append", gamma=GAMMA, num_generations=2)
CHAIN = TURNS | dict(branching="chain", history="none", num_generations=3)
CASES = {  # settings, and the architecture of the second agent
    "a tree, one agent at a time": TURNS | dict(algorithm="magrpo", update_order="alternating", kl_coef=0.1),
    "a chain, a frozen agent": CHAIN | dict(algorithm="magrpo", frozen_agents=(1,), joint_mode="aligned", num_updates=1),
    "cross, several passes": dict(algorithm="magrpo", joint_mode="cross", num_epochs=2, num_minibatches=2, per_agent="map"),
    "counterfactual": dict(algorithm="c3", history="append", num_turns=2, num_updates=1, gamma=GAMMA),
    "early rows": dict(algorithm="magrpo", async_steps=1, max_new_tokens=16, num_updates=3),
    "other tasks": dict(algorithm="magrpo", dynamic_sampling=1, num_updates=1),
    "a critic of values": dict(algorithm="maac"),
    "a critic of tokens": CHAIN | dict(algorithm="ippo", num_epochs=2),
    "values of the same pass": dict(algorithm="ippo", separate_critic=False, num_updates=1),
    "two stacks": dict(algorithm="grpo", mask_overlong=True, num_updates=1, temperature=2.0),
    "shared weights": CHAIN | dict(algorithm="magrpo", num_updates=1, log_tokens=4),
}  # fmt: skip


def noisy(a, b, batch_items, rng):
    """A reward that no two joint actions share; one joint action in eight has none."""
    values = [len(set(x.split()) & set(y.split())) + rng.random() for x, y in zip(a, b, strict=True)]
    return [float("nan") if rng.random() < 1 / 8 else x for x in values]


def run(directory, cfg, name=""):
    following = transition if cfg.episodes.num_turns > 1 else None
    env = RewardEnvironment(make_reward(noisy, num_agents=2), [default_formatter] * 2, following)
    other = tiny_agents(1, seed=1, width=64) if name == "two stacks" else tiny_agents(2)[1:]
    agents = tiny_agents(1) * 2 if name == "shared weights" else [*tiny_agents(1), *other]
    team, params = make_team(agents, shared_weights=name == "shared weights")
    return train(team, env, ITEMS, cfg.replace(output_dir=str(directory)), params=params, eval_items=ITEMS[:1])


def rows_of(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row for row in rows if "reward/mean" in row}


def array(numbers):
    return np.array(numbers, float)


def returns_of(turns, gamma):
    """Return the return [N, P, G] of each completion of each turn from rewards: those to come, discounted; the mean over the
    joint actions of a completion. NaN where one is not finite, or the agent does not act."""
    joint_returns, after = [], None
    for turn in reversed(turns):
        total = array(turn["rewards"])
        if after is not None:
            later, parents = after
            total = total.copy()
            flat = total.reshape(-1, total.shape[-1])
            for node, parent in enumerate(parents):
                valid = np.isfinite(later[node, :, 0])
                flat[parent] += gamma * later[node][valid].mean(0) if valid.any() else np.nan
        joint_returns.insert(0, total)
        after = total, turn["parents"]
    result = []
    for turn, total in zip(turns, joint_returns, strict=True):
        joint = np.array(turn["joint"])
        own = np.full(array(turn["lengths"]).shape, np.nan)
        for agent, p, g in np.ndindex(own.shape):
            mine = total[p, joint[:, agent] == g, agent]
            if turn["acts"][agent][p] and np.isfinite(mine).any():
                own[agent, p, g] = mine[np.isfinite(mine)].mean()
        result.append(own)
    return result


def check_tokens(turn, most):
    """Check that the first completions of each agent have their tokens, and no other."""
    for acts, tokens, texts, lengths in zip(
        *(turn[name] for name in ("acts", "tokens", "completions", "lengths")), strict=True
    ):
        own = [
            (kept, text, length)
            for p, act in enumerate(acts)
            if act
            for kept, text, length in zip(tokens[p], texts[p], lengths[p], strict=True)
        ]
        assert [kept is not None for kept, _, _ in own] == [i < most for i in range(len(own))]
        assert not any(kept for p, act in enumerate(acts) if not act for kept in tokens[p])
        for kept, text, length in own[:most]:
            assert len(kept["ids"]) == len(kept["texts"]) == len(kept["logprobs"]) == length and max(kept["logprobs"]) < 0
            assert "".join(kept["texts"]).replace(" ", "").startswith(text.replace(" ", ""))


def check(directory, cfg):
    """Check the records of a run, and return them."""
    records, rows = [*read_completions(directory / "completions.jsonl.gz")], rows_of(directory)
    for record in records:
        turns = record["turns"]
        for t, (turn, expected) in enumerate(zip(turns, returns_of(turns, cfg.episodes.gamma), strict=True)):
            lengths, cut = array(turn["lengths"]), array(turn.get("cut", np.zeros_like(turn["lengths"]))) == 1
            acts = np.array(turn["acts"])[..., None] & np.ones(lengths.shape, bool)
            assert (
                (lengths[acts] > 0).all() and not lengths[~acts].any() and (lengths[cut] == cfg.sampling.max_new_tokens).all()
            )
            if cfg.algorithm != "c3":  # whose changed completions are played to the end without nodes of their own
                np.testing.assert_allclose(array(turn["returns"]), expected, atol=2e-6)
            assert ("fault" in turn) == (None in np.ravel(turn["rewards"]))
            if record["kind"] == EVAL:
                assert not {"advantages", "masked"} & turn.keys()
                continue
            if cfg.run.log_tokens:
                check_tokens(turn, cfg.run.log_tokens)
            advantages = array(turn.get("advantages", np.full(lengths.shape, np.nan)))
            masked = np.array(turn["masked"]) if "masked" in turn else ~acts
            assert (
                (masked == np.isnan(advantages)).all()
                and masked[~acts].all()
                and masked[np.isnan(array(turn["returns"]))].all()
            )
            row, name = rows[record["step"]], f"turn_{t}/" if cfg.episodes.num_turns > 1 else ""
            for agent in np.flatnonzero(acts.any((1, 2))):
                own = acts[agent]
                assert row[f"{name}agent_{agent}/length"] == pytest.approx(lengths[agent][own].mean())
                assert row[f"{name}agent_{agent}/ended"] == pytest.approx(1 - cut[agent][own].mean())
        if record["kind"] == TRAIN and cfg.algorithm != "ippo":  # whose column is of tokens
            check_spread(record, rows[record["step"]])
    return [record for record in records if record["kind"] == TRAIN]


def check_spread(record, row):
    """Check that the advantages of each agent have the spread that the update has logged."""
    for agent in (0, 1):
        if row.get(f"agent_{agent}/frozen"):
            continue
        parts = [array(turn["advantages"][agent]).ravel() for turn in record["turns"] if "advantages" in turn]
        own = np.concatenate(parts)
        assert row[f"agent_{agent}/advantage_std"] == pytest.approx(np.nanstd(own), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_completions_are_those_of_rewards_and_of_the_log(name, tmp_path):
    cfg = TrainConfig.of(**HOUSE | dict(adam_eps=1e-4, eval_generations=2) | CASES[name])
    run(tmp_path, cfg, name)
    records = check(tmp_path, cfg)
    assert len(records) == cfg.run.num_updates
    for record in records:
        for turn in record["turns"]:
            advantages, returns = array(turn.get("advantages", [])), array(turn["returns"])
            if cfg.algorithm == "magrpo" and cfg.episodes.branching == "tree" and advantages.size:
                sums = np.nansum(advantages, -1)
                np.testing.assert_allclose(sums, 0, atol=1e-5, err_msg="the mean of a group is 0")
                learns = ~np.isnan(advantages).all((1, 2))
                means = np.nansum(returns, -1, keepdims=True) / np.maximum(np.isfinite(returns).sum(-1, keepdims=True), 1)
                np.testing.assert_allclose(advantages[learns], (returns - means)[learns], atol=1e-5)
            if name == "a critic of values":  # of a prompt: equal for its completions
                np.testing.assert_allclose(np.nanstd(returns - advantages, -1), 0, atol=1e-5)
    if name in ("a tree, one agent at a time", "a chain, a frozen agent"):
        learns = [~np.isnan(array(record["turns"][0]["advantages"])).all((1, 2)) for record in records]
        assert [x.tolist() for x in learns] == [[True, False], [False, True]][: len(records)]
    if name == "two stacks":
        cut = np.array([record["turns"][0]["cut"] for record in records])
        assert cut.any() and np.array([record["turns"][0]["masked"] for record in records])[cut].all()


def test_numbers_of_completions_of_several_seeds(tmp_path):
    """Episodes of the runs end at different times, so that their batches are padded."""
    cfg = TrainConfig.of(**HOUSE | CHAIN | dict(algorithm="magrpo", early_termination_threshold=1.5, output_dir=str(tmp_path)))
    env = RewardEnvironment(make_reward(noisy, num_agents=2), [default_formatter] * 2, transition)
    team, params = make_team(tiny_agents(2))
    train_seeds(team, env, ITEMS, cfg, params=params, seeds=(0, 1))
    counts = [len(record["turns"][1]["items"]) for n in (0, 1) for record in check(tmp_path / f"seed_{n}", cfg)]
    assert len(counts) == 4 and len({*counts}) > 1


def test_opponents_of_a_league_have_no_advantages(tmp_path):
    cfg = TrainConfig.of(**HOUSE | dict(num_prompts=4, num_turns=2, branching="chain", output_dir=str(tmp_path)), league=LEAGUE)
    env, (team, params) = Duel(in_turns=True), make_team(tiny_agents(2))
    train(team, env, env.tasks(count=8), cfg, params=params)
    records = check(tmp_path, cfg)
    assert any("league" in task for record in records for task in record["tasks"])
    for record in records:
        for turn in record["turns"]:
            texts = np.array(turn["completions"])
            others = ~np.array(turn["acts"]) & (texts != "").any(-1)
            assert not np.isfinite(array(turn["advantages"])[others]).any() and "masked" not in turn


def test_a_run_without_a_directory_copies_no_advantages(monkeypatch, tmp_path):
    from jmarl.logs import rollout_log

    copies, copy = [], rollout_log.trained_advantages
    monkeypatch.setattr(rollout_log, "trained_advantages", lambda *given: copies.append(given) or copy(*given))
    env = RewardEnvironment(make_reward(noisy, num_agents=2), [default_formatter] * 2, None)
    team, params = make_team(tiny_agents(2))
    cfg = TrainConfig.of(**HOUSE, algorithm="magrpo")
    train(team, env, ITEMS, cfg, params=params)
    assert not copies
    train(team, env, ITEMS, cfg.replace(output_dir=str(tmp_path / "run")), params=make_team(tiny_agents(2))[1])
    assert len(copies) == cfg.run.num_updates
