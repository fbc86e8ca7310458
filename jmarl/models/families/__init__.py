"""The model families that load, sample, train and save: one file each. No jax. Open `family.py` first, then `gemma.py`.

To add one:

1. Write ``NAME.py`` with a `Family`: what its config.json says (`read`), how that is written back (`write`), and the names of
   its modules that differ from Llama's (`modules`).
2. Name it in `FAMILIES` by the `model_type` of its config.json; its fields of GGUF say how llama.cpp files it, if it does.
3. If it computes something new: a static field of `models.config.ModelConfig` that costs other models nothing, a weight in
   `models.weights.WEIGHTS`, and the line of `models.decoder.Block` that reads them.

tests/families/test_families.py then compares it with transformers.
"""

from __future__ import annotations

from jmarl.models.families.family import Family
from jmarl.models.families.gemma import GEMMA2
from jmarl.models.families.gemma3 import GEMMA3
from jmarl.models.families.granite import GRANITE
from jmarl.models.families.llama import LLAMA
from jmarl.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from jmarl.models.families.olmo import OLMO2, OLMO3
from jmarl.models.families.phi3 import PHI3
from jmarl.models.families.qwen2 import QWEN2
from jmarl.models.families.qwen3 import QWEN3
from jmarl.models.families.qwen3_5 import QWEN3_5
from jmarl.models.families.qwen3_moe import QWEN3_MOE
from jmarl.models.families.smollm3 import SMOLLM3

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_5_text": QWEN3_5,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite": GRANITE,
}
