"""A whole run in a process of its own, which tests stop, kill and start again:
`python -m tests.runs.training_process JSON [CALL SECONDS]`.

The JSON object has `kind` (a key of KINDS) and fields of `TrainConfig`. Asked for rewards it prints a line, so
that a test knows how far it is; in the CALL-th it sleeps for so many SECONDS. It ends with the exit code of a command.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from experiments.report import exit_code
from experiments.tiny import random_agents, tokenizer
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team

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
    "early rows": {"async_steps": 1, "max_new_tokens": 24},
    "seeds": {},
}
BASE = dict(num_updates=8, num_prompts=2, num_generations=4, max_new_tokens=3, learning_rate=1e-2, mesh="agent=1")
calls = 0


def reward(a, b, batch_items, rng):
    """Of two agents: the words that both wrote, and some noise of the step."""
    global calls
    calls += 1
    print(f"rewarded {calls}", flush=True)
    if len(sys.argv) > 2 and calls == int(sys.argv[2]):  # it hangs
        time.sleep(float(sys.argv[3]))
    return [len(set(x.split()) & set(y.split())) + rng.random() for x, y in zip(a, b, strict=True)]


def transition(agent_completions, prompt, **_):
    return [f"{prompt} {text}" for text in agent_completions]


def main() -> int:
    fields = json.loads(sys.argv[1])
    kind = fields.pop("kind", "plain")
    cfg = TrainConfig.of(**{**BASE, **KINDS[kind], **fields})
    agents = random_agents("tiny", tokenizer(WORDS, spaced=True), 2, seed=0, width=32)
    agents = [agents[0]] * 2 if cfg.lora.lora_rank else agents
    team, params = make_team(agents, lora=cfg.lora.lora_rank > 0)
    env = RewardEnvironment(
        make_reward(reward, num_agents=2), [default_formatter] * 2, transition if cfg.episodes.num_turns > 1 else None
    )
    if kind == "seeds":
        results = train_seeds(team, env, ITEMS, cfg, params=params, seeds=(0, 1), eval_items=ITEMS[:2])
    else:
        results = [train(team, env, ITEMS, cfg, params=params, eval_items=ITEMS[:2])]
    print(json.dumps({"updates": int(results[0].state.step), "rewards": np.sum(results[0].rewards)}), flush=True)
    return exit_code(cfg, *results)


if __name__ == "__main__":
    sys.exit(main())
