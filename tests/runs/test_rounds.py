"""Pairs of a team's own completions: sampling, comparators, replay, resume, and that teams learn from them."""

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
from jmarl.learning.optimizer import init_state
from jmarl.learning.setup import make_setup
from jmarl.learning.team_update import update_team
from jmarl.logs.goodput import PHASES
from jmarl.models import decoder
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import ChatPrompt
from jmarl.preferences import comparators
from jmarl.preferences.comparators import Candidates, History
from jmarl.preferences.pairs import Pair, load_pairs
from jmarl.randomness import Randomness, tasks_of
from jmarl.rollout.play import play
from jmarl.runs.kinds.given import complete_batches, draw_examples
from jmarl.runs.kinds.rounds import Round, Rounds, draw_evenly, load_round, save_round
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team, tokens_of
from jmarl.team import Team, make_team, policies

ITEMS = [{"prompt": text} for text in ("the answer", "is in a", "basket", "of fruit", "def add", "seven", "42", "walked")]
HELD_OUT = [{"prompt": text} for text in ("apples", "or pears", "so they", "the market", "with", "two", "agents", "return")]
CONFIG = TrainConfig.of(
    algorithm="madpo_iter", num_updates=24, round_updates=2, num_prompts=8, num_generations=8, max_new_tokens=6,
    min_new_tokens=6, learning_rate=1e-2, per_agent="vmap", eval_generations=8, batch_size=16, pairs_per_prompt=8,
    progress=False,
)  # fmt: skip


KEYS = 8, Randomness(seed=0, step=0, purpose=comparators.PROPOSE)


def vowels(text):
    return sum(text.count(v) for v in "aeiou") / max(len(text), 1)


