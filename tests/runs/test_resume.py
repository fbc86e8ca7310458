"""What a resumed run may change, and `resume=auto`: a job that a queue starts again begins, continues or ends at once."""

from __future__ import annotations

import functools
import json
import shutil
import tarfile
import time
from pathlib import Path

import pytest

from jmarl.cli.main import main
from jmarl.config import SECTION_OF, TrainConfig, flat
from jmarl.envs.rewards import make_reward
from jmarl.files.attempt import is_complete
from jmarl.files.changes import ADVISED, MAY_CHANGE, CannotGoOn, check_changes
from jmarl.files.checkpoint import saved_steps
from jmarl.files.lock import locked
from jmarl.files.run_directory import resolve_resume
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.runs.test_faults import ITEMS, Signalling, assert_equal_runs, flip, rows_of, run
from tests.runs.training_process import BASE, KINDS, first_words, tiny_agents

ROOT = Path(__file__).resolve().parents[2] / "jmarl"
# What an error in the middle of a run says, where, and the settings that it advises.
ADVICE = [
    ("models/hub/tokenize.py", "shorten it, lower max_new_tokens", dict(max_new_tokens=2)),
    ("models/hub/tokenize.py", "set long_prompts='truncate_left'", dict(long_prompts="truncate_left")),
    ("models/hub/tokenize.py", "long_prompts (truncate_left or drop)", dict(long_prompts="drop", num_turns=2)),
    ("models/hub/tokenize.py", "use fewer or shorter turns, history=none", dict(history="none", num_turns=1)),
    ("memory.py", "micro_batches={2 * largest.parts}", dict(micro_batches=2)),
    ("memory.py", "num_generations={largest.group // 2}", dict(num_generations=2)),
    ("memory.py", "max_new_tokens={largest.new_tokens // 2}", dict(max_new_tokens=1)),
    ("memory.py", "num_prompts or batch_size; try remat='full'", dict(num_prompts=1, remat="full")),
    ("memory.py", "num_prompts or batch_size;", dict(batch_size=1)),
    ("memory.py", "compute_dtype='bfloat16' or per_agent='map'", dict(compute_dtype="bfloat16", per_agent="map")),
    ("rollout/critic_values.py", "set gae_lambda to 1", dict(gae_lambda=1.0)),
    ("rollout/critic_values.py", "set history=none", dict(history="none")),
    ("rollout/play.py", "set history to 'none'", dict(history="none")),
    ("objectives/objective.py", "they follow from num_prompts, num_generations and", dict(num_minibatches=2, num_prompts=4)),
    ("objectives/objective.py", "use at most batch_size", dict(micro_batches=1, batch_size=4)),
    ("logs/failed_update.py", "a lower learning_rate or", dict(learning_rate=1e-6, critic_learning_rate=1e-6)),
    ("logs/failed_update.py", "max_grad_norm; stop_after_nonfinite=", dict(max_grad_norm=0.1)),
    ("files/saving.py", "make no checkpoints (save_every=0)", dict(save_every=0, output_dir="other")),
    ("logs/completions_file.py", "(max_completions_mb)", dict(max_completions_mb=1)),
    ("files/checkpoint.py", "without strict_checkpoints", dict(strict_checkpoints=True)),
    ("models/sharding.py", "use a smaller mesh or auto", dict(mesh="agent=1")),
]  # fmt: skip


def meta(**settings):
    """What a checkpoint says of its run."""
    cfg = TrainConfig.of(**{"output_dir": "run"} | settings)
    team = [{"config": {"layers": 2}, "members": [[0]], "tokenizer": "x"}]
    return cfg, {"config": json.loads(json.dumps(flat(cfg))), "team": team, "critics": [], "bases": []}


