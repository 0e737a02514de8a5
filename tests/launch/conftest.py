"""The two hosts, for tests that ask for them."""

from __future__ import annotations

import pytest
import two_hosts


@pytest.fixture(scope="module")
def hosts():
    with two_hosts.made():
        yield
