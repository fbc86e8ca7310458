"""The client of environments on servers: training cannot tell them from its own, whatever happens to them."""

from __future__ import annotations

import os
import pickle
import time

import numpy as np
import pytest

from jmarl import RemoteEnvironment, make, make_reward, remote_reward
from jmarl.config import TaskConfig
from jmarl.envs.mixture import Mixture
from jmarl.envs.pool import in_pool
from jmarl.envs.vector import Fault, LockStep, vectorize
from jmarl.files.identity.fingerprint import of_options, of_reward
from jmarl.processes.ending import Interrupted
from jmarl.remote.access import Access, Tls
from jmarl.remote.catalog import read_offer
from jmarl.remote.client.addresses import Addresses, parse
from jmarl.remote.limits import ServerLimits
from tests.remote.lying import between
from tests.remote.playing import plain, play
from tests.remote.served import HERE, SUM, TALK, Sum, Talk, certificates, length, length_later, running

OFFER = read_offer(f"{HERE}:Sum,{HERE}:Talk,math,debate_scripted,sudoku", f"{HERE}:length,{HERE}:length_later,{HERE}:failing")
pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture(scope="module")
def second_server():
    with running(OFFER) as server:
        yield server


def sessions_of(*servers):
    return sum(len(server.server.sessions) for server in servers)


# --- equal trajectories


@pytest.mark.parametrize("name", ["math", "debate_scripted", "sudoku", SUM])
def test_episodes_that_branch_are_those_of_this_process(name, server, second_server):
    here, far = vectorize(make(name)), make(name, servers=[server.address, f"{second_server.address}=3"])
    tasks = here.tasks("train", 5, 3)
    assert far.tasks("train", 5, 3) == tasks
    for again in (False, True):
        assert plain(play(far, tasks, again=again)) == plain(play(here, tasks, again=again))
    assert (far.roles, far.reward_range, far.max_turns) == (here.roles, here.reward_range, here.max_turns)
    assert far.describe().items() >= here.describe().items()
    far = None  # who leaves leaves no session behind
    assert sessions_of(server, second_server) == 0


def test_options_and_own_tasks_act_as_here(server, tmp_path):
    options = {"reward_scale": 3.0, "reward_clip": [-2, 2], "difficulty_range": [1, 1]}
    here, far = make("math", **options), make("math", servers=server.address, **options)
    tasks = here.tasks(count=4)
    assert plain(play(far, tasks)) == plain(play(here, tasks)) and far.tasks(count=4) == tasks
    (tmp_path / "own.json").write_text('[{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": "3"}]')
    own = {"problems": str(tmp_path / "own.json")}
    assert make("math", servers=server.address, **own).tasks() == make("math", **own).tasks()


@pytest.mark.long
def test_programs_run_where_the_server_is_and_their_level_is_told():
    """`code` plays whole batches in this process, and single episodes on a server."""
    here = make("code", max_turns=2, difficulty_range=[1, 1])
    with running(read_offer("code")) as server:
        far = make("code", servers=server.address, max_turns=2, difficulty_range=[1, 1])
        assert far.describe().items() >= here.describe().items() and far.describe()["sandbox"] >= "S2"
        tasks = here.tasks(count=2)
        solution = "".join(["def ", tasks[0]["entry_point"], tasks[0]["solution"].partition(tasks[0]["entry_point"])[2]])
        texts = [[solution, "def f(: 1", "no program"] * 2]
        answers = []
        for env in (here, far):
            rng = np.random.default_rng(0)
            states, prompts = env.reset(tasks, rng)
            answer = env.step([state for state in states for _ in range(3)], texts, rng)
            going = [after for after, done in zip(answer.after, answer.done, strict=True) if not done]
            result = answer.result
            answers.append(plain((prompts, result.total, result.parts, result.measures, answer.done, env.observe(going)[1])))
        assert answers[0] == answers[1] and answer.result.total.max() > answer.result.total.min()


def test_an_environment_that_declares_no_turns_has_those_of_the_run(server):
    with pytest.warns(UserWarning, match="not done after 2 turns"):
        here = plain(play(vectorize(Talk(), 2), [{"word": "a"}]))
        far = plain(play(vectorize(make(TALK, servers=server.address), 2), [{"word": "a"}]))
    assert far == here


