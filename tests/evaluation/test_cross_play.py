"""Cross-play: pairings of agents of several runs get the rewards of these agents as a team, from completions sampled once."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from experiments.cross_play import main as command
from jmarl.config import TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.evaluation import cross_play as crossplay
from jmarl.evaluation.cross_play import MAX_PAIRINGS, check_runs, cross_play, load_runs
from jmarl.evaluation.evaluate import evaluate, play_held_out
from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.evaluation.zero_shot import CrossPlay
from jmarl.models.hub.tokenize import stop_ids
from jmarl.sampling.generate import sample_team
from jmarl.team import agents_of, make_team, save_team

NEW, GROUP, SEED = 6, 3, 12
CONFIG = TrainConfig.of(
    max_new_tokens=NEW,
    min_new_tokens=NEW,  # so that no two agents write the same
    eval_generations=GROUP,
    num_generations=GROUP,
    seed=SEED,
)
ITEMS = [{"prompt": "The answer"}, {"prompt": "seven apples and three pears"}, {"prompt": "of fruit"}]
FORMATTERS = [lambda item: item["prompt"], lambda item: f"{item['prompt']} or", lambda item: f"What is {item['prompt']}"]


def texts_reward(*completions):
    """Return rewards that show which texts form a joint action."""
    weights = 31.0 ** np.arange(len(completions))
    values = [[sum(map(ord, text)) % 29 for text in texts] for texts in completions]
    return list(weights @ np.array(values))


def env_of(n, reward=texts_reward):
    return RewardEnvironment(reward, FORMATTERS[:n])


def crossed(teams, reward=texts_reward, joint_mode="aligned", **options):
    return cross_play(teams, ITEMS, env_of(len(teams[0]), reward), CONFIG.replace(joint_mode=joint_mode), **options)


def alone(agents, joint_mode="aligned", **options):
    """Return the rollout of a team of these agents, played as `evaluate` plays it."""
    team, params = make_team(agents, **options)
    cfg = CONFIG.replace(joint_mode=joint_mode)
    return play_held_out(partial(sample_team, team, params), team, ITEMS, env_of(len(agents)), cfg)


@pytest.fixture(scope="module")
def runs(tiny_config, tiny_tokenizer, random_agent):
    """Three runs of two agents, all of one architecture."""
    cfg = tiny_config(tie_embeddings=False)
    return [[random_agent(cfg, tiny_tokenizer, 2 * run + i) for i in range(2)] for run in range(3)]


@pytest.fixture(scope="module")
def played(runs):
    return crossed(runs)


@pytest.fixture(scope="module")
def other(tiny_config, make_tokenizer, random_agent):
    """Agents of another architecture and tokenizer, by seed."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    return lambda seed: random_agent(tiny_config("qwen2", vocab_size=321), tokenizer, seed)


# --- what is sampled -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", ["aligned", "cross"])
def test_a_pairing_has_the_rewards_of_a_team_of_its_agents(runs, mode):
    """All rewards of every pairing are those of playing agent 0 of one run and agent 1 of the other as a team. On the diagonal
    are the texts of each run's own team, with the keys of `evaluate`, and its means and intervals."""
    got = crossed(runs, joint_mode=mode)
    assert got.rewards.shape == (3, 3, 3, GROUP if mode == "aligned" else GROUP**2, 2)
    for i, first in enumerate(runs):
        for j, second in enumerate(runs):
            turn = alone([first[0], second[1]], mode).turns[0]
            np.testing.assert_array_equal(got.rewards[i, j], turn.rewards)
            assert i != j or got.texts[i] == turn.texts
    assert len(set(got.mean.ravel())) == 9
    assert len({t for run in got.texts for agent in run for item in agent for t in item}) == 3 * 2 * 3 * GROUP, "all differ"
    results = [evaluate(*make_team(agents), ITEMS, env_of(2), CONFIG.replace(joint_mode=mode)) for agents in runs]
    assert np.diag(got.mean).tolist() == [r.mean for r in results]
    assert np.diag(got.interval).tolist() == [r.interval for r in results]


class Echo(TextEnvironment):
    """Both agents read the prompt; the reward is that of `texts_reward`."""

    roles = ("a", "b")

    def reset(self, task, rng):
        return None, [task["prompt"]] * 2

    def step(self, state, messages, rng):
        return Step(state, [None] * 2, texts_reward(*([text] for text in messages))[0], done=True)


