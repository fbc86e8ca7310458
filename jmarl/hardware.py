"""Ask JAX what the devices of this process are, and what follows for the type that programs compute in.

The platform is an argument where programs may be for a device that is not here, see `models.platforms`.
"""

from __future__ import annotations

import functools

import jax

GPU = ("gpu", "cuda")  # names of their platform: that of devices, and that of lowering


@functools.cache
def has_old_gpu() -> bool:
    """Return whether a GPU of this process is older than Ampere: it has no products in bfloat16, and cuDNN no attention."""
    return any(float(device.compute_capability) < 8 for device in jax.devices() if device.platform == "gpu")


def dtype_on(platform: str, dtype: str = "auto") -> str:
    """Return the value of the setting compute_dtype on a platform: bfloat16 in place of auto on newer GPUs, else float32."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if platform in GPU and not has_old_gpu() else "float32"


def memory_pool() -> int | None:
    """Return the bytes that JAX takes on each device (the least of all); None where the platform does not say it, as CPUs."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return min((limit for limit in limits if limit), default=None)


def memory_in_use() -> int:
    """Return the bytes of the pool that are taken now, the most of all devices; 0 where the platform does not say it."""
    return max((device.memory_stats() or {}).get("bytes_in_use", 0) for device in jax.local_devices())
