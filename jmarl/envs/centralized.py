"""One model that writes for all roles of a team: the single-model baseline, and a way to train it (host code, no jax).

`Centralized` turns the environment of a team into one for a team of one. The model reads one prompt made of the prompts of all
roles, and answers with one section per role, `<agent_0>…</agent_0>`. The sections are the joint action of the inner
environment, which scores it and continues as if separate agents had written it; rewards, transitions and histories see only
the texts of the roles. It works with any environment, also one of several turns.

The log says how well the model keeps the form, which no reward does: `measures/parse_error` is the share of completions without
any complete section, `measures/missing_sections` the share of missing sections. Left out: sections without a closing tag (a
completion that is cut off loses its last section), and grammars that would enforce the form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.columns import join_numbers
from jmarl.envs.base import Answer, Environment, Texts, describe, special_tokens
from jmarl.envs.calls.user_code import calling
from jmarl.envs.reward_environment import RewardEnvironment


class Sections(NamedTuple):
    """The sections of a completion."""

    texts: list[str]  # [N]; "" where a section is missing
    missing: int  # number of missing sections

    @property
    def parse_error(self) -> bool:
        """Whether all sections are missing."""
        return self.missing == len(self.texts)


def parse(text: str, num_agents: int) -> Sections:
    """Return the sections of a completion, without surrounding white space.

    Tags may be in upper or lower case. If a role has several sections, the first one counts. Sections of roles that do not
    exist and text outside of sections are ignored.
    """
    matches = [
        re.search(rf"<agent_{agent}>(.*?)</agent_{agent}>", text, re.IGNORECASE | re.DOTALL) for agent in range(num_agents)
    ]
    return Sections([match.group(1).strip() if match else "" for match in matches], sum(match is None for match in matches))


def joint_prompt(prompts: Sequence[str]) -> str:
    """Return one prompt made of the prompts of all roles."""
    tasks = "\n\n".join(f"Agent {agent} was asked:\n{prompt}" for agent, prompt in enumerate(prompts))
    form = "\n".join(f"<agent_{agent}>answer of agent {agent}</agent_{agent}>" for agent in range(len(prompts)))
    return (
        f"You speak for {len(prompts)} agents that work together. Give the answer of each of them.\n\n{tasks}\n\n"
        f"Write every answer between the tags of its agent, and nothing else:\n{form}"
    )


class Centralized:
    """The environment of `num_agents` roles as that of one agent that writes for all of them.

    Its reward is the mean of the roles' rewards.

    Args:
        env: of the roles, such as `RewardEnvironment(make_reward(f, num_agents=2), formatters, transition)`.
        num_agents: the number of roles.
        write_prompt: prompts of the roles [N] -> the prompt of the one agent.
    """

    def __init__(self, env: Environment, num_agents: int, write_prompt: Callable[[Sequence[str]], str] = joint_prompt):
        self.env = env.for_agents(num_agents) if isinstance(env, RewardEnvironment) else env
        self.num_agents, self.write_prompt = num_agents, write_prompt
        self.max_turns, self.special_tokens = getattr(env, "max_turns", 1), special_tokens(env)

    def describe(self) -> dict[str, Any]:
        return {"centralized": self.num_agents} | describe(self.env)

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[str]]]:
        states, prompts = self.env.reset(items, rng)
        return states, self._joint_prompts(prompts)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        if len(actions) != 1:
            raise ValueError(f"one model writes for all roles, but the team has {len(actions)} agents: make a team of one")
        sections = [self.sections(text, state) for text, state in zip(actions[0], states, strict=True)]
        answer = self.env.step(states, [[s.texts[agent] for s in sections] for agent in range(self.num_agents)], rng)
        result = answer.result
        form = {
            "parse_error": np.array([float(s.parse_error) for s in sections]),
            "missing_sections": np.array([s.missing / self.num_agents for s in sections]),
        }
        measures = join_numbers(form, result.measures)
        return answer._replace(result=result._replace(rewards=result.total[:, None], measures=measures))

    def sections(self, text: str, state: Any) -> Sections:
        """Return the sections of a completion. state: of its episode."""
        del state
        return parse(text, self.num_agents)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[str]]]:
        states, prompts = self.env.observe(after)
        return states, self._joint_prompts(prompts)

    def _joint_prompts(self, prompts: Sequence[Sequence[str | None]]) -> list[list[str]]:
        """Return the prompts [1][P] of the one agent for those of the roles, [N][P]."""
        if any(text is None for column in prompts for text in column):
            raise ValueError("one model writes for all roles in every turn, but in this environment the roles act in turns")
        with calling("write_prompt", function=self.write_prompt):
            return [[self.write_prompt(texts) for texts in zip(*prompts, strict=True)]]
