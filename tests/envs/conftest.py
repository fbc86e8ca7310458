"""Fixtures of the tests of environments."""

from __future__ import annotations

import pytest

from jmarl.sandbox import SandboxUnavailable, default_sandbox


@pytest.fixture(scope="module")
def needs_sandbox():
    """Skip where this machine has no sandbox."""
    try:
        default_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox: {error}")


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Data sets are cached in a directory of the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