def test_environments_of_a_mixture_may_be_remote(server):
    mixtures = [Mixture({"a": make("math"), "b": env}) for env in (make("math"), make("math", servers=server.address))]
    tasks = mixtures[0].tasks(count=4)
    assert mixtures[1].tasks(count=4) == tasks
    assert plain(play(mixtures[0], tasks)) == plain(play(mixtures[1], tasks))


def test_an_environment_that_is_closed_can_be_played_again(server):
    far, here = make(SUM, servers=server.address), LockStep(Sum())
    tasks, before = [{"start": 1}, {"start": 2}], sessions_of(server)
    states = [env.reset(tasks, np.random.default_rng(0))[0] for env in (far, here)]
    far.close()
    assert sessions_of(server) == before
    answers = [env.step(x, [["1", "2"]] * 2, np.random.default_rng(1)) for env, x in zip((far, here), states, strict=True)]
    assert answers[0].result.rewards.tolist() == answers[1].result.rewards.tolist()


def test_a_pool_is_refused_because_servers_have_their_own(server):
    with pytest.raises(ValueError, match="pool='ray' is not allowed for Sum: its servers play it"):
        in_pool(make(SUM, servers=server.address), TaskConfig("grid", pool="ray"), 1)


def test_weights_divide_sessions(server, second_server):
    far = make("math", servers=[server.address, f"{second_server.address}=3"])
    states, _ = far.reset(far.tasks(count=40), np.random.default_rng(0))
    assert [sessions_of(server), sessions_of(second_server)] == [10, 30]


def test_an_episode_crosses_processes_without_its_session(server):
    far = make(SUM, servers=server.address)
    (state,), _ = far.reset([{"start": 1}], np.random.default_rng(0))
    other = pickle.loads(pickle.dumps(state))
    assert other.session is None and other.history == state.history and state.own_session() is not None
    steps = [far.engine.step([x], [("2", "3")], [7]) for x in (other, state)]
    assert steps[0][0].observations == steps[1][0].observations and steps[0][0].reward == [6.0, 0.5]


# --- servers that come and go


def test_servers_that_end_and_come_change_nothing(server, tmp_path, capfd):
    here, file = LockStep(Sum()), tmp_path / "servers.txt"
    tasks = [{"start": n} for n in range(6)]
    with running(OFFER) as first, running(OFFER) as last:
        file.write_text(f"{first.address}  # the first\n{server.address}\n")
        far = make(SUM, servers=str(file))

        def change(turn):
            if turn == 0:
                first.run(first.server._server.stop(0))  # connections are closed at once, as when it is killed
            elif turn == 1:
                file.write_text(f"{last.address}\n")

        assert plain(play(far, tasks, turns=4, between_turns=change)) == plain(play(here, tasks, turns=4))
        before = sessions_of(server)
        states, _ = far.reset(tasks, np.random.default_rng(0))
        assert sessions_of(last) == len(states) and sessions_of(server) <= before
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jmarl: ")]  # gRPC writes some, too
    of_first = [line for line in printed if first.address in line]
    assert "is put aside: " in of_first[0] and of_first[-1] == f"jmarl: {SUM!r}: server {first.address} goes"
    assert [line for line in printed if last.address in line] == [f"jmarl: {SUM!r}: server {last.address} comes"]


def test_a_server_that_ends_plays_its_episodes_and_begins_no_others(second_server, capfd):
    tasks = [{"start": n} for n in range(4)]
    with running(OFFER) as ending:
        far = make(SUM, servers=[ending.address, f"{second_server.address}=0.001"])

        def drain(turn):
            if turn == 0:
                ending.server.sessions.is_draining = True

        assert plain(play(far, tasks, between_turns=drain)) == plain(play(LockStep(Sum()), tasks))
        before = sessions_of(ending), sessions_of(second_server)
        assert before[0] > 0 and far.engine.servers.all[ending.address].generation == 0
        states, _ = far.reset(tasks, np.random.default_rng(0))
        assert sessions_of(ending) <= before[0] and len(states) == 4
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "is put aside" in line]
    assert f"server {ending.address} is put aside: this server is ending and begins no new episodes" in line


def test_sessions_that_a_server_has_forgotten_are_played_again(server):
    far, here = make(SUM, servers=server.address), LockStep(Sum())
    tasks = [{"start": n} for n in range(3)]

    def forget(turn):
        server.call(lambda: [server.server.sessions._end(x) for x in [*server.server.sessions._sessions.values()]])

    assert plain(play(far, tasks, between_turns=forget)) == plain(play(here, tasks))


