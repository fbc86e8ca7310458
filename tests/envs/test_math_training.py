"""Mathematics as a user runs it, with a tiny model."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from experiments.mathematics import PIECES, TURNS, MathConfig, environment_of, run
from experiments.start import start
from experiments.tiny import random_agents, tokenizer
from jmarl.models.hub.agents import load_agent
from jmarl.team import agents_of
from tests.running import rows


def test_settings_that_do_not_exist_are_refused():
    for options, message in (
        (dict(environment="maths"), "environment='maths'"),
        (dict(data="math500"), "data='math500'"),
        (dict(difficulty=4), "difficulty=4"),
    ):
        with pytest.raises(ValueError, match=message):
            MathConfig.of(**options, output_dir="")
    assert MathConfig.of(environment="math", num_turns=3, output_dir="").episodes.num_turns == 3
    assert MathConfig.of(environment="math_planner", output_dir="").episodes.num_turns == TURNS["math_planner"] == 2


@pytest.mark.long
def test_a_tiny_team_imitates_and_is_trained(tmp_path, capsys):
    """From random weights: what it had untrained, after two updates of imitation, and after two of training."""
    cfg = MathConfig.of(
        model="tiny", chat=False, topics=("arithmetic",), environment="math_verifier", tasks=16, demonstrations=16,
        imitation_slips=0.5, imitation_updates=2, num_updates=2, num_prompts=2, num_generations=2, max_new_tokens=8,
        held_out=2, save_every=2, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    result = run(cfg)
    assert len(result.rewards) == 2 and result.before and result.after
    assert np.isfinite(result.rewards).all() and any("solved" in name for row in rows(tmp_path / "run") for name in row)
    assert "held-out untrained: reward" in capsys.readouterr().out
    resumed = run(cfg.replace(num_updates=3, resume=True))  # nothing is imitated again: all is in the checkpoint
    assert len(resumed.rewards) == 1 and "untrained" not in capsys.readouterr().out
    alone = cfg.replace(num_updates=4, resume=True, environment="math", num_turns=1)
    env, agents = environment_of(alone), random_agents("tiny", tokenizer(PIECES), 1, 0, 128)
    pairs = alone.replace(algorithm="madpo_iter")  # whose reference is what it began with, in no checkpoint
    for of, shown in ((alone, False), (pairs, True)):
        begun = agents_of(*start(of, env, env.tasks("train", 16), [], agents))
        moved = [np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (begun[0].params, agents[0].params)), strict=True)]
        assert any(moved) == shown
    words = load_agent(tmp_path / "run" / "models" / "agent_0").tokenizer  # of the run, read back
    assert words.encode("What is 85 × 9?") == words.encode("85×9") and words.decode(words.encode("-3 6")) == "-36"