@pytest.mark.long
def test_evaluate_and_cross_play_take_what_train_takes(runs):
    """A function, the result of make_reward, and environments of one episode or of many."""
    (team, params), first = make_team(runs[0]), FORMATTERS[:1] * 2
    forms = [
        texts_reward,
        make_reward(texts_reward, num_agents=2),
        Echo(),
        LockStep(Echo()),
        RewardEnvironment(texts_reward, first),
    ]
    results = [evaluate(team, params, ITEMS, form, CONFIG) for form in forms]
    assert len({result.mean for result in results}) == 1 and results[0].episodes == 3 * GROUP
    assert len({cross_play(runs[:2], ITEMS, form, CONFIG).mean.tobytes() for form in forms}) == 1
    with pytest.raises(TypeError, match=r"Echo is a class: give an environment, Echo\(...\)"):
        evaluate(team, params, ITEMS, Echo, CONFIG)
    with pytest.raises(TypeError, match="reward is a int without reset, step, observe"):
        evaluate(team, params, ITEMS, 3, CONFIG)


def test_every_agent_is_sampled_once_in_one_program(runs, monkeypatch):
    """k N P G rows in one call of the program, where sampling the pairings would take k^N N P G; and one of the environment."""
    shapes, calls, sample = [], [], crossplay.sample_stack

    def counted(*args, **options):
        done = sample(*args, **options)
        shapes.append(done.tokens.shape)
        return done

    def reward(a, b):
        calls.append(len(a))
        return [0.0] * len(a)

    monkeypatch.setattr(crossplay, "sample_stack", counted)
    crossed(runs, reward=reward)
    assert shapes == [(3 * 2, len(ITEMS), GROUP, NEW)]
    assert calls == [3**2 * len(ITEMS) * GROUP]


def test_permuting_the_runs_permutes_the_matrix(runs, played):
    order = [2, 0, 1]
    got = crossed([runs[i] for i in order])
    np.testing.assert_array_equal(got.rewards, played.rewards[np.ix_(order, order)])
    assert got.zero_shot.mean == pytest.approx(played.zero_shot.mean, rel=1e-12)


@pytest.mark.long
def test_several_architectures(runs, other):
    """One stack for each, over all runs.

    If a run has its models in the other order, the same agent is in another stack of its own team, which its keys follow.
    """
    teams = [[runs[0][0], other(8)], [other(9), runs[1][1]], [runs[2][0], runs[2][1]]]
    got = crossed(teams)
    for run, agents in enumerate(teams):
        result = alone(agents)
        assert got.texts[run] == result.turns[0].texts
        np.testing.assert_array_equal(got.rewards[run, run], result.turns[0].rewards)
    np.testing.assert_array_equal(got.rewards[0, 2], alone([teams[0][0], teams[2][1]]).turns[0].rewards)


