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

SOURCE = Path(one_page.__file__).read_text()
RATE = 1e-3  # so that three updates move parameters by a hundred times the tolerance


def written(text: str) -> str:
    """Return what a completion says without its end token."""
    return text.replace(STOP, "").rstrip()


@pytest.mark.long
def test_the_first_three_updates_of_the_command_are_those_of_train(monkeypatch, capsys):
    """Texts with their special tokens stand for tokens one to one, because a space parts the words. The command prints a line
    per update, and the held-out reward before and after."""
    words = tokenizer(one_page.WORDS, spaced=True)
    played, updates, train = [], [], one_page.train

    def reward(setups, stories):
        played.append((setups[:: one_page.G], stories[: one_page.G]))  # joint mode cross: all pairs
        return [one_page.reward(written(a), written(b)) for a, b in zip(setups, stories, strict=True)]

    def kept(*arguments):
        for update in train(*arguments):
            updates.append(jax.device_get(update))  # before the next update consumes the state
            yield update

    items = [{"prompt": f"Tell a story about {topic}."} for topic in one_page.TOPICS]
    cfg = jmarl.TrainConfig.of(
        algorithm="magrpo", joint_mode="cross", num_updates=3, num_generations=one_page.G, max_new_tokens=one_page.T,
        learning_rate=RATE, skip_special_tokens=False, progress=False,
    )  # fmt: skip
    result = jmarl.train(jmarl.Team.of(random_agents("random", words, one_page.A, 0)), reward, items, cfg)

    monkeypatch.setattr(one_page, "train", kept)
    monkeypatch.setattr(sys, "argv", ["one_page", "--updates", "3", "--rate", str(RATE)])
    capsys.readouterr()
    one_page.main()
    for texts, expected, (_, completions, rewards) in zip(played, result.rewards, updates, strict=True):
        for agent in range(one_page.A):
            tokens, mask = completions.tokens[agent, 0], completions.action_mask[agent, 0]
            assert [row[chosen].tolist() for row, chosen in zip(tokens, mask, strict=True)] == words(texts[agent])["input_ids"]
        assert abs(rewards.mean() - expected) < 1e-6
    last, params = updates[-1][0].params, result.state.stacks[0].params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), last, params)

    *lines, held_out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    before, after = (float(part.split()[-1]) for part in held_out.split(","))
    assert held_out.startswith("held-out reward before") and 0 < before < 1 and 0 < after < 1


def test_the_page_stands_on_pure_functions_alone():
    rooms = set()
    for name in ("one_page", "tiny"):
        for node in ast.walk(ast.parse((Path(one_page.__file__).parent / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmarl"):
                rooms.add((node.module or "").split(".")[1])
    assert rooms == {"models", "rl", "sampling", "types"}
    assert len(SOURCE.splitlines()) <= 160
