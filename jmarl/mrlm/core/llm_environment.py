"""A language model as a policy, which can also be talked to: messages in, messages out.

    env = LLMEnvironment("Qwen/Qwen2.5-0.5B-Instruct", system_prompt="Answer briefly.")
    env.reset()
    observation, reward = env.step(Message("user", "What is 2 + 2?"))
    observation.messages[-1].content

A trainer trains the policies in its environments, samples by their `generation_config`, puts their `system_prompt` before each
prompt, and gives them the trained weights. Left out: rewards of a conversation in training, where environments give them
(`reward_fn` scores the answers of `step`); a policy in the place of an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmarl.comlrl.arguments import Model, load_agents
from jmarl.config.mrlm_keys import KEYS
from jmarl.config.mrlm_rules import Refused
from jmarl.config.validation import did_you_mean
from jmarl.envs.messages import EnvironmentMode, Message, Observation, Reward, chat_of
from jmarl.models.hub.agents import Agent
from jmarl.rollout.text_model import AgentModel

RewardFn = Callable[[list[Message]], Reward | float]


class LLMEnvironment:
    """A language model as a policy.

    Args:
        model: a loaded model of `transformers`, a loaded agent, or a name or path to load.
        tokenizer: what the policy uses; it must have the vocabulary of the model. None: that of the model.
        mode: SERVER is trained, CLIENT is frozen.
        generation_config: a dict or an object of `transformers` with max_new_tokens, temperature, do_sample, top_p, top_k, …
        reward_fn: conversation -> `Reward` or a number, for `step`; None: 0.
        system_prompt: the first message of every conversation and prompt.
        seed: of the answers of `step`; equal conversations from equal seeds are equal.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any = None,
        mode: EnvironmentMode = EnvironmentMode.SERVER,
        generation_config: Any = None,
        reward_fn: RewardFn | None = None,
        system_prompt: str | None = None,
        seed: int = 0,
    ):
        self.mode = EnvironmentMode(mode)
        self.sampling = sampling_settings(generation_config)
        self.agent: Agent = load_agents(None, model, 1, tokenizer)[0]
        self.reward_fn, self.system_prompt, self.seed = reward_fn, system_prompt, seed
        self._conversation: list[Message] = []
        self._model: AgentModel | None = None

    @property
    def tokenizer(self) -> Any:
        return self.agent.tokenizer

    @property
    def chat(self) -> bool:
        """Whether the tokenizer has a chat template, which then writes the prompts."""
        return self.tokenizer.chat_template is not None

    def set_mode(self, mode: EnvironmentMode) -> None:
        """Train the policy from now on (SERVER), or not (CLIENT). Trainers read it when they are made."""
        self.mode = EnvironmentMode(mode)

    def set_reward_function(self, reward_fn: RewardFn | None) -> None:
        """Score the next answers with another function."""
        self.reward_fn = reward_fn

    def get_conversation(self) -> list[Message]:
        """Return the messages so far."""
        return list(self._conversation)

    def set_conversation(self, messages: Sequence[Message]) -> None:
        """Continue from other messages."""
        self._conversation = list(messages)

    def reset(self) -> Observation:
        """Begin a new conversation: with the system prompt, if there is one."""
        self._conversation = [] if self.system_prompt is None else [Message("system", self.system_prompt)]
        return Observation(self.get_conversation())

    def step(self, action: Message) -> tuple[Observation, Reward]:
        """Answer a message. Return the conversation with the answer, and the reward of `reward_fn`."""
        if not isinstance(action, Message):
            raise TypeError(f'step takes a message, such as Message("user", "Hello"); got {action!r:.60}')
        self._conversation.append(action)
        conversation = Observation(self._conversation)
        prompt = chat_of(conversation) if self.chat else conversation.text
        answer = self._text_model()([prompt], 1, self.seed + len(self._conversation))[0][0]
        self._conversation.append(Message("assistant", answer))
        observation = Observation(self.get_conversation(), info={"response_length": len(answer)})
        reward = Reward(0.0) if self.reward_fn is None else self.reward_fn(self.get_conversation())
        return observation, reward if isinstance(reward, Reward) else Reward(float(reward))

    def _text_model(self) -> AgentModel:
        """Return the model on the device; a new one after training."""
        if self._model is None or self._model.agent is not self.agent:
            self._model = AgentModel(self.agent, chat=False, **self.sampling)
        return self._model


def sampling_settings(generation_config: Any) -> dict[str, Any]:
    """Return a generation config (a dict, or an object of `transformers`) as settings of `jmarl.config.Sampling`.

    Raises:
        ValueError: a setting is unknown or cannot act here.
    """
    given = {} if generation_config is None else generation_config
    known = {name: entry for name, entry in KEYS["generation"].items() if not isinstance(entry, Refused)}
    if not isinstance(given, Mapping):  # an object of transformers, most of whose settings are None
        settings = given.to_dict()
        given = {name: settings[name] for name in KEYS["generation"] if settings.get(name) is not None}
    rules: dict[Any, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for name, value in given.items():
        if name not in KEYS["generation"]:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise ValueError(f"generation_config has no setting {name!r}{hint}")
        entry = KEYS["generation"][name]
        if isinstance(entry, Refused):
            raise ValueError(f"generation_config: {name} has no effect here: {entry.reason}")
        if isinstance(entry, str):
            result[entry] = value
        else:
            rules.setdefault(entry, {})[name] = value
    for rule, values in rules.items():
        result |= rule(values, "rollouts")
    return result