def test_few_sessions_suffice(capfd):
    """Sessions that wait are closed, and played again when they are needed."""
    with running(OFFER, limits=ServerLimits(sessions=5, batch=3)) as small:
        far, here = make(SUM, servers=small.address), LockStep(Sum())
        tasks = [{"start": n} for n in range(4)]
        assert plain(play(far, tasks)) == plain(play(here, tasks))
        assert sessions_of(small) <= 5
    assert capfd.readouterr().err.count("aside") == 0


def test_without_any_server_the_run_is_interrupted(capfd):
    with running(OFFER) as only:
        far = make(SUM, servers={"address": only.address, "patience": 0.2})
        states, _ = far.reset([{"start": 1}], np.random.default_rng(0))
    with pytest.raises(Interrupted, match=f"^because no server of '{SUM}' answers \\({only.address}: it cannot be reached"):
        far.step(states, [["1"], ["2"]], np.random.default_rng(0))
    assert "no server of" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="no server of 'math' answers .*Connection refused.*: start one there"):
        make("math", servers={"address": only.address, "patience": 0.2})


def test_a_server_of_another_environment_is_not_used(server, capfd):
    with running(read_offer(f"{HERE}:Sum,math")) as other:
        other.call(lambda: setattr(other.server.catalog._built[(SUM, "[]")].facts, "fingerprint", "other"))
        far = make(SUM, servers=[server.address, other.address])
        assert plain(play(far, [{"start": 1}])) == plain(play(LockStep(Sum()), [{"start": 1}]))
        assert sessions_of(other) == 0
    (line,) = [line for line in capfd.readouterr().err.splitlines() if other.address in line]
    assert "is not used" in line and "is another one (fingerprint other, and the run has" in line


# --- servers that hang or lie


def lie_number(reply):
    reply.answers[0].reply.step.step += 1


def lie_observations(reply):
    del reply.answers[0].reply.step.observations[1:]


def lie_nobody(reply):
    for observation in reply.answers[0].reply.step.observations:
        observation.absent = True


def lie_reward(reply):
    reply.answers[0].reply.step.reward.list.values[0].number = 1e6


def lie_huge_reward(reply):
    reply.answers[0].reply.step.reward.list.values[0].big_integer = format(10**400, "x")


def lie_huge_info(reply):
    reply.answers[0].reply.step.info.entries[0].value.big_integer = format(10**400, "x")


def lie_huge_part(reply):
    reply.answers[0].reply.step.parts.entries.add(key="all").value.big_integer = format(-(10**400), "x")


def lie_rewards(reply):
    del reply.answers[0].reply.step.reward.list.values[1:]


def lie_text(reply):
    reply.answers[0].reply.step.reward.text = "1.0"


def lie_parts(reply):
    part = reply.answers[0].reply.step.parts.entries.add(key="all")
    part.value.number = 1e3


def lie_answers(reply):
    del reply.answers[0]


def lie_nothing(reply):
    reply.answers[0].reply.ClearField("step")


def lie_bytes(reply):
    return b"\xff\xff\xff"


LIES = [
    lie_number,
    lie_observations,
    lie_nobody,
    lie_reward,
    lie_huge_reward,
    lie_huge_info,
    lie_huge_part,
    lie_rewards,
    lie_text,
    lie_parts,
    lie_answers,
    lie_nothing,
    lie_bytes,
]


@pytest.mark.parametrize("lie", LIES)
def test_garbage_is_dropped_and_its_server_put_aside(lie, server, capfd):
    here = plain(play(LockStep(Sum()), [{"start": n} for n in range(4)]))
    with between(server.address, lambda method, reply: lie(reply) if method == "BatchStep" else None) as (address, _):
        far = make(SUM, servers=[address, server.address])
        assert plain(play(far, [{"start": n} for n in range(4)])) == here
        first, *_ = [line for line in capfd.readouterr().err.splitlines() if address in line]
        assert f"server {address} is put aside: it" in first and "Exception" not in first
        alone = make(SUM, servers=address)
        _, (rewards, _, _, faults, raised, done), *_ = play(alone, [{"start": 1}], group=1)
        assert np.isnan(rewards).all() and raised == 1 and done.all() and f"{SUM}: server {address}: " in faults[0]
        assert "after 4 tries" in faults[0]


