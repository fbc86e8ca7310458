"""Several seeds of a LoRA team in one program against one seed: the time of a step.

Command: python -m experiments.bench_seeds                                  (flags: --help)
         python -m experiments.bench_seeds --model smollm2-135m-instruct --max-new-tokens 32 --updates 4
Trains a team of two by `train_seeds`, on one seed and on `--seeds` of them, by turns, all in this process, and prints one JSON
object: parameters of a model; the median seconds of a warm step (from the rewards of one update to those of the next, between
which lie an update and a sampling) of each, and their ratio; and the seconds of the first run of each with its compiling, and
theirs. Completions have their full length, rewards are random.
The model is by default a small Llama with random weights; its size is set by the flags.
"""

from __future__ import annotations

import dataclasses
import json
import time

import jax
import numpy as np
import tyro

from experiments.story_length import TOPICS
from jmarl.config import TrainConfig, check
from jmarl.envs.rewards import make_reward
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.team import make_team
from jmarl.training.seeds import train_seeds


@dataclasses.dataclass(frozen=True)
class Bench:
    """One seed and several; prints one JSON object."""

    model: str = ""
    """Model of both agents: a name, a directory, a .gguf file or a hub id; empty: a small one with random weights."""
    layers: int = 4
    """Of the small model, and so is the next."""
    width: int = 128
    """Hidden size; the feed-forward layer is four times as wide."""
    seeds: int = 4
    algorithm: str = "magrpo"
    lora_rank: int = 8
    prompts: int = 1
    group: int = 4
    max_new_tokens: int = 32
    """Length of all completions, forced."""
    updates: int = 40
    """Of each run; the first two are not counted."""
    repeats: int = 3
    """Runs of one seed and of several, by turns."""
    per_agent: str = "vmap"
    mesh: str = "auto"

    def __post_init__(self):
        check("updates", self.updates, self.updates > 3, "> 3: the first two are not counted")
        check("width", self.width, self.width % 32 == 0, "a multiple of 32")


def small_model(layers: int, width: int) -> Agent:
    """A Llama with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0} | {letter: i for i, letter in enumerate(letters, 1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    cfg = ModelConfig(
        family="llama", vocab_size=len(letters) + 1, hidden_size=width, intermediate_size=4 * width, num_layers=layers,
        num_heads=width // 32, num_kv_heads=width // 32, head_dim=32, max_positions=512, qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    params = jax.device_get(decoder.init_params(cfg, jax.random.key(0)))
    return Agent("random", cfg, params, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))


def seconds(agent: Agent, cfg: Bench, seeds: int) -> tuple[list[float], float]:
    """Of each warm step, and of the run."""
    learning = TrainConfig.of(
        algorithm=cfg.algorithm, num_updates=cfg.updates, num_prompts=cfg.prompts, num_generations=cfg.group,
        max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.max_new_tokens, lora_rank=cfg.lora_rank, learning_rate=1e-4,
        per_agent=cfg.per_agent, mesh=cfg.mesh, progress=False,
    )  # fmt: skip
    rng, times = np.random.default_rng(0), []

    def random(*texts):
        times.append(time.perf_counter())
        return rng.normal(size=len(texts[0])).tolist()

    team, params = make_team([agent, agent], lora=True)
    items = [{"prompt": f"{topic:.24}".ljust(24, ".")} for topic in TOPICS]
    began = time.perf_counter()
    results = train_seeds(team, make_reward(random, num_agents=2), items, learning, params=params, seeds=range(seeds))
    jax.block_until_ready(results[-1].state)
    return np.diff(times[::seeds])[2:].tolist(), time.perf_counter() - began


def main() -> None:
    cfg = tyro.cli(Bench)
    agent = load_agent(cfg.model) if cfg.model else small_model(cfg.layers, cfg.width)
    found = [[seconds(agent, cfg, seeds) for seeds in (1, cfg.seeds)] for _ in range(cfg.repeats)]
    one, several = (float(np.median([s for times, _ in of for s in times])) for of in zip(*found, strict=True))
    (_, run), (_, runs) = found[0]
    figures = {"parameters": sum(x.size for x in jax.tree.leaves(agent.params))}
    figures |= {"one_seed_step_s": one, "several_seeds_step_s": several, "step_ratio": several / one}
    figures |= {"one_seed_run_s": run, "several_seeds_run_s": runs, "run_ratio": runs / run}
    print(json.dumps(dataclasses.asdict(cfg) | figures | {"device": jax.devices()[0].device_kind}))


if __name__ == "__main__":
    main()
