"""Longrope chooses its factors once for a run, by the longest row that it may have: a row does not depend on others."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl.cli import plan
from jmarl.cli.export import lines_of_vllm
from jmarl.cli.main import main
from jmarl.cli.teams.sources import TeamSource
from jmarl.config import Sampling, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.models import decoder
from jmarl.models.hub import agents
from jmarl.preferences.pairs import Pair
from jmarl.rollout.prompt_check import needs_long_context
from jmarl.runs.kinds import given
from jmarl.sampling import sampler, scoring
from jmarl.team import Team

SHORT, LONG, NEW = 16, 64, 8
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    long_factor=[3.0, 1.0, 6.0, 2.0, 9.0, 3.0, 12.0, 4.0], original_max_position_embeddings=SHORT,
)  # fmt: skip
FIELDS = dict(
    rope_parameters=LONGROPE,
    original_max_position_embeddings=SHORT,
    max_position_embeddings=LONG,
    hidden_size=64,
)
TOKENS = np.random.default_rng(0).integers(3, 320, (2, 40))
FEW, MANY = "ab", "the farmer walked to the market " * 2
forward = jax.jit(decoder.forward, static_argnums=1)
sample = jax.jit(sampler.sample, static_argnums=(1, 2))
pytestmark = pytest.mark.filterwarnings("ignore:.*longrope's short factors")


@pytest.fixture(scope="module")
def directory(tiny_dir):
    return tiny_dir("phi3", **FIELDS)


@pytest.fixture(scope="module")
def agent(directory):
    with pytest.warns(UserWarning, match="up to 16 tokens with longrope's short factors, and up to 64 with the long ones"):
        return agents.load_agent(directory)


def reward(completions):
    return [float(len(text)) for text in completions]


def settings(**changes):
    return TrainConfig.of(num_updates=1, num_generations=2, max_new_tokens=NEW, progress=False, mesh="agent=1", **changes)


@pytest.mark.long
def test_rows_beyond_the_short_context_equal_those_of_transformers(agent, directory):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    configs = {long: agent.config.in_context(long) for long in (True, False)}
    ours = {
        long: np.stack([forward(agent.params, config, jnp.asarray(row)) for row in TOKENS]) for long, config in configs.items()
    }
    for long, length in ((True, 40), (True, SHORT + 1), (False, SHORT)):
        assert (configs[long].context, configs[long].describe()) == (LONG if long else SHORT, agent.config.describe())
        with torch.no_grad():
            expected = model(torch.as_tensor(TOKENS[:, :length])).logits.numpy()
        np.testing.assert_allclose(ours[long][:, :length], expected, atol=1e-4)
        assert np.abs(ours[not long][0, :length] - expected[0]).max() > 0.01


@pytest.mark.long
def test_a_completion_is_the_same_beside_a_long_neighbor_and_rescored_as_sampled(agent):
    """Greedy ones."""
    config = agent.config.in_context(long=True)
    params = jax.tree.map(lambda x: x[None], agent.params)

    def sampled(*lengths):
        """Return completions after the first prompts of `TOKENS`."""
        count = len(lengths)
        rows = sampler.RowIds(seed=0, step=0, purpose=0, stack=0, agents=np.zeros((1, 1), int), prompt_ids=np.arange(count))
        prompts, keys = TOKENS[None, :count, : max(lengths)], sampler.row_keys(rows, 1)
        inputs = sampler.SampleInputs(prompts, np.array([lengths]), keys, np.array([320]))
        return jax.device_get(sample(params, config, Sampling(max_new_tokens=NEW, temperature=0), inputs))

    alone, beside = sampled(5), sampled(5, 40)
    scores = jax.jit(scoring.score, static_argnums=1)(agent.params, config, TOKENS, np.array([5, 40]), beside.tokens[0])
    np.testing.assert_array_equal(alone.tokens[0, 0], beside.tokens[0, 0])
    np.testing.assert_allclose(alone.logprobs[0, 0], beside.logprobs[0, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(beside.logprobs[0], scores.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_run_takes_the_long_factors_if_a_held_out_prompt_needs_them(agent, directory, tmp_path):
    """Its files are those of the model all the same, it resumes in its context, and so does an evaluation of its team."""
    rows, before = [{"prompt": FEW}, {"prompt": MANY}], json.loads((directory / "config.json").read_text())
    cfg = settings(output_dir=str(tmp_path))
    result = jmarl.train(Team.of([agent]), reward, rows[:1], cfg, eval_items=rows[1:])
    assert result.team.stacks[0].config.context == LONG and result.team.describe() == Team.of([agent]).describe()
    assert agents.load_agent(tmp_path / "models" / "agent_0").config == agent.config
    saved = json.loads((tmp_path / "models" / "agent_0" / "config.json").read_text())
    assert saved["rope_scaling"]["short_factor"] == before["rope_parameters"]["short_factor"]
    again = cfg.replace(resume=True, num_updates=2)
    resumed = jmarl.train(Team.of([agent]), reward, rows[:1], again, eval_items=rows[1:])
    assert int(resumed.state.step) == 2 and resumed.team.stacks[0].config.placement.long_context
    teams = (result.team, settings()), (Team.of([agent]), settings(long_context=True))
    (texts, others) = (jmarl.generate(team, [[MANY]], x, params=jmarl.policies(result.state)) for team, x in teams)
    assert texts == others and texts[0][0]


@pytest.mark.long
def test_a_fit_takes_the_long_factors_if_an_example_needs_them(agent):
    team, (few, many) = Team.of([agent]), (Pair((prompt,), ("a",), ("b",)) for prompt in (FEW, MANY))
    cfg = TrainConfig.of(algorithm="dpo", num_updates=1, batch_size=1, progress=False, mesh="agent=1")
    assert not given.needs_long_context(team, [few], cfg)
    assert jmarl.fit(team, [few, many], cfg).team.stacks[0].config.context == LONG


@pytest.mark.long
def test_a_prompt_of_the_long_context_is_played_with_the_flag_that_chooses_it(
    directory, tiny_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reward_of_long_context.py").write_text("def score(texts):\n    return [1.0] * len(texts)\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": MANY}))
    words = ["--data", "rows.jsonl", "--reward", "own_reward_of_long_context:score", "--max-new-tokens", str(NEW)]
    assert main(["play", "--model", str(directory), *words]) == 2 and "16" in capsys.readouterr().err
    assert main(["play", "--model", str(directory), *words, "--long-context"]) == 0
    assert main(["eval", "--model", str(tiny_dir("llama")), *words, "--long-context"]) == 2
    assert "long_context=True has no effect" in capsys.readouterr().err


def test_a_choice_where_there_is_none_is_an_error(agent, random_agent, tiny_config, tiny_tokenizer):
    llama = random_agent(tiny_config(), tiny_tokenizer, 0)
    with pytest.raises(ValueError, match="long_context=True has no effect: no model of the team has factors of longrope"):
        jmarl.train(Team.of([llama]), reward, [{"prompt": FEW}], settings(long_context=True))
    with pytest.raises(ValueError, match="1 of 1 items have a prompt too long .* the context is 16"):
        jmarl.train(Team.of([agent]), reward, [{"prompt": MANY}], settings(long_context=False))
    with pytest.raises(ValueError, match="more than the context of 16"):  # prompts of one call do not choose
        jmarl.generate(Team.of([agent]), [[FEW, MANY]], settings())


def test_prompts_need_the_long_factors_with_the_completions_that_they_and_later_turns_read(agent):
    team, env, cfg = Team.of([agent]), RewardEnvironment(reward, default_formatter).for_agents(1), settings(num_turns=2)
    few, many, read = [{"prompt": FEW}], [{"prompt": FEW}, {"prompt": MANY}], cfg.replace(history="append")
    needs = [needs_long_context(team, env, *x) for x in ((few, settings()), (many, settings()), (few, cfg), (few, read))]
    assert needs == [False, True, False, True]


def test_an_export_says_which_factors_vllm_must_take(agent):
    """vLLM 0.33.0 takes the long ones unless its longest row fits the short ones, layers/rotary_embedding/phi3_*.py."""
    runs = [settings(), settings(long_context=False), settings(long_context=True), None]
    lines = [lines_of_vllm(TeamSource([agent], "here", cfg)) for cfg in runs]
    line = "agent 0 learned with longrope's short factors: open it in vLLM with --max-model-len 16"
    assert lines == [[line], [line], [], []]


def test_a_plan_is_in_the_context_of_its_run(agent):
    team = Team.of([agent])
    for tokens, changes, context in ((8, {}, SHORT), (9, {}, LONG), (8, {"long_context": True}, LONG)):
        [spec] = plan.in_chosen_context(team, settings(**changes), tokens).stacks
        assert spec.config.context == context
