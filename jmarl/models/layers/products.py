"""Products, norms, activations and dropout of a layer."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jmarl.models.config import ModelConfig
from jmarl.models.cpu import Panels, panel_product
from jmarl.models.gpu import matmul_precision


def rms_norm(x: Float[Array, "*batch dim"], scale: Float[Array, " dim"], eps: float) -> Float[Array, "*batch dim"]:
    """Normalize by the root mean square (arXiv 1910.07467), computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return scale * y.astype(x.dtype)


def normalize(cfg: ModelConfig, x: Float[Array, "*batch dim"], weight: Float[Array, " dim"]) -> Float[Array, "*batch dim"]:
    """Return `rms_norm` as a model computes it."""
    if not cfg.norm_adds_one:
        return rms_norm(x, weight, cfg.rms_eps)
    return rms_norm(x.astype(jnp.float32), 1 + weight.astype(jnp.float32), cfg.rms_eps).astype(x.dtype)


def scaled(x: Float[Array, "*shape"], scale: float) -> Float[Array, "*shape"]:
    """Return x times a number, which would be rounded to the dtype of x before the product."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def product(x: Float[Array, "token d"], w: Float[Array, "d f"] | Panels) -> Float[Array, "token f"]:
    """Return x times a weight, which may be cut into panels."""
    precision = matmul_precision(x)
    return panel_product(x, w, precision) if isinstance(w, Panels) else jnp.matmul(x, w, precision=precision)


def drop(
    x: Float[Array, "token d"],
    key: PRNGKeyArray,
    keep_rate: Float[Array, ""],
    tokens: Int[Array, " token"] | None = None,
    whole: Float[Array, "all_token 0"] | None = None,
) -> Float[Array, "token d"]:
    """Return x with some of its numbers 0 and the others larger. The key is consumed. For tokens and whole see `lora`."""
    shape = x.shape if whole is None else (whole.shape[0], x.shape[1])
    keep = jax.random.bernoulli(key, keep_rate, shape)
    return jnp.where(keep if tokens is None else keep[tokens], x / keep_rate, 0)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
