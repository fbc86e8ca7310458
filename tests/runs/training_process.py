"""A whole run in a process of its own, which tests stop, kill and start again:
`python -m tests.runs.training_process JSON [CALL]`.

The JSON object has `kind` (a key of KINDS) and fields of `TrainConfig`. Asked for rewards it prints a line, so
that a test knows how far it is; in the CALL-th it waits for a line of input, and `exit` ends it there. It ends with the exit
code of a command.
"""

from __future__ import annotations

import json
import os
import sys

import jax
import numpy as np

from experiments.report import exit_code
from experiments.tiny import tokenizer
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import Agent
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.house import HOUSE

WORDS = ("red", "green", "blue", "one", "two", "six")
ITEMS = [{"prompt": f"{a} {b}"} for a in WORDS[:3] for b in WORDS[3:]]
KINDS = {  # what a kind of run sets, beside BASE
    "plain": {},
    "adapters": {"lora_rank": 2, "lora_dropout": 0.1},
    "turns": {"num_turns": 2, "num_generations": 2, "history": "append"},
    "critics": {"algorithm": "ippo", "num_epochs": 2, "critic_learning_rate": 1e-2},
    "central critic": {"algorithm": "maac"},
    "rounds": {"algorithm": "madpo_iter", "round_updates": 3, "replay": "all", "comparator": "history", "temperature": 2.0},
    "learned reward": {"algorithm": "marlhf_iter", "round_updates": 3, "reward_updates": 3, "temperature": 2.0},
    "early rows": {"async_steps": 1, "max_new_tokens": 16},
    "seeds": {},
}
BASE = HOUSE | dict(num_updates=8, eval_generations=HOUSE["num_generations"], mesh="agent=1", progress=True)
calls = 0


def tiny_agents(count=2, seed=0, width=32):
    """Agents with different random weights, made by one program, not one per operation."""
    words = tokenizer(WORDS, spaced=True)
    model = ModelConfig("llama", len(words), width, 2 * width, 2, 4, 4, width // 4, 256)
    init = jax.jit(init_params, static_argnums=0)
    keys = jax.random.split(jax.random.key(seed), count)
    return [Agent(f"tiny-{i}", model, jax.device_get(init(model, key)), words) for i, key in enumerate(keys)]


def first_words(a, b, batch_items, rng):
    """Of two agents: the words that both wrote, and some noise of the step."""
    global calls
    calls += 1
    print(f"rewarded {calls}", flush=True)
    if sys.argv[2:] == [str(calls)] and sys.stdin.readline().strip() == "exit":
        os._exit(3)
    return [len(set(x.split()) & set(y.split())) + rng.random() for x, y in zip(a, b, strict=True)]


def transition(agent_completions, prompt, **_):
    return [f"{prompt} {text}" for text in agent_completions]


def tiny_team(count=2, seed=0, lora=False):
    return make_team(tiny_agents(1) * count if lora else tiny_agents(count, seed), lora=lora)


def main() -> int:
    fields = json.loads(sys.argv[1])
    kind = fields.pop("kind", "plain")
    cfg = TrainConfig.of(**{**BASE, **KINDS[kind], **fields})
    team, params = tiny_team(lora=cfg.lora.lora_rank > 0)
    env = RewardEnvironment(
        make_reward(first_words, num_agents=2), [default_formatter] * 2, transition if cfg.episodes.num_turns > 1 else None
    )
    if kind == "seeds":
        results = train_seeds(team, env, ITEMS, cfg, params=params, seeds=(0, 1), eval_items=ITEMS[:2])
    else:
        results = [train(team, env, ITEMS, cfg, params=params, eval_items=ITEMS[:2])]
    print(json.dumps({"updates": int(results[0].state.step), "rewards": np.sum(results[0].rewards)}), flush=True)
    return exit_code(cfg, *results)


if __name__ == "__main__":
    sys.exit(main())
