"""Compiled programs of the tests: kept on disk for all workers, stages and later runs, and in memory within a limit.

Import it before any other module that imports jax. Subprocesses inherit the environment: they read what is on disk, and write
nothing, because JAX writes a program in pieces, of which a worker could read the first.
"""

import gc
import os
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/jmarl-tests-compile-cache-{os.getuid()}")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1e9")

import jax
from jax._src.lru_cache import LRUCache

MAPS = Path("/proc/self/maps")
# A program takes dozens of memory maps. XLA ends the process with a segmentation fault where there are more than Linux allows.
MAX_MAPS = 65_530
MANY_MAPS = 15_000  # more than a module takes; with as many, a worker takes 3.3 GB


def write_whole(cache: LRUCache, key: str, value: bytes) -> None:
    """Write an entry of the cache by rename, so that no other process reads a part of it."""
    path = cache.path / f"{key}-cache"
    if not path.exists():
        part = cache.path / f"{key}-{os.getpid()}-{threading.get_ident()}"
        part.write_bytes(value)
        os.replace(part, path)


def num_maps() -> int:
    """Return how many memory maps this process has; 0 where that is not known."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def forget() -> None:
    """Forget the programs in memory."""
    jax.clear_caches()
    gc.collect()


LRUCache.put = write_whole
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
