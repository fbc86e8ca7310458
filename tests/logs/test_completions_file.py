"""completions.jsonl.gz: complete records after a kill, none repeated after a resume, a bounded size; attempts/N."""

from __future__ import annotations

import gzip
import json
import random
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jmarl.config import TrainConfig
from jmarl.config.bounded_files import VALUE, memory_of
from jmarl.envs.rewards import make_reward
from jmarl.files.attempt import attempt
from jmarl.logs import completions_file, samples
from jmarl.logs.completions_file import TRAIN, CompletionsFile, finite, newest_records, read_completions, steps_of
from jmarl.logs.log_file import LogFile
from jmarl.logs.metrics_writer import read_rows
from jmarl.logs.terminal import say
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.house import HOUSE

ITEMS = [{"prompt": text, "answer": 3} for text in ("apples", "pears", "question", "The answer")]


def turns(step: int, size: int = 400) -> dict:
    rng = random.Random(step)
    return {"turns": ["".join(chr(rng.randint(97, 122)) for _ in range(size))]}


def fill(path, steps, start_step=0, max_bytes=10**6):
    file = CompletionsFile(path, start_step, max_bytes)
    for step in steps:
        file.write(step, "train", turns(step))
    file.close()


def test_a_resumed_file_equals_one_that_was_never_stopped(tmp_path):
    fill(tmp_path / "whole", range(10))
    fill(tmp_path / "resumed", range(7))
    fill(tmp_path / "resumed", range(4, 10), start_step=4)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "resumed").read_bytes()
    lines = gzip.decompress((tmp_path / "whole").read_bytes()).decode().splitlines()
    assert [json.loads(line) for line in lines] == list(read_completions(tmp_path / "whole"))


def test_a_kill_damages_at_most_the_last_record(tmp_path, caplog):
    fill(tmp_path / "file", range(3))
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data[:-5])
    assert [record["step"] for record in read_completions(tmp_path / "file")] == [0, 1]
    assert "record 3 is damaged" in caplog.text
    fill(tmp_path / "file", [2], start_step=2)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("damage", ["flipped", "cut", "no header"])
def test_records_after_a_damaged_one_are_read_and_kept_at_a_resume(tmp_path, caplog, damage):
    path = tmp_path / "file"
    fill(path, range(5))
    data = path.read_bytes()
    start, end = (sum(size for _, _, size, _ in steps_of(path)[:count]) for count in (2, 3))
    member = bytearray(data[start:end])
    if damage == "cut":
        del member[-30:]
    else:
        member[{"flipped": 60, "no header": 0}[damage]] ^= 255
    path.write_bytes(data[:start] + member + data[end:])
    assert [record["step"] for record in read_completions(path)] == [0, 1, 3, 4]
    assert "record 3 is damaged or too large and left out" in caplog.text
    fill(path, [4], start_step=4)
    assert path.read_bytes() == data[:start] + data[end:]