@pytest.mark.parametrize(("file", "text", "settings"), ADVICE)
def test_what_an_error_advises_may_change_and_is_recorded(file, text, settings):
    words = " ".join((ROOT / file).read_text(encoding="utf-8").replace('"\n', "\n").replace('f"', "").replace('"', "").split())
    assert " ".join(text.split()) in words, "the message has changed: does it advise other settings?"
    before = dict(num_turns=3, branching="chain", history="append", num_prompts=2, num_generations=4)
    old, new = meta(**before)[1], meta(**before | settings)
    recorded = check_changes(new[0], old, new[1], 4)
    changed = {name for name in settings if new[1]["config"][name] != old["config"][name]}
    assert recorded.keys() == changed and all(name in recorded[name] for name in changed)


def test_what_no_error_advises_is_refused_by_name():
    cfg, new = meta(temperature=0.5, top_p=0.9, chat=True, kl_coef=0.1, max_new_tokens=5)
    with pytest.raises(CannotGoOn) as refused:
        check_changes(cfg, meta()[1], new, 4)
    *lines, advice = str(refused.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["temperature", "top_p", "chat", "kl_coef"]
    assert advice == "give what the run began with, which its config.yaml has, or choose another output_dir for a new run"
    assert set(SECTION_OF) > MAY_CHANGE - {"held_out"} and set(SECTION_OF) > ADVISED and not MAY_CHANGE & ADVISED


def test_a_changed_team_is_named_and_what_a_newer_version_adds_is_no_change():
    cfg, old = meta()
    agent = {"template": "a", "ends": [2], "special_tokens": {}, "encoding": "x"}
    [stack] = old["team"]
    new = old | {"team": [stack | {"config": {"layers": 2, "newer": 1}, "agents": [agent]}]}
    assert check_changes(cfg, old, new, 4) == {}
    other = new["team"][0] | {"agents": [agent | {"template": "b"}]}
    with pytest.raises(CannotGoOn, match="team: agent 0 has another chat template"):
        check_changes(cfg, new, new | {"team": [other]}, 4)
    with pytest.raises(CannotGoOn, match="team: other models, tokenizers or roles"):
        check_changes(cfg, old, new | {"team": [new["team"][0] | {"tokenizer": "y"}]}, 4)


def test_what_a_kind_of_run_adds_to_its_identity_must_not_change():
    cfg, old = meta()
    assert check_changes(cfg, old, old | {"texts": {"rows": 2}}, 4) == {}, "a checkpoint of an older version"
    assert check_changes(cfg, old | {"initial": []}, old | {"initial": ["a"]}, 4) == {}, "of one's own row for pairs"
    with pytest.raises(CannotGoOn, match="initial: other weights before training"):
        check_changes(cfg, old | {"initial": ["b"]}, old | {"initial": ["a"]}, 4)
    with pytest.raises(CannotGoOn, match=r"texts: \{'rows': 2\} -> \{'rows': 3\}"):
        check_changes(cfg, old | {"texts": {"rows": 2}}, old | {"texts": {"rows": 3}}, 4)


def test_a_changed_option_of_an_environment_is_named_unless_allowed():
    cfg, old = meta()
    old, new = (old | {"environment": {"max_turns": turns}, "options": {"Grid.size": size}} for turns, size in ((2, 4), (3, 5)))
    with pytest.raises(CannotGoOn, match=r"environment: max_turns 2 -> 3, Grid.size 4 -> 5\nallow_changed=environment resumes"):
        check_changes(cfg, old, new, 4)
    old["reward"], new["reward"] = {"duet.Duet": "1"}, {"duet.Duet": "2", "duet.f": "3"}
    code = r"environment: duet.Duet \(changed\), duet.f \(new\), max_turns 2 -> 3, Grid.size 4 -> 5\nallow_changed=environment"
    with pytest.raises(CannotGoOn, match=code):
        check_changes(cfg, old, new, 4)
    assert check_changes(cfg.replace(resume=True, allow_changed="environment"), old, new, 4).keys() == {"environment"}


@pytest.mark.long
def test_a_run_of_an_earlier_version_resumes_and_plays(tmp_path, capsys):
    """Agents with critics of their own, and completions that began early: its state after two updates, and the
    rows of all four."""
    with tarfile.open(Path(__file__).with_name("run_of_2026_11_28.tar.xz")) as file:
        file.extractall(tmp_path, filter="data")
    written, team = tmp_path / "run", make_team(tiny_agents(2, width=8))
    rows, env = rows_of(written), make_reward(first_words, num_agents=2)
    more = dict(algorithm="ippo", async_steps=1, num_updates=4, max_new_tokens=32, resume=True, progress=False)
    result = train(team[0], env, ITEMS, TrainConfig.of(**BASE | more, output_dir=str(written)), params=team[1])
    assert len(result.rewards) == 2 and len(rows) == 4 and min(row["off_policy"] for row in rows[1:]) > 0
    for old, new in zip(rows, rows_of(written), strict=True):
        assert {name: new[name] for name in old} == pytest.approx(old, rel=1e-3, abs=1e-5)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(ITEMS[0]))
    assert main(f"play --model {written} --data {data} --reward tests.runs.training_process:first_words".split()) == 0
    assert "agent 1" in capsys.readouterr().out


