"""Preferences that a team's own completions show: pairs, comparators, replay, and that teams learn from them."""

from __future__ import annotations

import json
import math
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.learning.critics import Critics
from jmarl.learning.optimizer import init_state
from jmarl.learning.setup import Setup
from jmarl.learning.team_update import update_team
from jmarl.models import decoder
from jmarl.models.hub.agents import Agent
from jmarl.randomness import Randomness, tasks_of
from jmarl.rollout.play import play
from jmarl.sampling.generate import sample_team, tokens_of
from jmarl.team import make_team, policies
from jmarl.training.preferences import comparators
from jmarl.training.preferences.comparators import Candidates, History
from jmarl.training.preferences.data_source import drawn
from jmarl.training.preferences.pair_rounds import Round, Rounds, chosen_of, load_round, pair_source, save_round
from jmarl.training.preferences.pairs import Pair, load_pairs
from jmarl.training.train import train

ITEMS = [{"prompt": text} for text in ("the answer", "is in a", "basket", "of fruit", "def add", "seven", "42", "walked")]
HELD_OUT = [{"prompt": text} for text in ("apples", "or pears", "so they", "the market", "with", "two", "agents", "return")]
CONFIG = TrainConfig.of(
    algorithm="madpo_iter", num_updates=24, round_updates=2, num_prompts=8, num_generations=8, max_new_tokens=6,
    min_new_tokens=6, learning_rate=1e-2, per_agent="vmap", eval_generations=8, batch_size=64, pairs_per_prompt=8,
    progress=False,
)  # fmt: skip


KEYS = 8, Randomness(seed=0, step=0, purpose=comparators.PROPOSE)


def vowels(text):
    return sum(text.count(v) for v in "aeiou") / max(len(text), 1)


