"""The language-model judge: a jmarl agent, in this process and behind a real server, and servers that fail in many ways."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.base import Unanswered
from jmarl.envs.chat_api import ChatAPI, ChatModel, Unavailable
from jmarl.envs.debate.debate import Debate
from jmarl.envs.debate.llm_judge import LLMJudge, judge_prompt, parse_scores, parse_vote
from jmarl.envs.debate.transcript import add_speech, begin_debate
from jmarl.envs.pool import Pool
from jmarl.envs.vector import LockStep
from jmarl.preferences.pairs import Trajectory
from jmarl.rollout.text_model import AgentModel
from jmarl.runs.train import fit, train
from jmarl.team import agents_of, make_team, policies

TASK = {"motion": "Towns should plant more trees.", "swapped": False}
DEBATE = add_speech(add_speech(begin_debate(TASK, False), "pro", "Shade is a good.\nReally."), "con", "Roots break pipes.")


def play(judge, count=1):
    """Return the answer to joint actions that end a debate."""
    env = LockStep(Debate(1, judge=judge, simultaneous=True))
    states, _ = env.reset([TASK] * count, np.random.default_rng(0))
    return env.step(states, [["Shade is a good."] * count, ["Roots break pipes."] * count], np.random.default_rng(0))


class Server(BaseHTTPRequestHandler):
    """Responds with `server.answer(body)`: texts, an HTTP error, bytes, or None to close the connection."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, self.headers.get("Authorization")))
        response = self.server.answer(body)
        if response is None:
            return self.connection.shutdown(socket.SHUT_RDWR)
        chat = self.path.endswith("/chat/completions")
        if isinstance(response, list):
            choices = [{"message": {"content": text}} if chat else {"text": text} for text in response]
            response = json.dumps({"choices": choices}).encode()
        self.send_response(response if isinstance(response, int) else 200)
        self.end_headers()
        if isinstance(response, bytes):
            self.wfile.write(response)

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the client may have closed the connection
            super().handle()


@pytest.fixture
def server():
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    http_server.daemon_threads, http_server.seen = True, []
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield http_server
    http_server.shutdown()
    http_server.server_close()
    thread.join()


def model_at(server, **changes):
    port = server if isinstance(server, int) else server.server_port
    api = ChatAPI(f"http://127.0.0.1:{port}/v1", "judge", wait_s=0.01, timeout_s=0.5, name="judge")
    return ChatModel(dataclasses.replace(api, **changes))


def prefers(side):
    """Return the answers of a judge that prefers this side, whichever letter it has."""

    def answer(body):
        prompt = body["messages"][0]["content"]
        return ["A=8 B=3" if f"Debater A, who argues {side}" in prompt else "A=3 B=8"] * body["n"]

    return answer


# --- parsing and prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "scores"), [
    ("A=7 B=4", (7, 4)),
    (" A = 7, B = 4.5. ", (7, 4.5)),
    ("Both were fine.\nA=10; B=0\n", (10, 0)),
    ("A=7 B=4\nA=7 B=4", None),
    ("I say A=7 B=4", None),
    ("A=11 B=4", None),
    ("A=-1 B=4", None),
    ("A=nan B=inf", None),
    ("A=7", None),
    ("B=7 A=4", None),
    ("A=<number> B=<number>", None),
    ("A=" + "9" * 100_000 + " B=1", None),
    ("", None),
    ("\x00\ud800", None),
])  # fmt: skip
def test_scores_are_parsed_strictly(text, scores):
    assert parse_scores(text) == (scores and tuple(score / 10 for score in scores))


@pytest.mark.parametrize(
    ("text", "vote"),
    [("A", (1, 0)), (" B.\n", (0, 1)), ("A or B", None), ("A\nB", None), ("a", None), ("", None), ("A=1 B=0", None)],
)
def test_votes_are_parsed_strictly(text, vote):
    assert parse_vote(text) == vote


def test_the_prompt_has_the_sides_in_order_and_a_line_per_speech():
    for order, stance in ((("pro", "con"), "for"), (("con", "pro"), "against")):
        text = judge_prompt(DEBATE, order)
        assert f"Debater A, who argues {stance} the motion" in text and "1. Shade is a good. Really.\n" in text
        assert text.index("Debater A") < text.index("Debater B")
        assert (text.index("Shade") < text.index("Roots")) == (order[0] == "pro")


