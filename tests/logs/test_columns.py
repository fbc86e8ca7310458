"""Every column of a run's log is in the table of columns of experiments/README.md, and every column there is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.games.grid import GridPlanning
from jmarl.envs.rewards import make_reward
from jmarl.preferences.pairs import load_pairs, load_trajectories
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import fit, train
from jmarl.team import make_team
from tests.house import HOUSE
from tests.league.test_talk import Whisper

README = Path(__file__).resolve().parents[2] / "experiments" / "README.md"
ITEMS = [{"prompt": text} for text in ("The answer", "apples", "question", "pears")]
RUNS = {
    "grpo": dict(
        algorithm="grpo", num_epochs=2, target_kl=1.0, kl_coef=0.1, importance_cap=2.0, dynamic_sampling=1, eval_every=1,
        update_order="alternating", num_updates=2,
    ),
    "ippo": dict(algorithm="ippo", num_epochs=2, value_clip=0.2),
    "ippo with a value head and early rows": dict(
        algorithm="ippo", separate_critic=False, num_epochs=2, value_clip=0.2, async_steps=1, num_updates=2
    ),
    "maac": dict(algorithm="maac"),
    "madpo_iter": dict(algorithm="madpo_iter", comparator="initial"),
    "marlhf": dict(algorithm="marlhf"),
}  # fmt: skip


class Unfinished(GridPlanning):
    """Its episodes only end because they are as long as they may be."""

    def step(self, state, messages, rng):
        step = super().step(state, messages, rng)
        return step._replace(truncated=step.done)


def described() -> list[str]:
    """Return the names in the table as patterns."""
    table = README.read_text().split("<!-- columns -->")[1].split("<!-- end of columns -->")[0]
    names = [name for line in table.strip().splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    patterns = [re.escape(name).replace("agent_N", r"agent_\d+").replace("NAME", "[^/]+").replace("…", ".+") for name in names]
    assert "step" in patterns and len(patterns) > 50
    return patterns


def columns(directory: Path) -> set[str]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {re.sub(r"^turn_\d+/", "", name) for line in lines for name in json.loads(line)}


def written(directory: Path, short, long) -> dict[str, set[str]]:
    """Return the columns of each run, of agents with a short context and with a long one."""
    columns_of, rng = {}, np.random.default_rng(0)
    base, writing = dict(num_updates=1, progress=False), HOUSE | dict(num_updates=1, eval_generations=3)

    def of(name: str, run, *arguments, agents=(short, short), **changes):
        cfg = TrainConfig.of(**base | changes | dict(output_dir=str(directory / name)))
        team, params = make_team(agents)
        run(team, params, *arguments, cfg)
        columns_of[name] = columns(directory / name)

    def random(a, b):
        return rng.normal(size=len(a)).tolist()

    def evaluated(team, params, reward, items, cfg):
        train(team, reward, items, cfg, params=params, eval_items=items[:2])

    for name, changes in RUNS.items():
        of(name, evaluated, make_reward(random, num_agents=2), ITEMS, **writing | changes)

    def own(a, b):
        return [[x, -x] for x in rng.normal(size=len(a)).tolist()]

    of(
        "league",
        evaluated,
        make_reward(own, num_agents=2),
        ITEMS,
        **writing | dict(num_updates=3),  # two slots and a stranger, of which each update meets one
        algorithm="magrpo",
        snapshots=2,
        snapshot_every=1,
        strangers=("builtins:str",),
        opponents="winrate",
        opponent_share=1.0,
    )

    def members(team, params, reward, items, cfg):
        train_seeds(team, reward, items, cfg, params=params, seeds=[0, 1], eval_items=items[:2])

    population = dict(num_updates=2, eval_every=1, population=dict(size=2, every=1))
    of("population", members, make_reward(random, num_agents=2), ITEMS, **writing | population, algorithm="magrpo")

    def failing(a, b):
        raise OSError("no service")

    with pytest.warns(UserWarning, match="no service"):
        mistaken = make_reward([random, failing], num_agents=2, on_error=0.0, max_error_share=1)
        of("mistakes", evaluated, mistaken, ITEMS, **writing, algorithm="magrpo", long_prompts="truncate_left")
    env = Unfinished(max_turns=2)
    turns = writing | dict(algorithm="magrpo", num_turns=2, branching="chain")
    with pytest.warns(UserWarning, match="were truncated"):
        of("turns", evaluated, env, env.tasks("train", 4), agents=(long, long), **turns)
    of("talk", evaluated, Whisper(), ITEMS, agents=(long, long), **turns, talk_every=1, talk_swap=True)

    def given(team, params, data, cfg):
        fit(team, data, cfg, params=params, eval_data=data)

    pairs = load_pairs([{"prompt": "apples", "chosen": ["a", "b"], "rejected": ["b", "a"]}] * 4, num_agents=2)
    of("dpo", given, pairs, algorithm="dpo")
    texts = load_trajectories([{"prompt": "apples", "completion": "a"}] * 4)
    of("sft", given, texts, agents=(short,), algorithm="sft", world_model_weight=0.5)
    return columns_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory, random_agent, tiny_config, tiny_tokenizer):
    agents = [random_agent(cfg, tiny_tokenizer, 0) for cfg in (tiny_config(), tiny_config(max_positions=512))]
    return written(tmp_path_factory.mktemp("runs"), *agents)


@pytest.mark.long
def test_every_column_is_described(runs):
    for name, written_columns in runs.items():
        unknown = [column for column in written_columns if not any(re.fullmatch(p, column) for p in described())]
        assert not unknown, (name, sorted(unknown))


@pytest.mark.long
def test_every_described_column_is_written(runs):
    written_columns = set.union(*runs.values())
    patterns = [x for x in described() if not x.startswith("exchange/")]  # of several processes: tests/processes
    missing = [pattern for pattern in patterns if not any(re.fullmatch(pattern, column) for column in written_columns)]
    assert not missing, sorted(missing)
