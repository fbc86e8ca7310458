"""A team of three families, each with a tokenizer, a template and end tokens of its own, trains adapters and resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jmarl.config import Sampling, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.models.hub.agents import load_agent
from jmarl.models.hub.tokenize import ChatPrompt
from jmarl.randomness import TRAIN, Randomness
from jmarl.runs.train import train
from jmarl.sampling.generate import SampleRequest, pad, sample_team, tokenize
from jmarl.team import make_team, to_agents
from tests.families.test_families import CASES, family_of
from tests.models.test_special_tokens import FAMILIES, tokenizer_of
from tests.runs.test_faults import Signalling, assert_equal_runs

VOCAB = 448  # more than any of the tokenizers has
AGENTS = {  # case -> its tokenizer, the end of sequence, other tokens that end a completion
    "gemma3_text": ("gemma", "<eos>", ["<eos>", "<end_of_turn>"]),
    "phi3": ("phi", "<|endoftext|>", ["<|end|>", "<|endoftext|>"]),
    "qwen3_5_text": ("chatml", "<|im_end|>", ["<|im_end|>"]),
}
PROMPT = [{"role": "system", "content": "Say where the farmer is."}, {"role": "user", "content": "Is he in the field now?"}]
ITEMS = [{"prompt": PROMPT}, {"prompt": "Where is the user?"}]
SETTINGS = dict(
    algorithm="magrpo", num_updates=5, num_prompts=2, num_generations=4, max_new_tokens=6, learning_rate=1e-2, adam_eps=1e-4,
    lora_rank=2, lora_targets="q_proj,up_proj", chat=True, save_every=3, progress=False, tensorboard=False, mesh="agent=1",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*refuses the role system")]  # that of Gemma


@pytest.fixture(scope="module")
def agents(tiny_dir, tmp_path_factory):
    loaded = []
    for case, (name, end, ends) in AGENTS.items():
        kinds = ["linear_attention" if case == "qwen3_5_text" else "sliding_attention", "full_attention"]
        layers = {"num_hidden_layers": 2, "layer_types": kinds}
        filed = tiny_dir(family_of(case), **CASES[case] | layers | {"vocab_size": VOCAB})
        directory = Path(shutil.copytree(filed, tmp_path_factory.mktemp("agents") / case))
        tokenizer = tokenizer_of(**FAMILIES[name] | {"eos_token": end})
        tokenizer.save_pretrained(directory)
        fields = {"eos_token_id": tokenizer.convert_tokens_to_ids(ends)}
        (directory / "generation_config.json").write_text(json.dumps(fields))
        loaded.append(load_agent(directory))
    return loaded


class Letters:
    """The letters of the first agent that the others wrote, too. Sends a signal as `Signalling` does."""

    __name__ = "letters"

    def __init__(self, signal_at):
        self.signalling = Signalling(signal_at)

    def __call__(self, a, b, c, batch_items, rng):
        self.signalling(a, b, batch_items, rng)
        return [float(len({*x} & {*y}) - len({*x} ^ {*z})) for x, y, z in zip(a, b, c, strict=True)]


def run(agents, where, signal_at=0, **fields):
    team, params = make_team(agents, lora=True)
    env = RewardEnvironment(make_reward(Letters(signal_at), num_agents=3), [lambda item: item["prompt"]] * 3)
    return train(team, env, ITEMS, TrainConfig.of(**SETTINGS, output_dir=str(where), **fields), params=params)


def test_three_families_train_together_and_resume_bit_equal(agents, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = run(agents, whole)
    assert len(done.state.stacks) == 3 and len(done.rewards) == 5
    assert all(np.abs(x["b"]).max() > 1e-3 for stack in done.state.stacks for x in stack.params["layers"].values() if "b" in x)
    stopped = run(agents, parts, signal_at=3)
    assert stopped.interrupted and int(stopped.state.step) == 3
    run(agents, parts, resume=True)
    assert_equal_runs(whole, parts, step=5)
    assert [path.name for path in sorted((parts / "models").iterdir())] == ["agent_0", "agent_1", "agent_2"]


def test_each_agent_ends_with_its_own_tokens_and_writes_no_other_than_its_tokenizers(agents):
    team, params = make_team(agents)
    settings, prompts = Sampling(24), [[ChatPrompt(PROMPT), ITEMS[1]["prompt"]]] * 3
    encoded = pad(team, tokenize(team, prompts, settings, chat=True))
    request = SampleRequest(encoded, settings, Randomness(0, 0, TRAIN), 64, np.arange(2))
    sampled = to_agents(team, [(x.tokens, x.action_mask, x.ended) for x in sample_team(team, params, request)])
    for agent, (tokens, mask, ended), (_, _, ends) in zip(agents, sampled, AGENTS.values(), strict=True):
        tokens, mask, ended = (np.asarray(x).reshape(128, -1) for x in (tokens, mask, ended))
        rows = [row[chosen].tolist() for row, chosen in zip(tokens, mask, strict=True)]
        size, stop = len(agent.tokenizer), {*agent.stop}
        assert {*agent.tokenizer.convert_tokens_to_ids(ends)} <= stop == {row[-1] for row in rows} & stop
        assert [row[-1] in stop for row in rows] == ended[:, 0].tolist() and not any({*row[:-1]} & stop for row in rows)
        assert size < VOCAB and size - 5 < max(map(max, rows)) < size
