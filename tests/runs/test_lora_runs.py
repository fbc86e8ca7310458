"""Runs with LoRA: learning, resuming, critics, turns, dropout, meshes, and the files for peft and transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import LORA_TARGETS, LoRA, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.files.run_directory import base_digests
from jmarl.learning.optimizer import init_state
from jmarl.learning.team_update import update_team
from jmarl.models import decoder, lora
from jmarl.models.hub import agents as weights
from jmarl.models.hub.peft import merge
from jmarl.models.layers import attention
from jmarl.models.stack import share_params, unstack
from jmarl.runs.kinds.rollouts import play_step, rollout_batches, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.team import make_team, policies, save_team, to_checkpoint
from jmarl.types import TRACES
from tests.house import HOUSE, ITEMS

ROOT = Path(__file__).resolve().parents[2]
BASE = TrainConfig.of(
    **HOUSE | dict(num_updates=1),
    algorithm="magrpo",
    adam_eps=1e-4,
    lora_rank=2,
    lora_targets="q_proj,down_proj",
    mesh="agent=1",
)


def lengths(*completions):
    return [float(len(first) - 0.5 * sum(map(len, rest))) for first, *rest in zip(*completions, strict=True)]


@pytest.fixture(scope="module")
def agent(tiny_config, tiny_tokenizer, random_agent):
    return random_agent(tiny_config(), tiny_tokenizer, 0)


def run(agents, cfg, params=None, reward=None):
    team, fresh = make_team(agents, lora=True)
    reward = reward or make_reward(lengths, num_agents=len(agents))
    return train(team, reward, ITEMS, cfg, params=fresh if params is None else params)


def moved(tree, other):
    return [
        float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(*map(jax.tree.leaves, (tree, other)), strict=True)
    ]


def assert_equal_trees(got, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(expected))


# --- training ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_team_of_adapters_learns_the_probe(agent):
    """The held-out mean rises above the untrained team's 95 % interval, as in `test_learning` with full weights. (The
    embeddings are so large that a policy with frozen embeddings can prefer tokens.)"""
    from tests.learning.test_learning import CONFIG, FORMATTERS, HELD_OUT, both
    from tests.learning.test_learning import ITEMS as PROMPTS

    team, params = make_team([agent, agent], lora=True)
    cfg = CONFIG.replace(lora_rank=8, lora_alpha=16, learning_rate=3e-2, num_updates=40)
    env = RewardEnvironment(make_reward(both, num_agents=2), FORMATTERS)
    result = train(team, env, PROMPTS, cfg, params=params, eval_items=HELD_OUT)
    before, after = result.before, result.after
    assert after.mean - after.interval > before.mean + before.interval
    assert_equal_trees(merge(agent.config, unstack(params[0], 0)), agent.params)


@pytest.fixture(scope="module")
def critics_run(agent, tmp_path_factory):
    """Four updates of two agents with own critics, a KL term and dropout, and checkpoints after the second and the fourth."""
    where = tmp_path_factory.mktemp("runs") / "whole"
    cfg = BASE.replace(algorithm="ippo", num_updates=4, kl_coef=0.1, lora_dropout=0.25, save_every=2, output_dir=str(where))
    before = TRACES["update"]
    result = run([agent, agent], cfg)
    assert TRACES["update"] == before + 2, "one program for the agents, one for the critics; no other test has them"
    return cfg, result


@pytest.mark.long
def test_a_resumed_run_is_bit_equal(critics_run, agent, tmp_path):
    """Adapters, moments and counters of agents and critics are, with dropout. The checkpoint holds no base and no gradients."""
    cfg, whole = critics_run
    broken = tmp_path / "broken"
    shutil.copytree(cfg.run.output_dir, broken)
    shutil.rmtree(broken / "checkpoints" / "4")
    resumed = run([agent, agent], cfg.replace(output_dir=str(broken), resume=True))
    assert int(resumed.state.step) == 4 and len(resumed.rewards) == 2
    assert_equal_trees(to_checkpoint(resumed.state), to_checkpoint(whole.state))
    spec = json.loads((Path(cfg.run.output_dir) / "checkpoints/4/meta.json").read_text())["spec"]
    assert any("q_proj/a" in name for name in spec) and not any(
        part in name for name in spec for part in ("embed", "qkv", "grads")
    )
    for name in ("agent_0", "agent_1"):
        files = [Path(d) / "models" / name / "model.safetensors" for d in (cfg.run.output_dir, broken)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.long
def test_a_run_cannot_be_resumed_with_another_base_or_alpha(critics_run, agent):
    """The other base has the same architecture and tokenizer, and one other weight. An alpha is named as a changed setting."""
    cfg, _ = critics_run
    params = {**agent.params, "final_norm": agent.params["final_norm"] * np.float32(1.0001)}
    other = agent._replace(params=params)
    with pytest.raises(ValueError, match="bases: the frozen weights of LoRA differ"):
        run([other, other], cfg.replace(resume=True))
    with pytest.raises(ValueError, match="lora_alpha: None -> 8.0") as refused:
        run([agent, agent], cfg.replace(resume=True, lora_alpha=8.0))
    assert "bases" not in str(refused.value)


@pytest.mark.long
def test_own_critics_learn_adapters_over_the_agents_base(critics_run, agent):
    """Adapters and value heads change. Agents and critics have one base, the loaded weights."""
    (stack,), (critic,) = critics_run[1].state.stacks, critics_run[1].state.critics
    pairs = zip(*map(jax.tree.leaves, (stack.base, critic.base)), strict=True)
    assert all(x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer() for x, y in pairs)
    begun = start(*make_team([agent, agent], lora=True), critics_run[0])[1].critics[0]
    assert min(moved(critic.params["layers"], begun.params["layers"])) > 1e-4 and np.abs(critic.params["value"]).min() > 0
    assert set(critic.params) == {"layers", "value", "value_bias"} and critic.reference is None
    base = unstack(stack.base, 0)
    assert_equal_trees(base["embed"], agent.params["embed"])
    assert_equal_trees(np.stack(base["layers"]["qkv"]), agent.params["layers"]["qkv"])


def test_critics_may_have_another_base_than_the_agents(agent, random_agent):
    """The weights of a given critic are the base of the critics, with new adapters, in every row with critics."""
    other = random_agent(agent.config, agent.tokenizer, 5)
    for algorithm, count in (("ippo", 2), ("maac", 1)):
        cfg = BASE.replace(algorithm=algorithm)
        team, params = make_team([agent, agent], lora=True)
        _, state = start(dataclasses.replace(team, critic=other), params, cfg)
        (stack,), (critic,) = state.stacks, state.critics
        assert_equal_trees(critic.base["embed"].value, other.params["embed"])
        assert_equal_trees(stack.base["embed"].value, agent.params["embed"])
        a, of_agents = (s.params["layers"]["q_proj"]["a"] for s in (critic, stack))
        assert (
            a.shape[0] == count and np.abs(a - of_agents[:count]).max() > 0.01 and critic.params["value"].shape == (count, 32)
        )


def other_architecture(tiny_config, make_tokenizer, random_agent):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    return random_agent(tiny_config("qwen3", vocab_size=321), tokenizer, 1)


def answer(agent_completions, **_):
    return [f"and {text}" for text in agent_completions[::-1]]


@pytest.mark.long
def test_two_architectures_with_value_heads_over_a_tree(agent, tiny_config, make_tokenizer, random_agent):
    """Two stacks have two bases. Joint actions continue in new groups. Agents have value heads."""
    changes = dict(algorithm="ippo", separate_critic=False, num_turns=2, num_generations=2)
    other = other_architecture(tiny_config, make_tokenizer, random_agent)
    result = run([agent, other], BASE.replace(**changes), reward=RewardEnvironment(lengths, [default_formatter] * 2, answer))
    for stack in result.state.stacks:
        assert np.abs(stack.params["value"]).max() > 0
        assert all(np.abs(pair["b"]).max() > 1e-4 for pair in stack.params["layers"].values())
    assert result.state.stacks[1].base["embed"].shape == (321, 32)


def test_shared_weights_are_one_set_of_adapters(agent):
    team, params = make_team([agent, agent], shared_weights=True, lora=True)
    result = train(team, make_reward(lengths, num_agents=2), ITEMS, BASE, params=params)
    assert {x.shape[0] for x in jax.tree.leaves(result.state.stacks[0].params)} == {1}
    assert np.abs(result.state.stacks[0].params["layers"]["q_proj"]["b"]).max() > 1e-4


@pytest.mark.long
def test_a_run_in_one_program_equals_the_loop():
    """As in `test_probes` with full weights, here with a KL term. The base is not donated."""
    from experiments import probe_tasks
    from experiments.probes import ITEMS, MODEL, ProbeEnvironment, items_of, probe_tokenizer, settings

    cfg = settings("grpo", "emit", 0).replace(num_updates=2, kl_coef=0.1, lora_rank=2)
    init_params = jax.jit(decoder.init_params, static_argnums=0)  # one program, not one per operation
    agent = weights.Agent("tiny", MODEL, jax.device_get(init_params(MODEL, jax.random.key(0))), probe_tokenizer())
    team, params = make_team([agent, agent], lora=True)
    looped = train(team, ProbeEnvironment("emit", 2), ITEMS, cfg, params=params)
    state = init_state(lora.init_models(params, [(MODEL, 2)], cfg.lora, cfg.run.seed), resolve(cfg)).stacks[0]
    state, metrics = probe_tasks.run(state, items_of(cfg, 2), probe="emit", model=MODEL, cfg=cfg)
    np.testing.assert_allclose(metrics["reward"], looped.rewards, rtol=1e-5)
    assert max(moved(state.params, looped.state.stacks[0].params)) < 2e-4
    assert_equal_trees(merge(agent.config, unstack(params[0], 0)), agent.params)


@pytest.mark.long
def test_a_second_training_starts_from_the_adapters_of_the_first(agent, tmp_path):
    """With a trainer and PEFT's name of the rank. Merged weights and adapters are saved."""
    from jmarl import MAGRPOConfig, MAGRPOTrainer

    settings = dict(adam_eps=1e-4, lora_r=2, lora_targets="q_proj,down_proj", mesh="agent=1", output_dir="")
    args = MAGRPOConfig(**HOUSE | dict(num_updates=1), **settings)
    assert args.lora_rank == 2
    trainer = MAGRPOTrainer(agent, num_agents=2, reward_func=lengths, args=args, train_dataset=ITEMS)
    first = jax.device_get(trainer.train().state.stacks[0].params)
    model = lora.init_models(trainer.params, [(agent.config, 2)], args, 0)[0]
    assert_equal_trees(lora.split(model)[1], first)
    second = trainer.train().state.stacks[0].params
    assert min(moved(second["layers"]["q_proj"], first["layers"]["q_proj"])) > 1e-4
    trainer.save_model(tmp_path)
    loaded = weights.load_agent(tmp_path / "agent_1")
    assert_equal_trees(loaded.params, trainer.agents[1].params)
    assert (tmp_path / "agent_1/adapter/adapter_model.safetensors").is_file()