def both(a, b):
    return [(vowels(x) + vowels(y)) / 2 for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def make_agent(tiny_tokenizer):
    """An agent with small random weights, as at initialisation, which learn faster than those of the fixture `random_agent`."""

    def make(cfg, seed):
        return Agent("random", cfg, jax.device_get(decoder.init_params(cfg, jax.random.key(seed))), tiny_tokenizer)

    return make


@pytest.fixture(scope="module")
def agents(tiny_config, make_agent):
    return [make_agent(tiny_config(), seed) for seed in (0, 10)]


def trained(agents, **changes):
    team, params = make_team(agents)
    base = CONFIG.replace(round_updates=None) if changes.get("algorithm") == "madpo" else CONFIG
    cfg = base.replace(**changes)
    return train(team, make_reward(both, num_agents=2), ITEMS, cfg, params=params, eval_items=HELD_OUT)


def rounds_of(agents, **changes):
    """The rounds of a run that has not begun, and its state."""
    team, params = make_team(agents)
    cfg = CONFIG.replace(**changes)
    env = RewardEnvironment(make_reward(both, num_agents=2), [default_formatter] * 2)
    initial = jax.tree.map(lambda x: x.copy(), params)
    algorithm = resolve(cfg)
    return Rounds(team, initial, ITEMS, env, algorithm, cfg), init_state(params, algorithm)


OFFLINE = dict(algorithm="madpo", num_generations=32, pairs_per_prompt=0, pair_selection="random", num_updates=60)


@pytest.mark.parametrize("changes", [OFFLINE, dict(), dict(pair_selection="reward_gap", replay="nearest_k", num_updates=36)])
def test_a_team_learns_from_its_own_preferences(agents, changes):
    """The reward on held-out prompts ends above the untrained team's 95 % interval."""
    result = trained(agents, **changes)
    assert result.after.mean - result.after.interval > result.before.mean + result.before.interval
    assert len(result.rewards) == (1 if changes is OFFLINE else changes.get("num_updates", 24) // 2)


def test_two_architectures_and_shared_weights_learn_too(agents, tiny_config, make_agent):
    other = [agents[0], make_agent(tiny_config("qwen3", hidden_size=48), 1)]
    result = trained(other)
    assert result.after.mean > result.before.mean + result.before.interval
    team, params = make_team([agents[0]] * 2, shared_weights=True)
    reward = make_reward(both, num_agents=2)
    result = train(team, reward, ITEMS, CONFIG, params=params, eval_items=HELD_OUT)
    assert result.after.mean > result.before.mean + result.before.interval


def test_pairs_are_what_was_sampled_and_rewarded(agents, tiny_tokenizer):
    """Chosen has the larger reward, each text is its tokens decoded, and the reward is that of the texts."""
    rounds, state = rounds_of(agents)
    made = rounds.begin(0, state)
    assert 8 < len(made.pairs) <= 8 * 8
    for pair in made.pairs:
        assert pair.rewards[0] > pair.rewards[1]
        for texts, which, reward in ((pair.chosen, 1, pair.rewards[0]), (pair.rejected, 2, pair.rewards[1])):
            assert both(texts[:1], texts[1:]) == [pytest.approx(reward)]
            decoded = [tiny_tokenizer.decode(of_agent[which], skip_special_tokens=True) for of_agent in pair.tokens]
            assert tuple(decoded) == texts
        assert [tiny_tokenizer.decode(of_agent[0]) for of_agent in pair.tokens] == list(pair.prompts)


def test_a_comparator_is_another_draw_of_the_same_policy(agents):
    """current: other completions than the team's own, of the same parameters; initial: those of the untrained team, which at
    the start are the same."""
    found = {}
    for kind in ("current", "initial"):
        rounds, state = rounds_of(agents, comparator=kind)
        params = [s.params for s in state.stacks]
        found[kind] = rounds.comparator.answer(params, ITEMS, rounds.env, 0, 0)
        moved = [jax.tree.map(lambda x: 1.5 * x, p) for p in params]
        changed = rounds.comparator.answer(moved, ITEMS, rounds.env, 0, 0)
        assert (changed.texts == found[kind].texts) == (kind == "initial")
    assert found["current"].texts == found["initial"].texts
    made = rounds.begin(0, state)
    texts = {text for of_agent in found["current"].texts for row in of_agent for text in row}
    own = {t for pair in made.pairs for t in (*pair.chosen, *pair.rejected)} - texts
    assert own, "the team's own completions are others"


def test_history_looks_back_as_many_rounds_as_it_is_told(agents):
    """In round 3 with a lag of 2 the comparator is the policy of round 1; before there are so many, the first."""
    rounds, state = rounds_of(agents, comparator="history", comparator_lag=2)
    policies = [jax.tree.map(lambda x, k=k: (1 + 0.2 * k) * x, [s.params for s in state.stacks]) for k in range(4)]
    for round_, params in enumerate(policies):
        rounds.comparator.history.remember(round_, params)
        found = rounds.comparator.answer(params, ITEMS, rounds.env, 7, round_)
        then = comparators.played(rounds.team, policies[max(0, round_ - 2)], ITEMS, rounds.env, rounds.cfg, 7)
        assert found.texts == then.turns[0].texts
    assert sorted(rounds.comparator.history.past) == [1, 2, 3]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_against_its_past_goes_on_bit_for_bit(agents, tmp_path, lora_rank):
    """The policies of rounds 1 and 2, which rounds 3 and 4 look back at, are read back; a run without checkpoints has them in
    memory and is the same. With LoRA a file has the adapters alone."""

    def run(where, **changes):
        team, params = make_team([agents[0]] * 2, lora=lora_rank > 0)
        how = dict(comparator="history", comparator_lag=2, lora_rank=lora_rank, output_dir=str(tmp_path / where), batch_size=8)
        cfg = CONFIG.replace(**how | dict(num_updates=9, round_updates=2) | changes)
        return train(team, make_reward(both, num_agents=2), ITEMS, cfg, params=params)

    whole = run("whole", save_every=0)
    run("parts", num_updates=5, save_every=1)
    rest = run("parts", save_every=1, resume=True)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    files = sorted((tmp_path / "parts" / "history").iterdir())
    assert [path.name for path in files] == [f"round_00000{k}.npz" for k in (1, 2, 3, 4)]
    assert not (tmp_path / "whole" / "history").exists()
    with np.load(files[0]) as file:
        assert len(file.files) == len(jax.tree.leaves(whole.state.stacks[0].params))


def test_a_policy_that_is_not_kept_is_named(tmp_path):
    history = History(1, tmp_path / "history")
    with pytest.raises(ValueError, match=r"cannot resume: .*round_000002.npz, the policy that round 2 began with, is missing"):
        history.at(2, [{"layers": {}}])


def test_another_model_is_a_comparator(agents, tiny_dir):
    """Its texts are encoded by the team's tokenizer, with an end only behind what it ended itself; the team's own completions
    stay the tokens that were sampled."""
    how = dict(comparator="model", comparator_model=str(tiny_dir("qwen2", seed=3)))
    for fewest in (6, 0):  # all are cut off after six tokens, or may end
        rounds, state = rounds_of(agents, **how, min_new_tokens=fewest)
        made = rounds.begin(0, state)
        params = [s.params for s in state.stacks]
        ((_, items),) = rounds._draws(0)
        sample = partial(sample_team, rounds.team, params)
        own = play(sample, rounds.team, items, rounds.env, rounds.cfg.sampling, rounds.cfg.episodes, **KEYS)
        sampled = {tuple(row) for of in tokens_of(rounds.team, own.turns[0].completions, 8) for p in of for row in p}
        stop = rounds.team.stacks[0].stop[0]
        rows = [tuple(row) for pair in made.pairs for of_agent in pair.tokens for row in of_agent[1:]]
        foreign = [row for row in rows if row not in sampled]
        assert len(rows) == 4 * len(made.pairs) and 0 < len(foreign) <= len(rows) // 2
        assert fewest == 0 or not any(row[-1] == stop for row in foreign)
        assert all(len(row) <= 6 for row in rows)
        setup = Setup(rounds.team, Critics((), rounds.algorithm), rounds.algorithm, rounds.cfg)
        source = pair_source(setup, rounds)
        batches = source.make_batches(state, drawn(rounds.team, rounds.drawn(0), rounds.algorithm))
        assert np.isfinite(update_team(setup, state, batches)[1][0]["loss"]).all()


def test_what_was_ended_gets_an_end_and_what_was_cut_off_none(agents):
    rounds, _ = rounds_of(agents)
    texts = [[["the market", "seven"]], [["a", ""]]]
    found = comparators.encoded(rounds.team, texts, [[[True, False]], [[False, True]]], rounds.cfg)
    stop, decode = rounds.team.stacks[0].stop[0], rounds.team.stacks[0].tokenizer.decode
    assert found[0][0][0][-1] == stop and found[0][0][1][-1] != stop and found[1][0][1] == [stop]
    assert decode(found[0][0][1]) == "seven"


def test_a_comparator_meets_the_same_tasks(agents):
    """An environment whose reset is random draws the same for the team and for whom it is compared with."""

    class Random:
        def reset(self, item, rng):
            return None, [f"say {rng.integers(1000)}"] * 2

        def step(self, state, texts, rng):
            return None, ["", ""], len(texts[0]) + rng.random(), True

    rounds, state = rounds_of(agents)
    rounds.env = LockStep(Random(), 2)
    made = rounds.begin(0, state)
    params = [s.params for s in state.stacks]
    other = rounds.comparator.answer(params, ITEMS, rounds.env, 0, 0)
    assert {pair.prompts for pair in made.pairs} <= set(zip(*other.prompts, strict=True)) and len(set(other.prompts[0])) > 1


class Service(BaseHTTPRequestHandler):
    """An OpenAI-compatible server; `script` says what it does to each request: answer, or an HTTP error."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        code = self.server.script.pop(0) if self.server.script else 200
        chat = self.path.endswith("/chat/completions")
        texts = [f"aeiou {k}" for k in range(self.server.short or body["n"])]
        choices = [{"message": {"content": t}} if chat else {"text": t} for t in texts]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": choices} if code == 200 else {"error": "no"}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(comparators, "WAIT_S", 0.01)
    server = HTTPServer(("127.0.0.1", 0), Service)
    server.seen, server.script, server.short = [], [], 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(service):
    return f"http://127.0.0.1:{service.server_port}/v1"


@pytest.mark.parametrize("chat", [False, True])
def test_an_http_service_is_a_comparator(agents, service, chat, monkeypatch):
    """Asked once a prompt and agent, with the key; the team then learns from texts that are better than its own."""
    monkeypatch.setenv(comparators.KEY, "secret")
    how = dict(comparator="api", comparator_url=address(service), comparator_model="some-model", chat=chat)
    rounds, state = rounds_of(agents, **how)
    made = rounds.begin(0, state)
    assert len(service.seen) == 16 and made.compared == pytest.approx(vowels("aeiou 0"))
    path, body, authorization = service.seen[0]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions") and authorization == "Bearer secret"
    asked = [b["messages"][0]["content"] if chat else b["prompt"] for _, b, _ in service.seen]
    assert sorted(asked) == sorted(2 * [item["prompt"] for item in ITEMS])
    assert body["n"] == 8 and body["max_tokens"] == 6 and body["model"] == "some-model"
    assert made.pairs and all(pair.chosen[0].startswith("aeiou") for pair in made.pairs)


def test_a_busy_service_is_asked_again_and_a_refusal_is_told(agents, service):
    cfg = CONFIG.replace(comparator="api", comparator_url=address(service))
    service.script = [503, 429]
    assert len(comparators.complete("a", 3, cfg)) == 3 and len(service.seen) == 3
    service.script = [401]
    with pytest.raises(RuntimeError, match=r"refused with 401: .*no"):
        comparators.complete("a", 3, cfg)
    service.script = [500] * 3
    with pytest.raises(RuntimeError, match="refused with 500"):
        comparators.complete("a", 3, cfg)
    service.short = 2
    with pytest.raises(RuntimeError, match="asked for 3 completions and gave 2"):
        comparators.complete("a", 3, cfg)


def test_a_service_that_is_not_there_is_named(service):
    cfg = CONFIG.replace(comparator="api", comparator_url="http://127.0.0.1:1/v1")
    with pytest.raises(RuntimeError, match="127.0.0.1:1/v1/completions cannot be used.*tried 3 times"):
        comparators.complete("a", 3, cfg)


def test_replay_draws_from_the_rounds_it_names(agents):
    """In the second round an update has pairs of that round only (`current`), or of both alike (`all`); none twice before all
    of their round were drawn."""
    for replay in ("current", "all"):
        rounds, state = rounds_of(agents, replay=replay, batch_size=20, round_updates=5)
        old, new = (rounds.begin(step, state) and rounds.encoded(step // 5) for step in (0, 5))
        known = [[repr(of) for of in part.encoded] for part in (old, new)]
        counts = np.zeros(2, int)
        for step in range(5, 10):
            drawn = rounds.drawn(step)
            assert len(drawn.encoded) == len(drawn.reference) == 20
            counts += [sum(repr(of) in part for of in drawn.encoded) for part in known]
        assert (counts[0] == 0) == (replay == "current") and counts.sum() == 100
        assert replay == "current" or 30 < counts[0] < 70


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        (dict(), [[0], [0], [2], [3], [3]]),  # rounds 1 and 4 make none, and learn from the last that did
        (dict(replay="nearest_k", replay_k=3), [[0], [0], [0, 2], [2, 3], [2, 3]]),
        (dict(replay="lambda_decay"), [[0], [0], [0, 2], [0, 2, 3], [0, 2, 3]]),
        (dict(replay="all"), [[0], [0], [0, 2], [0, 2, 3], [0, 2, 3]]),
    ],
)
def test_pairs_are_kept_as_long_as_they_are_drawn_from(agents, tmp_path, monkeypatch, changes, kept):
    """In a run that goes on too."""
    pairs = [Pair(("the",) * 2, ("a",) * 2, ("b",) * 2, (1.0, 0.0), (([1], [2], [3]),) * 2)]
    rounds, state = rounds_of(agents, round_updates=1, output_dir=str(tmp_path), **changes)
    monkeypatch.setattr(Rounds, "_round", lambda self, k, _: Round([] if k in (1, 4) else pairs, 0.0, 0.0))
    for step, wanted in enumerate(kept):
        rounds.begin(step, state)
        rounds.drawn(step)
        again, _ = rounds_of(agents, round_updates=1, output_dir=str(tmp_path), **changes)
        again.resume(step + 1)
        assert sorted(rounds.pairs) == sorted(again.pairs) == wanted and set(rounds.examples) <= set(wanted)


def test_none_is_drawn_twice_before_all_were_once():
    drawn = chosen_of(5, 12, np.random.default_rng(1))
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5)) and len(drawn) == 12
    assert chosen_of(5, 0, np.random.default_rng(0)) == [] == chosen_of(0, 0, np.random.default_rng(0))


def test_an_interrupted_run_goes_on_bit_for_bit(agents, tmp_path):
    """Stopped within a round: its pairs are read back, not made anew by another policy; the files are preference files."""

    def run(where, **changes):
        return trained(agents, output_dir=str(tmp_path / where), save_every=3, round_updates=4, replay="all", **changes)

    whole = run("whole", num_updates=9)
    run("parts", num_updates=6)
    rest = run("parts", num_updates=9, resume=True)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    names = sorted(p.name for p in (tmp_path / "whole" / "pairs").glob("*.jsonl"))
    assert names == [f"round_000{k}.jsonl" for k in range(3)]
    for name in names:
        assert (tmp_path / "parts" / "pairs" / name).read_text() == (tmp_path / "whole" / "pairs" / name).read_text()
    pairs = load_pairs(tmp_path / "whole" / "pairs" / names[1], 2)
    kept = load_round(tmp_path / "whole" / "pairs", 1)
    assert [p.chosen for p in pairs] == [p.chosen for p in kept] and all(p.tokens for p in kept)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    begun = [row["step"] for row in rows if "pairs" in row]
    assert begun == [0, 4, 8] and all(row["reward/comparator"] > 0 for row in rows if "pairs" in row)


def test_round_files_keep_any_text(tmp_path):
    """Line separators that are no line's end, for a team and for one agent; `load_pairs` reads the same."""
    odd = "a\u2028b\u0085c\nd"
    for n in (1, 2):
        pairs = [Pair(("p",) * n, (odd,) * n, ("x",) * n, (1.0, 0.0), (([1], [2, 3], [4]),) * n)]
        save_round(tmp_path, n, pairs)
        (found,) = load_round(tmp_path, n)
        assert found._replace(tokens=None) == pairs[0]._replace(tokens=None) and found.tokens == [[[1], [2, 3], [4]]] * n
        assert load_pairs(tmp_path / f"round_000{n}.jsonl", n) == [pairs[0]._replace(tokens=None)]


def test_equal_rewards_make_no_pairs(agents):
    team, params = make_team(agents)
    reward = make_reward(lambda a, b: [1.0] * len(a), num_agents=2)
    with pytest.raises(ValueError, match="no two completions of an item have different rewards"):
        train(team, reward, ITEMS, CONFIG, params=params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_turns=2), "num_turns=2 is not there for algorithm='madpo_iter'"),
        (dict(joint_mode="cross"), "joint_mode='cross' is not there"),
        (dict(temperature=0.0), "temperature=0 makes all completions"),
        (dict(algorithm="madpo", comparator="initial"), "comparator='initial' has no effect for algorithm='madpo'"),
        (dict(algorithm="madpo", round_updates=None, pair_selection="comparator_reward"), "needs a comparator"),
        (dict(algorithm="dpo", round_updates=None), r"learns from given data: use jmarl\.fit$"),
        (dict(num_generations=1), "num_generations=1 is too small"),
        (dict(micro_batches=65), "micro_batches=65 is more than batch_size=64"),
    ],
)
def test_what_rounds_do_not_have_is_refused(agents, changes, message):
    team, params = make_team(agents)
    base = CONFIG.replace(round_updates=None) if changes.get("algorithm") == "madpo" else CONFIG
    with pytest.raises(ValueError, match=message):
        cfg = base.replace(**changes)
        transition = (lambda **_: ["a", "b"]) if cfg.episodes.num_turns > 1 else None
        train(team, make_reward(both, num_agents=2), ITEMS, cfg, params=params, external_transition=transition)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(comparator="model"), "comparator_model must be set for comparator=model"),
        (dict(comparator="api"), "comparator_url must be set for comparator=api"),
        (dict(comparator_lag=2), "comparator_lag must be None where comparator=None: it is for comparator=history"),
        (dict(replay_lambda=0.3), "replay_lambda must be None where replay=None"),
        (dict(replay="lambda_decay", replay_lambda=1.5), r"replay_lambda must be in \[0, 1\]"),
        (dict(comparator="friend"), "comparator must be one of"),
    ],
)
def test_comparators_and_replay_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        CONFIG.replace(**changes)


