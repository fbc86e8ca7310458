"""A server for a module of tests."""

from __future__ import annotations

import pytest

import jmarl.remote  # noqa: F401  before gRPC, which it makes silent
from tests.remote.served import running


@pytest.fixture(scope="module")
def server(request):
    """A server of what the module calls OFFER."""
    with running(request.module.OFFER) as server:
        yield server


@pytest.fixture
def short_waits(monkeypatch):
    """Clients ask servers that were put aside again at once."""
    monkeypatch.setattr("jmarl.remote.client.servers.ASIDE_SECONDS", 0.02)