@pytest.mark.long
def test_agents_of_one_architecture_with_other_tokenizers(runs, make_tokenizer):
    """A chat template is applied to its own agent only, and an end of sequence ends only completions of its own agent."""
    cfg = CONFIG.replace(min_new_tokens=0, chat=True)

    def own(agents):
        team, params = make_team(agents)
        return play_held_out(partial(sample_team, team, params), team, ITEMS, env_of(2), cfg).turns[0]

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    second = [agent._replace(tokenizer=tokenizer) for agent in runs[1]]
    longer = own(second)
    wrote = int(longer.completions[0].tokens[0, 0, 0, 2])
    assert wrote not in stop_ids(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(wrote)
    got = cross_play([runs[0], second], ITEMS, env_of(2), cfg)
    assert got.texts == (own(runs[0]).texts, own(second).texts)
    assert len(got.texts[1][0][0][0]) < len(longer.texts[0][0][0])


@pytest.mark.long
def test_shared_weights_are_agents_with_the_same_parameters(runs):
    """`agents_of` splits a run with shared weights into agents that write the same."""
    team, params = make_team([runs[0][0]] * 2, shared_weights=True)
    got = crossed([agents_of(team, params), runs[1]])
    assert got.texts[0] == alone([runs[0][0]] * 2, shared_weights=True).turns[0].texts


# --- what is made of the rewards -----------------------------------------------------------------------------------------


def test_scores_by_hand_for_two_agents(runs, played):
    """The reward knows who wrote: 1 for partners of one run, else a fifth of agent 0's run plus a tenth of agent 1's."""
    who = [{t: run for run in range(3) for item in played.texts[run][a] for t in item} for a in range(2)]

    def reward(a, b):
        pairs = [(who[0][x], who[1][y]) for x, y in zip(a, b, strict=True)]
        return [1.0 if i == j else 0.2 * i + 0.1 * j for i, j in pairs]

    got = crossed(runs, reward=reward, names=["a", "b|c", "d"])
    expected = [[1, 0.1, 0.2], [0.2, 1, 0.4], [0.4, 0.5, 1]]
    np.testing.assert_allclose(got.mean, expected, rtol=1e-12)
    np.testing.assert_allclose(got.interval, 0, atol=1e-12)
    assert got.self_play.mean == 1 and got.zero_shot.mean == pytest.approx(1.8 / 6)
    assert got.gap.mean == pytest.approx(0.7) and got.ratio == pytest.approx(0.3)
    lines = got.table().splitlines()
    assert lines[0] == "| agent 0 of \\ agent 1 of | a | b\\|c | d |"
    assert lines[2] == "| a | 1.000 ± 0.000 | 0.100 ± 0.000 | 0.200 ± 0.000 |"
    assert lines[-1] == "self-play 1.000 ± 0.000, zero-shot 0.300 ± 0.000, gap 0.700 ± 0.000, ratio 0.300"


def test_scores_by_hand_for_three_agents(runs, played, random_agent, tiny_config, tiny_tokenizer):
    """Two runs of three: the reward is (4 i + 2 j + k)^2 for runs i, j, k; self-play has 0 and 49."""
    teams = [[*runs[r], random_agent(tiny_config(tie_embeddings=False), tiny_tokenizer, 20 + r)] for r in range(2)]
    texts = crossed(teams).texts
    who = [{t: run for run in range(2) for item in texts[run][a] for t in item} for a in range(3)]

    def reward(a, b, c):
        return [(4 * who[0][x] + 2 * who[1][y] + who[2][z]) ** 2 for x, y, z in zip(a, b, c, strict=True)]

    got = crossed(teams, reward=reward)
    assert got.mean.tolist() == [[[0, 1], [4, 9]], [[16, 25], [36, 49]]]
    assert got.self_play.mean == 24.5 and got.zero_shot.mean == pytest.approx(91 / 6)
    assert "| run 1 | run 0 | run 1 | 25.000 ± 0.000 |" in got.table().splitlines()
    assert len(got.table().splitlines()) == 2 + 8 + 2


def scores_of(means) -> CrossPlay:
    """Return the record of rewards [k, k, P], with one joint action per item."""
    rewards = np.repeat(np.array(means, float)[..., None, None], 2, -1)
    return CrossPlay(tuple("abc"[: len(means)]), rewards, ())


def test_intervals_are_over_items_and_the_gap_is_paired():
    """With items of very different difficulty and an equal gap, both scores have wide intervals and the gap has none."""
    got = scores_of([[[1, 5, 9], [0, 4, 8]], [[0, 4, 8], [1, 5, 9]]])
    wide = 4.302653 * np.std([1, 5, 9], ddof=1) / np.sqrt(3)
    assert got.self_play == pytest.approx((5, wide)) and got.zero_shot == pytest.approx((4, wide))
    assert got.gap == pytest.approx((1, 0)) and got.interval == pytest.approx(np.full((2, 2), wide))


def test_invalid_rewards_count_nowhere_and_are_reported():
    """One item of a pairing, and all of another pairing. JSON has None for NaN."""
    nan = float("nan")
    got = scores_of([[[1, 1], [nan, 3]], [[nan, nan], [1, 1]]])
    assert got.mean[0, 1] == 3 and np.isnan(got.mean[1, 0]) and got.invalid == 3
    assert got.zero_shot.mean == 3 and got.self_play.mean == 1
    table = got._replace(fault="no number").table()
    assert "nan ± nan (0 of 2)" in table and "3.000 ± nan (1 of 2)" in table and "1.000 ± 0.000 |" in table
    assert table.endswith("3 of 8 joint actions have no valid reward; no number")
    summary = json.loads(json.dumps(got.summary(), allow_nan=False))
    assert (
        summary["counted"] == [[2, 1], [0, 2]]
        and summary["mean"] == [[1, 3], [None, 1]]
        and summary["zero_shot"] == {"mean": 3, "interval": None}
    )
    assert scores_of([[[0, 0], [1, 1]], [[1, 1], [0, 0]]]).summary()["ratio"] is None


def test_means_and_intervals_leave_nan_out():
    x = np.array([[1.0, np.nan, 4.0, 7.0], [np.nan] * 4, [2.0, *[np.nan] * 3]])
    assert valid_mean(x).tolist()[::2] == [4, 2] and np.isnan(valid_mean(x)[1])
    mean, interval = mean_and_interval(x)
    assert interval[0] == pytest.approx(4.302653 * np.std([1, 4, 7], ddof=1) / np.sqrt(3)) and mean[2] == 2
    assert np.isnan(interval[1:]).all()


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, sizes, message",
    [
        ([], [], "different runs, got 0"),
        (["a"], [2], r"got 1 \(a: 2\): give at least 2"),
        (["a", "b"], [2, 3], r"different numbers of agents \(a: 2, b: 3\)"),
        (["a", "b"], [1, 1], "teams of 1 agent have no partners"),
        (["a", "a"], [2, 2], "2 runs need as many different names"),
        (["a"], [2, 2], "2 runs need as many different names"),
        ([*"abcde"], [5] * 5, r"5\^5 = 3125 pairings, more than max_pairings=1024: give fewer runs"),
    ],
)
def test_runs_without_pairings_or_with_too_many_are_refused(names, sizes, message):
    with pytest.raises(ValueError, match=message):
        check_runs(names, sizes)
    check_runs([*"ab"], [10, 10])
    assert MAX_PAIRINGS == 2**10