def test_scores_are_means_over_samples_and_orders():
    """By hand: pro is A with 8, 6 (one sample is unreadable) against 2, 4; then it is B with 5 against 3."""

    def model(prompts, samples, seed):
        assert samples == 3 and 0 <= seed < 2**31
        return [["A=8 B=2", "A=6 B=4", "pro wins"], ["A=3 B=5"] * 3]

    verdict = LLMJudge(model)(DEBATE, np.random.default_rng(0))
    assert (verdict.pro, verdict.con) == (pytest.approx((0.7 + 0.5) / 2), pytest.approx((0.3 + 0.3) / 2))
    expected = {"position_bias": (0.4 - 0.2) / 2, "order_agreement": 1, "judge_samples": 6, "judge_parse_errors": 1}
    assert verdict.info == pytest.approx(expected)
    votes = LLMJudge(lambda prompts, samples, seed: [["A", "A", "B"], ["A", "B", "?"]], asks="winner")
    verdict = votes(DEBATE, np.random.default_rng(0))  # pro: two of three, then one of two; A: 1/3 ahead, then nothing
    assert (verdict.pro, verdict.con) == (pytest.approx((2 / 3 + 1 / 2) / 2), pytest.approx((1 / 3 + 1 / 2) / 2))
    assert verdict.info["position_bias"] == pytest.approx(1 / 6) and verdict.info["order_agreement"] == 0
    with pytest.raises(ValueError, match="samples=0"):
        LLMJudge(model, 0)
    with pytest.raises(ValueError, match="asks='loser': choose scores or winner"):
        LLMJudge(model, asks="loser")


def test_one_order_alone_gives_no_score():
    judge = LLMJudge(lambda prompts, samples, seed: [["A=8 B=2"] * 3, ["no"] * 3])
    with pytest.raises(Unanswered, match="3 of 6 samples of the judge could be read, and in one order none: 'no'"):
        judge(DEBATE, np.random.default_rng(0))
    answer = play(judge, 2)
    assert answer.result.num_raised == 2 and np.isnan(answer.result.rewards).all() and answer.done.all()


# --- services ----------------------------------------------------------------------------------------------------------


def test_a_service_that_prefers_a_side_has_no_position_bias(server, monkeypatch):
    """The request has the key, and both orders have the same seed."""
    monkeypatch.setenv("SOME_KEY", "secret")
    server.answer = prefers("for")
    answer = play(LLMJudge(model_at(server, api_key_env="SOME_KEY"), 2))
    assert answer.result.rewards.tolist() == [[0.8, pytest.approx(0.3)]]
    parts = {name: values[0] for name, values in answer.result.measures.items()}
    assert parts["position_bias"] == 0 and parts["order_agreement"] == parts["pro_wins"] == 1
    assert len(server.seen) == 2 and {key for _, key in server.seen} == {"Bearer secret"}
    (first, _), (second, _) = server.seen
    assert first["n"] == 2 and first["model"] == "judge" and first["seed"] == second["seed"] and first["max_tokens"] == 64


def test_a_service_that_prefers_the_first_debater_has_position_bias(server):
    """Both sides get the same score."""
    server.answer = lambda body: ["A=9 B=2"] * body["n"]
    parts = play(LLMJudge(model_at(server))).result.measures
    assert parts["position_bias"][0] == pytest.approx(0.7) and parts["order_agreement"][0] == 0
    assert parts["pro_score"][0] == parts["con_score"][0] == pytest.approx(0.55) and parts["draw"][0] == 1


@pytest.mark.parametrize("failures", [1, 2])
def test_failed_requests_are_repeated(server, failures):
    """After error 500, a closed connection, no JSON, and too deep JSON."""
    for failure in (500, None, b"rubbish", b"[" * 100_000):
        script, lock = {}, threading.Lock()

        def answer(body, script=script, lock=lock, failure=failure):
            with lock:
                prompt = body["messages"][0]["content"]
                script[prompt] = script.get(prompt, 0) + 1
                return failure if script[prompt] <= failures else prefers("against")(body)

        server.answer = answer
        assert play(LLMJudge(model_at(server))).result.measures["con_wins"] == [1]