def both(a, b):
    return [(vowels(x) + vowels(y)) / 2 for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def make_agent(tiny_tokenizer):
    """Return a function that makes agents with the weights of initialization, which learn faster than `random_agent`."""
    init_params = jax.jit(decoder.init_params, static_argnums=0)

    def make(cfg, seed):
        return Agent("random", cfg, jax.device_get(init_params(cfg, jax.random.key(seed))), tiny_tokenizer)

    return make


@pytest.fixture(scope="module")
def agents(tiny_config, make_agent):
    return [make_agent(tiny_config(), seed) for seed in (0, 10)]


def reward():
    return make_reward(both, num_agents=2)


def trained(agents, team_options=None, held_out=HELD_OUT, **changes):
    team, params = make_team(agents, **team_options or {})
    base = CONFIG.replace(round_updates=None) if changes.get("algorithm") == "madpo" else CONFIG
    return train(team, reward(), ITEMS, base.replace(**changes), params=params, eval_items=held_out)


def rounds_of(agents, team_options=None, **changes):
    """Return the rounds of a run that has not begun, and its state."""
    team, params = make_team(agents, **team_options or {})
    cfg = CONFIG.replace(**changes)
    env = RewardEnvironment(reward(), [default_formatter] * 2)
    initial = jax.tree.map(lambda x: x.copy(), params)
    algorithm = resolve(cfg)
    return Rounds(team, initial, ITEMS, env, algorithm, cfg), init_state(params, algorithm)


def log_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


OFFLINE = dict(algorithm="madpo", pairs_per_prompt=0, pair_selection="random", num_updates=80, batch_size=64)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        OFFLINE,
        pytest.param(dict(), marks=pytest.mark.nightly),
        dict(pair_selection="reward_gap", replay="nearest_k", num_updates=36),
    ],
)
def test_a_team_learns_from_its_own_preferences(agents, changes):
    """The reward on held-out prompts ends above the untrained team's 95 % interval."""
    result = trained(agents, **changes)
    assert result.after.mean > result.before.mean + result.before.interval
    assert len(result.rewards) == (1 if changes is OFFLINE else changes.get("num_updates", 24) // 2)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_architectures_and_shared_weights_learn_too(agents, tiny_config, make_agent, shared):
    other = agents[0] if shared else make_agent(tiny_config("qwen3", hidden_size=48), 1)
    result = trained([agents[0], other], team_options=dict(shared_weights=shared))
    assert result.after.mean > result.before.mean + result.before.interval


@pytest.mark.parametrize("shared", [False, True])
def test_pairs_have_the_sampled_tokens_and_their_rewards(agents, tiny_tokenizer, shared):
    """The chosen text has the larger reward, texts are the decoded tokens, and rewards are those of the texts."""
    rounds, state = rounds_of([agents[0], agents[0 if shared else 1]], team_options=dict(shared_weights=shared))
    new = rounds.new_round(0, state)
    assert 8 < len(new.pairs) <= 8 * 8
    for pair in new.pairs:
        assert pair.rewards[0] > pair.rewards[1]
        for texts, which, reward in ((pair.chosen, 1, pair.rewards[0]), (pair.rejected, 2, pair.rewards[1])):
            assert both(texts[:1], texts[1:]) == [pytest.approx(reward)]
            decoded = [tiny_tokenizer.decode(tokens[which], skip_special_tokens=True) for tokens in pair.tokens]
            assert tuple(decoded) == texts
        assert [tiny_tokenizer.decode(tokens[0]) for tokens in pair.tokens] == list(pair.prompts)


def test_the_comparator_current_samples_again_and_initial_stays_the_untrained_team(agents):
    """`current` writes other completions than the team, with the same parameters. `initial` does not follow the parameters; at
    the start both write the same."""
    candidates = {}
    for kind in ("current", "initial"):
        rounds, state = rounds_of(agents, comparator=kind)
        params = [s.params for s in state.stacks]
        candidates[kind] = rounds.comparator.answer(params, ITEMS, rounds.env, 0, 0)
        moved = [jax.tree.map(lambda x: 1.5 * np.asarray(x), p) for p in params]
        changed = rounds.comparator.answer(moved, ITEMS, rounds.env, 0, 0)
        assert (changed.texts == candidates[kind].texts) == (kind == "initial")
    assert candidates["current"].texts == candidates["initial"].texts
    new = rounds.new_round(0, state)
    texts = {text for agent in candidates["current"].texts for row in agent for text in row}
    own = {t for pair in new.pairs for t in (*pair.chosen, *pair.rejected)} - texts
    assert own, "the team's own completions are others"


def test_the_comparator_history_is_the_policy_comparator_lag_rounds_ago(agents):
    """In round 3 with a lag of 2 it is the policy of round 1; in the first rounds that of round 0."""
    rounds, state = rounds_of(agents, comparator="history", comparator_lag=2)
    policies = [jax.tree.map(lambda x, k=k: (1 + 0.2 * k) * np.asarray(x), [s.params for s in state.stacks]) for k in range(4)]
    for round_, params in enumerate(policies):
        rounds.comparator.history.remember(round_, params)
        candidates = rounds.comparator.answer(params, ITEMS, rounds.env, 7, round_)
        randomness = Randomness(rounds.cfg.run.seed, 7, comparators.COMPARE, env_purpose=comparators.PROPOSE)
        policy = policies[max(0, round_ - 2)]
        then = comparators.play_items(rounds.team, policy, ITEMS, rounds.env, rounds.cfg, randomness)
        assert candidates.texts == then.turns[0].texts
    assert sorted(rounds.comparator.history.past) == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("lora", [{}, dict(lora_rank=8, learning_rate=3e-2)])
def test_a_run_with_history_resumes_bit_for_bit(agents, tmp_path, lora):
    """Resumed within round 2, a run reads the pairs of rounds from files, which `load_pairs` reads too. Rounds 3 and 4 need the
    policies of rounds 1 and 2, which are in files; a run without checkpoints has them in memory and is equal. With LoRA files
    hold only the adapters, and the reference is the base, so the loss of the first update is log 2; then it falls."""

    def run(where, **changes):
        settings = dict(comparator="history", comparator_lag=2, num_updates=9, replay="all", output_dir=str(tmp_path / where))
        team = dict(team_options=dict(lora=bool(lora)), held_out=())
        return trained([agents[0]] * 2, **team, **settings | lora | changes)

    whole = run("whole", save_every=0)
    run("parts", num_updates=5, save_every=1)
    rest = run("parts", save_every=1, resume=True)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    files = sorted((tmp_path / "parts" / "history").iterdir())
    assert [path.name for path in files] == [f"round_00000{k}.npz" for k in (1, 2, 3, 4)]
    assert not (tmp_path / "whole" / "history").exists()
    with np.load(files[0]) as file:
        assert len(file.files) == len(jax.tree.leaves(whole.state.stacks[0].params))
    names = sorted(p.name for p in (tmp_path / "whole" / "pairs").glob("*.jsonl"))
    assert names == [f"round_000{k}.jsonl" for k in range(5)]
    for name in names:
        assert (tmp_path / "parts" / "pairs" / name).read_text() == (tmp_path / "whole" / "pairs" / name).read_text()
    pairs = load_pairs(tmp_path / "whole" / "pairs" / names[1], 2)
    saved = load_round(tmp_path / "whole" / "pairs", 1)
    assert [p.chosen for p in pairs] == [p.chosen for p in saved] and all(p.tokens for p in saved)
    rows = log_of(tmp_path / "whole")
    begun = [row["step"] for row in rows if "pairs" in row]
    assert begun == [1, 3, 5, 7, 9] and all(row["reward/comparator"] > 0 for row in rows if "pairs" in row)
    for row in [row for row in rows if "time/step_s" in row]:  # of which sampling pairs is no part, and saving may be
        busy = sum(row[f"time/{phase}"] for phase in PHASES if phase not in ("sampling", "evaluation"))
        assert (row["time/sampling"] > 0) == ("pairs" in row) and 0 < row["time/step_s"] < busy + 0.1
    if lora:
        assert rows[0]["agent_1/loss"] == pytest.approx(math.log(2), rel=1e-5)
        assert rows[0]["agent_1/margin"] == pytest.approx(0, abs=1e-4)
        assert rows[-1]["agent_1/loss"] < rows[0]["agent_1/loss"] and rows[-1]["agent_1/margin"] > 0


def test_a_missing_policy_file_is_an_error_that_names_it(tmp_path):
    history = History(1, tmp_path / "history")
    with pytest.raises(ValueError, match=r"cannot resume: .*round_000002.npz, the policy that round 2 began with, is missing"):
        history.at(2, [{"layers": {}}], Team(()))


@pytest.mark.long
def test_the_comparator_model_is_encoded_by_the_teams_tokenizer(agents, tiny_dir):
    """The end token follows only completions that the model ended itself; the team's own keep their sampled tokens."""
    rounds, state = rounds_of(agents, comparator="model", comparator_model=str(tiny_dir("qwen2", seed=3)))
    new = rounds.new_round(0, state)
    params = [s.params for s in state.stacks]
    ((_, items),) = rounds.items_of(0)
    sample = partial(sample_team, rounds.team, params)
    own = play(sample, rounds.team, items, rounds.env, rounds.cfg.sampling, rounds.cfg.episodes, *KEYS)
    sampled = {tuple(row) for of in tokens_of(rounds.team, own.turns[0].completions, 8) for p in of for row in p}
    stop = rounds.team.stacks[0].stop[0]
    rows = [tuple(row) for pair in new.pairs for tokens in pair.tokens for row in tokens[1:]]
    foreign = [row for row in rows if row not in sampled]
    assert len(rows) == 4 * len(new.pairs) and 0 < len(foreign) <= len(rows) // 2
    assert not any(row[-1] == stop for row in foreign), "all were cut off after six tokens"
    assert all(len(row) <= 6 for row in rows)
    setup = make_setup(rounds.team, (), rounds.algorithm, rounds.cfg)
    batches = complete_batches(setup, state, draw_examples(rounds.team, rounds.draw(0), rounds.algorithm))
    assert np.isfinite(update_team(setup, state, batches)[1][0]["loss"]).all()


def test_only_completions_that_ended_get_an_end_token(agents):
    rounds, _ = rounds_of(agents)
    texts = [[["the market", "seven"]], [["a", ""]]]
    ids = comparators.encode_foreign(rounds.team, [[""], [""]], texts, [[[True, False]], [[False, True]]], rounds.cfg)
    stop, decode = rounds.team.stacks[0].stop[0], rounds.team.stacks[0].tokenizer.decode
    assert ids[0][0][0][-1] == stop and ids[0][0][1][-1] != stop and ids[1][0][1] == [stop]
    assert decode(ids[0][0][1]) == "seven"


def test_team_and_comparator_get_the_same_random_tasks(agents):
    """A random `reset` draws the same prompts for both."""

    class Random:
        def reset(self, item, rng):
            return None, [f"say {rng.integers(1000)}"] * 2

        def step(self, state, texts, rng):
            return None, ["", ""], len(texts[0]) + rng.random(), True

    rounds, state = rounds_of(agents)
    rounds.env = LockStep(Random(), 2)
    new = rounds.new_round(0, state)
    params = [s.params for s in state.stacks]
    other = rounds.comparator.answer(params, ITEMS, rounds.env, 0, 0)
    assert {pair.prompts for pair in new.pairs} <= set(zip(*other.prompts, strict=True)) and len(set(other.prompts[0])) > 1


class Service(BaseHTTPRequestHandler):
    """An OpenAI-compatible server. `script` holds the HTTP status of the next answers; without one it is 200."""

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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(service):
    return f"http://127.0.0.1:{service.server_port}/v1"


@pytest.mark.parametrize("chat", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_comparator_api_requests_completions_of_every_prompt(agents, service, chat, monkeypatch):
    """There is one request per prompt and agent, with the key. The better completions of the service are the chosen ones."""
    monkeypatch.setenv(comparators.KEY, "secret")
    changes = dict(comparator="api", comparator_url=address(service), comparator_model="some-model", chat=chat)
    rounds, state = rounds_of(agents, **changes)
    new = rounds.new_round(0, state)
    assert len(service.seen) == 16 and new.notes["reward/comparator"] == pytest.approx(vowels("aeiou 0"))
    path, body, authorization = service.seen[0]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions") and authorization == "Bearer secret"
    asked = [b["messages"][0]["content"] if chat else b["prompt"] for _, b, _ in service.seen]
    assert sorted(asked) == sorted(2 * [item["prompt"] for item in ITEMS])
    assert body["n"] == 8 and body["max_tokens"] == 6 and body["model"] == "some-model"
    assert new.pairs and all(pair.chosen[0].startswith("aeiou") for pair in new.pairs)


def test_the_comparator_api_gets_messages_as_messages_and_texts_as_their_agent(service):
    cfg = CONFIG.replace(comparator="api", comparator_url=address(service), chat=(False, True))
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "7"}]
    for prompt, agent in ((messages, 0), (ChatPrompt(messages), 0), ("7", 0), ("7", 1)):
        comparators.complete(prompt, 1, cfg, agent)
    bodies = [(path.removeprefix("/v1/"), body.get("messages", body.get("prompt"))) for path, body, _ in service.seen]
    chat, user = "chat/completions", [{"role": "user", "content": "7"}]
    assert bodies == [(chat, messages), (chat, messages), ("completions", "7"), (chat, user)]