# --- dropout -------------------------------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean(agent):
    """The mean output of an adapter of the last layer is that without dropout. Different keys give different outputs."""
    settings = LoRA(lora_rank=2, lora_targets="down_proj")
    model = unstack(lora.init_models([share_params([agent.params])], [(agent.config, 1)], settings, 0)[0], 0)
    pair = model["layers"]["down_proj"]
    b = pair["b"].at[-1].set(jax.random.normal(jax.random.key(1), pair["b"].shape[1:]))
    model = model | {"layers": model["layers"] | {"down_proj": pair | {"b": b}}}

    def last(params):
        x = params["embed"][jnp.arange(5)]
        return decoder.run_layers(params, agent.config, x, jnp.arange(5), attention.causal_attention(5))[0]

    n = 2000
    many = jax.jit(jax.vmap(lambda key: last(lora.with_dropout(model, key, 0.4))))(jax.random.split(jax.random.key(2), n))
    error = many.std(0) / n**0.5
    assert error.min() > 0 and np.abs((many.mean(0) - jax.jit(last)(model)) / error).max() < 5


@pytest.mark.long
def test_dropout_is_in_the_update_only(agent):
    """Sampling and its log-probabilities have none. In the update it is determined by step and agent."""
    plain = BASE.replace(max_grad_norm=100.0)
    cfg = plain.replace(lora_dropout=0.5)
    team, params = make_team([agent, agent], lora=True)

    def one(cfg, step):
        setup, state = start(team, params, cfg)
        played = play_step(sampler_of(setup, state), setup, ITEMS, environment(), 0)
        state, _ = update_team(
            setup, state._replace(step=jnp.int32(step)), rollout_batches(setup, state._replace(step=jnp.int32(step)), played)
        )
        return jax.device_get(played.turns[0].completions[0].logprobs), jax.device_get(state.stacks[0].params)

    (logprobs, without), (same, dropped) = one(plain, 0), one(cfg, 0)
    np.testing.assert_array_equal(logprobs, same)
    assert max(moved(without, dropped)) > 1e-4
    assert_equal_trees(one(cfg, 0)[1], dropped)
    assert max(moved(one(cfg, 1)[1], dropped)) > 1e-4
    programs = [start(team, params, settings)[0].programs[0] for settings in (cfg, plain)]
    keys = jax.random.key_data(programs[0].keys(0))
    assert (keys[0] != keys[1]).any() and programs[1].keys(0) is None


