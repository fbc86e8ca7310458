"""Open a page in Chromium, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=8000",
]  # fmt: skip
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def dom(page: Path | str, profile: Path, *flags: str) -> str:
    """Return the HTML of a page after its scripts ran, without the scripts. page: a file or an address."""
    address = page.resolve().as_uri() if isinstance(page, Path) else page
    command = [str(CHROMIUM), *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", address]
    html = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