def hang(body):
    time.sleep(1.0)
    return ["A=1 B=1"]


@pytest.mark.parametrize(("answer", "message", "num_requests"), [
    (lambda body: 500, "refused with 500", 3),
    (lambda body: 401, "refused with 401", 1),
    (lambda body: None, "tried 3 times", 3),
    (lambda body: b"rubbish", "tried 3 times", 3),
    (lambda body: b"[" * 100_000, "tried 3 times", 3),
    (lambda body: b'{"choices": [{"text": "A=1 B=2"}]}', "without choices", 1),
    (lambda body: b'{"choices": ["A=1 B=2"]}', "without choices", 1),
    (lambda body: b"3", "without choices", 1),
    (lambda body: ["A=1 B=2"], "asked for 3 completions and gave 1", 1),
    (hang, "tried 3 times", 3),
])  # fmt: skip
def test_a_service_that_fails_masks_the_joint_action(server, answer, message, num_requests):
    """After as many requests as tries, for each order; the run continues."""
    server.answer = answer
    start = time.monotonic()
    reply = play(LLMJudge(model_at(server, timeout_s=0.2)))
    assert time.monotonic() - start < 3
    assert reply.result.num_raised == 1 and np.isnan(reply.result.rewards).all() and reply.done.all()
    assert message in reply.result.faults[0] and "127.0.0.1" in reply.result.faults[0]
    assert len(server.seen) == 2 * num_requests


def test_the_timeout_is_of_the_whole_answer(server):
    """Each byte comes in time, the whole does not."""

    class Drips(Server):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(b" ")
                time.sleep(0.05)

    server.RequestHandlerClass = Drips
    start = time.monotonic()
    with pytest.raises(Unavailable, match="takes too long"):
        model_at(server, tries=1, timeout_s=0.2)(["a"], 1, 0)
    assert time.monotonic() - start < 1


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_an_unreachable_judge_masks_the_joint_actions_and_is_counted():
    answer = play(LLMJudge(model_at(unused_port())), 3)
    assert answer.result.num_raised == 3 and np.isnan(answer.result.rewards).all()
    assert "the judge gave no answer: judge at http://127.0.0.1" in answer.result.faults[2]
    assert "tried 3 times" in answer.result.faults[2]


def test_a_judge_behind_a_service_works_in_a_pool(server):
    server.answer = prefers("for")
    env = Debate(1, judge=LLMJudge(model_at(server)), simultaneous=True)
    with Pool(env, workers=1) as pool:
        world = LockStep(pool)
        states, _ = world.reset([TASK], np.random.default_rng(0))
        assert world.step(states, [["a"], ["b"]], np.random.default_rng(0)).result.measures["pro_wins"] == [1]
    assert json.dumps(env.describe()) and env.describe()["judge"]["model"]["model"] == "judge"


# --- jmarl agents ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaker(tiny_config, tiny_tokenizer, random_agent):
    """A tiny agent whose context holds a debate; its text is random."""
    return random_agent(tiny_config(max_positions=4096), tiny_tokenizer, 0)


@pytest.fixture(scope="module")
def judge_agent(speaker):
    """An agent trained to answer in the form; it prefers the first debater."""
    orders = [judge_prompt(DEBATE, order) for order in (("pro", "con"), ("con", "pro"))]
    data = [Trajectory((text,), ("A=7 B=3",)) for text in orders]
    cfg = TrainConfig.of(algorithm="sft", num_updates=30, learning_rate=1e-2, batch_size=1, chat=True, progress=False)
    team, params = make_team([speaker])
    result = fit(team, data, cfg, params=params)
    (agent,) = agents_of(team, policies(result.state))
    return agent


@pytest.fixture(scope="module")
def judge_model(judge_agent):
    return AgentModel(judge_agent, max_new_tokens=12, temperature=0.2)


@pytest.fixture(scope="module")
def random_model(speaker):
    """It runs the programs of the other one."""
    return AgentModel(speaker, max_new_tokens=12, temperature=0.2)


