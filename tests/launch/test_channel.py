"""The end of the channel between hosts: no thread of it may be inside torch when Python ends."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from hapi.distributed.launch import run
from hapi.distributed.launch.channel import Channel
from hapi.distributed.launch.hosts import Hosts


class QuietJob:
    """A job that is told nothing."""

    signal, is_told, is_mine, hurry = None, False, True, False

    def raise_if_told(self):
        pass


def channel_of_one():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    channel = Channel(Hosts("127.0.0.1", port, True, 1, 2, 0, "127.0.0.1"), QuietJob(), "x", True, 20.0)
    channel.gather(1)
    return channel


def channel_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hapi-channel")]


def test_its_threads_end_when_it_is_left():
    channel = channel_of_one()
    assert len(channel_threads()) == 2
    channel.leave()
    assert channel.has_ended()
    assert channel_threads() == []


def test_a_thread_that_is_caught_is_told_of(monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(Channel, "_look_at", lambda self, number: let_go.wait(30))
    channel = channel_of_one()
    assert not channel.has_ended()
    let_go.set()
    assert channel.has_ended()


@pytest.mark.parametrize(("has_ended", "left_at_once"), [(True, []), (False, [7])])
def test_the_launcher_ends_at_once_where_a_thread_is_caught(monkeypatch, has_ended, left_at_once):
    left = []
    channel = SimpleNamespace(has_ended=lambda: has_ended)
    monkeypatch.setattr(run, "_Run", lambda *parts: SimpleNamespace(go=lambda: 7, channel=channel))
    monkeypatch.setattr(run, "_quieten_torch", lambda: None)
    monkeypatch.setattr(run, "place", lambda *given: SimpleNamespace(environment={}, processes=1))
    monkeypatch.setattr(run, "find_hosts", lambda options: None)
    monkeypatch.setattr(run, "WorkerLogs", lambda *given: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(run.os, "_exit", left.append)
    options = SimpleNamespace(devices=None, processes=1, log_dir="log")
    assert run.run(options) == 7
    assert left == left_at_once
