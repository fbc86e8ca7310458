"""Time a step of several seeds of a LoRA team in one program against a step of one seed.

Claim: several seeds in one program take less time than one run after the other.
Command: python -m experiments.bench.seeds                                  (flags: --help)
         python -m experiments.bench.seeds --model smollm2-135m-instruct --max-new-tokens 32 --updates 4
Trains a team of two with `train_seeds`, in turn on one seed and on `--seeds` of them, in this process. Prints one JSON object:
the parameters of a model; for one and for several seeds, the median seconds of a warm step (an update and the next sampling,
from rewards to rewards) and the seconds of the first run with compiling; and their ratios. Completions have their full length,
rewards are random. The default model is a small Llama with random weights, whose size is set by flags.
Expected: on two cores, four seeds take 2.6 to 3.7 times the step of one, and 1.0 to 2.2 times its run with compiling; see
    experiments/README.md. Time: about a minute (estimated); more with SmolLM2.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Literal

import jax
import numpy as np
import tyro

from experiments.start import TrainingBenchOptions, train_config
from experiments.story_length import TOPICS
from experiments.tiny import random_agents, tokenizer
from jmarl.config import Count, check
from jmarl.envs.rewards import make_reward
from jmarl.models.config import ModelConfig
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.runs.seeds import train_seeds
from jmarl.team import make_team


@dataclasses.dataclass(frozen=True)
class Bench(TrainingBenchOptions):
    """One seed and several; prints one JSON object."""

    model: str = ""
    """Model of both agents: a name, a directory, a .gguf file or a Hub id; empty: a small one with random weights."""
    layers: Count = 4
    """Layers of the small model."""
    width: Count = 128
    """Hidden size of the small model; its feed-forward layer is four times as wide."""
    seeds: Count = 4
    """Number of seeds in one program."""
    algorithm: str = "magrpo"
    """Row of the algorithm table."""
    lora_rank: Count = 8
    """Rank of the adapters."""
    prompts: Count = 1
    """Prompts per update."""
    max_new_tokens: Count = 32
    updates: int = 40
    """Updates per run; the first two are not counted."""
    repeats: Count = 3
    """Runs of one seed and of several, in turn."""
    per_agent: Literal["map", "vmap"] = "vmap"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("updates", self.updates, self.updates > 3, "> 3, because the first two are not counted")
        check("width", self.width, self.width % 32 == 0, "a multiple of 32")


def small_model(layers: int, width: int) -> Agent:
    """Return a Llama with random weights and one token per character."""
    characters = tokenizer(tuple(map(chr, range(32, 288))))
    model = ModelConfig("llama", len(characters), width, 4 * width, layers, width // 32, width // 32, 32, 512)
    (agent,) = random_agents("random", characters, 1, seed=0, model=model)
    return agent


def time_run(agent: Agent, options: Bench, seeds: int) -> tuple[list[float], float]:
    """Train, and return the seconds of each warm step and of the run."""
    cfg = train_config(
        options, num_updates=options.updates, num_prompts=options.prompts, num_generations=options.group,
        min_new_tokens=options.max_new_tokens, learning_rate=1e-4, progress=False,
    )  # fmt: skip
    rng, times = np.random.default_rng(0), []

    def random_reward(*texts: list[str]) -> list[float]:
        times.append(time.perf_counter())
        return rng.normal(size=len(texts[0])).tolist()

    team, params = make_team([agent, agent], lora=True)
    items = [{"prompt": f"{topic:.24}".ljust(24, ".")} for topic in TOPICS]
    reward, start = make_reward(random_reward, num_agents=2), time.perf_counter()
    results = train_seeds(team, reward, items, cfg, params=params, seeds=range(seeds))
    jax.block_until_ready(results[-1].state)
    return np.diff(times[::seeds])[2:].tolist(), time.perf_counter() - start


def main() -> None:
    options = tyro.cli(Bench)
    agent = load_agent(options.model) if options.model else small_model(options.layers, options.width)
    runs = [[time_run(agent, options, seeds) for seeds in (1, options.seeds)] for _ in range(options.repeats)]
    one, several = (float(np.median([s for steps, _ in column for s in steps])) for column in zip(*runs, strict=True))
    (_, run_one), (_, run_several) = runs[0]
    figures = {
        "parameters": sum(x.size for x in jax.tree.leaves(agent.params)),
        "one_seed_step_s": one, "several_seeds_step_s": several, "step_ratio": several / one,
        "one_seed_run_s": run_one, "several_seeds_run_s": run_several, "run_ratio": run_several / run_one,
        "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    print(json.dumps(dataclasses.asdict(options) | figures))


if __name__ == "__main__":
    main()
