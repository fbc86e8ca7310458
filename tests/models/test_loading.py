"""Weights that stay in their files until they are needed are read once, a layer at a time, and only where they are needed."""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter

import jax
import numpy as np
import pytest

from jmarl.models import stack
from jmarl.models.hub.agents import load_agent, open_agent
from jmarl.models.hub.hf_format import StoredLeaf, Tensor, stored_params, tensors_from_params
from jmarl.models.stack import is_shared, read_parts, share_params, stack_params
from jmarl.team import Team, initial_params


@pytest.fixture(scope="module")
def stored(tiny_config, random_agent):
    """Parameters as arrays, as stored leaves, and how often each tensor was read."""
    agent, reads = random_agent(tiny_config("qwen2", num_layers=16, hidden_size=64, tie_embeddings=False), None, 0), Counter()

    def tensor(name, x):
        return Tensor(x.shape, lambda: reads.update([name]) or x.copy())

    tensors = {name: tensor(name, x) for name, x in tensors_from_params(agent.config, agent.params).items()}
    return agent.params, stored_params(agent.config, tensors, "here"), reads


@pytest.mark.parametrize("leaf", ["qkv", "out", "down"])
def test_beside_the_parts_of_a_leaf_only_a_layer_is_in_memory(stored, leaf):
    """Of two agents of one model and one of another, each divided in two; a layer is read as tensor, array and mask."""
    arrays, lazy, reads = stored[0]["layers"][leaf], stored[1]["layers"][leaf], stored[2]
    half = arrays.shape[1] // 2
    parts = [((0, 3), (0, 16), (0, half), *((0, n) for n in arrays.shape[2:]))]
    parts.append((*parts[0][:2], (half, 2 * half), *parts[0][3:]))
    reads.clear()
    tracemalloc.start()
    halves = read_parts([lazy, arrays, lazy], True, parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(reads.values()) == {1} and len(reads) == 16 * (3 if leaf == "qkv" else 1)
    whole = np.concatenate([halves[part] for part in parts], 2)
    np.testing.assert_array_equal(whole, np.stack([arrays] * 3))
    assert peak < whole.nbytes + 4 * arrays[0].nbytes + 20_000


def unstacked(params):
    """All arrays of parameters, of the layers one for each."""
    layers = [list(x.value if is_shared(x) else x) for x in params["layers"].values()]
    return jax.tree.leaves([{name: x for name, x in params.items() if name != "layers"}, layers])


@pytest.mark.parametrize("piece", [stack.PIECE, 100_000, 1])
def test_stored_weights_are_stacked_and_shared_like_arrays(stored, piece, monkeypatch):
    """Also in pieces: several layers at once, and one at a time."""
    monkeypatch.setattr(stack, "PIECE", piece)
    arrays, lazy, reads = stored
    reads.clear()
    stacked, shared = stack_params([lazy, lazy]), share_params([lazy, arrays])
    jax.tree.map(np.testing.assert_array_equal, stacked, jax.tree.map(lambda x: np.stack([x, x]), arrays))
    jax.tree.map(np.testing.assert_array_equal, unstacked(shared), unstacked(arrays))
    assert reads["model.embed_tokens.weight"] == 3  # once to stack, once to compare, once to share
    assert all(x.dtype == np.float32 for x in jax.tree.leaves((stacked, shared)))


def test_a_team_reads_its_models_when_it_needs_them(tiny_dir):
    directory = tiny_dir("llama")
    team, agent = Team.load([directory] * 2), load_agent(directory)
    assert all(isinstance(x, StoredLeaf) for x in jax.tree.leaves(team.agents[0].params))
    expected = stack_params([agent.params] * 2)
    jax.tree.map(np.testing.assert_array_equal, initial_params(team, None, lora=False)[0], expected)
    embed, down = team.agents[0].params["embed"], team.agents[0].params["layers"]["down"]
    assert embed.shape == agent.params["embed"].shape and down.size == agent.params["layers"]["down"].size
    np.testing.assert_array_equal(embed[3], agent.params["embed"][3])
    np.testing.assert_array_equal(down[1], agent.params["layers"]["down"][1])


@pytest.mark.parametrize("change", ["written again", "removed"])
def test_files_that_changed_since_they_were_opened_are_not_read(change, copy_dir):
    agent, file = open_agent(copy_dir), copy_dir / "model.safetensors"
    if change == "removed":
        file.unlink()
    else:
        os.utime(file, ns=(0, 0))
    with pytest.raises(ValueError, match=r"model.safetensors was changed or removed after the model was opened"):
        stack_params([agent.params])