def test_every_step_is_written_after_a_resume_with_a_damaged_second_record(tmp_path):
    """The gap that it leaves is not the distance of the records."""
    path = tmp_path / "file"
    fill(path, range(5))
    data, (first, second) = bytearray(path.read_bytes()), [size for _, _, size, _ in steps_of(path)[:2]]
    data[first + second // 2] ^= 255
    path.write_bytes(data)
    fill(path, range(5, 8), start_step=5)
    assert [step for step, *_ in steps_of(path)] == [0, 2, 3, 4, 5, 6, 7]


def test_a_full_file_keeps_steps_of_the_whole_run_and_held_out_ones(tmp_path, caplog):
    path = tmp_path / "file"
    file = CompletionsFile(path, 0, 4000)
    file.write(0, "eval", turns(0))
    for step in range(50):
        file.write(step, "train", turns(step))
        assert path.stat().st_size <= 4000
    file.close()
    assert [(step, kind) for step, kind, *_ in steps_of(path)] == [(0, "eval"), *((s, "train") for s in range(0, 50, 8))]
    assert caplog.text.count("max_completions_mb") == 1
    fill(path, range(40, 60), start_step=40, max_bytes=4000)  # a resumed run goes on with the same steps
    assert [step for step, kind, *_ in steps_of(path) if kind == "train"] == [*range(0, 60, 8)]


def test_a_file_that_counts_from_0_is_read_and_resumed_as_one_that_counts_updates(tmp_path):
    """As earlier versions wrote it: an evaluation had the step of the update before it."""
    path = tmp_path / "file"
    old = [(0, "eval", {"updates": 0}), (0, "train", {}), (1, "train", {}), (1, "eval", {"updates": 2}), (2, "train", {})]
    lines = [json.dumps({"step": step, "kind": kind, **more, "tasks": [], **turns(step)}) + "\n" for step, kind, more in old]
    path.write_bytes(b"".join(gzip.compress(line.encode(), 6, mtime=0) for line in lines))
    counted = [(0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train")]
    assert [(x["step"], x["kind"]) for x in read_completions(path)] == counted
    fill(path, [3], start_step=3)
    assert [(step, kind) for step, kind, *_ in steps_of(path)] == counted


def test_a_record_larger_than_the_file_may_be_is_left_out(tmp_path):
    file = CompletionsFile(tmp_path / "file", 0, 100)
    file.write(0, "train", turns(0))
    file.write(1, "train", turns(1))
    file.close()
    assert steps_of(tmp_path / "file") == []


def test_a_record_that_takes_too_much_memory_is_neither_written_nor_read(tmp_path, caplog, monkeypatch):
    """A list of a million lists takes much more than its text, and its text much more than it takes in the file."""
    path, lists = tmp_path / "file", {"turns": [[]] * 10**6}
    file = CompletionsFile(path, 0, 10**8)
    file.write(1, TRAIN, {})
    file.write(2, TRAIN, lists)
    assert len(list(read_completions(path))) == 2
    monkeypatch.setattr(completions_file, "MAX_MEMORY", 5 * 10**7)
    file.write(3, TRAIN, lists)
    file.write(4, TRAIN, {"turns": ["[{," * 10**6]})  # what texts have is no structure
    file.close()
    assert "the record of step 3 is left out" in caplog.text
    assert [step for step, *_ in steps_of(path)] == [record["step"] for record in read_completions(path)] == [1, 4]
    assert [record["step"] for record in newest_records(path, 1)] == [1, 4]
    assert "record 2 is too large and left out" in caplog.text


def test_a_resumed_run_keeps_records_that_are_too_large_to_be_read(tmp_path, caplog, monkeypatch):
    path = tmp_path / "file"
    fill(path, range(1, 4))
    file = CompletionsFile(path, 4, 10**7)
    for step in (4, 5, 6):
        file.write(step, TRAIN, {"turns": ["x" * (3 * 10**7 if step == 4 else 9)]})  # more than one chunk of the file
    file.close()
    data = path.read_bytes()
    monkeypatch.setattr(completions_file, "MAX_MEMORY", 10**6)
    assert [step for step, *_ in steps_of(path)] == [1, 2, 3, 5, 6] and "record 4 is damaged or too large" in caplog.text
    fill(path, [], start_step=7)
    assert path.read_bytes() == data
    fill(path, [], start_step=6)
    assert data.startswith(path.read_bytes()) and len(gzip.decompress(path.read_bytes()).splitlines()) == 5


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('[1, {"a": "b"}]', 3),
        ('["[{,\\"[,", ","]', 2),
        ('["\\\\", [","]]', 3),
        ('"[[', 0),
        ('["' + "," * 9**7 + '", []]', 3),
    ],
)
def test_the_memory_of_a_text_counts_what_is_outside_of_strings(text, values):
    assert memory_of(text.encode()) == len(text) + VALUE * values


def test_a_step_of_the_size_of_a_real_one_is_written_in_milliseconds(tmp_path):
    words = [*"abcdefgh", "story", "city", "clouds", "agents", "apples", "because", "together"]
    rng = random.Random(0)
    texts = [[[" ".join(rng.choices(words, k=90)) for _ in range(64)]] for _ in range(2)]
    file = CompletionsFile(tmp_path / "file", 0, 10**8)
    start = time.monotonic()
    file.write(0, "train", {"turns": [{"completions": texts}]})
    assert time.monotonic() - start < 0.2  # 64 completions of 2 agents: about 10 ms
    file.close()


def test_numbers_that_are_not_finite_are_null():
    assert finite({"a": [float("nan"), 1.0], 2: "x"}) == {"a": [None, 1.0], "2": "x"}


def overlap(a, b):
    return [float(len(set(x) & set(y))) for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def team(random_agent, tiny_config, tiny_tokenizer):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


def settings(directory, **changes) -> TrainConfig:
    return TrainConfig.of(**HOUSE | dict(output_dir=str(directory), eval_generations=3) | changes)


def play(agents, cfg):
    team, params = make_team(agents)
    train(team, make_reward([overlap], num_agents=2), ITEMS, cfg, params=params, eval_items=ITEMS[:2])


@pytest.fixture(scope="module")
def directory(team, tmp_path_factory):
    """A run of two updates that was resumed for a third one."""
    directory = tmp_path_factory.mktemp("run")
    play(team, settings(directory))
    play(team, settings(directory, num_updates=3, resume=True, progress=True))
    return directory


@pytest.mark.long
def test_a_run_keeps_all_that_was_written_and_how_it_was_rewarded(directory):
    records = list(read_completions(directory / "completions.jsonl.gz"))
    kinds = [(r["kind"], r["step"], r.get("updates")) for r in records]
    train_steps = [("train", step, None) for step in (1, 2, 3)]
    assert sorted(kinds, key=str) == sorted([("eval", 0, 0), ("eval", 2, 2), ("eval", 3, 3), *train_steps], key=str)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for record in (r for r in records if r["kind"] == "train"):
        turn = record["turns"][0]
        assert [task["prompt"] for task in record["tasks"]] == turn["prompts"][0] == turn["prompts"][1]
        (first, second), joint = turn["completions"], turn["joint"]
        values = [[overlap([first[p][a]], [second[p][b]])[0] for a, b in joint] for p in range(2)]
        assert (
            turn["parts"] == {"overlap": values}
            and not turn["measures"]
            and turn["rewards"] == [[[x, x] for x in row] for row in values]
        )
        row = next(row for row in rows if row["step"] == record["step"] and "reward/mean" in row)
        assert row["reward/mean"] == pytest.approx(sum(map(sum, values)) / 6)


@pytest.mark.long
def test_all_logs_count_updates(directory):
    """Rows, TensorBoard and the terminal, also over a resume: the first update is 1, and the evaluation before it 0."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    rows = read_rows(directory / "metrics.jsonl")
    for column, steps in (("reward/mean", [1, 2, 3]), ("agent_0/learning_rate", [1, 2, 3]), ("eval/reward", [0, 2, 3])):
        assert [event.step for event in events.Scalars(column)] == [row["step"] for row in rows if column in row] == steps
    assert "step 3/3  reward " in (directory / "attempts/2/log.txt").read_text()


@pytest.mark.long
def test_each_start_of_a_run_is_recorded(directory):
    first, second = (json.loads((directory / f"attempts/{n}/start.json").read_text()) for n in (1, 2))
    assert first["settings"]["config"]["num_updates"] == 2 and second["settings"]["config"]["num_updates"] == 3
    assert first["command"] and first["host"] and first["versions"]["jax"] and first["devices"] and first["time"]
    log = (directory / "attempts/2/log.txt").read_text()
    assert "from step 2 of 3" in log and "step 3/3  reward" in log and log.strip().endswith("the attempt ended")
    assert "reward" not in (directory / "attempts/1/log.txt").read_text(), "the first one printed no progress"


@pytest.mark.long
def test_an_attempt_that_fails_says_why(team, tmp_path):
    with pytest.raises(ValueError, match="valid reward"):
        train(
            make_team(team)[0],
            make_reward([lambda a, b: [float("nan")] * len(a)], num_agents=2),
            ITEMS,
            settings(tmp_path),
            params=make_team(team)[1],
        )
    log = (tmp_path / "attempts/1/log.txt").read_text()
    assert "the attempt ended with ValueError" in log and "Traceback (most recent call last)" in log


def test_a_full_disk_loses_records_before_they_fill_the_memory(tmp_path, caplog, full_disk):
    file = LogFile(tmp_path / "file", max_waiting=1000)
    file.write(b"a" * 100)
    with full_disk(150):
        for name in b"bcdef":
            with pytest.raises(OSError):
                file.write(bytes([name]) * 400)
        assert sum(map(len, file.waiting)) == 800
    file.write(b"g" * 400)  # there is space again
    file.close()
    assert (tmp_path / "file").read_bytes() == b"a" * 100 + b"b" * 400 + b"c" * 400 + b"g" * 400
    assert caplog.text.count("wait for space on the disk; until then records are lost") == 1


def test_the_records_of_completions_that_wait_are_bounded(tmp_path, full_disk, monkeypatch):
    monkeypatch.setattr(completions_file, "MAX_WAITING", 3000)
    file = CompletionsFile(tmp_path / "file", 0, 10**6)
    with full_disk(10):
        for step in range(50):
            with pytest.raises(OSError):
                file.write(step, "train", turns(step))
    assert 2000 < sum(map(len, file.file.waiting)) <= 3000
    file.close()
    records = [record["step"] for record in read_completions(tmp_path / "file")]
    assert records == list(range(len(records))) and len(records) > 5


def test_a_full_disk_stops_neither_the_attempt_nor_its_end(tmp_path, full_disk):
    with attempt(str(tmp_path), {}), full_disk(100):
        for number in range(4):
            say(f"{number} {'x' * 40}")
    lines = (tmp_path / "attempts/1/log.txt").read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["0", "1", "2", "3", "the"], "they waited until there was room"


@pytest.fixture
def samples_on():
    samples.SAMPLES.setLevel("INFO")
    yield
    samples.SAMPLES.setLevel("WARNING")


@pytest.mark.long
def test_no_completions_are_kept_where_they_are_switched_off(team, tmp_path, samples_on, capsys):
    play(team, settings(tmp_path, max_completions_mb=0, num_updates=1, progress=True))
    sample = capsys.readouterr().out.split("-- step 1, prompt 1 of 2, joint action 1 of 3: reward ")[1]
    assert sample.splitlines()[1] == "agent 0 reads:" and sample.count(" writes:") == 2, "but they are shown"
    assert (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "completions.jsonl.gz").exists()


@pytest.mark.long
def test_each_of_several_seeds_keeps_its_own(team, tmp_path, samples_on, capsys):
    team, params = make_team(team)
    cfg = settings(tmp_path, num_updates=1, progress=True)
    train_seeds(team, make_reward([overlap], num_agents=2), ITEMS, cfg, seeds=[0, 1], params=params)
    assert capsys.readouterr().out.count("-- step 1, prompt 1") == 1, "a sample of the first seed"
    runs = [list(read_completions(tmp_path / f"seed_{seed}" / "completions.jsonl.gz")) for seed in (0, 1)]
    assert [len(run) for run in runs] == [1, 1] and runs[0] != runs[1]
    assert not (tmp_path / "completions.jsonl.gz").exists()


def test_a_record_that_never_fits_does_not_rewrite_the_file_at_each_step(tmp_path, caplog):
    """Only the first step fits: later ones are left out with one warning, and ever fewer of them are tried."""
    record = {"text": "".join(map(str, range(500)))}
    file = CompletionsFile(tmp_path / "completions.jsonl.gz", 0, 900)
    for step in range(9):
        file.write(step, TRAIN, record)
    file.close()
    assert [step for step, *_ in steps_of(tmp_path / "completions.jsonl.gz")] == [0]
    assert file.every > 8 and len(caplog.records) == 1
