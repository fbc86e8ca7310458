"""Checkpoints: what comes back is what went in, and no failure loses a step that was reported as saved.

Kills are in `test_faults`.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.files import checkpoint
from jmarl.files.checkpoint import Checkpointer, CheckpointError


class Stack(NamedTuple):
    params: dict[str, Any]
    opt_state: tuple[Any, ...]


@flax.struct.dataclass
class Team:
    step: jax.Array
    key: jax.Array
    stacks: tuple[Stack, ...]


def make_state(agents: int = 2, seed: int = 0) -> Team:
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal((agents, 3, 4)), jnp.float32)
    weight = weight.at[0, 0].set(jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42]))  # bits that arithmetic would lose
    params = {"w": weight, "b": weight.astype(jnp.bfloat16), "frozen": None}
    stack = Stack(params, ((), {"count": jnp.arange(agents, dtype=jnp.int32)}))
    return Team(step=jnp.int32(seed), key=jnp.array([1, 2**32 - 1], jnp.uint32), stacks=(stack, stack))


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("like", [lambda s: s, abstract], ids=["arrays", "abstract"])
def test_round_trip_is_bit_equal(tmp_path, like):
    state, meta = make_state(), {"config": {"learning_rate": 1e-5, "roles": ["a", "b"]}, "epoch": 3}
    with Checkpointer(tmp_path / "new" / "dir") as ckpt:
        assert ckpt.latest_step() is None
        assert ckpt.save(7, state, meta)
        restored, got_meta, step = ckpt.restore(like(make_state(seed=1)))
    assert (got_meta, step) == (meta, 7)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert not any(leaf.committed for leaf in jax.tree.leaves(restored))  # as the leaves of `like`


def test_committed_leaves_come_back_with_their_sharding(tmp_path):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    state = jax.device_put(make_state(), sharding)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state, {})
        restored, _, _ = ckpt.restore(state)
    assert all(leaf.committed and leaf.sharding == sharding for leaf in jax.tree.leaves(restored))


def test_the_state_may_be_donated_right_after_save(tmp_path):
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(2_000_000)
    with Checkpointer(tmp_path, keep=10) as ckpt:
        for step in range(4):
            ckpt.save(step, {"x": x}, {})
            x = update(x)
        for step in range(4):
            restored = ckpt.restore({"x": x}, step)[0]["x"]
            assert (restored.min(), restored.max()) == (step, step)


def test_the_newest_steps_are_kept_and_none_is_saved_twice(tmp_path):
    with Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (5, 10, 15, 17):
            assert ckpt.save(step, {"x": jnp.float32(step)}, {"step": step})
        ckpt.wait()
        assert ckpt.steps() == [15, 17]
        assert not ckpt.save(17, {"x": jnp.float32(99)}, {})
        assert ckpt.restore({"x": jnp.float32(0)})[0]["x"] == 17
        assert ckpt.read_meta(15) == ({"step": 15}, 15)
        with pytest.raises(CheckpointError, match="step 3 is older than step 17"):
            ckpt.save(3, {"x": jnp.float32(3)}, {})
        ckpt.set_aside(17, "later")
        assert ckpt.save(16, {"x": jnp.float32(3)}, {})


def test_multiples_of_keep_every_stay_also_beside_those_of_an_earlier_process(tmp_path):
    for steps in ((2, 4, 5, 8), (9, 12, 13)):
        with Checkpointer(tmp_path, keep=1, keep_every=4) as ckpt:
            for step in steps:
                ckpt.save(step, {"x": jnp.float32(step)}, {})
    assert ckpt.steps() == [4, 8, 12, 13]


def test_a_step_is_listed_only_when_it_is_complete(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": jnp.ones(5_000_000)}, {})
        listed, complete = ckpt.latest_step(), (tmp_path / "1").exists()
        assert complete or listed is None
        ckpt.wait()
        assert ckpt.latest_step() == 1


def test_a_changed_agent_count_names_path_and_shapes(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, make_state(agents=2), {})
        with pytest.raises(CheckpointError) as error:
            ckpt.restore(make_state(agents=3))
    text = str(error.value)
    assert "checkpoint step 1" in text and "was the number of agents changed?" in text
    assert "stacks/0/params/w: checkpoint float32[2, 3, 4], this run float32[3, 3, 4]" in text


def test_a_checkpoint_of_another_version_is_an_error_that_names_both(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": jnp.ones(3)}, {})
        monkeypatch.setattr(checkpoint, "FORMAT", 7)
        for read in (lambda: ckpt.restore({"a": jnp.ones(3)}), ckpt.read_meta):
            with pytest.raises(CheckpointError, match="has format 2, and this version of jmarl reads format 7: resume it with"):
                read()


def test_a_changed_structure_or_dtype_is_named(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": jnp.ones(3), "b": jnp.ones(3)}, {})
        with pytest.raises(CheckpointError) as error:
            ckpt.restore({"a": jnp.ones(3, jnp.bfloat16), "c": jnp.ones(2)})
    text = str(error.value)
    assert "a: checkpoint float32[3], this run bfloat16[3]" in text
    assert "b: only in the checkpoint, float32[3]" in text and "c: only in this run, float32[2]" in text
    assert "agents" not in text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"n": 3}}, "a/n is a int"),
        ({"a": jax.random.key(0)}, "a is a typed PRNG key"),
        ({"a": jnp.zeros((0, 2))}, r"a has shape \(0, 2\)"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "two state leaves have the path a/b"),
    ],
)
def test_leaves_that_cannot_be_stored_are_named(tmp_path, state, message):
    with Checkpointer(tmp_path) as ckpt, pytest.raises((TypeError, ValueError), match=message):
        ckpt.save(1, state, {})


def test_meta_must_be_json(tmp_path):
    with Checkpointer(tmp_path) as ckpt, pytest.raises(TypeError, match="meta must be a JSON object"):
        ckpt.save(1, {"a": jnp.ones(1)}, {"path": object()})


def test_errors_at_construction(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpointer(tmp_path / "missing", read_only=True)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_a_missing_step_lists_the_others(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(CheckpointError, match="no complete checkpoint in"):
            ckpt.restore({"a": jnp.ones(1)})
        ckpt.save(4, {"a": jnp.ones(1)}, {})
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*; there are \[4\]"):
            ckpt.restore({"a": jnp.ones(1)}, 5)


def test_leftovers_are_ignored_cleaned_and_logged_but_not_by_a_reader(tmp_path, caplog):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": jnp.ones(1)}, {})
    leftover = tmp_path / "5.saving"
    (leftover / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    with Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.latest_step() == 1 and reader.restore({"a": jnp.zeros(1)})[0]["a"] == 1
        with pytest.raises(CheckpointError, match="read_only"):
            reader.save(2, {"a": jnp.ones(1)}, {})
    assert leftover.exists()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest_step() == 1
        assert ckpt.save(2, {"a": jnp.ones(1)}, {})
        ckpt.wait()
    assert not leftover.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    assert "5.saving" in caplog.text


def test_a_failed_background_save_is_reported_one_step_later_and_can_be_retried(tmp_path, full_disk):
    state = {"x": jnp.asarray(np.random.default_rng(0).standard_normal(1_000_000), jnp.float32)}  # does not compress
    ckpt = Checkpointer(tmp_path)
    assert ckpt.save(10, state, {}) and ckpt.save(20, state, {})
    ckpt.wait()
    deadline = time.monotonic() + 20
    with full_disk(1_000_000), pytest.raises(CheckpointError, match="step 30 was not saved .*complete step: 20"):
        assert ckpt.save(30, state, {})
        while time.monotonic() < deadline:  # the training steps after it
            ckpt.check()
            time.sleep(0.01)
    assert ckpt.steps() == [10, 20] and bits(ckpt.restore(state)[0]) == bits(state)
    assert ckpt.save(40, state, {})
    ckpt.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["20", "40"]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, damage_kind: str) -> None:
    content = bytearray(path.read_bytes())
    if damage_kind == "delete":
        path.unlink()
    elif damage_kind == "truncate":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A directory with steps 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    with Checkpointer(directory) as ckpt:
        for step in (1, 2):
            ckpt.save(step, make_state(seed=step), {"step": step})
    return directory


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly)])
def test_any_damaged_file_of_the_newest_step_is_named_and_the_step_before_is_used(two_steps, tmp_path, first, caplog):
    """Each file with one kind of damage, and the manifest with all. The damaged step is set aside, and an older one may be
    saved again."""
    names = [path.relative_to(two_steps / "2") for path in files_of(two_steps / "2")]
    assert len(names) > 8
    kinds = ["flip", "truncate", "delete"]
    damages = [(name, kinds[(first + i) % 3]) for i, name in enumerate(names) if name != Path("manifest.json")]
    for i, (name, damage_kind) in enumerate([*damages, *((Path("manifest.json"), kind) for kind in kinds)]):
        directory = Path(shutil.copytree(two_steps, tmp_path / str(i)))
        damage(directory / "2" / name, damage_kind)
        with Checkpointer(directory, read_only=True) as reader:
            assert str(name) in (reader.damage(2) or "") and reader.damage(1) is None
            with pytest.raises(CheckpointError, match=f"step 2 in .* is damaged: {name} .*Other steps there: \\[1\\]"):
                reader.newest_intact(strict=True)
            assert reader.restore(make_state())[2] == 1 and reader.steps() == [1, 2]
        caplog.clear()
        with Checkpointer(directory) as ckpt:
            restored, meta, step = ckpt.restore(make_state())
            assert (step, meta, ckpt.steps()) == (1, {"step": 1}, [1]) and bits(restored) == bits(make_state(seed=1))
            assert str(name) in caplog.text and (directory / "2.damaged").is_dir()
            assert ckpt.save(2, make_state(seed=2), {})
        with Checkpointer(directory) as ckpt:
            assert bits(ckpt.restore(make_state())[0]) == bits(make_state(seed=2))


def test_restoring_a_damaged_step_by_number_raises(two_steps, tmp_path):
    directory = Path(shutil.copytree(two_steps, tmp_path / "copy"))
    damage(directory / "2" / "meta.json", "flip")
    with Checkpointer(directory) as ckpt:
        with pytest.raises(
            CheckpointError, match=r"step 2 in .* cannot be read: meta.json has other bytes.*steps there: \[1\]"
        ):
            ckpt.restore(make_state(), 2)
        assert ckpt.restore(make_state(), 1)[2] == 1


def test_a_deletion_that_was_interrupted_leaves_no_step(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": jnp.ones(3)}, {})
    (tmp_path / "1").rename(tmp_path / "1.deleting")
    (tmp_path / "1.deleting" / "manifest.json").unlink()
    with Checkpointer(tmp_path, keep=1) as ckpt:
        assert ckpt.steps() == [2] and ckpt.restore({"a": jnp.ones(3)})[2] == 2
        assert ckpt.save(3, {"a": jnp.ones(3)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
