"""Operations, bytes and kernels of small programs whose counts are known."""

from __future__ import annotations

import pytest

from jmarl.plan.hlo import Cost, Program, groups_of, largest, parse, size_of

TEXT = """HloModule known

%fused_update (p0: f32[10,100], p1: f32[100], p2: s32[]) -> f32[10,100] {
  %p0 = f32[10,100]{1,0} parameter(0)
  %p1 = f32[100]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %row = f32[1,100]{1,0} bitcast(%p1)
  %zero = s32[] constant(0)
  ROOT %dus = f32[10,100]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

%body (t: (s32[], f32[10,100], f32[100])) -> (s32[], f32[10,100], f32[100]) {
  %t = (s32[], f32[10,100]{1,0}, f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %all = f32[10,100]{1,0} get-tuple-element(%t), index=1
  %new = f32[100]{0} get-tuple-element(%t), index=2
  %write = f32[10,100]{1,0} fusion(%all, %new, %i), kind=kLoop, calls=%fused_update
  ROOT %out = (s32[], f32[10,100]{1,0}, f32[100]{0}) tuple(%i, %write, %new)
}

ENTRY %main (a: bf16[8,16], b: bf16[16,32], c: f32[10,100], d: f32[100]) -> f32[8,32] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %product = (f32[8,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %start = (s32[], f32[10,100]{1,0}, f32[100]{0}) tuple(%i0, %c, %d)
  %loop = (s32[], f32[10,100]{1,0}, f32[100]{0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %unknown = (s32[], f32[10,100]{1,0}, f32[100]{0}) while(%loop), condition=%cond, body=%body
  ROOT %out = f32[8,32]{1,0} get-tuple-element(%product), index=0
}
"""  # noqa: E501
PRODUCT = Cost(2 * 8 * 16 * 32, 2 * 8 * 16 + 2 * 16 * 32 + 4 * 8 * 32, 1)
WRITE = Cost(0, 400 + 4 + 400, 1)  # a row is read and written in place, and its number is read


def test_a_loop_counts_as_often_as_it_runs_and_a_slice_counts_as_what_it_touches() -> None:
    assert Program(TEXT, unknown_trips=7).cost() == PRODUCT.plus(WRITE, 5 + 7)
    assert Program(TEXT).cost() == PRODUCT.plus(WRITE, 5 + 1)


def test_of_loops_of_unknown_length_the_first_makes_all_steps() -> None:
    """A decode loop comes first, and then, in a branch, a loop over fewer rows, of which a step may move more."""
    larger = (
        TEXT.replace("%body (t", "%many (t").split("ENTRY")[0].replace("HloModule known", "").replace("%fused_update", "%two")
    )
    larger = larger.replace("%write = f32[10,100]{1,0} fusion(", "%two_writes = f32[10,100]{1,0} fusion(").replace(
        "ROOT %out", "%write = f32[10,100]{1,0} fusion(%two_writes, %new, %i), kind=kLoop, calls=%two\n  ROOT %out"
    )
    branch = """
%moved (s: (s32[], f32[10,100], f32[100])) -> (s32[], f32[10,100], f32[100]) {
  %s = (s32[], f32[10,100]{1,0}, f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[10,100]{1,0}, f32[100]{0}) while(%s), condition=%cond, body=%many
}

%not_moved (s: (s32[], f32[10,100], f32[100])) -> (s32[], f32[10,100], f32[100]) {
  ROOT %s = (s32[], f32[10,100]{1,0}, f32[100]{0}) parameter(0)
}

"""
    cond = (
        "  %rest = (s32[], f32[10,100]{1,0}, f32[100]{0}) conditional(%p, %unknown, %unknown), true_computation=%moved, "
        "false_computation=%not_moved\n  ROOT %out = f32[8,32]"
    )
    text = TEXT.replace("ENTRY", larger + branch + "ENTRY").replace("  ROOT %out = f32[8,32]", cond)
    assert Program(text, unknown_trips=7).cost() == PRODUCT.plus(WRITE, 5 + 7)
    assert Program(text).cost("moved") == WRITE.plus(WRITE)


def test_loops_are_listed_with_their_steps() -> None:
    assert Program(TEXT).loops()[0] == ("body", None, WRITE)


def test_shapes_are_those_of_kernels_in_memory() -> None:
    shapes = list(Program(TEXT).shapes())
    assert len(shapes) == 2 and largest(shapes, lambda kind, axes: kind == "f32" and len(axes) == 2) == 4000
    assert size_of("(f32[8,32]{1,0}, bf16[3], pred[])") == 1024 + 6 + 1
    assert parse(TEXT)[1] == "main"


EXCHANGES = """HloModule exchanges

ENTRY %main (w: bf16[2,16], g: f32[8,16], n: f32[4]) -> f32[4] {
  %w = bf16[2,16]{1,0} parameter(0)
  %g = f32[8,16]{1,0} parameter(1)
  %n = f32[4]{0} parameter(2)
  %start = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%w), dimensions={0}
  %whole = bf16[8,16]{1,0} all-gather-done(%start)
  %part = f32[2,16]{1,0} reduce-scatter(%g), dimensions={0}, to_apply=%add
  ROOT %sum = f32[4]{0} all-reduce(%n), to_apply=%add
}
"""


def test_what_a_device_receives_from_others() -> None:
    """Of 4 devices: three quarters of a gathered weight, what three others add to a gradient, a sum there and back."""
    assert Program(EXCHANGES).cost().exchanged == 2 * (8 - 2) * 16 + 4 * (8 - 2) * 16 + 2 * 4 * 4


@pytest.mark.parametrize(
    "text, groups",
    [
        ("%w), replica_groups={{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("%w), replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("%w), replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("%w), source_target_pairs={{0,4},{4,0}}", [[0, 4], [4, 0]]),
        ("%w), replica_groups={}, to_apply=%add", []),
    ],
)
def test_which_devices_exchange_with_each_other(text, groups) -> None:
    assert groups_of(text) == groups


def test_what_crosses_between_hosts() -> None:
    """Weights are gathered within hosts of two devices; norms are added up over all."""
    text = EXCHANGES.replace("start(%w),", "start(%w), replica_groups={{0,1},{2,3}},").replace(
        "scatter(%g),", "scatter(%g), replica_groups=[2,2]<=[4],"
    )
    assert Program(text, per_host=2).cost().crossed == 2 * 4 * 4
    assert Program(text, per_host=1).cost().crossed == Program(text).cost().exchanged
    assert Program(text).cost().crossed == 0