def test_requests_are_repeated_if_the_service_is_busy_but_not_if_it_refuses(agents, service):
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


def test_an_unreachable_service_is_an_error_that_names_it(service):
    cfg = CONFIG.replace(comparator="api", comparator_url="http://127.0.0.1:1/v1")
    with pytest.raises(RuntimeError, match="127.0.0.1:1/v1/completions cannot be used.*tried 3 times"):
        comparators.complete("a", 3, cfg)


def test_replay_draws_from_the_rounds_of_the_setting(agents):
    """In the second round, updates have pairs of that round only (`current`), or of both rounds alike (`all`)."""
    for replay in ("current", "all"):
        rounds, state = rounds_of(agents, replay=replay, round_updates=5)
        old, new = (rounds.new_round(step, state) and rounds.encoded(step // 5) for step in (0, 5))
        known = [[repr(of) for of in part.tokens] for part in (old, new)]
        counts = np.zeros(2, int)
        for step in range(5, 10):
            batch = rounds.draw(step)
            assert len(batch.tokens) == len(batch.reference) == 16
            counts += [sum(repr(of) in part for of in batch.tokens) for part in known]
        assert (counts[0] == 0) == (replay == "current") and counts.sum() == 80
        assert replay == "current" or 20 < counts[0] < 60


@pytest.mark.parametrize(
    ("changes", "rounds_in_memory"),
    [
        (dict(), [[0], [0], [2], [3], [3]]),  # rounds 1 and 4 have no pairs, and learn from those of the round before
        (dict(replay="nearest_k", replay_k=3), [[0], [0], [0, 2], [2, 3], [2, 3]]),
        (dict(replay="lambda_decay"), [[0], [0], [0, 2], [0, 2, 3], [0, 2, 3]]),
        (dict(replay="all"), [[0], [0], [0, 2], [0, 2, 3], [0, 2, 3]]),
    ],
)
def test_pairs_stay_in_memory_as_long_as_they_are_drawn_from(agents, tmp_path, monkeypatch, changes, rounds_in_memory):
    """Also in a resumed run."""
    pairs = [Pair(("the",) * 2, ("a",) * 2, ("b",) * 2, (1.0, 0.0), (([1], [2], [3]),) * 2)]
    rounds, state = rounds_of(agents, round_updates=1, output_dir=str(tmp_path), **changes)
    monkeypatch.setattr(Rounds, "sample", lambda self, k, _: Round([] if k in (1, 4) else pairs, {}))
    for step, wanted in enumerate(rounds_in_memory):
        rounds.new_round(step, state)
        rounds.draw(step)
        again, _ = rounds_of(agents, round_updates=1, output_dir=str(tmp_path), **changes)
        again.resume(step + 1)
        assert sorted(rounds.pairs) == sorted(again.pairs) == wanted and set(rounds.examples) <= set(wanted)


def test_no_pair_is_drawn_twice_before_all_pairs_were_drawn():
    drawn = draw_evenly(5, 12, np.random.default_rng(1))
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5)) and len(drawn) == 12
    assert draw_evenly(5, 0, np.random.default_rng(0)) == [] == draw_evenly(0, 0, np.random.default_rng(0))


