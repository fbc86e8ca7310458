"""What the tests of CoMLRL's trainers share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Change to a temporary directory, because trainers write below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def model(tiny_dir) -> str:
    return str(tiny_dir("llama"))
