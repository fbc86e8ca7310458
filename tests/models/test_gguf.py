"""GGUF files hold the same model as a Hugging Face directory; the real SmolLM2 predicts English."""

import sys

import jax
import numpy as np
import pytest

from jmarl.models import decoder
from jmarl.models.hub import agents as weights
from jmarl.models.hub import gguf as gguf_weights
from jmarl.models.hub.tokenize import chat_prompt
from tests.gguf_files import tokenizer_fields, write_gguf

SENTENCE = (
    "The sun was setting over the small village, and the children were running home along the river "
    "because their mother had promised to tell them a story before dinner."
)


@pytest.fixture
def llama_file(tiny_dir, tmp_path):
    """`llama_file(change)` writes a tiny Llama GGUF after `change(fields, tensors)`."""
    return lambda change=lambda fields, tensors: None: write_gguf(tmp_path / "m.gguf", tiny_dir("llama"), change=change)


# --- weights -----------------------------------------------------------------------------------------------------------


def test_all_end_tokens_of_the_metadata_end_completions(llama_file):
    """End of sequence, of turn and of message; an id without a token is none."""
    ids = {"tokenizer.ggml.eot_token_id": 300, "tokenizer.ggml.eom_token_id": 999}
    assert weights.load_agent(llama_file(lambda fields, _: fields.update(ids))).stop == (2, 300, 0)
    assert weights.load_agent(llama_file()).stop == (2, 0)


def test_weights_that_are_not_finite_are_named(llama_file):
    def spoil(_, tensors):
        tensors["blk.1.attn_k.weight"] = tensors["blk.1.attn_k.weight"].copy()
        tensors["blk.1.attn_k.weight"][0, 3] = np.nan

    with pytest.raises(ValueError, match=r"m.gguf: model.layers.1.self_attn.k_proj.weight has 1 of 1024 weights that are NaN"):
        weights.load_agent(llama_file(spoil))


def test_a_gguf_file_holds_the_same_model_as_the_directory(tiny_dir, tmp_path):
    """To the last bit, biases of attention and an output weight of its own included."""
    directory = tiny_dir("llama", tie_word_embeddings=False, attention_bias=True)
    agent, expected = weights.load_agent(write_gguf(tmp_path / "model.gguf", directory)), weights.load_agent(directory)
    assert agent.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, agent.params, expected.params)
    assert agent.tokenizer.chat_template == expected.tokenizer.chat_template


@pytest.mark.parametrize(("quantization", "error"), [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 5e-3), ("Q4_1", 0.06)])
def test_quantized_files_load_within_their_precision(quantization, error, tiny_dir, tmp_path):
    exact = weights.load_agent(tiny_dir("llama")).params
    params = weights.load_agent(write_gguf(tmp_path / "model.gguf", tiny_dir("llama"), quantization)).params
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=error * max(1.0, np.abs(theirs).max()))


# --- tokenizer ---------------------------------------------------------------------------------------------------------

TEXTS = [
    "The farmer's seven apples, and 1234 pears in 2 baskets!",
    "def add(first, second):\n    return first + second\t# 3.14\r\n\n\n",
    "naïve café — 日本語 🙂 \u00a0 e\u0301",
    "<|im_start|>user\nHello<|im_end|>\n <|endoftext|>  they'll I'D",
    "",
]


def test_a_smollm_tokenizer_is_rebuilt_exactly(llama_file, tiny_tokenizer):
    tokenizer = weights.load_agent(llama_file()).tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == tiny_tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert tokenizer.model_max_length == 128


def test_a_smollm_tokenizer_never_joins_digits_or_a_space_with_one(llama_file):
    def change(fields, tensors):
        fields["tokenizer.ggml.tokens"] += ["42", "Ġ4"]
        fields["tokenizer.ggml.token_type"] += [1, 1]
        fields["tokenizer.ggml.merges"] += ["4 2", "Ġ 4"]
        tensors["token_embd.weight"] = np.concatenate([tensors["token_embd.weight"], np.ones((2, 32), np.float32)])

    assert weights.load_agent(llama_file(change)).tokenizer.tokenize(" 42") == ["Ġ", "4", "2"]


def test_a_qwen2_tokenizer_equals_transformers_own(tiny_dir, tmp_path):
    from transformers import Qwen2Tokenizer

    directory = tiny_dir("qwen2")
    fields = tokenizer_fields(directory, "qwen2")
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    reference = Qwen2Tokenizer(vocab=vocab, merges=merges)
    reference.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer = weights.load_agent(write_gguf(tmp_path / "m.gguf", directory)).tokenizer
    smollm = weights.load_agent(directory).tokenizer
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)
    assert any(tokenizer.encode(text) != smollm.encode(text) for text in TEXTS)


def test_unused_tokens_are_in_the_model_but_not_in_the_tokenizer(llama_file):
    def change(fields, tensors):
        fields["tokenizer.ggml.tokens"] += ["[PAD320]", "<think>"]
        fields["tokenizer.ggml.token_type"] += [5, 4]
        tensors["token_embd.weight"] = np.concatenate([tensors["token_embd.weight"], np.ones((2, 32), np.float32)])

    agent = weights.load_agent(llama_file(change))
    assert agent.config.vocab_size == 322
    assert "[PAD320]" not in agent.tokenizer.get_vocab()
    assert agent.tokenizer.encode("<think>") == [321]  # user-defined: one token, which is not skipped as special
    assert agent.tokenizer.decode([321], skip_special_tokens=True) == "<think>"


