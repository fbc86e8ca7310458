"""The model families that load, sample, train and save: one file each. No jax. Open `family.py` first, then `gemma.py`.

To add one:

1. Write ``NAME.py`` with a `Family`: what its config.json says (`read`), how that is written back (`write`), and the names of
   its modules that differ from Llama's (`modules`).
2. Name it in `FAMILIES` by the `model_type` of its config.json; its fields of GGUF say how llama.cpp files it, if it does.
3. If it computes something new: a static field of `models.config.ModelConfig` that costs other models nothing, a weight in
   `models.weights.WEIGHTS`, and the line of `models.decoder.Block` that reads them.

tests/families/test_families.py then compares it with transformers.
"""

from jmarl.lazy import Table
from jmarl.models.families.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES = Table[Family](
    {
        "llama": "jmarl.models.families.llama:LLAMA",
        "qwen2": "jmarl.models.families.qwen2:QWEN2",
        "qwen3": "jmarl.models.families.qwen3:QWEN3",
        "qwen3_moe": "jmarl.models.families.qwen3_moe:QWEN3_MOE",
        "qwen3_5_text": "jmarl.models.families.qwen3_5:QWEN3_5",
        "mistral": "jmarl.models.families.mistral:MISTRAL",
        "ministral": "jmarl.models.families.mistral:MINISTRAL",
        "ministral3": "jmarl.models.families.mistral:MINISTRAL3",
        "gemma2": "jmarl.models.families.gemma:GEMMA2",
        "gemma3_text": "jmarl.models.families.gemma3:GEMMA3",
        "phi3": "jmarl.models.families.phi3:PHI3",
        "smollm3": "jmarl.models.families.smollm3:SMOLLM3",
        "olmo2": "jmarl.models.families.olmo:OLMO2",
        "olmo3": "jmarl.models.families.olmo:OLMO3",
        "granite": "jmarl.models.families.granite:GRANITE",
    }
)