# --- every kind of run ---------------------------------------------------------------------------------------------------


SEEDS = ("seed_0", "seed_1")
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """`runs_of(kind)`: the directories of a run and of one that was interrupted, made once, and the updates of the second."""

    @functools.cache
    def make(kind):
        whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
        run(kind, reward=Signalling(0), output_dir=str(whole))
        stopped = run(kind, reward=Signalling(7), output_dir=str(parts))
        assert stopped.interrupted and 0 < int(stopped.state.step) < 8
        return whole, parts, int(stopped.state.step)

    return make


@pytest.fixture
def interrupted(runs_of, tmp_path):
    """`interrupted(kind)`: the directory of the whole run, a copy of the interrupted one, and its updates."""

    def copied(kind):
        whole, parts, updates = runs_of(kind)
        return whole, Path(shutil.copytree(parts, tmp_path / "parts")), updates

    return copied


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", "learned reward")])
def test_every_kind_of_run_resumes_bit_equal_after_an_interruption(interrupted, kind):
    """F2: adapters with dropout, several turns, critics and epochs, preference rounds, rows that begin a step early, several
    seeds."""
    whole, parts, _ = interrupted(kind)
    seeds = SEEDS if kind == "seeds" else ("",)
    assert saved_steps(parts / seeds[-1] / "checkpoints")
    assert not run(kind, reward=Signalling(0), output_dir=str(parts), resume=True).interrupted
    assert_equal_runs(whole, parts, seeds=seeds)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("early rows", [dict(compute_dtype="bfloat16"), dict(num_generations=2, num_prompts=3, max_new_tokens=12)]),
        ("rounds", [dict(num_generations=2, batch_size=2, max_new_tokens=2)]),
        ("seeds", [dict(num_generations=2, max_new_tokens=2)]),
        # These keep nothing of a step in their directory but the state, like the plain run below.
        nightly(
            "turns", [dict(num_turns=3, history="none", num_prompts=1, long_prompts="drop", remat="full", per_agent="vmap")]
        ),
        nightly("critics", [dict(num_minibatches=2, gae_lambda=1.0, max_new_tokens=2)]),
        nightly("central critic", [dict(num_generations=2, num_prompts=1)]),
        nightly("adapters", [dict(num_prompts=3, micro_batches=3, compute_dtype="bfloat16")]),
    ],
)
def test_every_kind_of_run_goes_on_with_other_shapes(interrupted, kind, changes):
    """Also once more with others."""
    _, parts, updates = interrupted(kind)
    for settings in changes:
        updates += 1
        fields = SMALL | settings | dict(num_updates=updates, output_dir=str(parts), resume=True, allow_changed="held_out")
        assert int(run(kind, reward=Signalling(0), held_out=(), **fields).state.step) == updates