def test_settings_that_do_not_fit_are_refused(runs, make_tokenizer, monkeypatch):
    """Before anything is sampled."""
    monkeypatch.setattr(crossplay, "sample_stack", None)
    with pytest.raises(ValueError, match="num_turns=2 is not allowed.*later prompts depend on the partners"):
        cross_play(runs, ITEMS, env_of(2), CONFIG.replace(num_turns=2))
    with pytest.raises(ValueError, match="items=0 is not allowed"):
        cross_play(runs, [], env_of(2), CONFIG)
    with pytest.raises(ValueError, match="prompts for 3 agents and the teams have 2"):
        cross_play(runs, ITEMS, env_of(3), CONFIG)
    with pytest.raises(ValueError, match="9 pairings, more than max_pairings=8"):
        cross_play(runs, ITEMS, env_of(2), CONFIG, max_pairings=8)
    base = make_tokenizer()
    base.chat_template = None
    teams = [runs[0], [agent._replace(tokenizer=base) for agent in runs[1]]]
    with pytest.raises(ValueError, match="agent 0 of run 1 has no chat template: use chat=False"):
        cross_play(teams, ITEMS, env_of(2), CONFIG.replace(chat=True))


# --- from run directories ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(runs, tmp_path_factory):
    """Two run directories, one as a run writes it and one as save_team does."""
    where = tmp_path_factory.mktemp("saved")
    for path, agents in ((where / "x" / "models", runs[0]), (where / "y", runs[1])):
        save_team(path, *make_team(agents))
    return [where / "x", where / "y"]


def test_runs_from_disk_are_played_as_in_memory(saved, runs):
    names, teams = load_runs(saved, chat=True, num_agents=2)
    assert names == ["x", "y"]
    np.testing.assert_array_equal(crossed(teams).rewards, crossed(runs[:2]).rewards)


def test_directories_are_checked_before_models_are_read(saved, runs, monkeypatch, tmp_path):
    saved = [Path(shutil.copytree(path, tmp_path / path.name)) for path in saved]
    monkeypatch.setattr(crossplay, "open_agent", None)
    with pytest.raises(ValueError, match=r"/x is given more than once"):
        load_runs([*saved, saved[0] / "models" / ".."], chat=False)
    with pytest.raises(FileNotFoundError, match="nothing has no whole team.*it has none"):
        load_runs([*saved, tmp_path / "nothing"], chat=False)
    with pytest.raises(ValueError, match="the runs have 2 agents, the task has 3"):
        load_runs(saved, chat=False, num_agents=3)
    save_team(tmp_path / "three", *make_team([*runs[0], runs[1][0]]))
    with pytest.raises(ValueError, match=r"different numbers of agents \(x: 2, three: 3\)"):
        load_runs([saved[0], tmp_path / "three"], chat=False)
    (tmp_path / "y" / "chat_template.jinja").unlink(missing_ok=True)
    for file in (tmp_path / "y" / "agent_1").glob("chat_template*"):
        file.unlink()
    with pytest.raises(ValueError, match="agent 1 of y has no chat template"):
        load_runs(saved, chat=True)
    (tmp_path / "y" / "agent_0").rename(tmp_path / "y" / "agent_2")
    with pytest.raises(FileNotFoundError, match="y has no whole team.*it has agent_1, agent_2"):
        load_runs(saved, chat=False)


def test_runs_of_equal_names_are_named_by_their_paths(saved, runs, tmp_path):
    save_team(tmp_path / "z" / "x", *make_team(runs[2]))
    paths = [saved[0], tmp_path / "z" / "x"]
    assert load_runs(paths, chat=False)[0] == [str(path) for path in paths]


@pytest.mark.long
def test_the_experiment_prints_the_matrix(saved, tmp_path, monkeypatch, capsys):
    """On two tiny runs: a table, one line of JSON, the same in a file, and a picture."""
    files = ("--out", str(tmp_path / "out.json"), "--picture", str(tmp_path / "matrix.png"))
    size = ("--held-out", "2", "--generations", "2", "--max-new-tokens", "4")
    monkeypatch.setattr("sys.argv", ["cross_play", "--runs", *map(str, saved), *size, *files])
    command()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| agent 0 of \\ agent 1 of | x | y |" and lines[3].startswith("| y | ")
    summary = json.loads(lines[-1])
    assert summary == json.loads((tmp_path / "out.json").read_text()) and summary["items"] == 2
    assert np.array(summary["mean"]).shape == (2, 2)
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
