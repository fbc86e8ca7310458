"""Runnable experiments: `python -m experiments.NAME --help`.

Importing this package from `python -m` on Linux starts the process again, once, with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`.
XLA on a CPU allocates and frees gigabytes in every step. With pages of 4 KiB, page faults took a fifth to a third of the time
on some machines, and less than a tenth, as with huge pages, on others (`bench.faults`). glibc reads the variable only when a
process starts. If you have set GLIBC_TUNABLES, it is left alone.

JAX gets one virtual CPU device per core, so that agents are computed in parallel (see `jmarl.models.sharding`). If you have set
JAX_NUM_CPU_DEVICES, it is left alone, and so it is in one of several processes, which share the cores.
"""

import os
import sys

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("experiments."):  # not when a test or notebook imports it
    if "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
