"""The pages make the updates of the library, on the library's pure functions alone.

Each page runs as a command, with three updates. Learning rates are such that these move parameters by a hundred times the
tolerance.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import experiments.one_page
import jmarl
from experiments import tiny
from experiments.pages import adapters, common, critic, magrpo, pairs, turns
from experiments.tiny import STOP, random_agents, tokenizer

PAGES = (magrpo, critic, turns, pairs, adapters)
RATE = 3e-4


def run_page(page: Any, monkeypatch, capsys, *flags: str) -> list[Any]:
    """Run the command of a page, and return what its `train` yields. It prints a line before and after each update."""
    updates, train = [], page.train

    def kept(*arguments):
        for update in train(*arguments):
            updates.append(jax.device_get(update))  # before the next update consumes the state
            yield update

    monkeypatch.setattr(page, "train", kept)
    monkeypatch.setattr(sys, "argv", [page.__name__, "--updates", "3", "--rate", str(RATE), *flags])
    capsys.readouterr()
    page.main()
    *lines, held_out = capsys.readouterr().out.splitlines()
    lines = [line.split() for line in lines if line.startswith("update ")]
    assert [words[1] for words in lines] == ["0", "1", "2", "3"] and all({*words[-1]} == {"#"} for words in lines)
    before, after = (float(part.split()[-1]) for part in held_out.split(","))
    assert held_out.startswith("held-out re") and 0 < before < 1 and 0 < after < 1
    return updates


def settings(algorithm: str, **others: Any) -> jmarl.TrainConfig:
    """Return settings of `jmarl.train` that are those of a page."""
    return jmarl.TrainConfig.of(algorithm=algorithm, num_updates=3, learning_rate=RATE, progress=False, **others)


def sampled(page: Any) -> dict[str, int]:
    return {"num_prompts": page.P, "num_generations": page.G, "max_new_tokens": page.T}


def team_of(page: Any) -> jmarl.Team:
    return jmarl.Team.of(random_agents("random", tokenizer(page.WORDS, spaced=True), page.A, 0))


def assert_equal(params: Any, others: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), params, others)


def written(text: str) -> str:
    """Return what a completion says without its end token."""
    return text.replace(STOP, "").rstrip()


@pytest.mark.long
def test_the_first_updates_of_magrpo_are_those_of_train(monkeypatch, capsys):
    """Texts with their special tokens stand for tokens one to one, because a space parts the words."""
    words, played = tokenizer(magrpo.WORDS, spaced=True), []

    def reward(setups, stories):
        played.append((setups[:: magrpo.G], stories[: magrpo.G]))  # joint mode cross: all pairs
        return [magrpo.reward(written(a), written(b)) for a, b in zip(setups, stories, strict=True)]

    items = [{"prompt": f"Tell a story about {topic}."} for topic in magrpo.TOPICS]
    sizes = {"num_generations": magrpo.G, "max_new_tokens": magrpo.T, "skip_special_tokens": False}
    result = jmarl.train(team_of(magrpo), reward, items, settings("magrpo", joint_mode="cross", **sizes))
    monkeypatch.setattr(magrpo, "HELD_OUT", magrpo.TOPICS[:1])  # of the shape of an update: one program
    updates = run_page(magrpo, monkeypatch, capsys)
    for texts, expected, (_, completions, rewards) in zip(played, result.rewards, updates, strict=True):
        for agent in range(magrpo.A):
            tokens, mask = completions.tokens[agent, 0], completions.action_mask[agent, 0]
            assert [row[chosen].tolist() for row, chosen in zip(tokens, mask, strict=True)] == words(texts[agent])["input_ids"]
        assert abs(rewards.mean() - expected) < 1e-6
    assert_equal(updates[-1][0].params, result.state.stacks[0].params)


@pytest.mark.long
def test_the_first_updates_of_a_critic_are_those_of_train(monkeypatch, capsys):
    def reward(setups, stories, factor):
        return [critic.reward(*texts) for texts in zip(setups, stories, factor, strict=True)]

    items = [{"prompt": critic.prompt(task), "factor": critic.FACTORS[task[1]]} for task in critic.TASKS]
    result = jmarl.train(team_of(critic), reward, items, settings("maac", **sampled(critic)))
    updates = run_page(critic, monkeypatch, capsys)
    np.testing.assert_allclose([rewards.mean() for *_, rewards, _ in updates], result.rewards, atol=1e-6)
    agents, critic_of_team, *_ = updates[-1]
    assert_equal(agents.params, result.state.stacks[0].params)
    assert_equal(critic_of_team.params, jax.tree.map(lambda x: x[0], result.state.critics[0].params))


@pytest.mark.long
def test_the_first_updates_of_turns_are_those_of_train(monkeypatch, capsys):
    env = turns.Boxes()
    cfg = settings("magrpo", num_turns=turns.TURNS, branching="chain", history="append", **sampled(turns))
    result = jmarl.train(team_of(turns), env, env.tasks(), cfg)
    updates = run_page(turns, monkeypatch, capsys)
    assert_equal(updates[-1][0].params, result.state.stacks[0].params)


@pytest.mark.long
def test_the_first_updates_of_pairs_are_those_of_fit(monkeypatch, capsys):
    data, encode = [], pairs.encode

    def kept(run, params, rows):
        data.append(rows)
        return encode(run, params, rows)

    monkeypatch.setattr(pairs, "encode", kept)
    updates = run_page(pairs, monkeypatch, capsys, "--draws", "2")
    result = jmarl.fit(team_of(pairs), jmarl.load_pairs(data[0], num_agents=pairs.A), settings("madpo", batch_size=pairs.P))
    assert_equal(updates[-1][0].params, result.state.stacks[0].params)


@pytest.mark.long
def test_the_first_updates_of_adapters_are_those_of_train(monkeypatch, capsys):
    def reward(*texts):
        return [adapters.reward(joint) for joint in zip(*texts, strict=True)]

    items = [{"prompt": f"Tell a story about {topic}."} for topic in adapters.TOPICS]
    team = jmarl.Team.of([adapters.make_base("", 0)] * adapters.A)
    cfg = settings("magrpo", lora_rank=adapters.ADAPTERS.lora_rank, **sampled(adapters))
    result = jmarl.train(team, reward, items, cfg)
    updates = run_page(adapters, monkeypatch, capsys)
    np.testing.assert_allclose([rewards.mean() for _, rewards in updates], result.rewards, atol=1e-6)
    assert_equal(updates[-1][0].adapters, result.state.stacks[0].params)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__.split(".")[-1])
def test_a_page_is_short_and_stands_on_pure_functions_alone(page):
    rooms, text = set(), Path(page.__file__).read_text()
    for source in (text, Path(common.__file__).read_text(), Path(tiny.__file__).read_text()):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmarl"):
                rooms.add((node.module or "").split(".")[1])
    pure = {"models", "rl", "sampling", "types", "randomness"}
    assert rooms <= pure | {turns: {"envs"}, adapters: {"config"}}.get(page, set())
    assert len(text.splitlines()) <= 180
    assert f"python -m {page.__name__} " in page.__doc__ and "tests/test_pages.py" in page.__doc__


def test_the_first_page_keeps_its_old_name():
    assert experiments.one_page.main is magrpo.main and experiments.one_page.WORDS is magrpo.WORDS
