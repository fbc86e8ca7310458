"""What a process exchanges that is alone. What several give each other is in `exchanging.py`."""

from __future__ import annotations

from jmarl.processes import exchange


def test_a_single_process_exchanges_nothing() -> None:
    assert exchange.gather(lambda: 3) == [3] and exchange.from_first(lambda: "a") == "a"
    assert exchange.share(5) == slice(0, 5) and exchange.is_first() and not exchange.any_of(False)
    assert exchange.take() == {}
