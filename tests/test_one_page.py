"""The experiment on one page makes the updates of the library, on the library's pure functions alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jmarl
from experiments import one_page
from experiments.tiny import STOP, random_agents, tokenizer
from jmarl.models.stack import stack_params

SOURCE = Path(one_page.__file__).read_text()
RATE = 1e-3  # so that three updates move parameters by a hundred times the tolerance


def written(text: str) -> str:
    """Return what a completion says without its end token."""
    return text.replace(STOP, "").rstrip()


@pytest.mark.long
def test_the_first_three_updates_are_those_of_train():
    """Texts with their special tokens stand for tokens one to one, because a space parts the words."""
    words = tokenizer(one_page.WORDS, spaced=True)
    agents = random_agents("random", words, one_page.A, 0)
    played = []

    def reward(setups, stories):
        played.append((setups[:: one_page.G], stories[: one_page.G]))  # joint mode cross: all pairs
        return [one_page.reward(written(a), written(b)) for a, b in zip(setups, stories, strict=True)]

    items = [{"prompt": f"Tell a story about {topic}."} for topic in one_page.TOPICS]
    cfg = jmarl.TrainConfig.of(
        algorithm="magrpo", joint_mode="cross", num_updates=3, num_generations=one_page.G, max_new_tokens=one_page.T,
        learning_rate=RATE, skip_special_tokens=False, progress=False,
    )  # fmt: skip
    result = jmarl.train(jmarl.Team.of(agents), reward, items, cfg)

    run = one_page.prepare(agents[0], RATE, seed=0)
    updates = one_page.train(run, stack_params([agent.params for agent in agents]), updates=3, seed=0)
    state = None
    for texts, expected, (new, completions, rewards) in zip(played, result.rewards, updates, strict=True):
        state = new
        for agent in range(one_page.A):
            tokens, mask = (np.asarray(x)[agent, 0] for x in (completions.tokens, completions.action_mask))
            assert [row[chosen].tolist() for row, chosen in zip(tokens, mask, strict=True)] == words(texts[agent])["input_ids"]
        assert abs(rewards.mean() - expected) < 1e-6
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), state.params, result.state.stacks[0].params)


@pytest.mark.long
def test_the_command_prints_a_line_per_update_and_the_held_out_reward_before_and_after(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_page", "--updates", "2"])
    one_page.main()
    *updates, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in updates] == ["1", "2"]
    before, after = (float(part.split()[-1]) for part in last.split(","))
    assert last.startswith("held-out reward before") and 0 < before < 1 and 0 < after < 1


def test_the_page_stands_on_pure_functions_alone():
    rooms = set()
    for name in ("one_page", "tiny"):
        for node in ast.walk(ast.parse((Path(one_page.__file__).parent / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmarl"):
                rooms.add((node.module or "").split(".")[1])
    assert rooms == {"models", "rl", "sampling", "types"}
    assert len(SOURCE.splitlines()) <= 160
