"""Greedy completions of SmolLM2-135M-Instruct by the sampler equal those of transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import Sampling
from jmarl.models.hub.agents import save_pretrained
from jmarl.sampling import sampler

PROMPTS = """The capital of France is|Once upon a time|def add(a, b):|The three laws of motion say that|Dear Sir or Madam,
In the beginning|To make a cup of tea, first|The sum of 17 and 25 is|A haiku about rain:|She opened the door and
Photosynthesis is|List the planets:|The fastest animal on land|Water boils at|He looked at the map because|My favourite book is
import numpy as np|The moon moves around the earth|If it rains tomorrow, we|The last train left""".replace("\n", "|").split("|")


@pytest.mark.slow
def test_greedy_smollm2_equals_transformers(smollm2, tmp_path):
    """Compare 20 prompts x 64 tokens with `generate` on an exported model. Completions may differ first where the two largest
    logits of transformers are closer than 1e-3."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer, new = smollm2.tokenizer, 64
    ids = [tokenizer.encode(text) for text in PROMPTS]
    width = max(map(len, ids))
    stop = tokenizer.eos_token_id
    prompts = jnp.array([[row + [0] * (width - len(row)) for row in ids]])
    rows = sampler.RowIds(seed=0, step=0, purpose=0, stack=0, agents=np.zeros((1, 1), int), prompt_ids=np.arange(len(ids)))
    settings = Sampling(max_new_tokens=new, temperature=0)
    params = jax.tree.map(lambda x: jnp.asarray(x)[None], smollm2.params)
    lengths = jnp.array([list(map(len, ids))])
    sample = jax.jit(sampler.sample, static_argnums=(1, 2))
    inputs = sampler.SampleInputs(prompts, lengths, sampler.row_keys(rows, 1), jnp.array([stop]))
    ours = jax.device_get(sample(params, smollm2.config, settings, inputs))
    del params
    save_pretrained(tmp_path, smollm2.config, smollm2.params, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    left = torch.tensor([[stop] * (width - len(row)) + row for row in ids])
    exists = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    options = dict(do_sample=False, max_new_tokens=new, eos_token_id=stop, pad_token_id=stop)
    theirs = model.generate(left, attention_mask=exists, **options)[:, width:].tolist()
    same = 0
    for i, row in enumerate(ids):
        got = ours.tokens[0, i, 0][ours.action_mask[0, i, 0]].tolist()
        expected = theirs[i][: theirs[i].index(stop) + 1] if stop in theirs[i] else theirs[i]
        if got == expected:
            same += 1
            continue
        t = next(k for k in range(new) if got[k] != expected[k])
        with torch.no_grad():
            z = model(torch.tensor([row + got[:t]])).logits[0, -1]
        best = z.topk(2)
        assert float(best.values[0] - best.values[1]) < 1e-3, (PROMPTS[i], t)
        assert {got[t], expected[t]} == set(best.indices.tolist())
    assert len(ids) == 20 and same >= 15
