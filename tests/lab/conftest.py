"""Fixtures of the bench's tests."""

from __future__ import annotations

import pytest
from fake_sglang import FakeServer


@pytest.fixture
def fake_server() -> FakeServer:
    """A server that is not up yet: set it up, then `async with fake_server.up()`."""
    return FakeServer()
