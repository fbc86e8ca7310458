"""Settings are ranked by time, and the formula goes the way of what was compiled."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from jmarl.config import TrainConfig
from jmarl.learning.choose import SHARE, Candidate, Work, all_options, candidates, proofs
from jmarl.models.config import ModelConfig
from jmarl.plan.plan import describe_team

MODEL = ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768)


@functools.cache
def ranked(dtypes=("bfloat16",), rows=64, model=MODEL, **settings):
    """The candidates for two agents of a model, of 8 prompts x 8 completions of 512 tokens after 256."""
    cfg = TrainConfig.of(**dict(max_new_tokens=512) | settings)
    tokens = 8 * (256 + 8 * cfg.sampling.max_new_tokens)
    work = Work.of(describe_team([("a", model, None)] * 2, shared_weights=False), cfg, tokens, rows)
    return candidates(work, all_options(work, cfg, dtypes))


BOTH = ("float32", "bfloat16")


def test_the_fastest_is_first_and_float32_is_no_faster() -> None:
    found = ranked(BOTH, rows=8, lora_rank=0)
    assert [x.time for x in found] == sorted(x.time for x in found)
    assert found[0].settings["compute_dtype"] == "bfloat16" and found[0].settings["remat"] != "full"
    assert {x.settings["compute_dtype"] for x in found} == {*BOTH}
    assert {x.settings["compute_dtype"] for x in ranked(rows=2)} == {"bfloat16"}


def test_weights_of_many_experts_are_read_in_few_parts() -> None:
    """30B, of which a token is multiplied with 3B: a second micro-batch costs more than to compute the forward pass again."""
    sizes = dict(num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, tie_embeddings=False)
    experts = dict(family="qwen3_moe", num_experts=128, experts_per_token=8, expert_size=768, intermediate_size=6144)
    many = dataclasses.replace(MODEL, **sizes, **experts)
    for model, new_tokens, one_part_is_faster in ((many, 64, True), (dataclasses.replace(many, num_experts=8), 256, False)):
        found = ranked(rows=2, model=model, max_new_tokens=new_tokens, lora_rank=8)
        times = {tuple(x.settings.values()): x.time for x in found}
        assert (times["bfloat16", "full", 1] < times["bfloat16", "dots", 2]) == one_part_is_faster


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_more_micro_batches_and_more_remat_need_less_memory(lora_rank: int) -> None:
    sizes = {tuple(x.settings.values()): x.temporaries for x in ranked(BOTH, rows=8, lora_rank=lora_rank)}
    for dtype in BOTH:
        assert sizes[dtype, "none", 1] > sizes[dtype, "dots", 1] > sizes[dtype, "full", 1]
        assert sizes[dtype, "dots", 2] > sizes[dtype, "dots", 8] > sizes[dtype, "full", 8]


SMALL = dataclasses.replace(MODEL, num_layers=1)


@pytest.mark.parametrize(
    "rows, settings, parts",
    [
        (12, {}, {1, 2, 4}),
        (12, dict(num_minibatches=3), {1, 2, 4}),
        (12, dict(num_minibatches=5), {1}),  # an error of the update itself
        (12, dict(lora_rank=8, lora_dropout=0.1), {1}),  # other parts have other noise
        (12, dict(micro_batches=3), {3}),
    ],
    ids=str,
)
def test_micro_batches_divide_the_rows_of_an_optimizer_step(rows: int, settings: dict, parts: set[int]) -> None:
    assert {x.settings["micro_batches"] for x in ranked(rows=rows, model=SMALL, **settings)} == parts


def test_a_setting_that_is_given_is_not_changed() -> None:
    assert {x.settings["remat"] for x in ranked(model=SMALL, remat="none")} == {"none"}
    assert {x.settings["remat"] for x in ranked(model=SMALL)} == {"none", "dots", "full"}


def test_the_formula_is_near_what_was_compiled() -> None:
    """Temporaries in GiB of an update for an H100, remat full: 6.15 for 512 tokens, 6.31 for 2048 in 8 micro-batches."""
    for rows, settings, parts, compiled in ((2, {}, 1, 6.15), (8, dict(max_new_tokens=2048), 8, 6.31)):
        sizes = {tuple(x.settings.values()): x.temporaries / 2**30 for x in ranked(rows=rows, **settings)}
        assert sizes["bfloat16", "full", parts] == pytest.approx(compiled, rel=0.35)


def tried(needs: list[int], estimates: list[int], room: int, state: int = 10) -> list[int]:
    """The numbers of the candidates, the fastest first, that are proved. needs, estimates: of their temporaries."""
    options = [Candidate({"number": i}, estimate, float(i)) for i, estimate in enumerate(estimates)]
    found = list(proofs(options, state, room, lambda settings: state + needs[settings["number"]]))
    assert [proof.fits for proof in found[:-1]] == [False] * (len(found) - 1), "only the last can fit"
    assert found[-1].fits == (state + needs[found[-1].settings["number"]] <= SHARE * room)
    return [proof.settings["number"] for proof in found]


def test_the_first_that_fits_is_chosen() -> None:
    assert tried([30, 20, 8, 7], [20, 15, 8, 7], room=20) == [2], "the first two are far above the room by the formula"
    assert tried([13, 12, 8, 7], [10, 9, 8, 7], room=20) == [0, 2], "the formula is off by a third, as the first proof shows"
    assert tried([5, 4], [5, 4], room=20) == [0]


def test_if_nothing_fits_the_smallest_is_proved_too() -> None:
    assert tried([30, 40, 50], [30, 20, 60], room=20) == [1], "the smallest by the formula"
    assert len(tried([10] * 40, [10] * 40, room=20)) == 12
    assert tried([10] * 40, [10] * 39 + [9], room=20) == [*range(11), 39]
