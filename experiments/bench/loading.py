"""Measure the memory that a process takes to load a model divided over several.

Claim: each of four processes takes about 1.3 times a quarter of the model's bytes (float32), beside what JAX itself takes.
Command: python -m experiments.bench.loading DIR --write
         jmarl launch --nproc-per-node 4 -- -m experiments.bench.loading DIR --mesh model=4
         JAX_NUM_CPU_DEVICES=1 and JAX_PLATFORMS=cpu where there are GPUs: their memory is not measured.
The first writes a Llama of 1.17 billion random weights in bfloat16 (2.3 GB), with the tokenizer of SmolLM2. The second prints
one JSON object for each process, in MB: anonymous memory (RssAnon of Linux, read every 2 ms) before loading, its peak, and at
the end; and the peak above what was before in shares of the process.
Expected: 1.26 to 1.31 on CPUs, with what the allocator keeps. Time: a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=49152, hidden_size=2048, intermediate_size=5632,
    num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=10000.0,
    max_position_embeddings=2048, tie_word_embeddings=False, hidden_act="silu", bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def write_model(directory: Path) -> None:
    """Write a model of random weights."""
    import ml_dtypes
    from safetensors.numpy import save_file

    from jmarl.models.config import ModelConfig
    from jmarl.models.hub.agents import open_agent
    from jmarl.models.hub.config_json import config_from_hf
    from jmarl.models.hub.hf_format import filed_tensors

    directory.mkdir(parents=True, exist_ok=True)
    open_agent().tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    cfg: ModelConfig = config_from_hf(LLAMA)
    rng = np.random.default_rng(0)
    shapes = {name: tensor.shape for name, tensor in filed_tensors(cfg).items()}
    draws = {name: rng.standard_normal(shape, np.float32) * 0.02 for name, shape in shapes.items()}
    save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in draws.items()}, directory / "model.safetensors")


def anonymous_bytes() -> int:
    """Return the memory of this process that is not that of files."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) * 1024  # type: ignore[index]


class Peak(threading.Thread):
    """Keeps the largest value of `anonymous_bytes`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes())


def measure(directory: Path, mesh: str) -> dict[str, Any]:
    """Load the model and return what it took, in MB."""
    import jmarl

    jmarl.join_processes()
    import jax

    from jmarl.config import TrainConfig
    from jmarl.models.hub.agents import open_agent
    from jmarl.processes import exchange
    from jmarl.runs.start import place_team

    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # JAX has started
    exchange.wait_for_all()
    before, peak, start = anonymous_bytes(), Peak(), time.monotonic()
    peak.start()
    _, _, params = place_team([open_agent(directory)], TrainConfig.of(mesh=mesh, num_updates=1))
    leaves = jax.block_until_ready(jax.tree.leaves(params))
    peak.ended.set()
    peak.join()
    share = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    sizes = dict(before=before, peak=peak.bytes, end=anonymous_bytes(), model=sum(x.nbytes for x in leaves), share=share)
    megabytes = {name: round(size / 1e6) for name, size in sizes.items()}
    ratio = (peak.bytes - before) / share
    return megabytes | {"peak above before in shares": round(ratio, 3), "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", action="store_true", help="write the model, and load nothing")
    parser.add_argument("--mesh", default="auto", help="devices by axis, such as model=4")
    options = parser.parse_args()
    if options.write:
        write_model(options.directory)
    else:
        print(json.dumps(measure(options.directory, options.mesh)), flush=True)


if __name__ == "__main__":
    main()
