"""A team over HTTP, called by OpenAI's own client: the same tokens as `jmarl.generate`, whoever else asks."""

import contextlib
import json
import re
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import jax
import numpy as np
import openai
import pytest

from jmarl import generate
from jmarl.config import TrainConfig
from jmarl.models.hub.tokenize import encode_prompt
from jmarl.remote.access import Access, Tls
from jmarl.sampling.scoring import score
from jmarl.serving.http_server import ModelServer
from jmarl.serving.service import TeamService

TOKEN, NAMES = "s3cret", ("writer", "critic")
MESSAGES = [{"role": "user", "content": "What is the answer?"}]
OTHERS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "And the question?"}]
CFG = TrainConfig.of(max_new_tokens=24, seed=7)
LIMIT, LONGEST = CFG.sampling.max_new_tokens, 60
LONG_SEED = 3  # with which the writer's completion of MESSAGES reaches LONGEST
FOUR_LONG = dict(model="critic", seed=1, n=4, max_tokens=LONGEST)  # the same for four of the critic's
CALLS = -(-LONGEST // 8)  # of `advance` for them


@pytest.fixture(scope="module")
def serve(team, params):
    """A function that starts a server in a thread; all have the programs of the first one."""
    servers, programs, threads = [], {}, ThreadPoolExecutor(16)

    def start(**access):
        service = TeamService(team, params, NAMES, CFG, slots=4, max_waiting=3, say=lambda line: None)
        service.engine.programs = programs
        server = ModelServer(service, Access(**access), grace_s=5, log=(lines := []).append)
        servers.append((server, running := threads.submit(server.run, False)))
        return server, running, lines

    yield start
    for server, running in servers:
        server.grace_s = 0
        server.drain()
        wait([running])


@pytest.fixture(scope="module")
def server(serve):
    server, _, server.lines = serve(token=TOKEN)
    return server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=TOKEN, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def ask(client):
    """A function that asks for a completion."""

    def ask(messages=MESSAGES, model="writer", **settings):
        return client.chat.completions.create(model=model, messages=messages, **settings)

    return ask


@pytest.fixture
def slow(server, monkeypatch):
    """Makes every turn of the engine slow."""
    turn = server.service.engine.turn
    monkeypatch.setattr(server.service.engine, "turn", lambda: (time.sleep(0.1), turn())[1])
    return server.service.engine


def texts(answer):
    return [choice.message.content for choice in answer.choices]


def post(server, content, **headers):
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"} | headers
    return httpx.post(f"{server.address}/v1/chat/completions", content=content, headers=headers)


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_every_agent_is_a_model(client):
    assert [model.id for model in client.models.list()] == [*NAMES]
    assert client.models.retrieve("critic").owned_by == "jmarl"


def test_a_completion_is_that_of_generate(ask, team, params):
    expected = generate(team, [[MESSAGES, OTHERS], [MESSAGES, OTHERS]], CFG, params=params)
    for name, [text, _] in zip(NAMES, expected, strict=True):  # the second prompt has other random numbers
        answer = ask(model=name, seed=7)
        assert texts(answer) == [text] and answer.model == name
        assert texts(ask(model=name, temperature=0)) == texts(ask(model=name, top_p=1e-6))
    usage = answer.usage
    assert usage.prompt_tokens == len(encode_prompt(team.stacks[0].tokenizer, MESSAGES, True))
    assert 0 < usage.completion_tokens <= LIMIT and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_completion_of_a_text_is_that_of_generate(client, team, params, as_ids):
    """A prompt without the chat template, or its token ids; whole and in pieces, with log-probabilities."""
    text = "The answer of the farmer"
    (_, (expected,)) = generate(team, [[text], [text]], CFG, params=params)
    prompt = encode_prompt(team.agent_specs[1].tokenizer, text) if as_ids else text
    settings = dict(model="critic", prompt=prompt, seed=7, max_tokens=LIMIT, logprobs=0, extra_body={"return_token_ids": True})
    whole = client.completions.create(**settings)
    (choice,) = whole.choices
    assert (whole.object, choice.text) == ("text_completion", expected)
    assert len(choice.logprobs.token_logprobs) == len(choice.token_ids) == whole.usage.completion_tokens
    assert choice.logprobs.top_logprobs is None
    more = client.completions.create(**settings | {"logprobs": 2}).choices[0].logprobs
    assert (more.tokens, more.token_logprobs) == (choice.logprobs.tokens, choice.logprobs.token_logprobs)
    for token, logprob, top in zip(more.tokens, more.token_logprobs, more.top_logprobs, strict=True):
        assert len(top) <= 3 and max(top.values()) >= top[token] >= logprob - 1e-4, "tokens of one text are one entry"
    pieces = list(client.completions.create(**settings, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text
    assert pieces[-1].choices[0].finish_reason == choice.finish_reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt must be a text or a list of token ids, and not empty"),
        ({"prompt": ["a", "b"]}, "give one prompt per request"),
        ({"prompt": [10**6]}, "prompt has the token 1000000: ids are from 0 to"),
        ({"logprobs": 21}, "logprobs must be less than or equal to 20, got 21"),
        ({"echo": True}, "echo is not supported: leave it out, or give false"),
        ({"extra_body": {"messages": []}}, "there is no field 'messages'"),
    ],
)
def test_texts_that_cannot_be_completed_are_refused_in_a_sentence(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        client.completions.create(**{"model": "writer", "prompt": "a"} | fields)


def test_the_stop_texts_of_the_run_end_completions_of_requests_without_any(ask, server, monkeypatch):
    whole = texts(ask(seed=7))[0]
    monkeypatch.setattr(server.service, "cfg", TrainConfig.of(max_new_tokens=24, seed=7, stop=whole[5]))
    assert texts(ask(seed=7)) == [whole.partition(whole[5])[0]] and texts(ask(seed=7, stop=[whole[9]])) == [
        whole.partition(whole[9])[0]
    ]


def test_choices_are_independent_of_each_other(ask):
    first, *others = texts(ask(seed=7, n=3))
    assert first == texts(ask(seed=7))[0] and len({first, *others}) == 3
    assert texts(ask(seed=8)) != [first]
    assert texts(ask(n=4)) != texts(ask(n=4))  # without a seed


def test_tokens_do_not_depend_on_who_else_asks(ask):
    requests = [dict(model=name, seed=seed, temperature=0.5 + seed) for name in NAMES for seed in range(1)]
    requests += [dict(model="writer", seed=5, top_p=0.7), dict(model="critic", messages=OTHERS, seed=5, n=2)]
    alone = [texts(ask(**request)) for request in requests]
    with ThreadPoolExecutor(3) as threads:
        crowd = list(threads.map(lambda request: texts(ask(**request)), requests))
    assert crowd == alone


def test_a_stream_is_the_same_text(ask):
    whole = ask(seed=LONG_SEED, n=2, max_tokens=40, logprobs=True)
    chunks = list(ask(seed=LONG_SEED, n=2, max_tokens=40, logprobs=True, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])  # as OpenAI's do
    for i, choice in enumerate(whole.choices):
        own = [part for chunk in chunks for part in chunk.choices if part.index == i]
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason and not any(part.finish_reason for part in own[:-1])
        assert sum((part.token_ids for part in own[1:]), []) == choice.token_ids
        assert [x for part in own[1:] for x in part.logprobs.content] == choice.logprobs.content
    assert len(chunks) > 6


def test_a_stop_string_ends_a_completion(ask):
    [text] = texts(ask(seed=LONG_SEED))
    stop = text[10:13]
    answer = ask(seed=LONG_SEED, stop=["never written", stop])
    assert texts(answer) == [text[: text.index(stop)]] and answer.choices[0].finish_reason == "stop"
    streamed = ask(seed=LONG_SEED, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text[: text.index(stop)]
    assert answer.usage.completion_tokens < LIMIT


def test_limits_end_a_completion(ask):
    assert ask(seed=LONG_SEED).usage.completion_tokens == LIMIT
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(seed=LONG_SEED, **{name: 5})
        assert answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length"
    short = next(x for x in (ask(seed=seed, max_tokens=LONGEST) for seed in range(20)) if x.choices[0].finish_reason == "stop")
    assert short.usage.completion_tokens < LONGEST


def test_logprobs_are_those_of_training(ask, team, params):
    """Those of the tokens, and those of other tokens in their place, whole and in pieces."""
    asked = dict(model="critic", seed=LONG_SEED, temperature=0.7, logprobs=True)
    answer = ask(**asked, top_logprobs=20)
    [choice], prompt, vocab = answer.choices, np.array([answer.prompt_token_ids]), team.stacks[0].config.vocab_size
    own = jax.tree.map(lambda x: x[1], params[0])
    place = len(choice.token_ids) - 2
    tokens = np.array([[choice.token_ids] * (1 + vocab)])
    tokens[0, 1:, place] = np.arange(vocab)
    scores = jax.jit(score, static_argnums=(1,), static_argnames=("temperature",))
    lengths = np.array([prompt.shape[1]])
    logprobs = scores(own, team.stacks[0].config, prompt, lengths, tokens, temperature=0.7).logprobs[0]
    np.testing.assert_allclose([entry.logprob for entry in choice.logprobs.content], logprobs[0], atol=1e-4)
    highest = [entry.logprob for entry in choice.logprobs.content[place].top_logprobs]
    np.testing.assert_allclose(highest, np.sort(logprobs[1:, place])[::-1][:20], atol=1e-4)
    best = team.agent_specs[1].tokenizer.decode([int(logprobs[1:, place].argmax())])
    assert choice.logprobs.content[place].top_logprobs[0].token == best
    chunks = [x.choices[0].logprobs for x in ask(**asked, top_logprobs=2, stream=True)]
    pieces = [entry.top_logprobs for chunk in chunks if chunk for entry in chunk.content]
    assert [[x.token for x in top] for top in pieces] == [
        [x.token for x in y.top_logprobs[:2]] for y in choice.logprobs.content
    ]
    assert all(not entry.top_logprobs for entry in ask(**asked).choices[0].logprobs.content)
    decoded = b"".join(bytes(x.bytes) if x.bytes is not None else b"?" for x in choice.logprobs.content)
    assert len(choice.logprobs.content) == len(choice.token_ids) and decoded


def test_a_client_that_goes_away_frees_its_rows(ask, slow):
    start = slow.calls
    with ask(**FOUR_LONG, stream=True) as stream:
        assert next(iter(stream)).choices
        wait_until(lambda: slow.num_rows() == 4)
    wait_until(lambda: slow.num_rows() == 0)
    assert slow.calls - start < CALLS
    start = slow.calls
    with pytest.raises(openai.APITimeoutError):  # also one that waits for its whole answer
        ask(**FOUR_LONG, timeout=0.3)
    wait_until(lambda: slow.calls > start and slow.num_rows() == 0)
    assert slow.calls - start < CALLS


def test_requests_beyond_the_limit_are_sent_away(ask, slow):
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(ask, **FOUR_LONG | {"max_tokens": 9}) for _ in range(6)]
    errors = [answer.exception() for answer in answers if answer.exception()]
    assert 2 <= len(errors) <= 3 and all(isinstance(error, openai.RateLimitError) for error in errors)
    assert errors[0].response.headers["retry-after"] == "1" and "3 requests wait already" in errors[0].body["message"]


def test_the_wrong_token_is_refused(server):
    for key in ("wrong", "s3cre", "s3cret0"):
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0)
        with client, pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
            client.models.list()
    assert httpx.get(f"{server.address}/v1/nothing").status_code == 401
    health = httpx.get(f"{server.address}/health")
    assert health.status_code == 200 and health.json() == {"status": "ok"}
    assert httpx.head(f"{server.address}/health").status_code == 200
    for path in ("docs", "redoc", "openapi.json"):
        assert httpx.get(f"{server.address}/{path}", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 404


def test_without_a_token_only_this_machine_is_answered(serve):
    server, *_ = serve()
    assert httpx.get(f"{server.address}/v1/models").status_code == 200
    for host in ("example.org", "example.org:80", "", "[", "127.0.0.1.example.org"):  # as of a page that has this address
        answer = httpx.get(f"{server.address}/v1/models", headers={"host": host})
        assert answer.status_code in (400, 403), host


def test_tls_hides_what_is_said(serve, tmp_path, monkeypatch):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 2"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    monkeypatch.setattr("jmarl.serving.connections.HEADER_S", 1.0)
    server, *_ = serve(token=TOKEN, tls=Tls(cert, key))
    assert server.address.startswith("https://")
    with socket.create_connection(server.socket.getsockname(), timeout=5) as slow:
        slow.sendall(b"\x16")
        assert slow.recv(1) == b""  # closed without a handshake
    verify, headers = ssl.create_default_context(cafile=cert), {"authorization": f"Bearer {TOKEN}"}
    assert httpx.get(f"{server.address}/v1/models", verify=verify, headers=headers).status_code == 200
    assert httpx.get(f"{server.address}/v1/models", verify=verify).status_code == 401
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http{server.address.removeprefix('https')}/v1/models", headers=headers)
    with pytest.raises(ValueError, match="--tls-cert and --tls-key cannot be used"):
        serve(token=TOKEN, tls=Tls(key, cert))
    server, *_ = serve(token=TOKEN, tls=Tls(cert, key, cert))  # and clients show a certificate: here the server's own
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.address}/v1/models", verify=verify, headers=headers)
    verify.load_cert_chain(cert, key)
    assert httpx.get(f"{server.address}/v1/models", verify=verify, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(model="nobody"), "there is no model 'nobody': this server has writer, critic"),
        (dict(max_tokens=110), "have 24 tokens; with max_completion_tokens=110 that is 134, more than the context of 128"),
        (dict(max_tokens=1000), "max_tokens=1000 is not allowed: give an integer from 1 to 128"),
        (dict(n=5), "n=5 is not allowed: give an integer from 1 to 4"),
        (dict(temperature=-1), "temperature must be greater than or equal to 0, got -1"),
        (dict(messages=[{"role": "user", "content": "x" * 2000}]), "more than the context of 128: shorten the messages"),
        (dict(extra_body={"temprature": 1}), "there is no field 'temprature'; did you mean 'temperature'?"),
        (dict(frequency_penalty=0.5), "frequency_penalty is not supported: leave it out, or give 0"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(ask, fields, message):
    with pytest.raises(openai.APIStatusError) as error:
        ask(**fields)
    assert message in error.value.body["message"]
    assert set(error.value.body) == {"message", "type", "code", "param"}
    assert error.value.status_code == (404 if "model" in fields else 400) and error.value.request_id


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must be a list of 1 to 2048 messages"),
        ({"messages": "hello"}, 'messages must be a list, got "hello"'),
        ({"messages": [1]}, "messages[0] must be an object, got 1"),
        (
            {"messages": [{"role": "god", "content": "-"}]},
            "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool', got",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a text, got nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type must be 'text', got",
        ),
        ({"messages": [{"role": "user", "content": "-", "name": "x"}]}, "messages[0] has 'name', which is not supported"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "-"}]}, "must not end with one of the assistant"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [1]}, *MESSAGES]},
            "messages[0].tool_calls[0] must be an object, got 1",
        ),
        ({"model": 3}, "model must be a text, got 3"),
        ({"n": True}, "n must be an integer, got true"),
        ({"n": 0}, "n=0 is not allowed: give an integer from 1 to 4"),
        ({"n": 10**30}, "is not allowed: give an integer from 1 to 4"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"stream": "yes"}, 'stream must be true or false, got "yes"'),
        ({"temperature": 1e-30}, "temperature=1e-30 is not allowed: give 0, which is greedy"),
        ({"temperature": 3}, "temperature must be less than or equal to 2, got 3"),
        ({"top_p": 0}, "top_p must be greater than 0, got 0"),
        ({"stop": ["a"] * 5}, "stop may have up to 4 texts of 1 to 256 characters"),
        ({"stop": ""}, "stop may have up to 4 texts of 1 to 256 characters"),
        ({"stop": 1}, "stop must be a text or a list, got 1"),
        ({"max_tokens": 0}, "max_tokens=0 is not allowed: give an integer from 1 to 128"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none', got \"required\""),
        ({"top_logprobs": 5}, "top_logprobs=5 needs logprobs: set it to true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be less than or equal to 20, got 21"),
        ({"stream_options": 1}, "stream_options must be an object, got 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
    ],
)
def test_wrong_fields_are_named(server, fields, message):
    answer = post(server, json.dumps({"model": "writer", "messages": MESSAGES} | fields))
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] in fields
    assert error["type"] == "invalid_request_error"


