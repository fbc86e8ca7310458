"""What the examples share: the flag --quick, a policy, settings, and the lines before and after training. Not an example."""

from __future__ import annotations

import argparse
from typing import Any

from experiments import tiny
from jmarl.models.config import ModelConfig
from jmarl.models.hub.agents import Agent
from jmarl.mrlm.config import ExperimentConfig, TrainingConfig
from jmarl.mrlm.core import LLMEnvironment

MODEL = "smollm2-135m-instruct"
DIGITS, SIGNS = tuple("0123456789"), tuple("+-*/=<>().,:\n ")
WORDS = ("The answer is", "What is", "def ", "return ", "for", "in", "debate", "motion", "evidence", "because", "<answer>",
         "</answer>", '<tool_call>{"name": "', '", "parameters": {', "}}</tool_call>", "calculator", "expression")  # fmt: skip


def quick_flag(text: str | None) -> bool:
    """Return whether the command line has --quick. text: the docstring of the example, for --help."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model and two updates")
    return parser.parse_args().quick


def tiny_agent(seed: int = 0) -> Agent:
    """Return a model of random weights that reads and writes digits, signs and a few words."""
    words = tiny.tokenizer((*DIGITS, *SIGNS, *WORDS))
    model = ModelConfig("llama", len(words), 32, 64, 1, 4, 4, 8, 2048)
    return tiny.random_agents("tiny", words, 1, seed, model=model)[0]


def policy(quick: bool, max_new_tokens: int = 128, **options: Any) -> LLMEnvironment:
    """Return the policy of an example: SmolLM2, or a tiny model. options: of `LLMEnvironment`."""
    generation = {"max_new_tokens": 8 if quick else max_new_tokens}
    return LLMEnvironment(tiny_agent() if quick else MODEL, generation_config=generation, **options)


def config(quick: bool, algorithm: str, section: Any, updates: int, batch_size: int, **settings: Any) -> ExperimentConfig:
    """Return the settings of an example. section: of the algorithm. settings: others of `TrainConfig`."""
    training = TrainingConfig(
        algorithm=algorithm,
        num_epochs=2 if quick else updates,
        batch_size=2 if quick else batch_size,
        learning_rate=1e-3 if quick else 2e-6,
        eval_episodes=4 if quick else 64,
    )
    return ExperimentConfig(training, **{algorithm: section}, progress=not quick, **settings)


def train_and_show(name: str, trainer: Any) -> None:
    """Train as the settings say, and print what `trainer.evaluate` returns before and after."""
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    shown = [column for column in after if column in ("eval/reward", "eval/loss", "eval/accuracy")]
    for column in [*shown, *(c for c in after if c.endswith("solved"))]:
        print(f"{name}: {column.removeprefix('eval/')} {before[column]:.3f} -> {after[column]:.3f}", flush=True)
