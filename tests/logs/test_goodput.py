"""The meters of a step: diversity of completions, and the seconds of each phase."""

from __future__ import annotations

import threading
import time
import warnings

import jax
import jax.numpy as jnp
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.rewards import make_reward
from jmarl.logs.data_log import DataLog
from jmarl.logs.diversity import diversity
from jmarl.logs.goodput import CLOCK, COMPILING, PHASES, Clock
from jmarl.logs.metrics_writer import MetricsWriter, read_rows
from jmarl.logs.terminal import WORDS
from jmarl.rollout.experience import DataExperience
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.house import HOUSE, ITEMS


def test_diversity_of_groups_in_closed_form():
    # words a b a c: 3 of 4 differ; pairs ab, ac: both; second group: 1 of 3 words, no pairs, 2 of 3 texts are repeats
    assert diversity([["a b", "a c"], ["x", "x", "x"]]) == {
        "distinct_1": pytest.approx((3 / 4 + 1 / 3) / 2),
        "distinct_2": 1.0,
        "repeated": pytest.approx((0 + 2 / 3) / 2),
    }


def test_groups_without_words_have_no_distinct_ones():
    assert diversity([["", ""]]) == {"repeated": 0.5}


def test_every_second_counts_once_for_the_innermost_phase():
    clock = Clock()
    start = time.monotonic()
    with clock.phase("rewards"):
        time.sleep(0.02)
        with clock.phase("sampling"):
            time.sleep(0.04)
        time.sleep(0.02)
    time.sleep(0.03)
    seconds, wall = clock.take(), time.monotonic() - start
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.005)
    assert seconds["sampling"] >= 0.04 and 0.04 <= seconds["rewards"] < 0.07 and seconds["idle"] >= 0.03
    assert sum(clock.take().values()) < 0.01, "what was taken does not count again"


def test_a_phase_in_another_thread_does_not_count():
    clock = Clock()

    def work():
        with clock.phase("rewards"):
            time.sleep(0.02)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    seconds = clock.take()
    assert seconds["rewards"] == 0 and seconds["idle"] >= 0.02


def test_runs_in_two_threads_have_clocks_of_their_own():
    barrier, seconds = threading.Barrier(2), {}

    def run(phase):
        with CLOCK.running():
            barrier.wait()
            with CLOCK.phase(phase):
                time.sleep(0.05)
                barrier.wait()
            seconds[phase] = CLOCK.take()

    threads = [threading.Thread(target=run, args=(phase,)) for phase in ("rewards", "sampling")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for phase, other in (("rewards", "sampling"), ("sampling", "rewards")):
        assert seconds[phase][phase] >= 0.05 and seconds[phase][other] == 0


def test_compilation_is_moved_out_of_the_phase_that_needed_it():
    CLOCK.start()
    start = time.monotonic()
    with CLOCK.phase("update"):
        jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T + start)(jnp.ones((3, 5)))
    seconds, wall = CLOCK.take(), time.monotonic() - start
    assert seconds["compiling"] > 0 and seconds["update"] > 0
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.01)


def test_another_thread_reads_the_phase_of_a_run_and_that_it_compiles():
    """A program is compiled at once after it was lowered, and jax only tells the end of both."""
    clock, seen = Clock(), []

    def look(read):
        thread = threading.Thread(target=lambda: seen.append(read()))
        thread.start()
        thread.join()
        return seen[-1]

    read = clock.reader()
    with clock.running(), clock.phase("sampling"):
        time.sleep(0.02)
        name, seconds = look(read)
        assert name == "sampling" and 0.02 <= seconds < 1
        clock.compiled(COMPILING[0], 0.0)
        assert look(read)[0] == "compiling"
        clock.compiled(COMPILING[1], 0.0)
        assert look(read)[0] == "sampling"
        clock.compiled(COMPILING[0], 0.0)  # lowered only to see its size
    assert look(read)[0] == "idle"