def test_round_files_hold_any_text(tmp_path):
    """Unicode line separators do not end a line, for a team and for one agent. `load_pairs` reads the same."""
    odd = "a\u2028b\u0085c\nd"
    for n in (1, 2):
        pairs = [Pair(("p",) * n, (odd,) * n, ("x",) * n, (1.0, 0.0), (([1], [2, 3], [4]),) * n)]
        save_round(tmp_path, n, pairs)
        assert load_round(tmp_path, n) == pairs
        assert load_pairs(tmp_path / f"round_000{n}.jsonl", n) == [pairs[0]._replace(tokens=None)]


def test_equal_rewards_everywhere_are_an_error(agents):
    team, params = make_team(agents)
    reward = make_reward(lambda a, b: [1.0] * len(a), num_agents=2)
    with pytest.raises(ValueError, match="no two completions of an item have different rewards"):
        train(team, reward, ITEMS, CONFIG, params=params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_turns=2), "algorithm='madpo_iter' needs num_turns=1 and joint_mode='aligned'; got num_turns=2"),
        (dict(joint_mode="cross"), "got num_turns=1 and joint_mode='cross'"),
        (dict(temperature=0.0), "temperature=0 makes all completions"),
        (dict(algorithm="madpo", comparator="initial"), "comparator='initial' has no effect for algorithm='madpo'"),
        (dict(algorithm="madpo", round_updates=None, pair_selection="comparator_reward"), "needs a comparator"),
        (dict(algorithm="dpo", round_updates=None), r"learns from given data: use jmarl\.fit$"),
        (dict(num_generations=1), "num_generations=1 is too small"),
        (dict(micro_batches=17), "micro_batches=17 is more than batch_size=16"),
    ],
)
def test_settings_that_do_not_go_with_rounds_are_refused(agents, changes, message):
    team, params = make_team(agents)
    base = CONFIG.replace(round_updates=None) if changes.get("algorithm") == "madpo" else CONFIG
    with pytest.raises(ValueError, match=message):
        cfg = base.replace(**changes)
        transition = (lambda **_: ["a", "b"]) if cfg.episodes.num_turns > 1 else None
        env = RewardEnvironment(make_reward(both, num_agents=2), [default_formatter] * 2, transition)
        train(team, env, ITEMS, cfg, params=params)


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
def test_settings_of_comparators_and_replay_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        CONFIG.replace(**changes)