def test_a_reward_out_of_range_that_two_servers_give_is_a_mistake_of_the_environment(server, second_server):
    far = make(SUM, servers=[server.address, second_server.address])
    with pytest.raises(ValueError, match=r"Sum returned the reward 5000.0, and its reward_range is \(-1000.0, 1000.0\)"):
        far.step(far.reset([{"start": 1}], np.random.default_rng(0))[0], [["4000"], ["999"]], np.random.default_rng(0))


def test_a_reward_that_is_nan_is_masked_and_no_lie(server):
    def unknown(method, reply):
        if method == "BatchStep":
            reply.answers[0].reply.step.reward.list.values[0].number = float("nan")

    with between(server.address, unknown) as (address, _):
        far = make(SUM, servers=address)
        _, (rewards, _, _, _, raised, done), *_ = play(far, [{"start": 1}, {"start": 2}], group=1, turns=1)
        assert np.isnan(rewards).any(1).tolist() == [True, False] and raised == 0 and not done.any()


def test_sessions_of_a_fork_are_as_many_as_asked_for(server, capfd):
    def twice(method, reply):
        if method == "Fork":
            reply.sessions.append(reply.sessions[0])

    with between(server.address, twice) as (address, _):
        far = make(SUM, servers=[address, server.address])
        assert plain(play(far, [{"start": 1}])) == plain(play(LockStep(Sum()), [{"start": 1}]))


def test_a_server_that_hangs_is_left_at_the_deadline(server, capfd):
    with between(server.address, hangs=("BatchStep",)) as (address, handler):
        far = make(SUM, servers={"address": [address, server.address], "timeout": 0.2})
        before = time.monotonic()
        tasks = [{"start": n} for n in range(4)]
        assert plain(play(far, tasks, turns=2)) == plain(play(LockStep(Sum()), tasks, turns=2))
        assert time.monotonic() - before < 10 and handler.calls.count("BatchStep")
    assert "does not answer in time" in capfd.readouterr().err


def test_batches_without_any_answer_interrupt_the_run(server):
    with between(server.address, lambda method, reply: b"\xff" if method == "BatchStep" else None) as (address, _):
        far = make(SUM, servers=address)
        states, _ = far.reset([{"start": 1}], np.random.default_rng(0))
        steps = [far.engine.step(states, [("1", "2")], [0]) for _ in range(2)]
        assert all(isinstance(step, Fault) for (step,) in steps)
        with pytest.raises(Interrupted, match="3 batches in a row had no answer"):
            far.engine.step(states, [("1", "2")], [0])


def test_errors_of_the_environment_are_raised(server, second_server):
    far = make(SUM, servers=[server.address, second_server.address])
    states, _ = far.reset([{"start": 1}], np.random.default_rng(0))
    with pytest.raises(RuntimeError, match=r"\(request "):
        far.step(states, [["raise"], ["2"]], np.random.default_rng(0))
    result = far.step(
        far.reset([{"start": 1}], np.random.default_rng(0))[0], [["lost"], ["2"]], np.random.default_rng(0)
    ).result
    assert result.invalid.all() and "the judge is away" in result.faults[0]
    with pytest.raises(ValueError, match="this server has"):
        make("chess", servers=server.address)


# --- rewards


@pytest.mark.parametrize("function", [length, length_later])
def test_a_remote_reward_is_that_of_this_process(function, server):
    name = f"{HERE}:{function.__name__}"
    far = remote_reward(server.address, name)
    items = [{"factor": 2.0}, {"factor": 3.0}]
    results = []
    for reward in (function, far):
        rng = np.random.default_rng(5)
        result = make_reward(reward, num_agents=2)([["a", "bcd"], ["ef", "g"]], [None, None], items, rng)
        results.append(repr((result.rewards, list(result.parts.values()), rng.random())))
    assert results[0] == results[1]
    assert any("fingerprint" in key for key in of_reward(make_reward(far, num_agents=2)))
    with pytest.raises(RuntimeError, match=r"\(request "):
        make_reward(remote_reward(server.address, f"{HERE}:failing"), num_agents=2)([["a"], ["b"]], [None], [{}], rng)
    with pytest.raises(ValueError, match=f"server {server.address}: it has no reward 'none', but "):
        remote_reward(server.address, "none")


# --- addresses


