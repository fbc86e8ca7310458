"""One model that writes for all roles of a team: the single-model baseline, and a way to train it (host world, no jax).

`Centralized` makes an environment of a team into one of a team of one. The model reads one prompt made of the prompts of all
roles and answers with a section for each, `<agent_0>…</agent_0>`; the sections are the joint action, and the inner environment
judges it and writes on as if agents of their own had spoken: rewards, transitions and histories see the roles' texts alone. So
any environment will do, of several turns too, and `train` and `evaluate` need not know.

How well the form is kept is in the log, and in no reward: `reward/parse_error`, the share of completions without any whole
section, and `reward/missing_sections`, the share of sections that were not there. Left out: sections that were not closed (a
completion that is cut off loses its last one), and grammars that would force the form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Environment, describe


class Sections(NamedTuple):
    """What a completion says for each role."""

    texts: list[str]  # [N]; "" where a section is missing
    missing: int  # sections that are not there

    @property
    def parse_error(self) -> bool:
        """There is not one section."""
        return self.missing == len(self.texts)


def parse(text: str, num_agents: int) -> Sections:
    """The sections of a completion, without the white space around them. Tags are read in small and capital letters; of several
    sections of one role the first counts; those of roles that do not exist, and what stands between, are passed over."""
    found = [
        re.search(rf"<agent_{agent}>(.*?)</agent_{agent}>", text, re.IGNORECASE | re.DOTALL) for agent in range(num_agents)
    ]
    return Sections([match.group(1).strip() if match else "" for match in found], sum(match is None for match in found))


def joint_prompt(prompts: Sequence[str]) -> str:
    """One prompt of the prompts of all roles."""
    tasks = "\n\n".join(f"Agent {agent} was asked:\n{prompt}" for agent, prompt in enumerate(prompts))
    form = "\n".join(f"<agent_{agent}>answer of agent {agent}</agent_{agent}>" for agent in range(len(prompts)))
    return (
        f"You speak for {len(prompts)} agents that work together. Give the answer of each of them.\n\n{tasks}\n\n"
        f"Write every answer between the tags of its agent, and nothing else:\n{form}"
    )


class Centralized:
    """The environment of `num_agents` roles as that of one agent that writes for all of them.

    env: of the roles, such as `environment.RewardEnvironment(make_reward(f, num_agents=2), formatters, transition)`.
    write: the prompts of the roles -> the one that is read.
    The one agent's reward is the mean of the roles' rewards.
    """

    def __init__(self, env: Environment, num_agents: int, write: Callable[[Sequence[str]], str] = joint_prompt):
        self.env, self.num_agents, self.write = env, num_agents, write
        self.max_turns = getattr(env, "max_turns", 1)

    def describe(self) -> dict:
        return {"centralized": self.num_agents} | describe(self.env)

    def reset(self, items, rng):
        states, prompts = self.env.reset(items, rng)
        return states, self._read(prompts)

    def step(self, states, actions, rng):
        if len(actions) != 1:
            raise ValueError(f"one model writes for all roles, but the team has {len(actions)} agents: make a team of one")
        said = [parse(text, self.num_agents) for text in actions[0]]
        texts = [[of.texts[agent] for of in said] for agent in range(self.num_agents)]
        answer = self.env.step(states, texts, rng)
        form = {
            "parse_error": np.array([float(of.parse_error) for of in said]),
            "missing_sections": np.array([of.missing / self.num_agents for of in said]),
        }
        result = answer.result
        mean = result._replace(rewards=result.total[:, None], parts={**result.parts, **form})
        return Answer(mean, answer.done, answer.after)

    def observe(self, after):
        states, prompts = self.env.observe(after)
        return states, self._read(prompts)

    def _read(self, prompts: Sequence[Sequence[str]]) -> list[list[str]]:
        """Prompts [N][P] of the roles as [1][P]."""
        if any(text is None for of_agent in prompts for text in of_agent):
            raise ValueError("one model writes for all roles at once, and in this environment they act in turns")
        return [[self.write(of_item) for of_item in zip(*prompts, strict=True)]]
