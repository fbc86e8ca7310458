"""Sessions of a server: equal to episodes in this process, of one client, idempotent, limited, and ended when nobody calls."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import numpy as np
import pytest

from jmarl.envs import make
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import InProcess, LockStep, as_text_environment
from jmarl.remote import environments_pb2 as pb
from jmarl.remote import values
from jmarl.remote.catalog import read_offer
from jmarl.remote.engines import Lane
from jmarl.remote.gate import GrpcRefusal
from jmarl.remote.limits import ServerLimits
from jmarl.remote.sessions import Sessions
from tests.remote import served
from tests.remote.faulty import eventually
from tests.remote.served import HERE, SLOW, SUM, TALK, Client, Sum, Talk, refused, running
from tests.remote.test_values import exact

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture
def client(server, request):
    with Client(server.address, request.node.name[:100]) as client:
        yield client


def replies(answers):
    return [getattr(answer, answer.WhichOneof("kind")) for answer in answers]


# --- equal to this process ---


@pytest.mark.parametrize(
    ("name", "env", "task", "messages"),
    [
        (SUM, Sum(), {"start": 3}, [("1", "2"), ("5", "-1"), ("0", "4")]),
        (TALK, Talk(), {"word": "hello"}, [("a",), ("b",)]),
        ("math", make("math"), make("math").tasks(count=1)[0], [("I think it is 3.",)]),
    ],
    ids=["text", "simulated", "math"],
)
def test_an_episode_is_that_of_the_engine_in_this_process(client, name, env, task, messages):
    engine = InProcess(as_text_environment(env))
    ((state, observations),) = engine.reset([task], [7])
    start = client.reset(task, name, seed=7)
    assert [values.from_observation(x) for x in start.observations] == observations
    for number, joint in enumerate(messages):
        (step,) = engine.step([state], [joint], [number])
        state = step.state
        remote = values.from_result(client.step(start.session, number, joint, seed=number).step, state)
        expected = step._replace(
            observations=[] if step.done else step.observations, info=dict(step.info), parts=dict(step.parts)
        )
        assert exact(tuple(remote)[1:]) == exact(tuple(expected)[1:])


def test_a_batch_gives_each_call_the_answer_that_it_has_alone(client):
    calls = [client.reset_request({"start": n}, seed=n) for n in range(5)]
    calls[2] = client.reset_request({"start": 2}, "nothing")
    calls[3] = client.reset_request({"wrong": 1})
    answers = replies(client.call("BatchReset", pb.BatchResetRequest(calls=calls)).answers)
    assert [type(answer).__name__ for answer in answers] == ["ResetReply", "ResetReply", "Error", "Error", "ResetReply"]
    assert answers[2].code == Code.INVALID_ARGUMENT.value[0] and "there is no environment 'nothing'" in answers[2].message
    assert answers[3].code == Code.INTERNAL.value[0] and "raised a KeyError in reset" in answers[3].message
    sessions = [answers[n].start.session for n in (0, 1, 4)]
    steps = [
        client.step_request(session, 0, message)
        for session, message in zip(sessions, [("1", "1"), ("raise", ""), ("lost", "")], strict=True)
    ]
    steps.append(client.step_request("unknown", 0))
    played, failed, lost, unknown = replies(client.call("BatchStep", pb.BatchStepRequest(calls=steps)).answers)
    assert values.from_value(played.step.reward) == [2.0, 0.5]
    assert failed.code == Code.INTERNAL.value[0] and served.SECRET not in failed.message
    assert lost.fault.reason == "the judge is away"
    assert unknown.code == Code.NOT_FOUND.value[0]


def test_sessions_with_the_same_task_do_not_share_a_state(client):
    first, second = client.reset(), client.reset()
    client.step(first.session, 0, ("40", "2"))
    assert "history [0, 3]" in client.step(second.session, 0).step.observations[0].text


def test_observe_tells_where_a_session_is(client):
    start = client.reset({"start": 1})
    assert client.call("Observe", pb.ObserveRequest(session=start.session)) == pb.ObserveReply(observations=start.observations)
    result = client.step(start.session, 0).step
    observed = client.call("Observe", pb.ObserveRequest(session=start.session))
    assert observed == pb.ObserveReply(step=1, observations=result.observations)
    client.step(start.session, 1, ("0", "0"))
    assert client.call("Observe", pb.ObserveRequest(session=start.session)) == pb.ObserveReply(step=2, done=True)


def test_forks_continue_from_the_same_state_and_do_not_disturb_each_other(client):
    start = client.reset()
    client.step(start.session, 0)
    request = pb.ForkRequest(session=start.session, step=1, count=2, request_id="fork")
    forks = client.call("Fork", request).sessions
    assert client.call("Fork", request).sessions == forks
    texts = [
        client.step(session, 1, ("1", str(n))).step.observations[0].text for n, session in enumerate([*forks, start.session])
    ]
    assert [text.split("]")[0] for text in texts] == [f"history [0, 3, {4 + n}" for n in range(3)]
    with refused(Code.FAILED_PRECONDITION, "the session is at step 2"):
        client.call("Fork", pb.ForkRequest(session=start.session, step=1, count=1, request_id="late"))
    with refused(Code.INVALID_ARGUMENT, "0 calls"):
        client.call("Fork", pb.ForkRequest(session=start.session, step=2, count=0, request_id="none"))


def test_a_simulated_environment_is_truncated_at_the_turns_of_the_run(client):
    start = client.reset({"word": "x"}, TALK, num_turns=2)
    assert not client.step(start.session, 0, ("a",)).step.done
    last = client.step(start.session, 1, ("b",)).step
    assert last.done and last.truncated
    assert client.call("Describe", pb.DescribeRequest(environment=TALK, num_turns=2)).max_turns == 2


# --- idempotent ---


def test_a_repeated_request_gets_the_stored_answer(client):
    reset = client.reset_request({"start": 5})
    reply = client.call("Reset", reset)
    assert client.call("Reset", reset) == reply
    step = client.step_request(reply.start.session, 0, ("7", "0"), seed=3)
    before = len(served.calls)
    first = client.call("Step", step)
    assert client.call("Step", step) == first
    assert len(served.calls) == before + 1
    client.step(reply.start.session, 1)
    assert client.call("Step", step) == first  # also after the next one
    with refused(Code.FAILED_PRECONDITION, "step 0 belongs to another request: the session is at step 2"):
        client.step(reply.start.session, 0)
    with refused(Code.FAILED_PRECONDITION, "step 5 cannot be played: the session is at step 2"):
        client.step(reply.start.session, 5)
    with refused(Code.INVALID_ARGUMENT, "was used with another content"):
        client.step(reply.start.session, 1 - 1, ("8", "0"), number=step.request_id)
    with refused(Code.INVALID_ARGUMENT, "was used with another content"):
        client.reset({"start": 6}, number=reset.request_id)


def test_equal_requests_at_once_wait_for_the_first(client):
    start = client.reset()
    step = client.step_request(start.session, 0, ("hang", "0.2"))
    before = len(served.calls)
    futures = [client.future("Step", step) for _ in range(5)]
    assert len({future.result().SerializeToString(deterministic=True) for future in futures}) == 1
    assert len(served.calls) == before + 1


def test_a_step_goes_on_when_its_client_has_given_up_and_is_not_played_twice(client):
    start = client.reset()
    step = client.step_request(start.session, 0, ("hang", "0.3"))
    before = len(served.calls)
    with pytest.raises(grpc.RpcError) as error:
        client.call("Step", step, timeout=0.1)
    assert error.value.code() is Code.DEADLINE_EXCEEDED
    assert client.call("Step", step).step.step == 1
    assert len(served.calls) == before + 1


def test_a_step_that_raised_may_be_tried_again(client):
    start = client.reset()
    for number in ("first", "first", "second"):
        with refused(Code.INTERNAL, "raised a KeyError in step"):
            client.step(start.session, 0, ("raise", ""), number=number)
    assert client.step(start.session, 0).step.step == 1


def test_an_episode_that_is_over_takes_no_step(client):
    start = client.reset()
    client.step(start.session, 0, ("lost", ""))
    with refused(Code.FAILED_PRECONDITION, "the session is at step 1 and over"):
        client.step(start.session, 1)
    with refused(Code.FAILED_PRECONDITION, "and over"):
        client.call("Fork", pb.ForkRequest(session=start.session, step=1, count=1, request_id="x"))


def test_the_number_of_messages_is_that_of_the_agents(client):
    start = client.reset()
    with refused(Code.INVALID_ARGUMENT, "has 2 messages, one for each agent; this one has 3"):
        client.step(start.session, 0, ("1", "2", "3"))
    with refused(Code.INVALID_ARGUMENT, "request_id has 0 characters"):
        client.call("Reset", pb.ResetRequest(environment=SUM))


# --- of one client ---


def test_sessions_of_another_client_are_unknown(server, client):
    start = client.reset()
    with Client(server.address, "other") as other:
        for call in (
            lambda: other.step(start.session, 0),
            lambda: other.call("Observe", pb.ObserveRequest(session=start.session)),
            lambda: other.call("Fork", pb.ForkRequest(session=start.session, count=1, request_id="f")),
        ):
            with refused(Code.NOT_FOUND, f"there is no session '{start.session}' of this client"):
                call()
        assert other.call("Close", pb.CloseRequest(sessions=[start.session])).closed == 0
    assert client.call("Close", pb.CloseRequest(sessions=[start.session, start.session, "unknown"])).closed == 1
    with refused(Code.NOT_FOUND):
        client.step(start.session, 0)


def test_a_closed_session_leaves_nothing_behind(server, client):
    def sizes():
        sessions = server.server.sessions
        return len(sessions), len(sessions.starts), dict(sessions._reserved), dict(sessions._bytes)

    before = server.call(sizes)
    sessions = [client.reset().session for _ in range(5)]
    for session in sessions:
        client.step(session, 0)
    fork = pb.ForkRequest(session=sessions[0], step=1, count=3, request_id="fork of what is closed")
    sessions += client.call("Fork", fork).sessions
    assert client.call("Close", pb.CloseRequest(sessions=sessions)).closed == 8
    assert server.call(sizes) == before


def test_names_of_sessions_cannot_be_guessed(client):
    names = {client.reset().session for _ in range(20)}
    assert len(names) == 20 and all(len(name) == 24 for name in names)


def test_clients_may_use_the_same_numbers_of_requests(server):
    with Client(server.address, "a") as a, Client(server.address, "b") as b:
        first, second = a.reset({"start": 1}, number="1"), b.reset({"start": 2}, number="1")
        assert first.session != second.session and first.observations != second.observations


# --- limits ---


def test_a_session_without_calls_ends_and_its_client_is_told():
    with running(limits=ServerLimits(idle_seconds=100.0)) as server, Client(server.address) as client:
        server.call(lambda: setattr(server.server.sessions, "clock", lambda: time.monotonic()))
        old, request = client.reset(), client.reset_request()
        number = client.call("Reset", request).start.session
        server.call(lambda: setattr(server.server.sessions, "clock", lambda: time.monotonic() + 101))
        client.step(number, 0)
        assert server.call(server.server.sessions.reap) == 1
        with refused(Code.NOT_FOUND, f"session '{old.session}' ended after 100 s without a call: play the episode again"):
            client.step(old.session, 0)
        with Client(server.address, "other") as other, refused(Code.NOT_FOUND, "there is no session"):
            other.step(old.session, 0)
        assert client.step(number, 1).step.step == 2


def test_a_full_server_says_how_many_sessions_it_has():
    with running(limits=ServerLimits(sessions=2)) as server, Client(server.address, "a") as a, Client(server.address, "b") as b:
        start = a.reset()
        a.reset()
        for client in (a, b):  # another name has no room of its own on the same host
            with refused(Code.RESOURCE_EXHAUSTED, "at most 2 open sessions of one client, and 2 are open"):
                client.reset()
        with refused(Code.RESOURCE_EXHAUSTED, "at most 2 open sessions of one client"):
            a.call("Fork", pb.ForkRequest(session=start.session, count=1, request_id="f"))
    with (
        running(limits=ServerLimits(all_sessions=3)) as server,
        Client(server.address, "a") as a,
        Client(server.address, "b") as b,
    ):
        start = a.reset()
        a.reset()
        b.reset()
        with refused(Code.RESOURCE_EXHAUSTED, "at most 3 open sessions of all clients, and 3 are open"):
            b.reset()
        batch = [b.reset_request(), b.reset_request({"wrong": 1})]
        assert b.call("Close", pb.CloseRequest(sessions=[start.session])).closed == 0  # sessions belong to a name
        a.call("Close", pb.CloseRequest(sessions=[start.session]))
        assert [answer.WhichOneof("kind") for answer in b.call("BatchReset", pb.BatchResetRequest(calls=batch)).answers] == [
            "reply",
            "error",
        ]
        assert server.call(lambda: dict(server.server.sessions._reserved)) == {"127.0.0.1": 3}


def test_the_sessions_of_a_client_have_a_limit_of_bytes():
    with running(limits=ServerLimits(client_bytes=100_000)) as server, Client(server.address) as client:
        sizes = server.server.sessions._bytes
        task = {"word": "x" * 20_000}
        starts = [client.reset(task, TALK, num_turns=9) for _ in range(2)]
        assert 80_000 < sizes["127.0.0.1"] < 82_000  # their tasks and what the agents read
        with refused(Code.RESOURCE_EXHAUSTED, "of the sessions of one client have", "and 50000 are allowed: close some"):
            client.reset(task, TALK, num_turns=9)
        with refused(Code.RESOURCE_EXHAUSTED, "and 50000 are allowed"):
            client.call("Fork", pb.ForkRequest(session=starts[0].session, count=1, request_id="f"))
        client.call("Close", pb.CloseRequest(sessions=[starts[1].session]))
        with refused(Code.RESOURCE_EXHAUSTED, "and 50000 are allowed"):  # no step could be played then
            client.call("Fork", pb.ForkRequest(session=starts[0].session, count=9, request_id="f"))
        before = sizes["127.0.0.1"]
        client.step(starts[0].session, 0, ("y" * 10_000,))
        assert before + 20_000 < sizes["127.0.0.1"]  # the message, which the state has, and the answer
        client.step(starts[0].session, 1, ("y" * 20_000,))
        with refused(Code.RESOURCE_EXHAUSTED, "and 100000 are allowed"):
            client.step(starts[0].session, 2, ("y",))
        client.call("Close", pb.CloseRequest(sessions=[starts[0].session]))
        assert not sizes


def test_requests_that_are_worked_on_count_too():
    with running(limits=ServerLimits(client_bytes=100_000)) as server, Client(server.address) as client:
        slow = client.future("Reset", client.reset_request({"start": 0, "sleep": 0.3, "long": "x" * 60_000}))
        time.sleep(0.1)
        slow.cancel()  # it goes on
        with refused(Code.RESOURCE_EXHAUSTED, "and 50000 are allowed: close some"):
            client.reset()
        time.sleep(0.4)
        sessions = server.server.sessions
        client.call("Close", pb.CloseRequest(sessions=list(sessions._sessions)))
        assert not sessions._bytes and client.reset().session


def test_the_answers_of_rewards_have_a_limit_of_bytes(monkeypatch):
    monkeypatch.setattr("jmarl.remote.sessions.SCORE_BYTES", 3000)

    async def remember(scores):
        for n in range(5):
            request = pb.ScoreRequest(reward="r", request_id=str(n))
            scores.remember("a", request).answer.set_result(pb.ScoreReply(rewards=values.to_value("x" * 1000, "t")))
        return len(scores)

    assert asyncio.run(remember(Sessions(ServerLimits()).scores)) in (3, 4)


def test_resets_that_fail_use_no_room():
    with running(limits=ServerLimits(sessions=1)) as server, Client(server.address) as client:
        for _ in range(3):
            with refused(Code.INTERNAL):
                client.reset({"wrong": 1})
            with refused(Code.INVALID_ARGUMENT):
                client.reset(environment="nothing")
        client.reset()


def test_messages_and_batches_have_limits():
    limits = ServerLimits(message_bytes=20_000, batch=3)
    with running(limits=limits) as server, Client(server.address) as client:
        with refused(Code.RESOURCE_EXHAUSTED, "4 calls in a batch: this server takes 0 to 3"):
            client.call("BatchReset", pb.BatchResetRequest(calls=[client.reset_request() for _ in range(4)]))
        with pytest.raises(grpc.RpcError) as error:
            client.reset({"start": 0, "long": "x" * 200_000})
        assert error.value.code() is Code.RESOURCE_EXHAUSTED
        start = client.reset()
        with refused(Code.RESOURCE_EXHAUSTED, "messages of this server have at most 20000"):
            for step in range(100):  # the history grows
                client.step(start.session, step, ("9" * 300, "1"))


# --- what is offered ---


def test_a_server_offers_only_what_it_was_started_with(client):
    listed = client.call("List", pb.ListRequest())
    assert listed.names == [SUM, TALK, "math"]
    assert [(reward.name, reward.is_async) for reward in listed.rewards] == [
        (f"{HERE}:length", False), (f"{HERE}:length_later", True), (f"{HERE}:failing", False),
    ]  # fmt: skip
    for name in ("tldr", "os:system", f"{HERE}:Drawing", ""):
        with refused(Code.INVALID_ARGUMENT, "there is no environment", f"this server has {SUM}, {TALK}, math"):
            client.reset(environment=name)
    with refused(Code.INVALID_ARGUMENT, "there is no environment 'mathh' here; did you mean 'math'?"):
        client.call("Describe", pb.DescribeRequest(environment="mathh"))


def test_describe_tells_what_a_client_must_know(client):
    facts = client.call("Describe", pb.DescribeRequest(environment=SUM, options=values.to_map({"start": 3}, "options")))
    assert (list(facts.roles), facts.lowest_reward, facts.highest_reward, facts.max_turns) == (
        ["left", "right"],
        -1000,
        1000,
        100,
    )
    assert (facts.class_name, facts.sandbox, facts.limits.idle_seconds) == ("Sum", "", 1800.0)
    assert values.from_map(facts.description) == Sum().describe()
    plain = client.call("Describe", pb.DescribeRequest(environment=SUM))
    assert plain.fingerprint != facts.fingerprint
    assert plain == client.call("Describe", pb.DescribeRequest(environment=SUM))


def test_options_of_a_client_are_those_of_the_constructor(client):
    assert client.reset(options={"start": 10}).observations[0].text.startswith("total 10")
    misspelt = pb.DescribeRequest(environment="math", options=values.to_map({"dificulty_range": [1, 2]}, "options"))
    with refused(Code.INVALID_ARGUMENT, "unexpected keyword argument 'dificulty_range'", "did you mean 'difficulty_range'?"):
        client.call("Describe", misspelt)
    with refused(Code.INVALID_ARGUMENT, f"environment '{SUM}' does not take begin with these values"):
        client.reset(options={"begin": 1})


def test_options_that_no_constructor_takes_are_mistakes_of_the_client(client):
    for options in ({"max_turns": 1e300}, {"generator": True}, {"max_turns": 10**5000}, {"difficulty_range": [1, 10**5000]}):
        with refused(Code.INVALID_ARGUMENT, "does not take"):
            client.call("Describe", pb.DescribeRequest(environment="math", options=values.to_map(options, "options")))
    with refused(Code.INVALID_ARGUMENT, "num_turns=-1: give at least 1"):
        client.call("Describe", pb.DescribeRequest(environment=TALK, num_turns=-1))


def test_a_client_may_send_its_own_problems_and_scale_rewards(client):
    problems = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(10)]
    options = {"problems": problems, "reward_scale": 2.0, "reward_bias": 1.0}
    env = make("math", **options)
    request = pb.TasksRequest(environment="math", options=values.to_map(options, "options"), split="eval", count=5, seed=3)
    tasks = [values.from_map(task) for task in client.call("Tasks", request).tasks]
    assert tasks == env.tasks("eval", 5, 3)
    (state,), _ = env.reset(tasks[:1], np.random.default_rng(0))
    local = env.step([state], [[f"The answer is {tasks[0]['answer']}."]], np.random.default_rng(0)).result
    start = client.reset(tasks[0], "math", options)
    step = values.from_result(client.step(start.session, 0, (f"The answer is {tasks[0]['answer']}.",)).step, None)
    client_side = LockStep(make("math"))
    client_side.reward_range = (-np.inf, np.inf)  # as Describe says
    other = client_side._result([step], [0])
    assert (other.rewards == local.rewards).all() and other.parts == local.parts == {}
    assert {name: float(x[0]) for name, x in other.measures.items()} == {
        name: float(x[0]) for name, x in local.measures.items()
    }
    assert client.call("Describe", pb.DescribeRequest(environment="math", options=request.options)).highest_reward == float(
        "inf"
    )


def test_environments_that_nobody_uses_make_room_for_others(monkeypatch):
    monkeypatch.setattr("jmarl.remote.catalog.MAX_BUILT", 3)
    with running(read_offer(SUM)) as server, Client(server.address) as client:
        threads = threading.active_count()
        sessions = [client.reset(options={"start": n}).session for n in range(2)]
        for n in range(2, 9):
            client.call("Describe", pb.DescribeRequest(environment=SUM, options=values.to_map({"start": n}, "options")))
        assert len(server.server.catalog._built) == 3
        last = client.reset(options={"start": 9}).session
        with refused(Code.RESOURCE_EXHAUSTED, "plays environments with 3 different options already"):
            client.reset(options={"start": 10})
        assert [client.step(session, 0).step.step for session in (*sessions, last)] == [1, 1, 1]
        client.call("Close", pb.CloseRequest(sessions=[sessions[0]]))
        client.reset(options={"start": 10})
        eventually(lambda: threading.active_count() <= threads + 4)  # of the environments, and of building them


def test_an_environment_is_built_once_for_all_who_wait_also_after_they_have_given_up():
    """And the builds of one client keep others waiting for one of them only."""

    def describe(client, start, timeout=20):
        request = pb.DescribeRequest(environment=SLOW, options=values.to_map({"start": start}, "options"))
        return client.future("Describe", request, timeout)

    with running(read_offer(SLOW)) as server, Client(server.address, "a") as a, Client(server.address, "b") as b:
        served.built.clear()
        with pytest.raises(grpc.RpcError, match="Deadline"):
            describe(a, 1, timeout=0.05).result()
        for future in [describe(client, 1) for client in (a, b) for _ in range(3)]:
            assert future.result().class_name == "Slow"
        assert served.built == [1]
        futures = [describe(a, start) for start in range(2, 9)]
        time.sleep(0.05)
        server.run(server.server.catalog.environment(SLOW, {"start": 9}, 0, "another host"))
        assert served.built == [1, 2, 9]
        for future in futures:
            future.cancel()
        time.sleep(0.4)
        assert served.built == [1, 2, 9, 3]  # the one that had begun


def test_work_that_has_not_begun_when_its_client_gives_up_is_not_done():
    async def work():
        lane, done, go_on = Lane("an environment", 5.0), [], threading.Event()
        first = asyncio.create_task(lane.run(lambda: done.append(go_on.wait(5))))
        second, third = (asyncio.create_task(lane.run(lambda n=n: done.append(n))) for n in (2, 3))
        await asyncio.sleep(0.05)
        first.cancel()
        second.cancel()
        await asyncio.sleep(0.05)
        assert not third.done() and not done  # the thread is not free
        go_on.set()
        await third
        assert done == [True, 3]
        lane.close()
        assert await lane.run(lambda: 4) == 4  # not for ever
        lane.close()

    asyncio.run(work())


def test_tasks_come_in_as_many_replies_as_they_need():
    with running(limits=ServerLimits(message_bytes=2000)) as server, Client(server.address) as client:
        request = pb.TasksRequest(environment=SUM, split="train", count=100, seed=1)
        tasks, total, num_replies = [], 100, 0
        while len(tasks) < total:
            reply = client.call("Tasks", request)
            tasks += [values.from_map(task) for task in reply.tasks]
            total, request.first, num_replies = reply.total, len(tasks), num_replies + 1
        assert tasks == Sum().tasks("train", 100, 1) and num_replies > 2
        with refused(Code.INVALID_ARGUMENT, "count=1000000"):
            client.call("Tasks", pb.TasksRequest(environment=SUM, count=1_000_000))


def test_an_error_of_an_environment_stays_in_the_log(client, caplog):
    with refused(Code.INVALID_ARGUMENT, f"a malformed task: {SUM} refused it; the server's log says why") as _:
        client.reset({"start": 0, "secret": True})
    assert served.SECRET in caplog.text and "served.py" in caplog.text
    with refused(Code.INVALID_ARGUMENT, "a malformed task: "):
        client.reset({"nothing": 1}, "math")


def test_the_reason_of_a_fault_names_no_place_of_the_server(client, caplog):
    for reason in (
        "no sandbox: [Errno 28] No space left on device",
        "see /home/me/judge",
        "https://key@judge failed",
        "C:\\\\me",
    ):
        fault = client.step(client.reset().session, 0, ("fault", reason)).fault
        assert fault.reason.startswith(f"{SUM} gave no result; the server's log says why (request ")
        assert reason.replace("\\\\", "\\") in caplog.text
    session = client.reset().session
    request = client.step_request(session, 0, ("fault", "no \\udcff or " + "x" * 5000))
    fault = client.call("Step", request).fault
    assert fault.reason.startswith("no ? or xxx") and len(fault.reason) == 2000
    assert client.call("Step", request).fault == fault


def test_the_request_in_the_sentence_is_that_of_the_log(client, caplog):
    start = client.reset()
    with pytest.raises(grpc.RpcError) as error:
        client.step(start.session, 0, ("raise", ""))
    number = error.value.details().rpartition("(request ")[2].rstrip(")")
    assert f"request {number}: {SUM}.step raised an error" in caplog.text and served.SECRET in caplog.text


# --- rewards ---


def score_request(client, name, texts, items, rng):
    return pb.ScoreRequest(
        reward=f"{HERE}:{name}",
        completions=[pb.Texts(texts=agent) for agent in texts],
        items=[values.to_map(item, "item") for item in items],
        random=values.to_map(rng.bit_generator.state, "random"),
        request_id=next(client.numbers),
    )


@pytest.mark.parametrize("name", ["length", "length_later"])
def test_a_reward_is_that_of_this_process_and_so_are_its_random_numbers(client, name):
    texts, items = [["a", "bbb", ""], ["", "c", "dd"]], [{"factor": n, "prompt": "p"} for n in (1.0, 2.5, -1)]
    local, remote = np.random.default_rng(5), np.random.default_rng(5)
    expected = RewardFunction(getattr(served, name), num_agents=2)(texts, ["p"] * 3, items, local).rewards
    reply = client.call("Score", score_request(client, name, texts, items, remote))
    returned = values.from_value(reply.rewards)
    remote.bit_generator.state = values.from_map(reply.random)
    result = RewardFunction(lambda a, b: returned, num_agents=2)(texts, ["p"] * 3, items, np.random.default_rng(0))
    assert (result.rewards == expected).all()
    if name == "length":  # a coroutine function draws from a generator of its own, which the client makes
        assert remote.random() == local.random()


def test_a_repeated_score_is_not_computed_again(client):
    request = score_request(client, "length", [["a"], ["b"]], [{"factor": 1}], np.random.default_rng(0))
    assert client.call("Score", request) == client.call("Score", request)


def test_wrong_calls_of_a_reward_are_refused_without_its_path(client):
    rng = np.random.default_rng(0)
    with refused(Code.INVALID_ARGUMENT, "needs a column 'factor'"):
        client.call("Score", score_request(client, "length", [["a"], ["b"]], [{}], rng))
    with refused(Code.INVALID_ARGUMENT, "takes 2 completion lists"):
        client.call("Score", score_request(client, "failing", [["a"]] * 3, [{}], rng))
    with refused(Code.INVALID_ARGUMENT, "2 completions of an agent for 1 items"):
        client.call("Score", score_request(client, "length", [["a"], ["b", "c"]], [{"factor": 1}], rng))
    with refused(Code.INTERNAL, "failing raised a RuntimeError"):
        client.call("Score", score_request(client, "failing", [["a"], ["b"]], [{}], rng))
    with refused(Code.INVALID_ARGUMENT, "there is no reward"):
        client.call("Score", pb.ScoreRequest(reward="os:system", request_id="x"))
    with refused(Code.INVALID_ARGUMENT):
        client.call("Score", pb.ScoreRequest(reward=f"{HERE}:length", request_id="x"))


# --- several clients ---


def test_a_slow_batch_of_one_client_does_not_block_another(client, server):
    with Client(server.address, "slow") as slow:
        sessions = [slow.reset().session for _ in range(30)]
        batch = pb.BatchStepRequest(calls=[slow.step_request(session, 0, ("hang", "0.05")) for session in sessions])
        start, future = client.reset(), slow.future("BatchStep", batch)
        time.sleep(0.1)
        client.step(start.session, 0)
        assert not future.done()
        assert len(future.result().answers) == 30


def test_a_call_that_hangs_is_given_up_and_all_others_go_on():
    limits = ServerLimits(call_seconds=0.5)
    with running(limits=limits) as server, Client(server.address, "a") as client, Client(server.address, "b") as other:
        sessions, theirs = [client.reset().session for _ in range(4)], other.reset().session
        messages = [("1", "2"), ("hang", "1.7"), ("3", "4"), ("5", "6")]
        calls = [client.step_request(session, 0, joint) for session, joint in zip(sessions, messages, strict=True)]
        future = client.future("BatchStep", pb.BatchStepRequest(calls=calls))
        assert other.step(theirs, 0).step.step == 1
        answers = replies(future.result().answers)
        assert [type(answer).__name__ for answer in answers] == ["StepReply", "Error", "StepReply", "StepReply"]
        assert answers[1].code == Code.DEADLINE_EXCEEDED.value[0]
        assert f"{SUM} did not answer within 0.5 s" in answers[1].message
        assert client.step(sessions[1], 0, number="again").step.step == 1


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_two_clients_never_see_each_other(server, count):
    """Interleaved episodes of two clients with the same tasks, seeds and numbers of requests."""
    errors: list[str] = []

    def play(name, sign):
        with Client(server.address, name) as client:
            for first in range(0, count // 2, 50):
                numbers = range(first, min(first + 50, count // 2))
                resets = [client.reset_request({"start": sign * n}, number=f"r{n}") for n in numbers]
                answers = client.call("BatchReset", pb.BatchResetRequest(calls=resets)).answers
                sessions = [answer.reply.start.session for answer in answers]
                for step in range(2):
                    calls = [
                        client.step_request(session, step, (str(sign), str(sign * n)), number=f"s{step}")
                        for n, session in zip(numbers, sessions, strict=True)
                    ]
                    results = client.call("BatchStep", pb.BatchStepRequest(calls=calls)).answers
                    for n, result in zip(numbers, results, strict=True):
                        total = sign * n + (step + 1) * (sign + sign * n)
                        if values.from_value(result.reply.step.reward) != [float(total), 0.5]:
                            errors.append(f"{name}, episode {n}, step {step}: {result}")
                client.call("Close", pb.CloseRequest(sessions=sessions))

    threads = [threading.Thread(target=play, args=(f"client {sign}", sign)) for sign in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# --- in the pool and in the sandbox ---


@pytest.mark.long
def test_bulk_work_runs_in_processes_with_the_same_results():
    with running(read_offer(SUM), workers=2) as pooled, running(read_offer(SUM)) as single:
        rewards = []
        for server in (pooled, single):
            with Client(server.address) as client:
                resets = [client.reset_request({"start": n}, seed=n) for n in range(6)]
                sessions = [
                    a.reply.start.session for a in client.call("BatchReset", pb.BatchResetRequest(calls=resets)).answers
                ]
                steps = [client.step_request(s, 0, ("1", str(n)), seed=n, number=f"{n}") for n, s in enumerate(sessions)]
                steps[3] = client.step_request(sessions[3], 0, ("raise", ""), number="3")
                answers = client.call("BatchStep", pb.BatchStepRequest(calls=steps)).answers
                rewards.append([a.reply if a.WhichOneof("kind") == "reply" else a.error.code for a in answers])
        assert rewards[0] == rewards[1] and rewards[0][3] == Code.INTERNAL.value[0]


def test_an_environment_of_many_episodes_that_draws_is_refused(caplog):
    with running(read_offer(f"{HERE}:Drawing")) as server, Client(server.address) as client:
        with refused(Code.INTERNAL, "raised a TypeError in reset"):
            client.reset({}, f"{HERE}:Drawing")
        assert "draws random numbers for a whole batch" in caplog.text


def test_programs_run_in_the_sandbox_of_the_server_whose_level_is_told():
    with running(read_offer("code,tools_sandbox")) as server, Client(server.address) as client:
        env = make("code")
        level = env.describe()["sandbox"]
        for name in ("code", "tools_sandbox"):
            assert client.call("Describe", pb.DescribeRequest(environment=name)).sandbox == level
        scaled = pb.DescribeRequest(environment="code", options=values.to_map({"reward_scale": 9.0}, "options"))
        assert (
            client.call("Describe", scaled).highest_reward
            == np.inf
            > client.call("Describe", pb.DescribeRequest(environment="code")).highest_reward
        )
        items = env.tasks(count=3)
        states, prompts = env.reset(items, np.random.default_rng(0))
        texts = [env.solve(states[0])[0], "```python\nwrong\n```", ""]
        local = env.step(states, [texts], np.random.default_rng(0)).result
        resets = [client.reset_request(item, "code") for item in items]
        starts = [answer.reply.start for answer in client.call("BatchReset", pb.BatchResetRequest(calls=resets)).answers]
        assert [values.from_observation(start.observations[0]) for start in starts] == prompts[0]
        steps = [client.step_request(start.session, 0, (text,)) for start, text in zip(starts, texts, strict=True)]
        results = [answer.reply.step for answer in client.call("BatchStep", pb.BatchStepRequest(calls=steps)).answers]
        assert [values.from_value(result.reward) for result in results] == local.rewards.tolist()
        parts = [values.from_map(result.parts) for result in results]
        assert parts == [{name: x[j] for name, x in local.parts.items()} for j in range(3)]


def test_a_server_that_ends_is_not_described_and_goes_on_with_its_sessions():
    with running() as server, Client(server.address) as client:
        start = client.reset()
        server.server.sessions.is_draining = True
        with refused(Code.UNAVAILABLE, "this server is ending"):
            client.call("Describe", pb.DescribeRequest(environment=SUM))
        with refused(Code.UNAVAILABLE, "this server is ending"):
            client.call("List", pb.ListRequest())
        with refused(Code.UNAVAILABLE, "this server is ending"):
            client.call("Score", pb.ScoreRequest(reward=f"{HERE}:length", request_id="x"))
        with refused(Code.UNAVAILABLE, "this server is ending"):
            client.reset()
        assert client.step(start.session, 0).step.step == 1
        fork = pb.ForkRequest(session=start.session, step=1, count=1, request_id="fork")
        (forked,) = client.call("Fork", fork).sessions
        assert client.call("Observe", pb.ObserveRequest(session=forked)).step == 1
        assert client.call("Close", pb.CloseRequest(sessions=[start.session, forked])).closed == 2


def test_a_server_that_ends_waits_for_what_is_begun():
    with running() as server, Client(server.address) as client:
        future = client.future("Reset", client.reset_request({"start": 0, "sleep": 0.3}))
        time.sleep(0.1)
        assert server.run(server.server.drain(0.4)) == 1  # after the grace period
        client.call("Close", pb.CloseRequest(sessions=[future.result(0).start.session]))
        assert server.run(server.server.drain(60)) == 0


def test_an_environment_whose_calls_hang_is_played_again_when_they_return(monkeypatch):
    monkeypatch.setattr("jmarl.remote.engines.MAX_HANGING", 2)
    go_on = threading.Event()

    async def play():
        lane = Lane("an environment", 0.1)
        for _ in range(2):
            with pytest.raises(GrpcRefusal, match="an environment did not answer within 0.1 s"):
                await lane.run(go_on.wait)
        with pytest.raises(GrpcRefusal, match="hangs in 2 calls on this server"):
            await lane.run(lambda: 1)
        go_on.set()
        for thread in lane.hanging:
            thread.join(5)
        assert await lane.run(lambda: 2) == 2
        lane.close()

    asyncio.run(play())
