"""`jmarl export`: transformers and peft load what it writes, and compute what our decoder computes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jmarl import ExperimentConfig, load_agent, run_experiment, save_pretrained
from jmarl.cli.export import base_names
from jmarl.cli.main import main
from jmarl.models import decoder
from jmarl.models.config import DeltaSizes

pytestmark = pytest.mark.long

TOKENS = [1, 40, 71, 9, 200, 17]
FORWARD = jax.jit(decoder.forward, static_argnums=1)


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory, tiny_config, tiny_tokenizer, random_agent):
    """The current directory, with a model and a run with LoRA on it, whose adapters matter."""
    root, before = tmp_path_factory.mktemp("export"), os.getcwd()
    os.chdir(root)
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    save_pretrained("m0", agent.config, agent.params, tiny_tokenizer)
    Path("texts.jsonl").write_text(json.dumps({"prompt": "What is", "completion": "the answer"}) + "\n")
    settings = dict(algorithm="sft", data="texts.jsonl", batch_size=1, num_updates=3, progress=False, learning_rate=0.05)
    run_experiment(ExperimentConfig.of(models=["m0"], output_dir="lora", lora_rank=2, save_every=1, **settings))
    shutil.copytree("lora", "checkpoint")
    shutil.rmtree("checkpoint/models")
    yield root
    os.chdir(before)


def logits_of(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.as_tensor(np.array(TOKENS))[None]).logits[0].float().numpy()


def our_logits(path) -> np.ndarray:
    agent = load_agent(path)
    return np.asarray(FORWARD(agent.params, agent.config, np.asarray(TOKENS, np.int32)))


def test_transformers_loads_a_merged_model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["export", "--model", "checkpoint", "--output", str(tmp_path / "out"), "--merge"]) == 0
    path = tmp_path / "out" / "agent_0"
    expected = our_logits("lora/models/agent_0")
    np.testing.assert_allclose(logits_of(AutoModelForCausalLM.from_pretrained(path)), expected, atol=1e-4)
    assert np.abs(expected - our_logits("m0")).max() > 0.1
    assert AutoTokenizer.from_pretrained(path).decode(TOKENS) == load_agent("m0").tokenizer.decode(TOKENS)
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


@pytest.mark.filterwarnings("ignore")  # of peft itself
def test_peft_loads_the_adapters_onto_their_base(tmp_path):
    from peft import AutoPeftModelForCausalLM

    assert main(["export", "--model", "lora", "--output", str(tmp_path / "out")]) == 0
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "agent_0")
    np.testing.assert_allclose(logits_of(model), our_logits("lora/models/agent_0"), atol=1e-4)


def test_adapters_of_models_and_of_the_checkpoint_are_the_same_and_name_their_base(tmp_path):
    for run in ("lora", "checkpoint"):
        assert main(["export", "--model", run, "--output", str(tmp_path / run), "--dtype", "bfloat16"]) == 0
    paths = [tmp_path / run / "agent_0" for run in ("lora", "checkpoint")]
    weights, settings = (
        [(path / name).read_bytes() for path in paths] for name in ("adapter_model.safetensors", "adapter_config.json")
    )
    assert weights[0] == weights[1] and settings[0] == settings[1]
    assert json.loads(settings[0])["base_model_name_or_path"] == str(Path("m0").resolve())
    assert len(weights[0]) < 0.7 * Path("lora/models/agent_0/adapter/adapter_model.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore:gemma3")
def test_a_base_of_text_and_images_is_written_as_its_text_part(tmp_path, tiny_config, tiny_tokenizer, random_agent):
    """peft would look for the modules of the text model in the whole model, and find none."""
    switches = dict(
        norms_after=True, norm_adds_one=True, qk_norm=True, embed_scale=32**0.5, attention_scale=0.25,
        activation="gelu_tanh", sliding_rope_theta=1e4,
    )  # fmt: skip
    agent = random_agent(tiny_config("gemma3_text", **switches), tiny_tokenizer, 0)
    save_pretrained(tmp_path / "whole", agent.config, agent.params, tiny_tokenizer)
    text = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    source = SimpleNamespace(experiment=None, agents=[agent])
    for model in ("whole", "new/base"):
        args = SimpleNamespace(base_model=[str(tmp_path / model)])
        names = base_names(source, args, tmp_path / "new", tmp_path / "new")  # pyright: ignore[reportArgumentType]
        assert names == [str((tmp_path / "new/base").resolve())]
    assert json.loads((tmp_path / "new/base/config.json").read_text())["model_type"] == "gemma3_text"


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_weights_are_rounded_to_the_type(dtype, step, tmp_path):
    assert main(["export", "--model", "m0", "--output", str(tmp_path / "out"), "--dtype", dtype]) == 0
    path = tmp_path / "out" / "agent_0"
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == dtype
    before, after = (load_agent(x).params["embed"] for x in ("m0", path))
    assert 0 < np.abs(after / before - 1).max() <= step


def test_rates_of_decays_are_not_rounded(tmp_path, tiny_config, tiny_tokenizer, random_agent):
    """Nor the biases and norms of recurrent layers: the decoder computes with them in float32, whatever it computes in."""
    switches = dict(norm_adds_one=True, qk_norm=True, attention_gate=True, rotary_dim=4)
    cfg = tiny_config("qwen3_5_text", delta=DeltaSizes(2, 4, 8, 12), delta_layers=(True, False), **switches)
    agent = random_agent(cfg, tiny_tokenizer, 0)
    save_pretrained(tmp_path / "one", cfg, agent.params, tiny_tokenizer)
    arguments = ["--model", str(tmp_path / "one"), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(["export", *arguments]) == 0
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("one", "out/agent_0"))
    whole = {name.partition("linear_attn.")[2] for name, x in after.items() if x.dtype == np.float32}
    assert whole == {"A_log", "dt_bias", "norm.weight"} and after["model.embed_tokens.weight"].dtype.itemsize == 2
    np.testing.assert_array_equal(after["model.layers.0.linear_attn.A_log"], before["model.layers.0.linear_attn.A_log"])


def test_the_card_has_the_settings_and_the_curve(tmp_path):
    assert main(["export", "--model", "lora", "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "agent_0" / "README.md").read_text()
    rows = [json.loads(line) for line in Path("lora/metrics.jsonl").read_text().splitlines()]
    lines = [f"| {row['step']} | {row['loss']:.4g} |" for row in rows if "loss" in row]
    expected = ["library_name: peft", "| algorithm | sft |", "| lora_rank | 2 |", "| learning_rate | 0.05 |", *lines]
    assert len(lines) == 3 and [text for text in expected if text not in card] == []
    assert str(Path.cwd()) not in card


@pytest.mark.parametrize("card", ["---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n", "# license: no field\n", None])
def test_the_card_has_the_license_of_the_base(card, tmp_path):
    path = Path("m0/README.md")
    path.unlink(missing_ok=True)
    if card:
        path.write_text(card)
    assert main(["export", "--model", "lora", "--output", str(tmp_path / "out")]) == 0
    head = (tmp_path / "out" / "agent_0" / "README.md").read_text().split("---")[1]
    assert ("license: apache-2.0" in head.splitlines()) == ("license" in head) == bool(card and card.startswith("---"))


def test_what_cannot_be_exported_is_refused(tmp_path, capsys):
    assert main(["export", "--model", "m0", "--output", str(tmp_path / "out"), "--merge"]) == 2
    assert "--merge is for runs with LoRA, and m0 has no adapters" in capsys.readouterr().err
    assert main(["export", "--model", "m0", "--output", "lora"]) == 2
    assert "lora exists and is not empty" in capsys.readouterr().err
    shutil.copytree("lora", "linked")
    for name in ("adapter/notes", "generation_config.json"):
        link = Path("linked/models/agent_0") / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("texts.jsonl").absolute())
        assert main(["export", "--model", "linked", "--output", str(tmp_path / "out")]) == 2
        assert re.search(f"{name} is a link to .*texts.jsonl, out of .*agent_0, and is not read", capsys.readouterr().err)
        link.unlink()
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.saving").exists()
