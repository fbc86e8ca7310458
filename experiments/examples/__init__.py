"""Short programs that train with MRLM's classes: `python -m experiments.examples.NAME [--quick]`.

Each prints held-out results before and after. Without --quick the policy is SmolLM2-135M-Instruct, for minutes to hours on CPU
cores; with it a tiny random model makes two updates in seconds, which shows that everything runs and teaches nothing.
`start.py` has what they share.

Nearly all the time of a quick run would go to compiling programs that run for milliseconds, so XLA compiles them faster, to
slower code, unless you have set XLA_FLAGS.
"""

import importlib.metadata
import os
import sys

if "--quick" in sys.orig_argv and "jax" not in sys.modules:
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
             "--xla_cpu_parallel_codegen_split_count=1"]  # fmt: skip
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):  # later ones do not know the flag
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