@pytest.mark.long
def test_an_interrupted_reward_model_resumes_where_it_stopped(interrupted):
    """The signal comes while the pairs of the second round are sampled, so the fit of its reward model stops at once."""
    whole, parts, _ = interrupted("learned reward")
    assert saved_steps(parts / "checkpoints") == [3]
    assert [saved_steps(parts / f"reward_model_{n}" / "checkpoints") for n in (0, 1)] == [[3], [0]]
    run("learned reward", reward=Signalling(0), output_dir=str(parts), resume=True)
    assert_equal_runs(whole, parts)


@pytest.mark.long
def test_a_reward_model_is_retrained_if_its_pairs_have_changed(interrupted, caplog):
    """The reward differs from call to call, like that of some judges, so the repeated round has other pairs."""

    class Judge(Signalling):
        def __call__(self, a, b, batch_items, rng):
            return [x + time.monotonic() % 1e-3 for x in super().__call__(a, b, batch_items, rng)]

    _, parts, _ = interrupted("learned reward")
    changed = dict(output_dir=str(parts), resume=True, allow_changed="reward")
    assert len(run("learned reward", reward=Judge(0), **changed).rewards) == 5
    assert "the reward model of round 1 is trained from the beginning" in caplog.text


@pytest.mark.long
def test_damaged_pairs_of_rounds_are_named_in_the_error(interrupted):
    """One digit of a token, and a file of no bytes."""
    _, parts, _ = interrupted("rounds")
    path = parts / "pairs" / "round_0000.jsonl"
    content = path.read_bytes()
    at = content.index(b'"tokens"') + 12
    for damaged in (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot resume: .*round_0000.jsonl, the pairs of round 0, is damaged"):
            run("rounds", reward=Signalling(0), output_dir=str(parts), resume=True)


@pytest.mark.long
def test_seeds_resume_from_the_newest_step_that_is_intact_in_all_runs(runs_of, tmp_path):
    """F4: the newest checkpoint of one run is damaged; that of the other is set aside too."""
    run("seeds", reward=Signalling(9), output_dir=str(tmp_path), save_every=1)
    newest = saved_steps(tmp_path / "seed_0" / "checkpoints")[-1]
    flip(tmp_path / "seed_1" / "checkpoints" / str(newest) / "meta.json")
    run("seeds", reward=Signalling(0), output_dir=str(tmp_path), resume=True)
    assert (tmp_path / "seed_0" / "checkpoints" / f"{newest}.later").is_dir()
    assert_equal_runs(runs_of("seeds")[0], tmp_path, seeds=SEEDS)


# --- whole runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was interrupted after update 2 of 8."""
    directory = tmp_path_factory.mktemp("begun") / "run"
    run(reward=Signalling(3), output_dir=str(directory), **SMALL)
    return directory


SMALL = dict(num_updates=8, tensorboard=False, save_models=False)


@pytest.mark.long
def test_other_shapes_of_batches_train_and_are_kept_in_the_log_and_the_checkpoint(begun, tmp_path):
    where = Path(shutil.copytree(begun, tmp_path / "run"))
    updates = saved_steps(where / "checkpoints")[-1]
    settings = dict(num_prompts=1, num_generations=2, max_new_tokens=2, micro_batches=2, sample_parts=1, max_grad_norm=0.5)
    result = run(reward=Signalling(0), output_dir=str(where), resume="auto", **SMALL | settings | {"num_updates": updates + 1})
    assert int(result.state.step) == updates + 1 and rows_of(where)[-2]["step"] == updates + 1
    content = json.loads((where / "checkpoints" / str(updates + 1) / "meta.json").read_text(encoding="utf-8"))["meta"]
    [change] = content["changes"]
    assert change["step"] == updates and "num_generations: 3 -> 2" in change["changed"]
    names = {text.split(":")[0] for text in change["changed"]}
    assert names == settings.keys() - {"sample_parts"} | {"num_updates", "output_dir"}
    log = (where / "attempts" / "2" / "log.txt").read_text(encoding="utf-8")
    assert "resumed with other settings: " in log and "num_updates: 8 -> 3" in log and "max_grad_norm: 1.0 -> 0.5" in log


@pytest.mark.long
def test_auto_begins_without_a_checkpoint_and_keeps_the_files_that_are_there(tmp_path):
    """A run that was killed before its first checkpoint, while its config.yaml was written, or when it had only the lock."""
    cfg = TrainConfig.of(output_dir=str(tmp_path), resume="auto")
    assert resolve_resume(cfg).run.resume is False
    (tmp_path / "lock").write_text('{"host": "another host", "pid": 1, "since": "yesterday"}', encoding="utf-8")
    (tmp_path / "attempts" / "1").mkdir(parents=True)  # what a run writes first
    (tmp_path / "attempts" / "1" / "start.json").write_text("{}", encoding="utf-8")
    (tmp_path / "config.yaml.tmp").write_text("algor", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 1.0}\n', encoding="utf-8")
    (tmp_path / "checkpoints" / "4.saving").mkdir(parents=True)
    assert resolve_resume(cfg).run.resume is False
    result = run(reward=Signalling(0), output_dir=str(tmp_path), resume="auto", **SMALL | {"num_updates": 1})
    assert len(result.rewards) == 1 and saved_steps(tmp_path / "checkpoints") == [1]
    assert (tmp_path / "earlier_1" / "metrics.jsonl").is_file() and is_complete(tmp_path, 1)
    again = run(reward=(unused := Signalling(0)), output_dir=str(tmp_path), resume="auto", **SMALL | {"num_updates": 1})
    assert not again.rewards and int(again.state.step) == 1 and not (tmp_path / "earlier_2").exists()
    assert unused.calls_left == 0 and again.after[:2] == result.after[:2] and again.after.episodes == result.after.episodes
    other = run(output_dir=str(tmp_path), resume="auto", **SMALL | {"num_updates": 1, "allow_changed": "reward"})
    assert not again.after.rollout.turns and other.after.rollout.turns, "another reward is evaluated"


@pytest.mark.long
def test_auto_continues_and_does_not_count_a_run_that_was_cut_short_as_complete(begun, tmp_path):
    cfg = TrainConfig.of(output_dir=str(begun), resume="auto")
    assert resolve_resume(cfg).run.resume is True and not is_complete(begun, 8)
    assert resolve_resume(cfg.replace(resume=False)).run.resume is False
    with locked(begun), pytest.raises(RuntimeError, match="in use by process"):
        run(reward=Signalling(0), output_dir=str(begun), resume="auto", **SMALL)
    with pytest.raises(ValueError, match="resume='auto' is not allowed: resume must be True or False where save_every=0"):
        TrainConfig.of(output_dir=str(tmp_path), resume="auto", save_every=0)
    with pytest.raises(ValueError, match="data: 9 items -> 8"):
        run(reward=Signalling(0), items=ITEMS[:8], output_dir=str(begun), resume="auto", **SMALL)


def test_auto_of_several_seeds_needs_a_checkpoint_of_each(tmp_path):
    cfg = TrainConfig.of(output_dir=str(tmp_path), resume="auto")
    assert resolve_resume(cfg, (0, 1)).run.resume is False
    for seed in (0, 1):
        (tmp_path / f"seed_{seed}" / "checkpoints" / "3").mkdir(parents=True)
        (tmp_path / f"seed_{seed}" / "checkpoints" / "3" / "meta.json").touch()
        if not seed:
            with pytest.raises(CannotGoOn, match="only some of its seeds have one: move .*seed_0/checkpoints away"):
                resolve_resume(cfg, (0, 1))
    assert resolve_resume(cfg, (0, 1)).run.resume is True
