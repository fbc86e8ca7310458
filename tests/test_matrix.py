"""What all tests share: cases of a matrix, programs on disk that are whole, and few programs in memory."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import compiled
from tests.matrix import product


@pytest.mark.parametrize("first, second", [("abc", "xy"), ("ab", "vwxyz"), ("a", "xyz"), ("abcd", "wxyz")])
def test_every_value_of_two_axes_is_in_a_case_of_ci_and_all_pairs_are_cases(first, second):
    cases = product(first, second)
    assert [case.values for case in cases] == [*itertools.product(first, second)]
    in_ci = [case.values for case in cases if not case.marks]
    assert [{*axis} for axis in zip(*in_ci, strict=True)] == [{*first}, {*second}]
    assert len(in_ci) == max(len(first), len(second))


def test_a_program_on_disk_is_whole_whenever_it_is_read(tmp_path):
    """Entries of 8 MB are read by another thread while they are written."""
    cache, sizes, done = compiled.LRUCache(str(tmp_path), max_size=-1), set(), threading.Event()

    def read():
        while not done.is_set():
            sizes.update(path.stat().st_size for path in tmp_path.glob("*-cache"))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(20):
        cache.put(str(i), bytes(8 << 20))
    done.set()
    reader.join()
    assert sizes == {8 << 20} and len([*tmp_path.iterdir()]) == 20
    assert cache.get("19") == bytes(8 << 20)


@pytest.mark.skipif(not compiled.MAPS.exists(), reason="memory maps are counted on Linux")
def test_forgotten_programs_leave_no_memory_maps():
    program = jax.jit(lambda x: jnp.sin(x @ x.T) + 1)

    def hold(first):
        for n in range(first, first + 12):
            program(np.ones((n, 3)))
        return compiled.num_maps()

    hold(1)
    compiled.forget()
    before = compiled.num_maps()
    assert hold(20) >= before + 24
    compiled.forget()
    assert compiled.num_maps() <= before + 6