def test_addresses_are_texts_lists_or_files(tmp_path):
    assert parse("[::1]:5=0.5") == ("[::1]:5", 0.5) and parse("unix:/tmp/a") == ("unix:/tmp/a", 1.0)
    told = []
    assert Addresses("a:1", told.append).current == {"a:1": 1.0}
    assert Addresses(["a:1", "b:2=3"], told.append).current == {"a:1": 1.0, "b:2": 3.0}
    for wrong in ("a:1=0", "a:1=x", "a:99999", "a:0"):
        with pytest.raises(ValueError, match="is no address of a server: give HOST:PORT"):
            parse(wrong)
    with pytest.raises(ValueError, match="twice"):
        Addresses(["a:1", "a:1=2"], told.append)
    with pytest.raises(FileNotFoundError, match="no address and no file"):
        Addresses("servers.txt", told.append)
    file = tmp_path / "servers.txt"
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="names no server"):
        Addresses(file, told.append)
    file.write_text("a:1\n\nb:2=3  # fast\n")
    addresses = Addresses(str(file), told.append)
    assert addresses.current == {"a:1": 1.0, "b:2": 3.0} and not addresses.changed()
    for text, current in (("c:3", {"c:3": 1.0}), ("c:3\nwhat", {"c:3": 1.0}), ("d:4", {"d:4": 1.0})):
        before = addresses.current
        file.write_text(text)
        os.utime(file, ns=(time.time_ns(), time.time_ns()))
        assert addresses.changed() == (current != before) and addresses.current == current
    stat = file.stat()
    file.write_text("e:4")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the clock of a file system may be coarse
    assert addresses.changed() and addresses.current == {"e:4": 1.0}
    for spoil in (lambda: file.write_bytes(b"\xff"), lambda: file.write_bytes(b""), file.unlink):
        spoil()
        assert not addresses.changed() and addresses.current == {"e:4": 1.0}
    assert [str(file) in line and line.endswith("until the file is right") for line in told] == [True] * 4


def test_addresses_are_no_part_of_what_a_run_is(server, second_server):
    described = [
        (of_options(env), of_reward(env), env.describe())
        for env in (
            make("math", servers=x)
            for x in (server.address, [second_server.address], {"address": server.address, "timeout": 5.0})
        )
    ]
    assert described[0] == described[1] == described[2]
    assert described[0][0]["RemoteEnvironment.name"] == "math"
    with pytest.raises(ValueError, match="the key 'adress' is unknown or missing"):
        make("math", servers={"adress": server.address})
    with pytest.raises(ValueError, match="timeout=0"):
        RemoteEnvironment(server.address, "math", timeout=0)


# --- tokens and certificates


def test_a_client_shows_a_token_and_a_certificate(tmp_path, capfd):
    files = certificates(tmp_path)
    (tmp_path / "token").write_text("correct-horse")
    (tmp_path / "wrong").write_text("battery-staple")
    for name in ("token", "wrong"):
        (tmp_path / name).chmod(0o600)
    tls = Tls(files["localhost.pem"], files["localhost.key"], files["ca.pem"])
    with running(OFFER, access=Access(token="correct-horse", tls=tls)) as server:
        address = server.address.replace("127.0.0.1", "localhost")
        needed = {"tls_ca": str(files["ca.pem"]), "tls_cert": str(files["trainer.pem"]), "tls_key": str(files["trainer.key"])}
        given = {"address": address, "patience": 0.2, **needed, "token_file": str(tmp_path / "token")}
        assert plain(play(make(SUM, servers=given), [{"start": 1}])) == plain(play(LockStep(Sum()), [{"start": 1}]))
        with pytest.raises(PermissionError, match=f"server {address}: this call has a wrong token"):
            make(SUM, servers=given | {"token_file": str(tmp_path / "wrong")})
        for missing in ("tls_ca", "tls_cert"):
            without = {key: x for key, x in given.items() if key not in (missing, "tls_cert", "tls_key", "token_file")}
            with pytest.raises(RuntimeError, match="no server of"):
                make(SUM, servers=without)
        assert "ssl_transport" not in capfd.readouterr().err  # gRPC's own lines
    for wrong, message in (
        ({"address": "node1:5", "token_file": str(tmp_path / "token")}, "would go to node1:5 unencrypted: give tls_ca"),
        ({"address": "a:1", "tls_cert": str(files["trainer.pem"])}, "tls_cert and tls_key belong together"),
        ({"address": "a:1", "tls_cert": "x", "tls_key": "y"}, "tls_cert needs tls_ca"),
    ):
        with pytest.raises(ValueError, match=message):
            make(SUM, servers=wrong)
    with pytest.raises(FileNotFoundError, match="there is no file missing.pem"):
        make(SUM, servers={"address": "a:1", "tls_ca": "missing.pem"})
