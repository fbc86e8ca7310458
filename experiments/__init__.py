"""Runnable experiments: `python -m experiments.NAME --help`.

On Linux the process starts itself again once with `glibc.malloc.hugetlb=1`. XLA on a CPU allocates and frees gigabytes at
every step; in 4 KiB pages the kernel's page faults take a fifth to a third of the time, in huge pages a few per cent. glibc
reads the setting only when a process starts. Anything set in GLIBC_TUNABLES already is left alone.

JAX gets one virtual CPU device a core, so that agents can run beside each other (see
`jmarl.models.sharding`); JAX_NUM_CPU_DEVICES set by the user wins.
"""

import os
import sys

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("experiments."):  # not where a test or notebook imports one
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
