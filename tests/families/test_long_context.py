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
from jmarl.cli.teams.sources import Source
from jmarl.config import Sampling, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.models import decoder
from jmarl.models.hub import agents
from jmarl.preferences.pairs import Pair
from jmarl.rollout.prompt_check import needs_long_context
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
score = jax.jit(scoring.score, static_argnums=1)
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


def test_rows_beyond_the_short_context_equal_those_of_transformers(agent, directory):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    for long, length in ((True, 40), (True, SHORT + 1), (False, SHORT)):
        config = agent.config.in_context(long)
        assert (config.context, config.describe()) == (LONG if long else SHORT, agent.config.describe())
        with torch.no_grad():
            expected = model(torch.as_tensor(TOKENS[:, :length])).logits.numpy()
        ours = [np.asarray(forward(agent.params, config, jnp.asarray(row[:length]))) for row in TOKENS]
        np.testing.assert_allclose(ours, expected, atol=1e-4)
        other = np.asarray(forward(agent.params, config.in_context(not long), jnp.asarray(TOKENS[0, :length])))
        assert np.abs(other - expected[0]).max() > 0.01


def sampled(agent, config, lengths):
    """Sample greedily after the first prompts of `TOKENS`; returns the completions and what `score` gives them."""
    lengths, count = np.array(lengths), len(lengths)
    rows = sampler.RowIds(seed=0, step=0, purpose=0, stack=0, agents=np.zeros((1, 1), int), prompt_ids=np.arange(count))
    prompts = jnp.asarray(TOKENS[None, :count, : max(lengths)])
    inputs = sampler.SampleInputs(prompts, jnp.asarray(lengths[None]), sampler.row_keys(rows, 1), jnp.array([320]))
    params = jax.tree.map(lambda x: jnp.asarray(x)[None], agent.params)
    result = jax.device_get(sample(params, config, Sampling(max_new_tokens=NEW, temperature=0), inputs))
    return result, score(agent.params, config, TOKENS[:count], lengths, result.tokens[0])


def test_a_completion_is_the_same_beside_a_long_neighbor_and_rescored_as_sampled(agent):
    config = agent.config.in_context(long=True)
    (alone, _), (beside, scores) = sampled(agent, config, [5]), sampled(agent, config, [5, 40])
    np.testing.assert_array_equal(alone.tokens[0, 0], beside.tokens[0, 0])
    np.testing.assert_allclose(alone.logprobs[0, 0], beside.logprobs[0, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(beside.logprobs[0], scores.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_run_takes_the_long_factors_if_a_prompt_needs_them(agent, directory, tmp_path):
    """Its files are those of the model all the same, it resumes in its context, and so does an evaluation of its team."""
    rows, before = [{"prompt": FEW}, {"prompt": MANY}], json.loads((directory / "config.json").read_text())
    short = jmarl.train(Team.of([agent]), reward, rows[:1], settings())
    held_out = jmarl.train(Team.of([agent]), reward, rows[:1], settings(), eval_items=rows[1:])
    cfg = settings(output_dir=str(tmp_path))
    long = jmarl.train(Team.of([agent]), reward, rows, cfg)
    assert [result.team.stacks[0].config.context for result in (short, held_out, long)] == [SHORT, LONG, LONG]
    after = agents.load_agent(tmp_path / "models" / "agent_0")
    assert after.config == agent.config and long.team.describe() == Team.of([agent]).describe()
    saved = json.loads((tmp_path / "models" / "agent_0" / "config.json").read_text())
    assert saved["rope_scaling"]["short_factor"] == before["rope_parameters"]["short_factor"]
    resumed = jmarl.train(Team.of([agent]), reward, rows, cfg.replace(resume=True, num_updates=2))
    assert int(resumed.state.step) == 2 and resumed.team.stacks[0].config.long_context
    texts = jmarl.generate(long.team, [[MANY]], settings(), params=jmarl.policies(long.state))
    assert len(texts[0]) == 1


@pytest.mark.long
def test_a_fit_takes_the_long_factors_if_an_example_needs_them(agent):
    def pair(prompt):
        return Pair((prompt,), ("a",), ("b",))

    for prompts, context in (((FEW,), SHORT), ((FEW, MANY), LONG)):
        cfg = TrainConfig.of(algorithm="dpo", num_updates=1, batch_size=1, progress=False, mesh="agent=1")
        result = jmarl.fit(Team.of([agent]), [pair(prompt) for prompt in prompts], cfg)
        assert result.team.stacks[0].config.context == context


def test_prompts_of_one_call_do_not_choose(agent):
    team = Team.of([agent])
    with pytest.raises(ValueError, match="more than the context of 16"):
        jmarl.generate(team, [[FEW, MANY]], settings())
    alone, beside = (jmarl.generate(team, [row], settings(long_context=True))[0] for row in ([FEW], [FEW, MANY]))
    assert alone[0] == beside[0]


def test_a_choice_where_there_is_none_is_an_error(agent, random_agent, tiny_config, tiny_tokenizer):
    llama = random_agent(tiny_config(), tiny_tokenizer, 0)
    with pytest.raises(ValueError, match="long_context=True has no effect: no model of the team has factors of longrope"):
        jmarl.train(Team.of([llama]), reward, [{"prompt": FEW}], settings(long_context=True))
    with pytest.raises(ValueError, match="1 of 1 items have a prompt too long .* the context is 16"):
        jmarl.train(Team.of([agent]), reward, [{"prompt": MANY}], settings(long_context=False))


def test_completions_that_later_turns_read_are_counted(agent):
    team, env, cfg = Team.of([agent]), RewardEnvironment(reward, default_formatter).for_agents(1), settings(num_turns=2)
    items, read = [{"prompt": FEW}], cfg.replace(history="append")
    assert [needs_long_context(team, env, items, x) for x in (cfg, read)] == [False, True]


def test_an_export_says_which_factors_vllm_must_take(agent):
    """vLLM 0.33.0 takes the long ones unless its longest row fits the short ones, layers/rotary_embedding/phi3_*.py."""
    runs = [settings(), settings(long_context=False), settings(long_context=True), None]
    lines = [lines_of_vllm(Source([agent], "here", cfg)) for cfg in runs]
    line = "agent 0 learned with longrope's short factors: open it in vLLM with --max-model-len 16"
    assert lines == [[line], [line], [], []]


def test_a_plan_is_in_the_context_of_its_run(agent):
    team = Team.of([agent])
    for tokens, changes, context in ((8, {}, SHORT), (9, {}, LONG), (8, {"long_context": True}, LONG)):
        [spec] = plan.in_chosen_context(team, settings(**changes), tokens).stacks
        assert spec.config.context == context