def test_every_round_has_its_own_items_and_random_numbers(agents):
    """Round n has the items of step n of `train`. With equal items and weights, another round samples other texts."""
    rounds, _ = rounds_of(agents, num_prompts=3)
    assert rounds.items_of(2) == [(2, [ITEMS[i] for i in tasks_of(2, len(ITEMS), 3, CONFIG.run.seed)])] != rounds.items_of(1)
    rounds, state = rounds_of(agents)
    first, second = (rounds.sample(n, policies(state)).pairs for n in (0, 1))
    said = [{(pair.prompts, texts) for pair in of for texts in (pair.chosen, pair.rejected)} for of in (first, second)]
    assert len(said[0] & said[1]) < 0.05 * len(said[0])


def test_random_selection_differs_between_rounds(agents, monkeypatch):
    """From the same candidates, which all lose to those of the comparator."""

    def candidates(first):
        texts, ids = ([[[make(first + g) for g in range(8)]]] * 2 for make in (str, lambda k: [k]))
        return Candidates([["p"]] * 2, texts, first + np.arange(8.0)[None], [[[1]]] * 2, ids)

    rounds, _ = rounds_of(agents, pair_selection="random", num_prompts=1)
    monkeypatch.setattr("jmarl.runs.kinds.rounds.play_items", lambda *_, **__: None)
    monkeypatch.setattr("jmarl.runs.kinds.rounds.candidates_of", lambda *_: candidates(0))
    monkeypatch.setattr(rounds.comparator, "answer", lambda *_: candidates(10))
    first, second, again = ([pair.chosen[0] for pair in rounds.sample(k, []).pairs] for k in (0, 1, 0))
    assert sorted(first) == [str(10 + k) for k in range(8)] and first == again != second


def test_a_reward_model_is_trained_on_all_pairs_of_the_most_probable_rounds(agents):
    for changes, share in ((dict(replay="all"), 1), (dict(replay="lambda_decay", replay_lambda=0.5), 0.5)):
        rounds, state = rounds_of(agents, **changes)
        for n in (0, 1):
            rounds.add(n, rounds.sample(n, policies(state)).pairs)
        assert len(rounds.replayed(1)) == round(share * len(rounds.pairs[0])) + len(rounds.pairs[1])
