"""A prompt may be a list of chat messages, wherever a prompt may be a text."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial

import numpy as np
import pytest

from jmarl import Step, Team, TextEnvironment, TrainConfig, evaluate, train
from jmarl.config import Episodes
from jmarl.envs.messages import Message, Observation, Reward, SimulatedAdapter, SimulatedEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.vector import LockStep
from jmarl.models.hub.tokenize import ChatPrompt, as_prompt, chat_prompt, encode_prompts, follow_ups
from jmarl.randomness import Randomness
from jmarl.rollout.play import play
from jmarl.runs.experiment import with_role
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team
from tests.house import HOUSE

TEXTS = ["Where is the farmer?", "Count the apples."]
MESSAGES = [[{"role": "user", "content": text}] for text in TEXTS]


def length(completions):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def agent(random_agent, tiny_config, tiny_tokenizer):
    return random_agent(tiny_config(max_positions=256), tiny_tokenizer, 0)


def test_messages_are_encoded_like_a_users_text_in_the_template(tiny_tokenizer):
    chat = encode_prompts(tiny_tokenizer, TEXTS, 200, chat=True)
    assert encode_prompts(tiny_tokenizer, MESSAGES, 200) == chat == encode_prompts(tiny_tokenizer, MESSAGES, 200, chat=True)
    (row,) = encode_prompts(tiny_tokenizer, [[{"role": "system", "content": "Be kind."}, *MESSAGES[0]]], 200)
    assert tiny_tokenizer.decode(row) == chat_prompt(tiny_tokenizer, TEXTS[0], "Be kind.")


@pytest.mark.long
@pytest.mark.parametrize("chat", [False, True])
def test_long_messages_are_cut_inside_the_template(agent, chat):
    """The agent reads the whole template around the end of the text, whatever `chat` says."""
    items = [{"prompt": [{"role": "user", "content": "Count the apples. " * 60 + f"Are there {n}?"}]} for n in range(2)]
    with pytest.warns(UserWarning, match="cut on the left"):
        cfg = TrainConfig.of(**HOUSE, eval_generations=3, chat=chat, long_prompts="truncate_left")
        result = evaluate(*make_team([agent]), items, RewardEnvironment(length, [default_formatter]), cfg)
    for ids, size in zip(*(np.asarray(x)[0] for x in result.rollout.turns[0].encoded[0]), strict=True):
        read = agent.tokenizer.decode(ids[:size])
        assert 230 < size <= 252 and read.startswith("<|im_start|>user\n") and read.count("<|im_start|>") == 2
        assert read.endswith("?<|im_end|>\n<|im_start|>assistant\n")


def test_messages_continue_a_conversation(tiny_tokenizer):
    history = encode_prompts(tiny_tokenizer, TEXTS[:1], 200, chat=True)
    assert follow_ups(tiny_tokenizer, history, MESSAGES[1:], 200) == follow_ups(
        tiny_tokenizer, history, TEXTS[1:], 200, chat=True
    )


def test_a_chat_prompt_is_a_text_with_its_messages():
    prompt = as_prompt([{"role": "system", "content": "Be kind."}, *MESSAGES[0]])
    assert prompt == "[system] Be kind.\n[user] Where is the farmer?" == json.loads(json.dumps(prompt))
    for copied in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert isinstance(copied, ChatPrompt) and copied.messages == prompt.messages
    assert as_prompt("text") == "text" and as_prompt(None) is None


def test_malformed_messages_raise():
    for wrong in ([], [{"role": "user"}], ["text"], [{"role": "user", "content": 3}]):
        with pytest.raises(ValueError, match="a prompt is a text or a list of messages"):
            as_prompt(wrong)


@pytest.mark.long
def test_items_with_messages_train_like_texts_with_chat(agent):
    team = Team.of([agent])
    texts = train(team, length, [{"prompt": text} for text in TEXTS], TrainConfig.of(**HOUSE, chat=True))
    messages = train(team, length, [{"prompt": chat} for chat in MESSAGES], TrainConfig.of(**HOUSE))
    assert texts.rewards == messages.rewards


class Greeting(TextEnvironment):
    """Two turns of messages; the reward is the length."""

    max_turns = 2

    def reset(self, task, rng):
        return 0, [[{"role": "system", "content": "Greet."}, {"role": "user", "content": "Hi"}]]

    def step(self, state, messages, rng):
        return Step(state + 1, [[{"role": "user", "content": "Go on"}]], float(len(messages[0])), state == 1)


@pytest.mark.long
@pytest.mark.parametrize("history", ["none", "append"])
def test_environments_may_return_messages(agent, history):
    team, params = make_team([agent])
    episodes = Episodes(num_turns=2, branching="chain", history=history)
    sample, settings = partial(sample_team, team, params), TrainConfig.of(**HOUSE, compute_dtype="float32").sampling
    turns = play(sample, team, [{}, {}], LockStep(Greeting()), settings, episodes, 3, Randomness(seed=0, step=0)).turns
    assert np.isfinite([turn.rewards.sum() for turn in turns]).all()
    ids, sizes = turns[1].encoded[0]
    (read,) = {agent.tokenizer.decode(row[:size][-16:]) for row, size in zip(ids[0], sizes[0], strict=True)}
    assert read.endswith("Go on<|im_end|>\n<|im_start|>assistant\n") and (sizes > 50).all() == (history == "append")


def test_observations_of_a_simulated_environment_become_messages_or_a_text():
    class Greet(SimulatedEnvironment):
        def reset(self):
            return Observation([Message("system", "Greet."), Message("environment", "Hi")])

        def step(self, action):
            return Observation([], done=True), Reward(1.0)

    rng = np.random.default_rng(0)
    (text,) = SimulatedAdapter(Greet()).reset({}, rng)[1]
    (chat,) = SimulatedAdapter(Greet(), chat=True).reset({}, rng)[1]
    assert text == "Greet.\n\nHi" and not isinstance(text, ChatPrompt)
    assert [m["role"] for m in chat.messages] == ["system", "user"]


def test_a_role_is_a_system_message_before_messages_and_text_before_a_text():
    write = with_role(lambda item: item["prompt"], "Be kind.")
    assert write({"prompt": "Hi"}) == "Be kind.\n\nHi"
    assert [m["role"] for m in write({"prompt": MESSAGES[0]}).messages] == ["system", "user"]
