"""Processes meet before JAX connects them: all go on, or each one ends within the time-out with a sentence."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from jmarl.processes import meeting
from jmarl.processes.launch import free_port
from jmarl.processes.place import Place


def results(*places, timeout=5.0, lines=None):
    """What each place returns or raises."""

    def one(place):
        try:
            return meeting.meet(place, timeout, (lines if lines is not None else []).append)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, places))


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def test_all_go_on_once_all_are_there(address):
    assert results(*(Place(address, i, 3) for i in (2, 0, 1))) == ["127.0.0.1"] * 3


def test_the_sentence_says_who_is_missing_where_and_what_to_check(address):
    first, third = results(Place(address, 0, 4), Place(address, 2, 4), timeout=0.3)
    for text in (first, third):
        assert f"only 2 of 4 processes are there (missing: 1, 3) at {address} within 0 s" in text or "others did not" in text
    assert "127.0.0.1, which only processes of the same host reach; see whether all processes run" in first


def test_a_coordinator_that_is_not_there_is_one_sentence_with_lines_meanwhile(address, monkeypatch):
    monkeypatch.setattr(meeting, "EVERY", 0.1)
    lines = []
    (text,) = results(Place(address, 1, 2), timeout=0.45, lines=lines)
    assert text.startswith(f"process 1 of 2 did not reach process 0 at {address} within 0 s (Connection refused): ")
    assert len(lines) >= 2 and lines[0].startswith(
        f"process 1 of 2 waits for process 0 at {address} (Connection refused) for 0 s"
    )
    (text,) = results(Place("no-such-host.invalid:1", 1, 2), timeout=0.1)
    assert "the name no-such-host.invalid is not known on this host" in text


def test_processes_that_disagree_say_so(address):
    first, second = results(Place(address, 0, 2), Place(address, 1, 3))
    assert first == "process 0 is one of 2 processes, and process 1 says that there are 3"
    assert second == "process 1 of 3: process 0 is one of 2"
    texts = results(Place(address, 0, 3), Place(address, 1, 3), Place(address, 1, 3))
    assert texts[0] == "two processes say that they are process 1 of 3"


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        (text,) = results(Place(f"127.0.0.1:{port}", 0, 2))
    assert text == f"process 0 cannot listen at port {port}: Address already in use; choose another port"


def test_others_that_knock_are_ignored(address):
    host, port = address.split(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meeting.meet, Place(address, 0, 2), 5.0, print)
        for text in (b"GET / HTTP/1.0\r\n\r\n", b""):
            for _ in range(50):
                try:
                    with socket.create_connection((host, int(port))) as guest:
                        guest.sendall(text)
                    break
                except ConnectionRefusedError:
                    continue
        assert results(Place(address, 1, 2)) == ["127.0.0.1"] == [first.result()]
