"""What all tests share: cases that cover a matrix, programs on disk that are whole, and few programs in memory."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import compiled
from tests.matrix import cover, product


@pytest.mark.parametrize("sizes", [(2, 3, 2), (3, 3, 3, 3), (7, 3, 2), (1, 4, 5)])
def test_every_pair_of_values_is_in_a_case(sizes):
    """With fewer cases than the product."""
    cases = cover(*map(range, sizes))
    for first, second in itertools.combinations(range(len(sizes)), 2):
        pairs = {(case[first], case[second]) for case in cases}
        assert pairs == {*itertools.product(range(sizes[first]), range(sizes[second]))}
    assert len({*cases}) == len(cases) and (len(cases) < len([*itertools.product(*map(range, sizes))]) or 1 in sizes)


def test_of_two_axes_every_value_is_in_a_case_and_the_rest_is_nightly():
    assert cover("abc", "xy") == [(0, 0), (1, 1), (2, 0)]
    cases = product("abc", "xy")
    assert [case.values for case in cases] == [*itertools.product("abc", "xy")]
    assert [bool(case.marks) for case in cases] == [False, True, True, False, False, True]


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
