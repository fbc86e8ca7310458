"""`jmarl.generate`: what a team writes for prompts, for use in one's own code.

Left out: later turns, in which an environment writes what the agents read. `jmarl.evaluate` plays those.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.config import TrainConfig
from jmarl.models.hub.messages import as_prompt
from jmarl.randomness import EVAL, Randomness
from jmarl.sampling.generate import SampleRequest, Special, on_host, pad, sample_team, texts_of, tokenize_first_turn, tokens_of
from jmarl.team import Team, check_arguments, moved


def generate(
    team: Team,
    prompts: Sequence[Sequence[Any]],
    cfg: TrainConfig | None = None,
    *,
    params: Sequence[Any] | None = None,
    special: Special | None = None,
) -> list[list[str]]:
    """Return one text of each agent for each of its prompts.

        team = jmarl.Team.load(["out/agent_0", "out/agent_1"])
        setups, stories = jmarl.generate(team, [["Set up a story about owls."], ["Tell a story about owls."]])

    The first call compiles a program; a call with more prompts, or with prompts that are much longer, compiles another one.

    Args:
        team: from `Team.load` or `Team.of`.
        prompts: one list per agent, all of one length; texts, or lists of chat messages. An agent with None in place of a
            prompt writes nothing: "".
        cfg: settings of sampling and of the chat template, as those of the training; None: the defaults. Texts follow from
            `seed`, and are sampled at `eval_temperature` if that is set: they are those of `jmarl.evaluate`.
        params: parameters [A, ...] of each stack, as `make_team` returns them; None: those of the team's agents. Give them
            where it is called often: otherwise each call moves the weights to the device again.
        special: the special tokens that each prompt may write if it is a text, without `chat`; None: all that it spells. Give
            empty lists for prompts with texts of others.

    Returns:
        One list of texts per agent, as a reward function gets them.

    Raises:
        ValueError: if there is not one list of prompts per agent, or if the lists differ in length.
    """
    cfg = TrainConfig() if cfg is None else cfg
    check_arguments(team, cfg)
    team = team.in_context(cfg.run.long_context)
    count = check_prompts(team, prompts)
    settings, randomness = cfg.eval_sampling(), Randomness(cfg.run.seed, 0, EVAL)
    asked = [[as_prompt(prompt) for prompt in row] for row in prompts]  # messages are now texts, None is still None
    encoded = pad(team, tokenize_first_turn(team, asked, settings, cfg.episodes, special))
    acts = np.array([[prompt is not None for prompt in row] for row in asked])
    team, weights = moved(team, params, cfg.run)
    request = SampleRequest(encoded, settings, randomness, 1, np.arange(count, dtype=np.uint32), acts=acts)
    tokens = tokens_of(team, tuple(map(on_host, sample_team(team, weights, request))), count)
    texts = texts_of(team, tokens, cfg.episodes.skip_special_tokens)
    return [
        [text if act else "" for [text], act in zip(rows, acting, strict=True)]
        for rows, acting in zip(texts, acts, strict=True)
    ]


def check_prompts(team: Team, prompts: Sequence[Sequence[Any]]) -> int:
    """Return the number of prompts of each agent. Raises ValueError unless there is one list per agent, all of one length."""
    example = "[[prompt of agent 0], [prompt of agent 1], ...]"
    rows = prompts if isinstance(prompts, Sequence) else [prompts]
    if isinstance(prompts, str) or any(isinstance(row, str) or not isinstance(row, Sequence) for row in rows):
        raise ValueError(f"prompts={prompts!r:.60} is not allowed: give one list of prompts per agent, {example}")
    if len(prompts) != team.num_agents:
        raise ValueError(f"{len(prompts)} lists of prompts for a team of {team.num_agents}: give one list per agent, {example}")
    counts = sorted({len(row) for row in prompts})
    if len(counts) > 1 or not counts[0]:
        lengths = [len(row) for row in prompts]
        raise ValueError(f"the agents have {lengths} prompts: give each equally many, and None where one writes nothing")
    return counts[0]
