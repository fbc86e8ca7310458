"""Who is sampled when: agents in one program, requests in their order, pools of long prompts with fewer slots."""

import pytest

from jmarl.config import TrainConfig
from jmarl.models.hub.tokenize import encode_prompt
from jmarl.serving.engine import SamplingEngine
from jmarl.serving.errors import HttpRefusal
from jmarl.serving.records import SamplingRequest, Size
from jmarl.types import TRACES

MESSAGES = [{"role": "user", "content": "What is the answer?"}]
SAMPLING = TrainConfig.of(max_new_tokens=24).sampling
LIMIT, LONGEST, SLOTS = 24, 60, 4


@pytest.fixture(scope="module")
def new_engine(team, params):
    """A function that makes an engine whose thread is not started; all have the same programs.

    Its prompts are long for it: a pool has 4 of the 8 slots.
    """
    programs = {}

    def new(**settings):
        engine = SamplingEngine(team, params, SAMPLING, slots=2 * SLOTS, say=lambda line: None, **settings)
        engine.programs = programs
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jmarl.serving.engine.SLOT_TOKENS", 96)
        size = new().size_of(0, 64, LONGEST)
        assert new().slots_of(size) == SLOTS
        new().compile(size).result()
        yield new


@pytest.fixture(scope="module")
def ids(team):
    return encode_prompt(team.stacks[0].tokenizer, MESSAGES, True)


def test_requests_of_all_agents_are_sampled_in_one_program(new_engine, ids):
    before, engine, updates, calls = dict(TRACES), new_engine(), {}, {}
    for agents in ([0], [1], [0, 1]):
        for agent in agents:
            engine.submit(SamplingRequest(agent, ids, LIMIT, 7, updates.setdefault((len(agents), agent), []).append))
        start = engine.calls
        while engine.turn():
            pass
        calls[tuple(agents)] = engine.calls - start
    assert calls[0, 1] == max(calls[(0,)], calls[(1,)])
    assert updates[2, 0] == updates[1, 0] and updates[2, 1] == updates[1, 1]
    assert engine.pools == {} and dict(TRACES) == before


def test_requests_of_an_agent_do_not_overtake_each_other(new_engine, ids):
    engine, updates = new_engine(), []
    requests = [SamplingRequest(agent, ids, LONGEST, 1, updates.append, n) for agent, n in ((1, 3), (1, 2), (1, 1), (0, 1))]
    for request in requests:
        engine.submit(request)
    engine.turn()
    assert engine.waiting == requests[1:3] and engine.num_rows() >= 3
    requests[1].cancel()  # its client has gone before it had a slot
    engine.turn()
    assert engine.waiting == []
    while engine.turn():
        pass
    assert sum(update.last for update in updates) == 5 and not engine.pools


def test_pools_of_long_prompts_have_fewer_slots(new_engine):
    engine = new_engine()
    assert engine.size_of(1, 64, 1) == (0, 64, 128) and engine.size_of(0, 65, 60) == (0, 128, 128)  # 128: the context
    slots = [engine.slots_of(Size(0, width, 32)) for width in (32, 96, 224, 4096)]
    assert slots == [8, 6, 3, 1]


def test_full_says_how_many_wait(new_engine):
    engine = new_engine(max_waiting=1)
    engine.submit(SamplingRequest(0, [1], 1, 0, print))
    with pytest.raises(HttpRefusal, match="1 requests wait") as error:
        engine.submit(SamplingRequest(0, [1], 1, 0, print))
    assert error.value.status_code == 429


def test_an_engine_whose_turns_all_fail_ends(new_engine, ids):
    engine, answers = new_engine(), []
    engine.compiler.shutdown()
    engine.submit(SamplingRequest(0, [*ids] * 3, LIMIT, 1, answers.append))  # for whose size there is no program yet
    engine.run()
    assert [answer.status_code for answer in answers] == [503] and "after shutdown" in str(engine.failure)


def test_requests_get_an_answer_when_the_engine_ends(new_engine, ids):
    engine, answers = new_engine(), []
    for n in (SLOTS, 1):
        engine.submit(SamplingRequest(1, ids, LONGEST, 1, answers.append, n))
    engine.turn()
    engine.submit(SamplingRequest(1, ids, LONGEST, 1, answers.append))
    engine.end()
    engine.run()
    assert [answer.status_code for answer in answers if isinstance(answer, HttpRefusal)] == [503] * 3
    with pytest.raises(HttpRefusal, match="stopping"):
        engine.submit(SamplingRequest(0, ids, LIMIT, 1, print))