def test_an_error_ends_its_phase():
    clock = Clock()
    with pytest.raises(KeyError), clock.phase("rewards"):
        raise KeyError
    time.sleep(0.01)
    assert clock.take()["idle"] >= 0.01


def slow(a, b):
    time.sleep(0.05)
    return [float(len(x) > len(y)) for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def agents(random_agent, tiny_config, tiny_tokenizer):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


def run(agents, reward, output_dir, **changes):
    team, params = make_team(agents)
    settings = HOUSE | dict(output_dir=str(output_dir), save_every=1, log_every=1) | changes
    return train(team, make_reward([reward], num_agents=2), ITEMS, TrainConfig.of(**settings), params=params)


@pytest.mark.long
def test_the_seconds_of_a_slow_reward_are_in_its_column(agents, tmp_path):
    start = time.monotonic()
    run(agents, slow, tmp_path, num_updates=3, temperature=0.8)  # of no other test, so that it compiles
    wall = time.monotonic() - start
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert all(f"time/{phase}" in row for row in rows for phase in PHASES)
    assert all(0.05 <= row["time/rewards"] < 0.05 + wall / 10 for row in rows)
    assert rows[0]["time/compiling"] > rows[2]["time/compiling"] and rows[1]["time/update"] > 0
    assert rows[1]["time/checkpoint"] > 0 and rows[1]["time/sampling"] > 0 and rows[1]["time/evaluation"] == 0
    assert sum(row[f"time/{phase}"] for row in rows for phase in PHASES) <= wall


@pytest.mark.long
def test_models_are_written_in_the_phase_that_is_named_saving(agents, tmp_path, monkeypatch):
    """A file stands where their directory should be, and the phase is that of the warning of it."""

    def reward(a, b):
        (tmp_path / "models").write_text("no directory")
        return slow(a, b)

    phases: dict[str, str] = {}
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: phases.setdefault(str(message), CLOCK.current))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run(agents, reward, tmp_path, num_updates=1)
    [phase] = [phase for text, phase in phases.items() if "the models in" in text]
    assert result.unsaved and WORDS[phase] == "saving"


def test_a_step_on_given_data_ends_with_its_own_update(agents, tmp_path):
    """Of three updates of which the second takes long, started one after the other, only the second row is long."""

    @jax.jit
    def update(products):
        start = jnp.full((200, 200), 1 / 200)
        return jax.lax.fori_loop(0, products, lambda i, x: x @ start, start)[0, :1]

    jax.block_until_ready(update(1))
    start = time.monotonic()
    jax.block_until_ready(update(1000))
    long = time.monotonic() - start
    team, _ = make_team(agents[:1])
    options = dict(total_steps=3, tensorboard=False, progress=False)
    with MetricsWriter(str(tmp_path), {}, **options) as writer, CLOCK.running():
        log = DataLog(team, TrainConfig.of(algorithm="dpo"), writer)
        for step, products in enumerate((1, 1000, 1)):
            with CLOCK.phase("update"):
                metrics = [{"loss": update(products)}]
            log.step(step, DataExperience((), 30), metrics, time.monotonic())
        log.flush()
    rows = read_rows(tmp_path / "metrics.jsonl")
    for column in ("time/step_s", "time/update"):
        first, second, third = (row[column] for row in rows)
        assert second > 0.5 * long > max(first, third), column
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([30 / row["time/step_s"] for row in rows])
    seconds = [sum(row[f"time/{phase}"] for phase in PHASES) for row in rows]
    assert seconds == pytest.approx([row["time/step_s"] for row in rows], abs=0.02)


def test_a_run_inside_another_one_counts_for_the_phase_of_the_outer_one():
    clock = Clock()
    with clock.running():
        with clock.phase("update"):
            time.sleep(0.02)
        with clock.phase("rewards"):
            with clock.running(), clock.phase("sampling"):
                time.sleep(0.05)
            time.sleep(0.02)
        seconds = clock.take()
    assert seconds["rewards"] > 0.06 and seconds["update"] > 0.01 and seconds["sampling"] == 0