@pytest.mark.long
def test_a_jmarl_agent_can_be_a_judge(judge_model):
    """Its preference for the first debater shows in position_bias and gives no side an advantage."""
    verdict = LLMJudge(judge_model)(DEBATE, np.random.default_rng(0))
    assert verdict.info["judge_parse_errors"] <= 2 and verdict.info["position_bias"] == pytest.approx(0.4, abs=0.1)
    assert verdict.pro == pytest.approx(0.5, abs=0.1) and verdict.con == pytest.approx(0.5, abs=0.1)
    assert json.dumps(Debate(judge=LLMJudge(judge_model)).describe())


@pytest.mark.long
def test_an_untrained_agent_as_a_judge_masks_the_joint_action(random_model):
    """Equal seeds give equal texts."""
    answer = play(LLMJudge(random_model))
    assert answer.result.num_raised == 1 and "0 of 6 samples of the judge could be read" in answer.result.faults[0]
    prompts = [judge_prompt(DEBATE, order) for order in (("pro", "con"), ("con", "pro"))]
    texts = [random_model(prompts, 3, seed) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2] and [len(samples) for samples in texts[0]] == [3, 3]


def test_a_debate_too_long_for_the_judge_masks_the_joint_action(tiny_config, tiny_tokenizer, random_agent):
    short = AgentModel(random_agent(tiny_config(), tiny_tokenizer, 0), max_new_tokens=8)
    answer = play(LLMJudge(short))
    assert answer.result.num_raised == 1 and "more than the context of 128" in answer.result.faults[0]


def test_an_agent_as_a_judge_cannot_be_pickled_for_a_pool(random_model):
    with pytest.raises(TypeError, match="cannot be pickled: play the environment .* with LockStep"):
        pickle.dumps(Debate(judge=LLMJudge(random_model)))


@pytest.mark.long
def test_a_server_that_serves_a_jmarl_agent(server, judge_model, random_model):
    """Debate, HTTP and sampling give the scores of the agent without a server. An untrained agent masks the joint actions."""

    def answer(body, model=judge_model):
        return model([body["messages"][0]["content"]], body["n"], body["seed"])[0]

    server.answer = answer
    result = play(LLMJudge(model_at(server, timeout_s=60)), 2).result
    assert result.num_raised == 0 and result.measures["position_bias"] == pytest.approx(0.4, abs=0.1)
    assert result.rewards == pytest.approx(np.full((2, 2), 0.5), abs=0.1)
    server.answer = lambda body: answer(body, random_model)
    assert play(LLMJudge(model_at(server, timeout_s=60)), 2).result.num_raised == 2


# --- in training ----------------------------------------------------------------------------------------------------------

SHORT = TrainConfig.of(
    num_updates=2, num_prompts=1, num_generations=2, num_turns=2, branching="chain", max_new_tokens=4, per_agent="vmap",
    progress=False,
)  # fmt: skip


@pytest.mark.long
def test_training_continues_when_the_judge_fails(server, speaker, tmp_path):
    """It fails in the second update: those joint actions are masked and counted, and the policies do not change."""
    calls = []

    def answer(body):
        calls.append(body)
        return prefers("for")(body) if len(calls) <= 4 else 500

    server.answer = answer
    env = Debate(1, judge=LLMJudge(model_at(server), 1), zero_sum=True)
    team, params = make_team([speaker] * 2)
    with pytest.warns(UserWarning, match="update 2: 2 of 2 joint actions have no valid reward; .*refused with 500"):
        train(team, env, [TASK], SHORT.replace(output_dir=str(tmp_path)), params=params)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(calls) == 4 + 4 * 3
    assert rows[0]["turn_1/measures/pro_wins"] == 1 and rows[0]["turn_1/measures/position_bias"] == 0
    assert (rows[0]["turn_0/agent_0/return"], rows[0]["turn_1/agent_1/return"]) == (0.5, -0.5)
    assert [row["turn_1/reward/invalid"] for row in rows] == [0, 2]
    assert rows[1]["agent_0/grad_norm"] == rows[1]["agent_1/grad_norm"] == 0


@pytest.mark.long
def test_a_run_whose_judge_is_unreachable_from_the_start_fails(speaker):
    env = Debate(1, judge=LLMJudge(model_at(unused_port()), 1))
    team, params = make_team([speaker] * 2)
    with pytest.raises(ValueError, match="no joint action of the first update has a valid reward: .*the judge gave no answer"):
        train(team, env, [TASK], SHORT, params=params)
