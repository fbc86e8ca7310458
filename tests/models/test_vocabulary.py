"""A tokenizer with special tokens that the model does not have, as that of Gemma 3 1B: their spelling is text."""

import json

import numpy as np
import pytest

from jmarl.config import Sampling
from jmarl.models.hub import agents
from jmarl.models.hub.special_tokens import tokenizer_for
from jmarl.models.hub.tokenize import decode, encode_prompt
from jmarl.models.hub.transformers_model import agent_from_transformers
from jmarl.sampling.generate import tokenize
from jmarl.team import Team

VOCAB, IMAGE = 320, "<image_soft_token>"
TEXT = f"What is in {IMAGE}?"


@pytest.fixture
def tokenizer(make_tokenizer):
    """As the files of Gemma 3 call the token: also by a name of its own."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.init_kwargs["image_token"] = IMAGE
    assert tokenizer.convert_tokens_to_ids(IMAGE) == VOCAB
    return tokenizer


@pytest.mark.parametrize("in_words", [False, True])
def test_a_special_token_beyond_the_models_is_text(copy_dir, tokenizer, make_tokenizer, in_words):
    """Also where it is among the words of the tokenizer's model, beside the added ones."""
    tokenizer.save_pretrained(copy_dir)
    if in_words:
        tree = json.loads((copy_dir / "tokenizer.json").read_text())
        tree["model"]["vocab"][IMAGE] = VOCAB
        (copy_dir / "tokenizer.json").write_text(json.dumps(tree))
    agent, plain = agents.load_agent(copy_dir), make_tokenizer()
    assert IMAGE in (copy_dir / "tokenizer_config.json").read_text()
    assert agent.tokenizer.get_vocab() == plain.get_vocab()
    assert encode_prompt(tokenizer, TEXT)[-2:-1] == [VOCAB]
    for chat in (False, True):
        ids = encode_prompt(agent.tokenizer, TEXT, chat)
        assert ids == encode_prompt(plain, TEXT, chat)
        assert max(ids) < VOCAB and TEXT in decode(agent.tokenizer, [ids])[0]
    agents.save_pretrained(copy_dir / "saved", agent.config, agent.params, agent.tokenizer)
    saved = agents.load_agent(copy_dir / "saved").tokenizer
    assert IMAGE not in "".join(path.read_text() for path in (copy_dir / "saved").glob("*.json"))
    assert (saved.get_vocab(), saved.chat_template, saved.eos_token) == (
        plain.get_vocab(), plain.chat_template, plain.eos_token
    )  # fmt: skip


def test_a_team_reads_the_spelling_of_such_a_token(tokenizer, make_tokenizer, random_agent, tiny_config):
    """It has the prompts, ends and allowed tokens of a tokenizer without the token."""
    agent = random_agent(tiny_config(), tokenizer, 0)
    tokenizers = tokenizer_for(agent.config, tokenizer, "here"), make_tokenizer()
    one, other = (Team.of([agent._replace(tokenizer=x)]) for x in tokenizers)
    assert one.describe() == other.describe() and one.stacks[0].allowed is other.stacks[0].allowed is None
    for chat in (False, True):
        own, plain = (tokenize(team, [[TEXT]], Sampling(max_new_tokens=4), chat) for team in (one, other))
        assert own == plain and max(own[0][0]) < VOCAB


def test_a_loaded_model_of_transformers_gets_such_a_tokenizer(copy_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    agent = agent_from_transformers(AutoModelForCausalLM.from_pretrained(copy_dir), tokenizer)
    assert max(agent.tokenizer.get_vocab().values()) == VOCAB - 1
    assert IMAGE in tokenizer.get_vocab() and np.all(np.isfinite(agent.params["embed"]))


def test_a_tokenizer_of_another_model_is_an_error(tiny_config, make_tokenizer):
    def words(tokenizer):
        tokenizer.add_tokens(["one more"])

    def role(tokenizer):
        tokenizer.add_special_tokens({"eos_token": "<end>"})

    def template(tokenizer):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
        tokenizer.chat_template = "<|turn|>" + tokenizer.chat_template

    for change in (words, role, template):
        tokenizer = make_tokenizer()
        change(tokenizer)
        with pytest.raises(ValueError, match="here: the tokenizer has 321 tokens but the model's vocabulary only 320"):
            tokenizer_for(tiny_config(), tokenizer, "here")
    same = make_tokenizer()
    assert tokenizer_for(tiny_config(), same, "here") is same