def test_bodies_that_are_no_requests_are_refused(server):
    good = json.dumps({"model": "writer", "messages": MESSAGES, "max_tokens": 1})
    assert post(server, good).status_code == 200
    for body in (b"", b"{", b"[]", b"\xff", b"1", b'{"n": NaN}', b"[" * 10_000, b'{"n": 1' + b"0" * 5000 + b"}"):
        answer = post(server, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", body[:20]
    assert post(server, b" " * (1 << 20) + good.encode()).status_code == 413
    assert post(server, (part for part in [b" " * (1 << 20), good.encode()])).status_code == 413  # without its length
    assert post(server, good, **{"content-type": "text/plain"}).status_code == 415  # as a page in a browser may send
    two = [("authorization", f"Bearer {TOKEN}"), ("content-type", "text/plain"), ("content-type", "application/json")]
    for headers in (two, two[::-1], two[:1]):
        answer = httpx.post(f"{server.address}/v1/chat/completions", content=good, headers=headers)
        assert answer.status_code == 415 and "one header Content-Type" in answer.json()["error"]["message"]
        for path, status in (("/v1/embeddings", 404), ("/health", 405)):
            assert httpx.post(server.address + path, content=good, headers=headers).status_code == status
    for fields in ({"\ud800": 1}, {"model": "\ud800"}, {"messages": [{"role": "\ud800"}]}):  # half a character
        answer = post(server, json.dumps(json.loads(good) | fields))
        assert answer.status_code in (400, 404) and answer.json()["error"]["message"], fields
    for path, status in (("/v1/embeddings", 404), ("/v1/chat/completions", 405)):
        answer = httpx.get(server.address + path, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == status and "POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_failures_are_in_the_log_and_not_in_the_answer(ask, server, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a secret path")

    monkeypatch.setattr(server.service.engine, "_admit", fail)
    for stream in (False, True):
        with pytest.raises(openai.APIError) as error:
            list(ask(stream=stream))
        assert "secret" not in str(error.value) and "request id" in str(error.value)
        request_id = str(error.value).partition("request id ")[2][:16]
        wait_until(lambda i=request_id: any(line.startswith(i) and "a secret path" in line for line in server.lines))
    monkeypatch.undo()
    assert texts(ask(seed=7))  # the engine goes on


def test_draining_finishes_what_is_under_way(serve):
    server, running, _ = serve(token=TOKEN)
    turn = server.service.engine.turn
    server.service.engine.turn = lambda: (time.sleep(0.1), turn())[1]
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=TOKEN, max_retries=0, timeout=60) as client:
        settings = dict(model="writer", messages=MESSAGES, seed=LONG_SEED, max_tokens=LONGEST)
        stream = client.chat.completions.create(**settings, stream=True)
        next(iter(stream))
        server.drain()
        with pytest.raises(openai.InternalServerError, match="stopping") as error:
            client.chat.completions.create(**settings)
        assert error.value.status_code == 503 and httpx.get(f"{server.address}/health").status_code == 503
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
    assert running.result(5) is None


