"""Strangers: what they write is what the environment reads and the record shows, in training and in cross-play over turns."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jax
import numpy as np
import pytest

from experiments.tiny import tokenizer
from jmarl.config import Sampling, TrainConfig
from jmarl.envs import make
from jmarl.envs.games.tictactoe import legal_moves, minimax, read_board
from jmarl.envs.vector import vectorize
from jmarl.evaluation.evaluate import evaluate
from jmarl.league import pairings
from jmarl.league.pairings import PairedRuns, play_pairings, sample_runs
from jmarl.league.seats import Seated
from jmarl.league.strangers import frozen_params, open_stranger, short_names
from jmarl.models.hub.messages import as_prompt
from jmarl.randomness import Randomness
from jmarl.remote.access import Access
from jmarl.runs.checks import check_settings
from jmarl.runs.start import start
from jmarl.sampling.generate import SampleRequest, pad
from jmarl.serving.http_server import ModelServer
from jmarl.serving.service import TeamService
from jmarl.team import make_team, save_team
from tests.league.test_league import BASE, STRANGER, Duel, met_of, records, run, tells
from tests.runs.training_process import WORDS, tiny_agents, tiny_team

SAMPLING = Sampling(max_new_tokens=4, temperature=0.5)


def salted(salt):
    """Return a player of tic-tac-toe that moves at random."""
    return lambda prompts: [str(random.Random(f"{salt} {x}").choice(legal_moves(read_board(x)))) for x in prompts]


def test_minimax_never_loses_to_random_players():
    """From all nine openings, in both seats, against eight random players; and it wins most games."""
    env, count = vectorize(make("tictactoe", openings=1)), 8
    pairs = [pair for s in range(count) for pair in ((1, 2 + s), (2 + s, 1))]
    items = env.tasks("train", 9)
    holders = [pair for pair in pairs for _ in items]
    strangers = [lambda prompts: [minimax(prompt) for prompt in prompts], *map(salted, range(count))]
    seated, rng = Seated(env, holders, 2, 1, strangers), np.random.default_rng(0)
    states, prompts = seated.reset(items * len(pairs), rng)
    won = []
    while states:
        assert prompts == [[None] * len(states)] * 2
        answer = seated.step(states, [[""] * len(states)] * 2, rng)
        over = [*zip(states, answer.result.rewards, answer.done, strict=True)]
        won += [rewards[state.holders.index(1)] for state, rewards, done in over if done]
        states, prompts = seated.observe([x for x, done in zip(answer.after, answer.done, strict=True) if not done])
    assert len(won) == 2 * count * len(items) and min(won) == 0 and np.mean(won) > 0.8


def test_a_stranger_writes_once_for_a_group_where_it_sits_and_acts():
    """Also where the other agent is a stranger too; who has no prompt writes nothing."""
    calls = []

    def write(prompts):
        calls.append(list(prompts))
        return [f"<{prompt}>" for prompt in prompts]

    env = vectorize(Duel(in_turns=True))
    seated = Seated(env, [(0, 0), (1, 0), (0, 1), (1, 1)], 2, 1, [write])
    states, prompts = seated.reset([{"prompt": x} for x in "abcd"], np.random.default_rng(0))
    assert prompts == [["a", None, "c", None], [None] * 4] and calls == [["b", "d"]]
    answer = seated.step([x for x in states for _ in range(2)], [["x"] * 8, [""] * 8], np.random.default_rng(0))
    _, prompts = seated.observe(answer.after[::2])
    assert prompts == [[None] * 4, ["a x", "b <b>", None, None]] and calls[1:] == [["c x", "d <d>"]]


@pytest.mark.long
def test_the_environment_and_the_record_have_what_a_stranger_wrote(tmp_path):
    """Without slots, in a run of two turns: the second agent reads it, all completions of a group met it, and its seat does not
    act."""
    run(True, tmp_path, dict(strangers=[STRANGER]), num_updates=1)
    (record,) = records(tmp_path)
    assert [{**met, "seat": 0} for met in met_of(record)] == [{"stranger": STRANGER, "seat": 0}] * 2
    for p, task in enumerate(record["tasks"]):
        if "league" not in task:
            continue
        seat = task["league"]["seat"]
        turn = record["turns"][seat]
        nodes = [i for i, item in enumerate(turn["items"]) if item == p]
        assert not any(turn["acts"][seat][i] for i in nodes)
        for i in nodes:
            assert set(turn["completions"][seat][i]) == {tells(turn["prompts"][seat][i])}
        if seat == 0:
            following = record["turns"][1]
            read = [following["prompts"][1][i] for i, item in enumerate(following["items"]) if item == p]
            assert read == [f"{task['prompt']} {tells(task['prompt'])}"] * 3


class Recorded(Duel):
    """Keeps what agent 0 reads and writes."""

    def __init__(self, in_turns):
        super().__init__(in_turns)
        self.first = []

    def step(self, state, messages, rng):
        self.first += [] if state[1] else [(state[0], messages[0])]
        return super().step(state, messages, rng)


@pytest.mark.long
def test_a_pairing_over_turns_earns_what_its_agents_earn_as_a_team():
    """The diagonal has the returns of `evaluate`, to all bits. What an agent writes first is the same with all partners. A
    stranger holds any seat."""
    runs, env = [tiny_agents(2), tiny_agents(2, seed=5)], Recorded(in_turns=True)
    items, cfg = env.tasks(count=4), TrainConfig.of(**BASE, num_turns=2, branching="chain", eval_generations=3)
    strangers = [lambda prompts: [tells(prompt) for prompt in prompts]]
    got = play_pairings(PairedRuns.of(runs, cfg), items, env, cfg, ["a", "b", "tells"], strangers)
    assert got.rewards.shape == (3, 3, 4, 3, 2) and got.is_zero_sum
    assert len(env.first) == 9 * 4 * 3 and {count % 3 for count in Counter(env.first).values()} == {0}
    for i, agents in enumerate(runs):
        own = evaluate(*make_team(agents), items, env, cfg).rollout
        np.testing.assert_array_equal(got.rewards[i, i], own.joint_returns[0])
    assert np.all(got.rewards[2, 2] == [-1, 1])  # the second adds to what the first wrote
    assert len({x.tobytes() for x in got.rewards.reshape(9, -1)}) >= 4
    lines = got.table().splitlines()
    assert lines[0] == "own reward of agent 0:" and lines[-1][:9] + lines[-1][-18:] == "| tells || -1.000 ± 0.000 |"
    assert np.allclose(got.summary()["own"]["mean"][0], got.rewards[..., 0].mean((-2, -1)))


def test_the_keys_of_pairings_are_those_of_each_run_alone(monkeypatch):
    """Also where a run has its agents in other stacks than all runs together have them."""
    (narrow,), cfg = tiny_agents(1, width=16), TrainConfig.of(**BASE)
    runs = PairedRuns.of([tiny_agents(2), [narrow, *tiny_agents(1)]], cfg)
    monkeypatch.setattr(pairings, "sample_stack", lambda params, prompts, keys, *rest, **options: keys)
    encoded = pad(runs.team, [[[1]] * 6] * 4)
    request = SampleRequest(encoded, cfg.sampling, Randomness(0, 0), 3, np.arange(6, dtype=np.uint32), turn=1)
    sampled: Any = sample_runs(runs, 1, 3, request)
    wide, own = sampled
    assert [np.ravel(keys.agents).tolist() for keys in (wide, own)] == [[0, 1, 1], [0]]
    assert np.array(wide.stack).tolist() == [0, 0, 1] and own.stack == 0
    assert wide.prompt_ids.tolist() == [0, 1, 2, 0, 1, 2]


def test_what_pairings_are_not_for_is_refused():
    paired, env = PairedRuns.of([tiny_agents(2)], cfg := TrainConfig.of(**BASE, num_turns=2)), Duel(in_turns=True)
    for changes, match in (
        (dict(history="append"), "history='append' is not allowed: history must be none: players who do not sit"),
        (dict(joint_mode="cross", num_turns=1), "joint_mode must be aligned: completions of players"),
    ):
        with pytest.raises(ValueError, match=match):
            play_pairings(paired, env.tasks(), env, cfg.replace(**changes), ["a", "b"], [list])
    with pytest.raises(ValueError, match="got 1 .a: 2.: give at least 2"):
        play_pairings(paired, env.tasks(), env, cfg, ["a"])


@pytest.mark.parametrize(
    "settings, match",
    [
        (dict(opponents="latest"), "opponents='latest' is not allowed: .* uniform or winrate where there are strangers"),
        (dict(snapshot_every=3), "snapshot_every=3 is not allowed: .* where snapshots=0"),
        (dict(opponents_at_once=2), "opponents_at_once=2 is more than there are"),
        (dict(joint_mode="cross"), "joint_mode='cross' does not go with a league"),
        (dict(algorithm="remax"), "choose one that learns from rollouts"),
    ],
)
def test_what_strangers_in_training_are_not_for_is_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        check_settings(TrainConfig.of(**{**BASE, "strangers": (STRANGER,), **settings}))


def test_a_directory_of_the_teams_architecture_is_a_slot_and_another_is_refused(tmp_path):
    (team, params), others = tiny_team(), tiny_agents(2, seed=7)
    save_team(tmp_path / "others", *make_team(others))
    save_team(tmp_path / "narrow", *make_team(tiny_agents(2, width=16)))
    setup, _ = start(team, params, TrainConfig.of(**BASE))
    (own,), (_, [expected]) = frozen_params(str(tmp_path / "others"), setup, params), make_team(others)
    for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="serve it with `jmarl serve --http`, and give its address"):
        frozen_params(str(tmp_path / "narrow"), setup, params)
    words = tokenizer(WORDS[::-1], spaced=True)  # equal shapes
    save_team(tmp_path / "reversed", *make_team([agent._replace(tokenizer=words) for agent in others]))
    with pytest.raises(ValueError, match="other arrays or tokens"):
        frozen_params(str(tmp_path / "reversed"), setup, params)
    with pytest.raises(FileNotFoundError, match="has no whole team"):
        frozen_params(str(tmp_path), setup, params)


def test_functions_that_are_none_and_texts_that_are_none_are_refused():
    with pytest.raises(ValueError, match="strangers='jmarl.envs.games.tictactoe:minmax' cannot be imported.*did you mean"):
        open_stranger("jmarl.envs.games.tictactoe:minmax", SAMPLING)
    with pytest.raises(ValueError, match="is a str: give a function from a prompt to a text"):
        open_stranger("jmarl.envs.games.tictactoe:EMPTY", SAMPLING)
    with pytest.raises(TypeError, match="returned 1 for the prompt 'x': return a text"):
        open_stranger("tests.league.test_strangers:number", SAMPLING)(["x"])
    assert short_names(["a.b:f", "c:f", "c:g", "http://x:1/v1"]) == ["a.b:f", "c:f", "g", "http://x:1/v1"]


def number(prompt):
    return 1


def test_an_address_is_asked_as_the_agents_are():
    """Chats and texts, with the settings of sampling and the name of the model."""
    asked = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            choice = {"message": {"content": f"re {text}"}, "text": f"re {text}"}
            answer = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stranger = open_stranger(f"http://127.0.0.1:{server.server_address[1]}/v1#mine", SAMPLING, seed=3)
        chat = as_prompt([{"role": "user", "content": "b"}])
        assert stranger(["a", chat]) == ["re a", "re b"] and stranger(["c"]) == ["re c"]
        server.shutdown()
    assert sorted(path for path, _ in asked) == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert [body["seed"] for _, body in asked] == [3, 3, 4]
    assert all((body["model"], body["max_tokens"], body["temperature"]) == ("mine", 4, 0.5) for _, body in asked)


@pytest.mark.long
def test_a_run_meets_a_team_that_is_served_at_an_address(tmp_path):
    """The record of each update has what the server writes, which asked again with the same seeds writes the same."""
    service = TeamService(
        *make_team(tiny_agents(2, seed=9)), ("first", "second"), TrainConfig.of(**BASE), say=lambda line: None
    )
    server, updates = ModelServer(service, Access(), log=lambda line: None), 2
    with ThreadPoolExecutor() as threads:
        threads.submit(server.run, False)
        try:
            name = f"{server.address}/v1#second"
            run(True, tmp_path, dict(strangers=[name]), num_updates=updates)
            again, texts = open_stranger(name, TrainConfig.of(**BASE).sampling), []
            for record in records(tmp_path):
                for agent, turn in enumerate(record["turns"]):
                    met = [task.get("league") for task in record["tasks"]]
                    nodes = [i for i, p in enumerate(turn["items"]) if met[p] == {"stranger": name, "seat": agent}]
                    written = [turn["completions"][agent][i] for i in nodes]
                    assert again([turn["prompts"][agent][i] for i in nodes]) == [own[0] for own in written]
                    assert not any(turn["acts"][agent][i] for i in nodes)
                    texts += written
        finally:
            server.drain()
    assert len(texts) == updates * (1 + 3) and len({own[0] for own in texts}) > 1
