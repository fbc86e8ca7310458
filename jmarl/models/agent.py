"""A loaded agent: its architecture, weights and tokenizer, on the host, and how those of two agents are compared. `hub.agents`
loads and saves it."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jmarl.models.config import ModelConfig
from jmarl.models.hub.tokenize import decode, stop_ids

# Encoded to compare tokenizers: blanks, digits, cases, accents, letters of other scripts, an emoji, control characters.
PROBE = "  Hello  HELLO, it's 12345.67!\n\n\tdef f(x): return x\u00e9 e\u0301 \ufb01 \u4f60\u597d \U0001f600 </s><|im_end|>\r\n"


class Agent(NamedTuple):
    """A loaded agent, from `load_agent(name)`. `Team.of([agent, agent])` is a team of two with its weights."""

    name: str
    config: ModelConfig
    params: dict[str, Any]  # the decoder's parameters: nested dicts of numpy float32 arrays; of `open_agent`, of `StoredLeaf`
    tokenizer: Any  # a transformers fast tokenizer
    generation_config: Mapping[str, Any] = {}
    """The fields of generation_config.json, which are written again when the agent is saved. Of these jmarl reads eos_token_id,
    a list of ids that end a completion besides those of the tokenizer."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        return stop_ids(self.tokenizer, self.generation_config.get("eos_token_id", ()))


def agents_by_model(agents: Sequence[Agent]) -> dict[Any, list[int]]:
    """Return the indices of agents that can share a stack, by architecture and vocabulary, in the order of the stacks."""
    indices: dict[Any, list[int]] = {}
    digests = {i: vocabulary_digest(tokenizer) for i, tokenizer in {id(a.tokenizer): a.tokenizer for a in agents}.items()}
    for i, agent in enumerate(agents):
        indices.setdefault((agent.config, digests[id(agent.tokenizer)]), []).append(i)
    return indices


def describe_tokenizer(tokenizer: Any, stop: Sequence[int]) -> dict[str, Any]:
    """Return, as JSON, what an agent's prompts and completions depend on beside its vocabulary.

    Text is encoded and decoded in place of comparing files, whose form depends on the version of `transformers`."""
    rows = [tokenizer.encode(PROBE, add_special_tokens=special, verbose=False) for special in (True, False)]
    return {
        "template": _digest(repr(tokenizer.chat_template)),
        "ends": list(stop),
        "special_tokens": {x: getattr(tokenizer, x) for x in ("bos_token", "eos_token", "pad_token", "unk_token")},
        "encoding": _digest(repr((rows, decode(tokenizer, rows)))),
    }


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of the tokens of a tokenizer and their ids."""
    return _digest(repr(sorted(tokenizer.get_vocab().items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
