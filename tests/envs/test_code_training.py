"""Training and evaluation on code: pass@k, metrics, the sandbox level in the metadata of a run, the sequential pipeline."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import code_baselines, code_team
from experiments.code_pipeline import WAIT, CodePipeline
from experiments.report import command, report
from jmarl.config import TrainConfig
from jmarl.envs.code import problems as code_problems
from jmarl.envs.code.execution import CodeExecutionEnvironment
from jmarl.envs.code.generation import CodeGeneration
from jmarl.envs.code.problems import CodeProblemGenerator
from jmarl.envs.math.problems import MathProblemGenerator
from jmarl.envs.math.reasoning import MathReasoningEnvironment
from jmarl.envs.mixture import Mixture
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.evaluation.evaluate import choices_of, evaluate, in_last_turn, numbers
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.files.checkpoint import Checkpointer
from jmarl.rl.returns import pass_at_k
from jmarl.runs.train import train
from jmarl.sandbox import Sandbox, launch
from jmarl.team import Team, make_team
from tests.house import HOUSE
from tests.running import rows

ITEMS = code_problems.generate_problems(4, difficulty=(1, 1))
AUX = "def aux(x):\n    return x * x\n"
MAIN = "def squares(a, b):\n    return aux(a) + aux(b)\n"
SQUARES = {
    "prompt": "Add the squares of two numbers.",
    "entry_point": "squares",
    "test": "def check(f):\n    assert f(1, 2) == 5\n    assert f(2, 2) == 8",
}


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    cfg = tiny_config(max_positions=2048)
    return [random_agent(cfg, tiny_tokenizer, seed) for seed in (0, 1)]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(k):
    solved = np.random.default_rng(0).random((6, 5)) < np.linspace(0, 1, 6)[:, None]
    expected = [np.mean([max(samples) for samples in itertools.combinations(row, k)]) for row in solved.astype(float)]
    np.testing.assert_allclose(pass_at_k(solved.astype(float), k), expected)


def test_pass_at_k_ignores_masked_samples():
    nan = np.nan
    np.testing.assert_allclose(pass_at_k(np.array([[1, nan, 0, nan], [nan, nan, nan, 1], [nan] * 4]), 2), [1, nan, nan])
    np.testing.assert_allclose(pass_at_k(np.array([[1, nan, 0, nan], [nan, nan, nan, 1], [nan] * 4]), 1), [0.5, 1, nan])


@pytest.mark.long
def test_evaluation_reports_the_last_turn_of_each_episode(agents):
    """Chains of up to three turns, some of which end early, compared with a loop over the episodes."""
    rng = np.random.default_rng(0)

    def solved(a, b):
        return (rng.random(len(a)) < 0.3).astype(float).tolist()

    env = RewardEnvironment(
        make_reward(solved, num_agents=2), [lambda item: item["prompt"]] * 2, lambda num_agents, **_: ["on"] * 2
    )
    cfg = TrainConfig.of(
        num_turns=3, branching="chain", early_termination_threshold=0.5, eval_generations=4, max_new_tokens=4, num_prompts=3
    )
    result = evaluate(*make_team(agents), [{"prompt": p} for p in ("a", "b c", "d")], env, cfg)
    turns = result.rollout.turns
    assert len(turns) == 3 and len(turns[1].items) < 12
    expected, written = [], []
    for i in range(12):
        value, at, texts = turns[0].parts["solved"][i], i, [agent[i // 4][i % 4] for agent in turns[0].texts]
        for turn in turns[1:]:
            (child,) = np.flatnonzero(turn.parents == at) if at in turn.parents else (None,)
            if child is None:
                break
            value, at = turn.parts["solved"][child], child
            texts += [agent[child][0] for agent in turn.texts]
        expected.append(value)
        written.append([text.strip() for text in texts])
    choices = choices_of(result.rollout).ravel()
    assert [[x == y for y in choices] for x in choices] == [[x == y for y in written] for x in written]
    last = in_last_turn(result.rollout, [turn.parts["solved"] for turn in turns])
    np.testing.assert_array_equal(last, np.reshape(expected, (3, 4)))
    metrics = numbers(result)
    assert set(metrics) == {"eval/reward", "eval/reward_ci95", "eval/episodes", "eval/reward/invalid", "eval/reward/solved"} | {
        f"eval/{name}{suffix}"
        for name in ("pass@1", "pass@2", "pass@4", "best@2", "best@4", "majority@2", "majority@4")
        for suffix in ("", "_ci95")
    }
    mean, interval = mean_and_interval(pass_at_k(last, 4))
    assert metrics["eval/pass@1"] == pytest.approx(np.mean(expected)), "of the last turn"
    assert metrics["eval/reward/solved"] == pytest.approx(metrics["eval/reward"]), "the only part, summed over the turns"
    assert (metrics["eval/pass@4"], metrics["eval/pass@4_ci95"]) == (pytest.approx(mean), pytest.approx(interval))


# The sequential pipeline


def test_a_pipeline_asks_one_agent_per_turn_which_reads_the_earlier_code():
    env = CodePipeline(2)
    rng = np.random.default_rng(0)
    states, first = env.reset([SQUARES], rng)
    assert "named aux" in first[0][0] and first[1] == [WAIT]
    answer = env.step(states, [[f"```python\n{AUX}```"], [MAIN]], rng)  # agent 1 is not on turn: its completion is ignored
    assert answer.result.total[0] == pytest.approx(0.4) and answer.after[0].score.result is None
    states, second = env.observe(answer.after)
    assert second[0] == [WAIT] and "def aux(x):" in second[1][0] and "squares" in second[1][0]
    done = env.step(states, [["def aux(x): return 0"], [MAIN]], rng)
    assert done.result.total[0] == pytest.approx(4.0) and done.after[0].codes == (AUX.strip(), MAIN.strip())


def test_three_agents_of_a_pipeline_read_the_helpers_before_them():
    env, rng = CodePipeline(3), np.random.default_rng(0)
    states, _ = env.reset([SQUARES], rng)
    codes = ["def aux_1(x):\n    return x * x", "def aux_2(x):\n    return aux_1(x)", MAIN.replace("aux(a)", "aux_1(a)")]
    for turn, code in enumerate(codes):
        answer = env.step(
            states, [[code.replace("aux(b)", "aux_2(b)")] if agent == turn else ["no"] for agent in range(3)], rng
        )
        states, prompts = env.observe(answer.after) if turn < 2 else (None, None)
        if turn == 1:
            assert "aux_1" in prompts[2][0] and "def aux_2" in prompts[2][0]
    assert answer.after[0].score.solved


# Runs


class Noisy(CodeGeneration):
    """Turns any text into a program that passes some tests, so that a random model has rewards to learn from."""

    def code_of(self, completion):
        functions = [f"def {item['entry_point']}(x):\n    return aux(x) % 7" for item in ITEMS]
        return "\n".join([f"def aux(x):\n    return {len(completion)}", *functions])


SETTINGS = HOUSE | dict(max_new_tokens=8, sample_parts=2, eval_generations=2)


@pytest.fixture(scope="module")
def trained(agents, box, tmp_path_factory):
    """A run with rewards of real executions, for half of the prompts of a step at a time, which overlap with sampling."""
    cfg = TrainConfig.of(**SETTINGS, save_every=1, output_dir=str(tmp_path_factory.mktemp("run")))
    return train(Team.of(agents), Noisy(2, sandbox=box), ITEMS, cfg, eval_items=ITEMS[:2]), cfg


@pytest.mark.long
def test_metrics_of_levels_and_pass_at_k_are_logged(trained):
    written = rows(trained[1].run.output_dir)
    steps, evaluations = ([row for row in written if name in row] for name in ("reward/mean", "eval/reward"))
    parts = [f"reward/{name}" for name in ("level_1", "level_2", "level_3", "bonus")]
    names = [*parts, "measures/solved", "measures/limited"]
    assert len(steps) == 2 and all(name in row for row in steps for name in names)
    assert len(evaluations) == 2 and all(f"eval/{name}" in row for row in evaluations for name in names)
    assert all(sum(row[name] for name in parts) == pytest.approx(row["reward/mean"]) for row in steps)
    assert all(f"eval/pass@{k}" in row and f"eval/pass@{k}_ci95" in row for row in evaluations for k in (1, 2))


@pytest.mark.long
def test_the_sandbox_level_is_in_the_metadata_and_must_not_change(trained, agents, box):
    out = Path(trained[1].run.output_dir)
    with Checkpointer(out / "checkpoints", read_only=True) as saved:
        assert saved.read_meta(None)[0]["environment"] == {"sandbox": box.level}
    events = b"".join(path.read_bytes() for path in out.rglob("*tfevents*"))
    assert b"sandbox" in events
    with Sandbox("unsafe-process") as other, pytest.raises(ValueError, match=rf"environment: .*{box.level}.* -> .*S1"):
        train(Team.of(agents), Noisy(2, sandbox=other), ITEMS, trained[1].replace(resume=True, num_updates=3))


@pytest.mark.long
def test_overlapping_rewards_with_sampling_gives_bit_equal_parameters(trained, agents, box):
    alone = train(Team.of(agents), Noisy(2, sandbox=box), ITEMS, TrainConfig.of(**SETTINGS, overlap_rewards=False))
    for x, y in zip(*map(jax.tree.leaves, (trained[0].state, alone.state)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_training_without_sandbox_level_s2_is_refused_with_reason_and_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    monkeypatch.setattr("jmarl.sandbox.client.unsupported_reason", lambda level: "no Landlock" if level == "S2" else "")
    monkeypatch.setattr("sys.argv", ["code_team", "--output-dir", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"S3: bwrap is not installed.*apt-get install bubblewrap.*S2: no Landlock.*Linux 6.7"):
        command(code_team.CodeConfig, code_team.run, report)
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_the_table_of_baselines_has_a_row_per_method(tiny_dir, monkeypatch, capsys, tmp_path):
    """The whole experiment with a tiny model: every method has a row with its cost."""
    model = str(tiny_dir("llama", seed=0, max_position_embeddings=1024))
    for i in range(2):
        (tmp_path / f"agent_{i}").symlink_to(model)
    flags = ["--model", model, "--team", str(tmp_path), "--held-out", "2", "--eval-generations", "2", "--max-new-tokens", "4"]
    monkeypatch.setattr("sys.argv", ["code_baselines", *flags, "--no-chat"])
    code_baselines.main()
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in table[2:]] == [
        "single agent", "naive concatenation", "sequential pipeline", "one-round discussion", "trained team",
    ]  # fmt: skip
    assert table[0][3:5] == ["pass@1", "pass@2"] and all(row[3] == "0.000 ± 0.000" for row in table[2:])
    tokens = [float(row[5].strip("| ")) for row in table[2:]]
    assert tokens[0] <= 8 and tokens[1] <= 8 and tokens[3] > tokens[1]


def test_the_mrlm_environment_works_alone_and_in_a_mixture(box):
    """The MRLM constructor takes a generator first; a mixture scores each joint action by its own environment."""
    env = CodeExecutionEnvironment(CodeProblemGenerator(difficulty_range=(1, 1)), sandbox=box)
    tasks = env.tasks("eval", 3)
    assert {task["difficulty"] for task in tasks} == {1} and env.roles == ("main",)
    both = Mixture({"code": env, "math": MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 2)))})
    mixed, rng = both.tasks("train", 6), np.random.default_rng(0)
    states, _ = both.reset(mixed, rng)
    texts = [task["task"].get("solution") or f"Answer: {task['task']['answer']}" for task in mixed]
    result = both.step(states, [texts], rng).result
    assert result.total.tolist() == [2.0 if task["environment"] == "code" else 1.0 for task in mixed]
    with pytest.raises(ValueError, match="both between 1 and 3"):
        CodeProblemGenerator((0, 3))
