"""Describe GPUs, and make devices of them for which XLA compiles although they are not here.

XLA's compiler for CUDA runs on any Linux machine with x86-64 and the wheels of `jax[cuda12]`, which hold cuBLAS, cuDNN and the
assembler. It needs no driver; what a GPU looks like is told in text. Left out: autotuning, which times kernels on a device.
"""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from jmarl.config.validation import did_you_mean
from jmarl.models.gpu import has_cuda

# Triton's products need autotuning; without it they go to cuBLAS, as most large ones do on a GPU anyway.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
INSTALL = "pip install 'jmarl[cuda12]'"


class Gpu(NamedTuple):
    """What XLA's compiler and a best time need to know of a GPU. Sizes in bytes."""

    name: str
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # of float32, per core
    shared_memory: int  # per core; a block may use 1 KiB less
    cache: int
    clock: float  # GHz
    memory: int
    bandwidth: float  # bytes per second
    bfloat16: float  # dense operations per second
    float32: float  # operations per second without tensor cores
    link: float  # bytes per second from a GPU to the others of its host, in each direction: NVLink, or PCIe


GIB = 2**30
NETWORK = 50e9  # bytes per second and GPU between hosts: InfiniBand with 400 Gb/s for each
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 50 << 20, 1.98, 84942979072, 3.352e12, 989e12, 67e12, 450e9),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 233472, 50 << 20, 1.98, 150754820096, 4.814e12, 989e12, 67e12, 450e9),
    "a100-80g": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 40 << 20, 1.41, 84987740160, 2.039e12, 312e12, 19.5e12, 300e9
    ),
    "a100-40g": Gpu(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 167936, 40 << 20, 1.41, 42298834944, 1.555e12, 312e12, 19.5e12, 300e9
    ),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 102400, 96 << 20, 2.52, 47810936832, 0.864e12, 362e12, 91.6e12, 32e9),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 102400, 72 << 20, 2.52, 25393692672, 1.008e12, 165e12, 82.6e12, 32e9
    ),
}


def find_gpu(name: str) -> Gpu | None:
    """Return a GPU of the table; None for cpu. Raises ValueError for another name."""
    if name == "cpu":
        return None
    if name not in GPUS:
        allowed = ", ".join([*GPUS, "cpu"])
        raise ValueError(f"device={name!r} is not allowed: choose {allowed}{did_you_mean(name, [*GPUS, 'cpu'])}")
    return GPUS[name]


def compile_devices(gpu: Gpu | None, count: int = 1, hosts: int = 1) -> list[Any]:
    """Return devices to compile for: the CPU of this machine, or GPUs that need not be here, equally many on each host.

    Raises ValueError without the wheels for CUDA.
    """
    if gpu is None:
        return jax.devices("cpu")[:count]
    if not has_cuda():
        raise ValueError(f"XLA's compiler for {gpu.name} comes with JAX's wheels for CUDA, which are not installed: {INSTALL}")
    from jax.experimental import topologies

    shape = {"topology": f"1x{hosts}x{count // hosts}", "target_config": _target(gpu)}
    return [*topologies.get_topology_desc(platform="cuda", topology_name="", **shape).devices]


def compile_for(gpu: Gpu | None, programs: Mapping[str, Lowered]) -> dict[str, Compiled]:
    """Compile programs, by name, for a device of `compile_devices`; in threads, as a run does.

    JAX's persistent cache is left out: it cannot read a program for a device that is not here, and for a CPU the memory that
    the compiler takes is a part of the plan.
    """
    compile_one = functools.partial(Lowered.compile, compiler_options=COMPILER_OPTIONS if gpu else None)
    settings: Any = jax.config  # its type has no such attribute
    enabled = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks for a cache once
    try:
        with ThreadPoolExecutor() as threads:
            return dict(zip(programs, threads.map(compile_one, programs.values()), strict=True))
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _target(gpu: Gpu) -> str:
    """Return XLA's description of a GPU: the text of a GpuTargetConfigProto."""
    major, minor = gpu.compute_capability
    feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    numbers = {
        "core_count": gpu.cores, "fpus_per_core": gpu.lanes, "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory, "memory_bandwidth": int(gpu.bandwidth), "l2_cache_size": gpu.cache,
        "shared_memory_per_core": gpu.shared_memory, "shared_memory_per_block_optin": gpu.shared_memory - 1024,
        "shared_memory_per_block": 49152, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
        "threads_per_warp": 32, "threads_per_block_limit": 1024,
        "threads_per_core_limit": 1536 if gpu.compute_capability == (8, 9) else 2048,
        "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64,
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in numbers.items()]
    lines += [f'{name}_version: "{version}"' for name, version in VERSIONS.items()]
    return (
        f'gpu_device_info {{ cuda_compute_capability {{ major: {major} minor: {minor} {feature} }} name: "{gpu.name}" '
        + " ".join(lines)
        + f' }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{gpu.name}"'
    )


VERSIONS = {"driver": "12.8.0", "runtime": "12.8.0", "compile_time_toolkit": "12.8.0", "dnn": "9.10.0"}
