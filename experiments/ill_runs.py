"""Make twelve deliberately ill runs and five healthy ones, and print what `jmarl doctor` says of each.

Claim: each ill run is told by its rule, and none fires on a healthy one. The thresholds of jmarl/report/rules.yaml rest on it.
Command: python -m experiments.ill_runs               (flags: --help; --names: some of the runs)
Tasks: two agents read a letter. Most rewards are for writing it; Kuhn poker is a game whose rewards add up to 0.
Model: two layers of width 32, a token per letter, random weights; 8 prompts with 8 completions of a few tokens.
Expected: a table in which the rule of each ill run is among its sentences, and "healthy" alone for the five healthy runs.
Time: two minutes on two quiet cores.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from experiments.tables import markdown_table
from experiments.tiny import random_agents, tokenizer
from jmarl.config import TrainConfig, check
from jmarl.envs.games import kuhn
from jmarl.envs.rewards import make_reward
from jmarl.report import diagnose_runs
from jmarl.runs.train import train
from jmarl.team import make_team

LETTERS = "abcdefgh"
Texts = Sequence[str]


def copied(first: Texts, second: Texts, letter: Texts) -> list[float]:
    """The share of agents whose text begins with the letter."""
    return [(a.startswith(x) + b.startswith(x)) / 2 for a, b, x in zip(first, second, letter, strict=True)]


def read_alone(first: Texts, second: Texts, letter: Texts) -> list[float]:
    """Whether the first text begins with the letter; nobody reads the second."""
    return [float(a.startswith(x)) for a, x in zip(first, letter, strict=True)]


def emitted(first: Texts, second: Texts) -> list[float]:
    """The share of agents whose text begins with an a."""
    return [(a.startswith("a") + b.startswith("a")) / 2 for a, b in zip(first, second, strict=True)]


def tripled(first: Texts, second: Texts, letter: Texts) -> list[float]:
    """The share of agents whose whole text is the letter three times."""
    return [((a == 3 * x) + (b == 3 * x)) / 2 for a, b, x in zip(first, second, letter, strict=True)]


def agreed(first: Texts, second: Texts) -> list[float]:
    """Whether both texts begin with the same letter."""
    return [float(a[:1] == b[:1] != "") for a, b in zip(first, second, strict=True)]


def brief(first: Texts, second: Texts) -> list[float]:
    """The share of texts of one letter."""
    return [((len(a) == 1) + (len(b) == 1)) / 2 for a, b in zip(first, second, strict=True)]


def constant(first: Texts, second: Texts) -> list[float]:
    return [0.5] * len(first)


def long(first: Texts, second: Texts) -> list[float]:
    """The number of letters, of 24."""
    return [len(a + b) / 24 for a, b in zip(first, second, strict=True)]


def short(first: Texts, second: Texts) -> list[float]:
    return [-0.8 * x for x in long(first, second)]


def settled(first: Texts, second: Texts, letter: Texts) -> list[float]:
    """1 for the letters a to c, 0 for d to f, whatever is written; else as `copied`."""
    return [{**dict.fromkeys("abc", 1.0), **dict.fromkeys("def", 0.0)}.get(x, own)
            for x, own in zip(letter, copied(first, second, letter), strict=True)]  # fmt: skip


def slow(first: Texts, second: Texts, letter: Texts) -> list[float]:
    time.sleep(0.3)
    return copied(first, second, letter)


class ToyRun(NamedTuple):
    """A run: the rule that tells it (healthy: none), its reward functions, and what differs from `SETTINGS`."""

    rule: str
    rewards: tuple[Callable[..., list[float]], ...]
    settings: dict[str, Any] = {}
    letters: str = LETTERS
    held_out: str = ""


SETTINGS: dict[str, Any] = dict(
    algorithm="magrpo", num_updates=60, num_prompts=8, num_generations=8, max_new_tokens=3, learning_rate=5e-3,
    per_agent="vmap", mesh="agent=1", progress=False, save_every=0, save_models=False, tensorboard=False,
)  # fmt: skip
SLOWER: dict[str, Any] = dict(num_updates=200, learning_rate=3e-3)  # what copying needs
RUNS = {
    "rate too high": ToyRun("entropy_collapsed", (copied,), dict(learning_rate=0.3)),
    "rate too low": ToyRun("no_progress", (copied,), dict(learning_rate=1e-7)),
    "constant reward": ToyRun("no_variance", (constant,), dict(num_updates=20)),
    "too few tokens": ToyRun("cut", (tripled, copied), dict(max_new_tokens=2, num_updates=20)),
    "reward of length": ToyRun("length_learned", (long,), dict(max_new_tokens=12)),
    "opposed parts": ToyRun("parts_opposed", (long, short), dict(max_new_tokens=12)),
    "one learning rate of 0": ToyRun("idle_agent", (copied,), SLOWER | dict(learning_rate=(3e-3, 1e-8))),
    "agent that nobody reads": ToyRun("no_influence", (read_alone,)),
    "tiny clip": ToyRun("clipped", (copied,), dict(algorithm="grpo", num_epochs=8, clip_eps_low=1e-3, clip_eps_high=1e-3)),
    "other held-out tasks": ToyRun("held_out_behind", (copied,), SLOWER, "abcd", "efgh"),
    "tasks without signal": ToyRun("tasks_settled", (settled,)),
    "slow reward": ToyRun("time_lost", (slow,), dict(num_updates=16)),
    "emit": ToyRun("healthy", (emitted,)),
    "copy": ToyRun("healthy", (copied,), SLOWER | dict(entropy_coef=0.02), LETTERS, LETTERS),
    "agree": ToyRun("healthy", (agreed,)),
    "emit briefly": ToyRun("healthy", (emitted, brief), {}, LETTERS, LETTERS),
    "kuhn": ToyRun("healthy", (), dict(algorithm="rae", num_prompts=6, num_generations=16, max_new_tokens=1, num_turns=3,
                                       branching="chain", entropy_coef=0.1, learning_rate=1e-3, num_updates=60)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class IllRunsConfig:
    """Which runs are made."""

    names: tuple[str, ...] = tuple(RUNS)
    """Names of runs."""
    seed: int = 0
    """Seed of weights and training."""
    output_dir: Path = Path("runs/ill")
    """Directory of the runs."""

    def __post_init__(self) -> None:
        check("names", self.names, set(self.names) <= RUNS.keys(), f"some of {', '.join(RUNS)}")


def make_run(name: str, directory: Path, seed: int = 0) -> None:
    """Train a team into a directory."""
    run = RUNS[name]
    cfg = TrainConfig.of(**SETTINGS | run.settings, output_dir=str(directory), seed=seed)
    pieces = ("|", *LETTERS) if run.rewards else (*kuhn.CARDS, "check", "bet", "fold", "call")
    team, params = make_team(random_agents("agent", tokenizer(pieces), 2, seed, width=32))
    if not run.rewards:
        env = kuhn.KuhnPoker(brief=True)
        train(team, env, env.tasks(), cfg, params=params)
        return
    items, held_out = ([{"prompt": f"|{x}|", "letter": x} for x in letters] for letters in (run.letters, run.held_out))
    reward = make_reward([*run.rewards], num_agents=2)
    train(team, reward, items * (8 // len(items)), cfg, params=params, eval_items=held_out)


def main(cfg: IllRunsConfig) -> None:
    table = []
    for name in cfg.names:
        directory, start = cfg.output_dir / name.replace(" ", "_"), time.monotonic()
        make_run(name, directory, cfg.seed)
        seconds = time.monotonic() - start
        [findings] = diagnose_runs([directory]).values()
        print(f"{name} ({seconds:.0f} s)", *(f"  {x.severity:.2f} {x.rule}: {x.text}" for x in findings), sep="\n", flush=True)
        rules = [finding.rule for finding in findings]
        is_right = rules == ["healthy"] if RUNS[name].rule == "healthy" else RUNS[name].rule in rules
        table.append([name, RUNS[name].rule, ", ".join(rules), "yes" if is_right else "NO", f"{seconds:.0f}"])
    print(markdown_table(["run", "its rule", "rules that fire, the most severe first", "told", "seconds"], table))


if __name__ == "__main__":
    main(tyro.cli(IllRunsConfig))
