"""Populations: who copies whom, what is copied, and runs that equal several seeds until then and resume."""

from __future__ import annotations

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import ExperimentConfig, Population, TrainConfig
from jmarl.envs.rewards import make_reward
from jmarl.evaluation.evaluate import Evaluation
from jmarl.files.checkpoint import Checkpointer
from jmarl.league.population import Exploit, _copy, best_of, copied, truncation
from jmarl.logs.completions_file import read_completions
from jmarl.rollout.turns import Rollout
from jmarl.runs.checks import check_seeds
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.types import Running, Shared, StackState, TeamState
from tests.house import HOUSE
from tests.runs.training_process import ITEMS, first_words, tiny_team

SEEDS = (4, 7)
POPULATION = dict(size=2, every=2, perturb=dict(learning_rate=[0.5, 2.0]))
BASE = HOUSE | dict(num_updates=5, eval_every=2, eval_generations=3, save_every=1, save_total_limit=10)


# --- who copies whom


@pytest.mark.parametrize(("count", "number"), [(2, 1), (3, 1), (7, 1), (8, 2), (10, 2), (20, 4)])
def test_the_worst_copy_as_many_best(count, number):
    scores = np.random.default_rng(0).permutation(count).astype(float)
    parents = set()
    for step in range(60):
        exploit = truncation(Population(members=count), scores, np.random.default_rng(step))
        assert sorted(scores[exploit.children]) == [*range(number)]
        assert min(scores[exploit.parents]) >= count - number and not {*exploit.children} & {*exploit.parents}
        parents |= {*exploit.parents}
    assert len(parents) == number  # each of the best is drawn at some time


def test_a_score_that_is_no_number_is_the_lowest():
    for worst in (np.nan, -np.inf):
        assert truncation(Population(members=3), [-9.0, worst, 3.0], np.random.default_rng(0))[:2] == ([1], [2])
    results = [Evaluation(mean, 0.0, Rollout(0, (), (), ())) for mean in (np.nan, 0.5, 2.0, 2.0)]
    assert best_of(results) == 2


def state_of(agents: int, seed: int) -> TeamState:
    """A state of stacks of one and of two agents per member, with a base that members share."""

    def stack(agents: int) -> StackState:
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.normal(size=(agents, 3, 2)), jnp.float32)
        row = jnp.asarray(rng.random(agents), jnp.float32)
        running = Running(row[:, None], row + 1, row + 2, row + 3, row + 4)
        scales = {"learning_rate": row + 5, "kl_coef": row + 6}
        return StackState({"w": x}, {"m": x + 1}, None, jnp.arange(agents), running, None, {"w": Shared(x[0])}, scales)

    return TeamState(jnp.int32(4), (stack(agents), stack(2 * agents)), (stack(agents),))


def test_an_exploit_copies_all_that_members_have_and_changes_only_settings():
    exploit = Exploit(np.array([2]), np.array([0]), {"learning_rate": np.array([0.5]), "kl_coef": np.array([3.0])})
    before, after = state_of(3, 0), copied(state_of(3, 0), exploit, 3, None)
    assert int(after.step) == 4
    for old, new in zip((*before.stacks, *before.critics), (*after.stacks, *after.critics), strict=True):
        n = len(old.skipped) // 3
        rows = np.concatenate([np.arange(2 * n), np.arange(n)])
        expected = jax.tree.map(lambda x, rows=rows: np.array(x[rows]), old._replace(base=None))
        for name, x in (("learning_rate", 0.5), ("kl_coef", 3.0)):
            expected.scales[name][2 * n :] *= x
        expected.running.kl_coef[2 * n :] *= 3
        jax.tree.map(np.testing.assert_array_equal, new._replace(base=None), expected)
        np.testing.assert_array_equal(new.base["w"].value, old.base["w"].value)


def test_an_exploit_that_is_repeated_changes_nothing_more():
    """So a checkpoint of after it continues as one of before it."""
    exploit = Exploit(np.array([2]), np.array([1]), {"learning_rate": np.array([0.5]), "kl_coef": np.array([2.0])})
    once = copied(state_of(3, 1), exploit, 3, None)
    expected = jax.tree.map(np.asarray, jax.device_get(once))
    jax.tree.map(np.testing.assert_array_equal, copied(once, exploit, 3, None), expected)


