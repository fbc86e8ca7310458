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

import jax

from jmarl.comlrl.arguments import Model, load_agents
from jmarl.config.validation import did_you_mean
from jmarl.envs.messages import BaseEnvironment, EnvironmentMode, Message, Observation, Reward, chat_of
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.transformers_model import TransformersModel, copy_to_transformers
from jmarl.mrlm.config import GenerationConfig
from jmarl.mrlm.keys import KEYS, IgnoredKey, One, Only, RefusedKey, settings_of_key
from jmarl.rollout.text_model import AgentModel

RewardFn = Callable[[list[Message]], Reward | float]


class LLMEnvironment(BaseEnvironment):
    """A language model as a policy.

    Args:
        model: a loaded model of `transformers`, a loaded agent, or a name or path to load.
        tokenizer: what the policy uses; it must have the vocabulary of the model. None: that of the model.
        mode: SERVER is trained, CLIENT is frozen.
        generation_config: a dict, a `GenerationConfig` or an object of `transformers` with max_new_tokens, temperature,
            do_sample, top_p, top_k, …
        reward_fn: conversation -> `Reward` or a number, for `step`; None: 0.
        system_prompt: the first message of every conversation and prompt.
        device: of the model; it must be the platform of JAX, which chooses the device.
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
        device: Any = None,
        seed: int = 0,
    ):
        super().__init__(mode)
        check_device(device)
        self.model, self.generation_config = model, generation_config
        self.agent: Agent = load_agents(None, model, 1, tokenizer)[0]
        self.sampling = sampling_settings(generation_config, self.agent.stop)
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

    @property
    def conversation_history(self) -> list[Message]:
        return self._conversation

    def learned(self, agent: Agent) -> None:
        """Take trained weights. A model of torch that the policy was made from gets them too."""
        self.agent = agent._replace(name=self.agent.name)
        if isinstance(self.model, TransformersModel):
            copy_to_transformers(self.agent, self.model)

    def __repr__(self) -> str:
        return f"LLMEnvironment(model={self.agent.name}, mode={self.mode.value})"

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
        answer = self.answer(self._conversation)
        self._conversation.append(Message("assistant", answer))
        observation = Observation(self.get_conversation(), info={"response_length": len(answer)})
        reward = Reward(0.0) if self.reward_fn is None else self.reward_fn(self.get_conversation())
        return observation, reward if isinstance(reward, Reward) else Reward(float(reward))

    def answer(self, messages: Sequence[Message]) -> str:
        """Return the answer to a conversation, which stays as it is."""
        conversation = Observation(list(messages))
        prompt = chat_of(conversation) if self.chat else conversation.text
        return self._text_model()([prompt], 1, self.seed + len(conversation.messages))[0][0]

    def _text_model(self) -> AgentModel:
        """Return the model on the device; a new one after training."""
        if self._model is None or self._model.agent is not self.agent:
            self._model = AgentModel(self.agent, chat=False, **self.sampling)
        return self._model


def check_device(device: Any) -> None:
    """Raise ValueError for a device of torch whose kind is not the platform of JAX."""
    kind = str(device).partition(":")[0]
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if device is not None and kind not in ("auto", platform):
        raise ValueError(f"device={str(device)!r}, but JAX runs on {platform}: leave device out, or set JAX_PLATFORMS={kind}")


def sampling_settings(generation_config: Any, stop: Sequence[int] = ()) -> dict[str, Any]:
    """Return a generation config as settings of `jmarl.config.Sampling`.

    Args:
        generation_config: a dict, a `GenerationConfig`, or an object of `transformers`.
        stop: ids that end a completion; one of them may be given as eos_token_id.

    Raises:
        ValueError: a setting is unknown or cannot act here.
    """
    given = {} if generation_config is None else generation_config
    known = {name: entry for name, entry in KEYS["generation"].items() if not isinstance(entry, RefusedKey)}
    if not isinstance(given, Mapping):  # of an object of transformers, only what is known here counts
        own, settings = isinstance(given, GenerationConfig), given.to_dict()
        given = {name: value for name, value in settings.items() if own or (name in known and value is not None)}
    rules: dict[Any, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for name, value in given.items():
        if name not in KEYS["generation"]:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise ValueError(f"generation_config has no setting {name!r}{hint}")
        entry = KEYS["generation"][name]
        if value is None or isinstance(entry, IgnoredKey) or (name == "eos_token_id" and value in stop):
            continue
        if isinstance(entry, RefusedKey):
            raise ValueError(f"generation_config: {name} has no effect here: {entry.reason}")
        if isinstance(entry, str | One | Only):
            result |= settings_of_key(name, entry, value)
        else:
            rules.setdefault(entry, {})[name] = value
    for rule, values in rules.items():
        result |= rule(values, "rollouts", {})
    return result