def environment():
    return RewardEnvironment(make_reward(lengths, num_agents=2), [default_formatter] * 2, None)


# --- on disk -------------------------------------------------------------------------------------------------------------


def noisy(model):
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21.2 asks transformers so
@pytest.mark.parametrize(
    "family, targets",
    [
        ("llama", "all"),
        ("qwen2", "q_proj, v_proj,down_proj"),
        pytest.param("qwen3", None, marks=pytest.mark.nightly),
    ],
)
def test_peft_and_transformers_load_what_is_saved(tiny_dir, tmp_path, family, targets):
    """The logits of agent 1 equal those of transformers with the merged directory and of peft's adapter over the base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = weights.load_agent(tiny_dir(family))
    settings = LoRA(lora_rank=4, lora_alpha=6.0, lora_targets=targets)
    team, params = make_team([base, base], lora=True)
    frozen, trained = lora.split(lora.init_models(params, [(base.config, 2)], settings, 0)[0])
    model = lora.join(frozen, noisy(trained))
    save_team(tmp_path, team, [model])
    tokens = np.random.default_rng(0).integers(1, 320, 20)
    ours = jax.jit(decoder.forward, static_argnums=1)(unstack(model, 1), base.config, jnp.asarray(tokens))
    written = tmp_path / "agent_1"
    original = AutoModelForCausalLM.from_pretrained(tiny_dir(family), dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    with torch.no_grad():
        plain, whole = (m(torch.tensor(tokens[None])).logits[0].numpy() for m in (original, merged))
        adapted = PeftModel.from_pretrained(original, written / "adapter").eval()
        theirs = adapted(torch.tensor(tokens[None])).logits[0].numpy()
    size = np.abs(np.asarray(ours)).max()
    assert np.abs(whole - ours).max() < 1e-5 * size and np.abs(theirs - ours).max() < 1e-5 * size
    assert np.abs(plain - ours).max() > 1e-2 * size
    config = json.loads((written / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6, list(settings.modules))


def test_digests_of_different_bases_differ(agent):
    """Also if one bit differs, or two values or two layers are exchanged."""
    embed = np.array(agent.params["embed"])
    changed, swapped = embed.copy(), embed.copy()
    changed.view(np.int32)[7, 3] ^= 1
    swapped[[0, 1]] = embed[[1, 0]]
    layers = {name: x[::-1] for name, x in agent.params["layers"].items()}
    bases = [{**agent.params, "embed": x} for x in (embed, embed.copy(), changed, swapped)]
    of = [lora.digest(share_params([base])) for base in (*bases, {**agent.params, "layers": layers})]
    assert of[0] == of[1] and len(set(of)) == 4


def test_a_digest_is_a_sum_over_each_leaf(agent):
    """Of its bits times odd numbers, where the layers of a leaf follow each other: old checkpoints have this number."""

    def checksum(leaf):
        bits = np.asarray(leaf, np.float32).view(np.uint32).reshape(-1)
        return np.sum(bits * (2 * np.arange(bits.size, dtype=np.uint32) + 1), dtype=np.uint32)

    assert lora.digest(share_params([agent.params])) == "".join(f"{checksum(x):08x}" for x in jax.tree.leaves(agent.params))


# --- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(lora_rank=-1), r"lora_rank=-1 is not allowed: lora_rank must be >= 0"),
        (dict(lora_alpha=8.0), r"lora_alpha=8.0 is not allowed: lora_alpha must be None where lora_rank=0"),
        (dict(lora_dropout=0.1), r"lora_dropout=0.1 is not allowed: lora_dropout must be 0 where lora_rank=0"),
        (dict(lora_targets="all"), r"lora_targets='all' is not allowed: .* where lora_rank=0"),
        (dict(lora_rank=4, lora_alpha=0.0), r"lora_alpha=0.0 is not allowed: lora_alpha must be > 0, or None$"),
        (dict(lora_rank=4, lora_dropout=1.0), r"lora_dropout=1.0 is not allowed: lora_dropout must be in \[0, 1\)"),
        (dict(lora_rank=4, lora_targets="q_proj,qkv"), r"lora_targets='q_proj,qkv' is not allowed: .* some of q_proj,k_proj,"),
        (dict(lora_rank=4, lora_targets="q_proj,q_proj"), r"each once"),
        (dict(lora_rank=4, lora_targets=""), r"lora_targets='' is not allowed"),
    ],
)
def test_bad_settings_say_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.of(**settings)


def test_targets_by_name():
    assert LoRA(lora_rank=1).modules == LoRA(lora_rank=1, lora_targets="all").modules == LORA_TARGETS
    assert LoRA(lora_rank=1, lora_targets="v_proj, q_proj").modules == ("q_proj", "v_proj")


def test_agents_that_start_from_different_weights_are_refused(agent, random_agent):
    """As agents of a team, and as a stack of full weights. Equal weights become one base."""
    other = random_agent(agent.config, agent.tokenizer, 1)
    with pytest.raises(ValueError, match=r"agents 0 and 1 of a stack start from different weights .*one base per stack"):
        make_team([agent, other], lora=True)
    _, params = make_team([agent, other])
    with pytest.raises(ValueError, match=r"agents 0 and 1 of a stack start from different weights"):
        lora.init_models(params, [(agent.config, 2)], BASE.lora, 0)
    shape = [(agent.config, 2)]
    stacked, shared = (
        lora.init_models(make_team([agent, agent], lora=one)[1], shape, BASE.lora, 0)[0] for one in (False, True)
    )
    assert_equal_trees(stacked, shared)


def test_a_model_with_adapters_of_the_settings_is_unchanged(agent):
    """Also with an alpha that is not exact in float32."""
    cfg, (_, params) = BASE.replace(lora_alpha=0.1), make_team([agent, agent], lora=True)
    model = lora.init_models(params, [(agent.config, 2)], cfg.lora, 0)
    assert lora.init_models(model, [(agent.config, 2)], cfg.lora, 1)[0] is model[0] and lora.describe(model[0])[1] == 0.1


def test_adapters_that_do_not_fit_the_settings_are_refused(agent):
    team, params = make_team([agent, agent], lora=True)
    with pytest.raises(ValueError, match=r"the agents of stack 0 share one base, and lora_rank=0 trains all weights"):
        start(team, params, BASE.replace(lora_rank=0, lora_targets=None))
    state = init_state(lora.init_models(params, [(agent.config, 2)], BASE.lora, 0), resolve(BASE))
    asked = BASE.replace(lora_rank=4, lora_targets="q_proj")
    with pytest.raises(ValueError, match=r"adapters of rank 2, alpha 2 for q_proj,.*ask for rank 4, alpha 4 for q_proj: set"):
        start(team, policies(state), asked)
    assert len(base_digests(state)) == 1


# --- meshes --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import jax, numpy as np
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.models.hub.agents import load_agent
from jmarl.team import make_team
from jmarl.learning.team_update import update_team
from jmarl.runs import start
from jmarl.runs.kinds import rollouts

agents = [load_agent(sys.argv[1])] * 4
cfg = TrainConfig.of(num_prompts=2, num_generations=4, max_new_tokens=6, learning_rate=1e-2, adam_eps=1e-4, lora_rank=2,
                     lora_dropout=0.1, algorithm="grpo", kl_coef=0.1, top_k=3, progress=False)
reward = make_reward(lambda *texts: [len(x[0]) - 0.5 * len(set(x[1])) for x in zip(*texts)], num_agents=4)
env = RewardEnvironment(reward, [default_formatter] * 4, None)

def differ(a, b):
    pairs = zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True)
    return max(float(np.abs(x - np.asarray(y)).max()) for x, y in pairs)

def run(mesh):
    of_mesh = cfg.replace(mesh=mesh)
    team, params = make_team(agents, lora=True)
    setup, state = start.start(team, params, of_mesh)
    kept = jax.device_get(state.stacks[0].base)
    for step in range(2):
        sample = rollouts.sampler_of(setup, state)
        played = rollouts.play_step(sample, setup, [{"prompt": "The answer is"}, {"prompt": "Two"}], env, step)
        state, _ = update_team(setup, state, rollouts.rollout_batches(setup, state, played))
    return jax.device_get(played.turns[0].completions[0]), state, differ(kept, state.stacks[0].base)

samples1, state1, _ = run("agent=1")
out = {}
for mesh in ("agent=2", "agent=2,data=2,model=2"):
    samples, state, changed = run(mesh)
    stack, trained = state.stacks[0], lambda s: [s.stacks[0].params, s.stacks[0].opt_state]
    _, judged = start.start(*make_team(agents, lora=True), cfg.replace(mesh=mesh, algorithm="ippo"))
    where = [[s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(of[0].base) for s in x.addressable_shards]
             for of in (judged.stacks, judged.critics)]
    first = {n: x.value[0] if isinstance(x.value, tuple) else x.value for n, x in stack.base["layers"].items()}
    shards = {n: x.addressable_shards[0].data.size / x.size for n, x in first.items()}
    out[mesh] = dict(tokens=bool((samples.tokens == samples1.tokens).all()),
                     logprobs=differ(samples.logprobs, samples1.logprobs),
                     trained=differ(trained(state), trained(state1)), base=changed, shards=shards,
                     one=where[0] == where[1],
                     adapter=stack.params["layers"]["q_proj"]["a"].addressable_shards[0].data.shape[0])
print(json.dumps(out))
"""


@pytest.mark.slow
def test_a_mesh_equals_one_device(tiny_dir):
    """Four agents, two updates with dropout and a KL term, on two devices, and on eight that also split base and batch. Every
    device holds the base once, or a part of it, for agents and critics."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tiny_dir("qwen2"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    for mesh, share in (("agent=2", 1), ("agent=2,data=2,model=2", 4)):
        of = facts[mesh]
        assert of["tokens"] and of["logprobs"] < 1e-5 and of["trained"] < 1e-5 and of["base"] == 0, (mesh, of)
        assert of["adapter"] == 2 and of["shards"]["qkv"] == of["shards"]["down"] == 1 / share and of["shards"]["mlp_norm"] == 1
        assert of["one"]
