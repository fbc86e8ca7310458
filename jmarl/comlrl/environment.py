"""The environment of trainers: what agents and rewards are given in later turns, as in CoMLRL 1.4.3.

It differs from `RewardEnvironment` in three facts:

- A text of the transition takes the place of the item's "prompt" and goes through the agent's formatter, also if that has no
  parameter `external_prompts`. The item's own prompt is then its "_original_prompt". With external_prompt_passthrough the text
  itself is the prompt. None stands for the agent's first prompt.
- `prompts` of a reward is a list with the prompt of agent 0: formatted in the first turn, the transition's text in later turns.
  Actor-critics give one formatted prompt per agent, in every turn.
- The histories of a transition hold the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jmarl.envs.calls.user_code import calling, excerpt
from jmarl.envs.reward_environment import Dialogue, Formatter, RewardEnvironment, Transition, append, bind_formatter
from jmarl.envs.rewards import RewardFunction
from jmarl.models.hub.tokenize import as_prompt


class TrainerEnvironment(RewardEnvironment):
    """A `RewardEnvironment` of a trainer.

    Args:
        reward, formatters, transition: as in `RewardEnvironment`.
        passthrough: the transition's texts are the prompts as they are.
        prompt_per_agent: what rewards and transitions are given as prompts: False for MAGRPO and its relatives, True for
            actor-critics.
    """

    def __init__(
        self,
        reward: RewardFunction,
        formatters: Sequence[Formatter],
        transition: Transition | None,
        *,
        passthrough: bool,
        prompt_per_agent: bool,
    ):
        super().__init__(reward, formatters, transition)
        self.prompt_per_agent = prompt_per_agent
        self._later_prompts = [
            partial(later_prompt, bind_formatter(formatter, every_turn=True), passthrough=passthrough)
            for formatter in self.formatters
        ]

    def reward_prompts(self, states: Sequence[Dialogue]) -> list[Any]:
        last = [[prompts[-1] for prompts in state.prompts] for state in states]
        return last if self.prompt_per_agent else [prompts[0] for prompts in last]

    def observe(self, after: Sequence[Dialogue]) -> tuple[list[Dialogue], list[list[Any]]]:
        columns, states = [], []
        for state in after:
            with calling("the transition", lambda state=state: f"item {excerpt(state.item)}", function=self.transition):
                texts = self._transition_texts(state, allow_none=True)
            prompts = []
            for agent, (write, text) in enumerate(zip(self._later_prompts, texts, strict=True)):
                with calling(f"the formatter of agent {agent}", lambda state=state: f"item {excerpt(state.item)}"):
                    prompts.append(write(dict(state.item), text))
            self._check_next(prompts, state)
            seen = [
                prompt if self.prompt_per_agent or text is None else text for prompt, text in zip(prompts, texts, strict=True)
            ]
            states.append(state._replace(prompts=append(state.prompts, seen)))
            columns.append(prompts)
        return states, [list(column) for column in zip(*columns, strict=True)]


# The names of this function and of `bind_formatter` are in the fingerprint of a run's reward, which a resumed run compares.
def later_prompt(formatter: Callable[[dict, Any], Any], item: dict, text: Any, *, passthrough: bool) -> Any:
    """Return an agent's prompt of a later turn.

    Args:
        formatter: from `bind_formatter`, of every turn.
        item: what the episode is about.
        text: of the transition; None: the agent gets its first prompt again.
        passthrough: the text itself is the prompt.
    """
    if text is None:
        return formatter(item, None)
    if passthrough:
        return as_prompt(text)
    return formatter(item | {"prompt": text, "_original_prompt": item.get("prompt", "")}, text)
