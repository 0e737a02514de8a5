"""The two hosts, for tests that ask for them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from namespaces import Hosts, NotPermittedError


@pytest.fixture(scope="module")
def hosts():
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts())
        except NotPermittedError as error:
            pytest.skip(f"not permitted on this machine: {error}")
        yield made
