"""Score what was sampled once more, in one program for each stack."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from jmarl.sampling import scoring


@partial(jax.jit, static_argnums=0)
def score_stack(cfg, params, prompts, lengths, tokens):
    return jax.vmap(partial(scoring.score, cfg=cfg))(params, prompts=prompts, lengths=lengths, tokens=tokens).logprobs


def assert_sampled_logprobs_are_those_of_scoring(team, params, batches):
    """Of all rows with a return."""
    for spec, weights, batch in zip(team.stacks, params, jax.device_get(batches), strict=True):
        scored = np.asarray(score_stack(spec.config, weights, batch.prompts, batch.prompt_lengths, batch.tokens))
        valid = batch.action_mask & np.isfinite(batch.rewards)[..., None]
        assert valid.any()
        np.testing.assert_allclose(scored[valid], batch.old_logprobs[valid], atol=1e-4)