def test_adapters_learn_from_the_teams_own_preferences(agents, tmp_path):
    """LoRA in rounds: the reference is the base, so the first update's loss is log 2; then it falls."""
    team, params = make_team([agents[0]] * 2, lora=True)
    changes = dict(lora_rank=8, learning_rate=3e-2, num_updates=8, replay="all", output_dir=str(tmp_path))
    train(team, make_reward(both, num_agents=2), ITEMS, CONFIG.replace(**changes), params=params)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["agent_1/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert rows[0]["agent_1/margin"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["agent_1/loss"] < rows[0]["agent_1/loss"] and rows[-1]["agent_1/margin"] > 0


def test_rounds_have_items_and_random_numbers_of_their_own(agents):
    """The items of a round are those of a step of that number; with the same items and weights, other texts are written."""
    rounds, _ = rounds_of(agents, num_prompts=3)
    assert rounds._draws(2) == [(2, [ITEMS[i] for i in tasks_of(2, len(ITEMS), 3, CONFIG.run.seed)])] != rounds._draws(1)
    rounds, state = rounds_of(agents)
    first, second = (rounds._round(n, policies(state)).pairs for n in (0, 1))
    said = [{(pair.prompts, texts) for pair in of for texts in (pair.chosen, pair.rejected)} for of in (first, second)]
    assert len(said[0] & said[1]) < 0.05 * len(said[0])


def test_random_pairs_are_drawn_anew_in_every_round(agents, monkeypatch):
    """Of the same candidates, which lose to the comparator's one by one."""

    def candidates(first):
        texts, ids = ([[[make(first + g) for g in range(8)]]] * 2 for make in (str, lambda k: [k]))
        return Candidates([["p"]] * 2, texts, first + np.arange(8.0)[None], [[[1]]] * 2, ids)

    rounds, _ = rounds_of(agents, pair_selection="random", num_prompts=1)
    monkeypatch.setattr("jmarl.training.preferences.pair_rounds.play", lambda *_, **__: None)
    monkeypatch.setattr("jmarl.training.preferences.pair_rounds.candidates_of", lambda *_: candidates(0))
    monkeypatch.setattr(rounds.comparator, "answer", lambda *_: candidates(10))
    first, second, again = ([pair.chosen[0] for pair in rounds._round(k, []).pairs] for k in (0, 1, 0))
    assert sorted(first) == [str(10 + k) for k in range(8)] and first == again != second


def test_a_reward_model_gets_all_pairs_of_the_likeliest_rounds(agents):
    for changes, share in ((dict(replay="all"), 1), (dict(replay="lambda_decay", replay_lambda=0.5), 0.5)):
        rounds, state = rounds_of(agents, **changes)
        for n in (0, 1):
            rounds._keep(n, rounds._round(n, policies(state)).pairs)
        assert len(rounds.replayed(1)) == round(share * len(rounds.pairs[0])) + len(rounds.pairs[1])