def test_add_bos_token_has_effect_also_after_saving(llama_file, tmp_path):
    agent = weights.load_agent(llama_file(lambda fields, _: fields.update({"tokenizer.ggml.add_bos_token": True})))
    weights.save_pretrained(tmp_path / "out", *agent[1:])
    for tokenizer in (agent.tokenizer, weights.load_agent(tmp_path / "out").tokenizer):
        assert tokenizer.encode("1")[0] == 1 and len(tokenizer.encode("1")) == 2
        assert len(tokenizer.encode("1", add_special_tokens=False)) == 1


# --- bad files ---------------------------------------------------------------------------------------------------------


def drop(key):
    return lambda fields, tensors: (fields if key in fields else tensors).pop(key)


def put(**fields):
    return lambda f, _: f.update({k.replace("__", "."): v for k, v in fields.items()})


def shrink(fields, tensors):
    tensors["token_embd.weight"] = tensors["token_embd.weight"][:300]


def narrow(fields, tensors):
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:-2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(general__architecture="gemma"), "unknown architecture 'gemma': jmarl knows llama, qwen2, qwen3, mistral3"),
        (drop("llama.embedding_length"), "no llama.embedding_length"),
        (drop("blk.1.ffn_up.weight"), "1 tensor is missing: model.layers.1.mlp.up_proj.weight"),
        (drop("token_embd.weight"), "missing: token_embd.weight"),
        (lambda f, t: t.update({"blk.0.extra.weight": np.ones((2, 2), np.float32)}), "unknown.*: blk.0.extra.weight"),
        (narrow, r"up_proj.weight has shape \(62, 32\), the config asks for \(64, 32\)"),
        (lambda f, t: t.update({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}), "not Llama 3's.*safetensors"),
        (put(llama__rope__scaling__type="ntk"), "m.gguf: rope type 'ntk' is not supported"),
        (put(llama__attention__temperature_scale=0.1), "attention.temperature_scale"),
        (put(llama__rope__dimension_count=8), "m.gguf: .*partial_rotary_factor=0.5"),
        (put(llama__expert_count=8), "experts"),
        (put(llama__attention__sliding_window=64), "a sliding window"),
        (put(split__count=2), "split over several files"),
        (
            put(tokenizer__ggml__pre="bloom"),
            "'gpt2' with pre-tokenizer 'bloom' is unknown: jmarl reads 'llama' and 'gpt2' with smollm, refact, qwen2,",
        ),
        (put(tokenizer__ggml__model="t5"), "tokenizer 't5' with"),
        (put(tokenizer__ggml__model="llama"), "no tokenizer.ggml.scores"),
        (drop("tokenizer.ggml.merges"), "no tokenizer.ggml.merges"),
        (shrink, "tokenizer has 320 tokens but the model's vocabulary only 300"),
    ],
)
def test_errors_name_what_is_wrong_with_a_file(change, message, llama_file):
    with pytest.raises(ValueError, match=message):
        weights.load_agent(llama_file(change))


@pytest.mark.parametrize("part", [0, 2, 40, 0.02, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_named_with_its_size(part, llama_file):
    path = llama_file()
    data = path.read_bytes()
    path.write_bytes(data[: part if isinstance(part, int) else int(part * len(data))])
    with pytest.raises(ValueError, match=rf"m.gguf \({path.stat().st_size} bytes\) is not a complete GGUF file"):
        weights.load_agent(path)


def test_the_error_without_the_gguf_package_names_the_extra(llama_file, monkeypatch):
    path = llama_file()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'jmarl\[gguf\]'"):
        weights.load_agent(path)


# --- SmolLM2 -----------------------------------------------------------------------------------------------------------


def nll(agent, text):
    """Mean negative log-likelihood of a text, in nats per token."""
    tokens = np.array(agent.tokenizer.encode(text))
    logprobs = jax.nn.log_softmax(jax.jit(decoder.forward, static_argnums=1)(agent.params, agent.config, tokens))
    return -float(np.mean(np.asarray(logprobs)[np.arange(len(tokens) - 1), tokens[1:]]))


@pytest.mark.slow
def test_unpermuting_lowers_the_nll_of_english(smollm2, monkeypatch):
    right = nll(smollm2, SENTENCE)
    assert right < 3.5
    monkeypatch.setattr(gguf_weights, "unpermute", lambda rows, heads: rows)
    wrong = nll(weights.load_agent(weights._smollm2_gguf()), SENTENCE)
    assert wrong > right + 0.5


@pytest.mark.slow
def test_smollm2s_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    # as printed in a public notebook (Cyb3rWard0g/HF-Agents-Course-Notes, unit 1) with the hub's own tokenizer
    assert tokenizer.encode("The Capital of France is") == [504, 14937, 282, 4649, 314]
    assert tokenizer.encode(chat_prompt(tokenizer, "Hi"))[:8] == [1, 9690, 198, 2683, 359, 253, 5356, 5646]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_smollm2s_cache_is_the_gguf_file(smollm2):
    agent = weights.load_agent(weights._smollm2_gguf())
    assert agent.config == smollm2.config
    jax.tree.map(np.testing.assert_array_equal, agent.params, smollm2.params)
    assert agent.tokenizer.encode(SENTENCE) == smollm2.tokenizer.encode(SENTENCE)