def test_whoever_is_drawn_one_program_copies():
    factors = {"learning_rate": np.array([0.5]), "kl_coef": np.array([1.0])}
    copied(state_of(3, 0), Exploit(np.array([0]), np.array([1]), factors), 3, None)
    count = _copy._cache_size()
    copied(state_of(3, 1), Exploit(np.array([1]), np.array([2]), {name: 2 * x for name, x in factors.items()}), 3, None)
    assert _copy._cache_size() == count


# --- runs


def run(directory, reward=first_words, resume=False, population=POPULATION, **fields):
    settings = {**BASE, "output_dir": str(directory), "resume": resume, **fields}
    cfg = TrainConfig.of(**settings, **({"population": population} if population else {}))
    team, params = tiny_team()
    return train_seeds(team, make_reward(reward, num_agents=2), ITEMS, cfg, params=params, seeds=SEEDS, eval_items=ITEMS[:2])


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def updates(directory, name):
    """The values of a column in the rows of updates, by their number."""
    return {row["step"]: row[name] for row in rows(directory) if name in row and "eval/updates" not in row}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A population of two members, with exploits after two and four of five updates, and its directory."""
    directory = tmp_path_factory.mktemp("population")
    return run(directory), directory


@pytest.mark.long
def test_until_the_first_exploit_members_are_several_seeds(whole, tmp_path):
    run(tmp_path, population=None, num_updates=2)
    for seed in SEEDS:
        one, other = whole[1] / f"seed_{seed}", tmp_path / f"seed_{seed}"
        texts = [[r for r in read_completions(x / "completions.jsonl.gz") if r["step"] <= 2] for x in (one, other)]
        assert len(texts[0]) == 4 and texts[0] == texts[1]  # of two updates and two evaluations
        for name in ("reward/mean", "agent_0/return"):
            assert [updates(one, name)[n] for n in (1, 2)] == [updates(other, name)[n] for n in (1, 2)]
        states = [Checkpointer(x / "checkpoints", read_only=True).read_arrays(2)[0] for x in (one, other)]
        assert {*states[0]} - {*states[1]} == {"stacks/0/scales/learning_rate"}
        for name, x in states[1].items():
            np.testing.assert_allclose(states[0][name], x, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.long
def test_a_member_learns_with_the_settings_that_it_took(whole):
    """The worse member continues from the weights of the better one, with its learning rate times a factor."""
    _, directory = whole
    factors = dict.fromkeys(range(2), 1.0)
    for n in (2, 4):
        (scores,) = [row for row in rows(directory) if row.get("eval/updates") == n]
        scores = [scores[f"eval/member_{k}"] for k in range(2)]
        child = int(np.argmin(scores))
        parents = [updates(directory, f"population/member_{k}/parent")[n + 1] for k in range(2)]
        assert parents == [1 - child if k == child else k for k in range(2)]
        now = [updates(directory, f"population/member_{k}/learning_rate_factor")[n + 1] for k in range(2)]
        assert now[1 - child] == factors[1 - child] and now[child] / factors[1 - child] in (0.5, 2.0)
        factors = dict(enumerate(now))
        for k, seed in enumerate(SEEDS):
            assert updates(directory / f"seed_{seed}", "agent_0/learning_rate")[n + 1] == pytest.approx(1e-2 * now[k])


def failing_in_the_step_after_the_exploit():
    """A reward that both members call in two updates and two evaluations before."""
    calls = itertools.count()

    def reward(a, b, rng):
        if next(calls) >= 8:
            raise RuntimeError("stopped")
        return first_words(a, b, None, rng)

    return reward


@pytest.mark.long
def test_a_population_resumes_bit_for_bit_between_two_exploits(whole, tmp_path):
    result, directory = whole
    shutil.copytree(directory, tmp_path / "run")
    again = run(tmp_path / "run", resume=True, resume_step=3, allow_changed="")
    assert_same(again, result, tmp_path / "run", directory)


@pytest.mark.long
def test_a_population_that_was_stopped_after_an_exploit_resumes_bit_for_bit(whole, tmp_path):
    """Its checkpoint is from after the exploit, which the resumed run makes again."""
    result, directory = whole
    with pytest.raises(Exception, match="stopped"):
        run(tmp_path, failing_in_the_step_after_the_exploit(), save_every=10)
    saved = Checkpointer(tmp_path / f"seed_{SEEDS[0]}" / "checkpoints", read_only=True)
    assert saved.steps() == [2]
    again = run(tmp_path, resume=True, save_every=10, allow_changed="reward")
    assert_same(again, result, tmp_path, directory)


def assert_same(one, other, directory, other_directory):
    for a, b in zip(one, other, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.state, b.state)
        assert a.after.mean == b.after.mean
    names = ("reward/mean", "population/member_0/parent", "population/member_1/learning_rate_factor", "agent_0/loss")
    for name in names:
        assert updates(directory, name) == updates(other_directory, name) != {}


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (dict(population=dict(size=1)), "members=1 is not allowed: members must be 0, or at least 2"),
        (dict(population=dict(every=5)), "exploit_every=5 is not allowed: exploit_every must be 20 where members=0"),
        (dict(population=dict(size=2, every=3)), "exploit_every must be a multiple of eval_every=2"),
        (dict(eval_every=0, population=dict(size=2, every=4)), "must be a multiple of eval_every=0"),
        (
            dict(population=dict(size=2, perturb=dict(temperature=[2.0]))),
            "may differ in learning_rate, .*'temperature'",
        ),
        (dict(population=dict(size=2, perturb=dict(learning_rate=[0]))), "must be a list of numbers > 0 for each setting"),
        (dict(population=dict(size=2, perturb=dict(learning_rate=2.0))), "must be a list of numbers > 0 for each setting"),
        (dict(population=dict(size=2, perturb=dict(kl_coef=[2.0]))), "has no effect on kl_coef=0"),
        (dict(kl_coef=1.0, kl_target=1.0, population=dict(size=2, perturb=dict(kl_coef=[2]))), "does not go with kl_target="),
        (dict(async_steps=1), "async_steps=1 is for one seed in a program"),
        (dict(snapshots=2), r"a league .snapshots=2, strangers=\(\)\) is for one seed in a program"),
        (dict(algorithm="madpo_iter"), "'madpo_iter' learns from pairs in rounds"),
    ],
)
def test_what_a_population_is_not_for_is_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        check_seeds((0, 1), TrainConfig.of(**{**HOUSE, "eval_every": 2, "population": dict(size=2), **settings}))


def test_members_are_the_runs_of_as_many_seeds():
    """A number of members is refused where a function trains another number of runs, and members need held-out tasks."""
    team, params = tiny_team()
    reward = make_reward(first_words, num_agents=2)
    cfg = TrainConfig.of(**HOUSE, eval_every=2, population=dict(size=3))
    with pytest.raises(ValueError, match="members=3 learns in `jmarl.train_seeds` from as many seeds, and there are none"):
        train(team, reward, ITEMS, cfg, params=params, eval_items=ITEMS)
    with pytest.raises(ValueError, match="there are 2: call it with seeds=range.3."):
        train_seeds(team, reward, ITEMS, cfg, params=params, seeds=[0, 1], eval_items=ITEMS)
    with pytest.raises(ValueError, match="needs held-out tasks that rank its members"):
        train_seeds(team, reward, ITEMS, cfg, params=params, seeds=[0, 1, 2])


def test_an_experiment_names_the_seeds_of_members():
    cfg = ExperimentConfig.of(models=("tiny",), environment="math", held_out=2, eval_every=20, seed=5, population=dict(size=3))
    assert cfg.seeds == () and cfg.with_seeds().seeds == (5, 6, 7)
    assert cfg.replace(seeds=(1, 2, 8)).with_seeds().seeds == (1, 2, 8)
    with pytest.raises(ValueError, match="seeds must be empty, or one per member of the population, 3"):
        cfg.replace(seeds=(1, 2))