def test_what_is_under_way_after_the_grace_gets_an_error(serve):
    server, running, _ = serve(token=TOKEN)
    turn = server.service.engine.turn
    server.service.engine.turn = lambda: (time.sleep(0.1), turn())[1]
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=TOKEN, max_retries=0, timeout=20) as client:
        whole = ThreadPoolExecutor(1).submit(client.chat.completions.create, messages=MESSAGES, **FOUR_LONG)
        stream = client.chat.completions.create(messages=MESSAGES, **FOUR_LONG, stream=True)  # waits for a slot
        next(iter(stream))
        server.drain()
        server.drain()  # a second signal: the grace is over
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert isinstance(whole.exception(5), openai.InternalServerError)
    assert running.result(5) is None


def test_a_server_ends_when_its_sampling_thread_does(serve):
    server, running, _ = serve(token=TOKEN)

    def fail():
        raise SystemExit("no device")

    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=TOKEN, max_retries=0, timeout=20) as client:
        assert client.models.list().data
        server.service.engine.turn = fail
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):  # soon, and not after 20 s
            client.chat.completions.create(model="writer", messages=MESSAGES)
    with pytest.raises(RuntimeError, match="the thread that samples failed"):
        running.result(5)


def test_silent_and_slow_connections_without_a_token_leave_room_for_others(serve, monkeypatch):
    monkeypatch.setattr("jmarl.serving.http_server.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("jmarl.serving.http_server.MAX_STRANGERS", 4)
    monkeypatch.setattr("jmarl.serving.connections.HEADER_S", 0.5)
    server, _, _ = serve(token=TOKEN)
    address = server.socket.getsockname()
    refused = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
    for first in (b"", b"GET /v1/models HT", refused, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"):
        sockets = [socket.create_connection(address) for _ in range(6)]
        for connection in sockets:
            connection.sendall(first)
        time.sleep(0.2)  # until they are accepted
        end = time.monotonic() + 3
        while len(server.server.server_state.connections) and time.monotonic() < end:
            for connection in sockets:
                with contextlib.suppress(OSError):
                    connection.sendall(first[:1] and b"x")  # byte by byte
            time.sleep(0.1)
        headers = {"authorization": f"Bearer {TOKEN}"}
        sockets += [socket.create_connection(address) for _ in range(20)]
        assert httpx.get(f"{server.address}/v1/models", headers=headers, timeout=5).status_code == 200, first
        assert sockets[6].recv(1) == b""  # the oldest is closed, not the newest refused
        for connection in sockets:
            connection.close()
    with httpx.Client(headers=headers) as client:  # one with a token keeps its connection
        assert client.get(f"{server.address}/v1/models").headers.get("connection") != "close"
        time.sleep(0.8)
        assert client.get(f"{server.address}/v1/models").status_code == 200
