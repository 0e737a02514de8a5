"""Fixtures that several test files share, and the account of skipped tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Small tensors gain nothing from threads, and several processes of one test share the machine's cores. Set before
# torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SKIPS_FAIL = bool(os.environ.get("HAPI_NO_SKIPS"))


@pytest.fixture(scope="session")
def data_home() -> Path:
    """The folder of the full MNIST, Fashion-MNIST and CIFAR-10; the test skips where it is not at hand."""
    folder = os.environ.get("HAPI_DATA_HOME")
    if not folder:
        pytest.skip("needs the full data sets: set HAPI_DATA_HOME to a torchvision root that holds them")
    return Path(folder)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    # Joining a process group sets variables (such as GLOO_SOCKET_IFNAME) that would steer every later one.
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_if_skipped((yield))


def _fail_if_skipped(report):
    # .ci/run sets HAPI_NO_SKIPS where all data is at hand: there a skip hides what should have been tested.
    if _SKIPS_FAIL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\n(a skip is a failure, since HAPI_NO_SKIPS is set)"
    return report
