"""The end of the channel between hosts: no thread of it may be inside torch when Python ends."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
from launches import eventually

from hapi.distributed.launch import channel as channel_module
from hapi.distributed.launch import run
from hapi.distributed.launch.channel import Channel
from hapi.distributed.launch.hosts import Hosts


class QuietJob:
    """A job that is told nothing."""

    signal, is_told, is_mine, hurry = None, False, True, False
    lost = ""

    def raise_if_told(self):
        pass

    def lose(self, what):
        self.lost = what


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def channel_of_one(port=None, keeps_store=True, watches=True):
    hosts = Hosts("127.0.0.1", port or free_port(), keeps_store, 1, 2, 0, "127.0.0.1")
    channel = Channel(hosts, QuietJob(), "x", watches, 20.0)
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


def channels_of_two(watches):
    port = free_port()
    keeper = channel_of_one(port, watches=watches)
    other = channel_of_one(port, keeps_store=False, watches=watches)
    eventually(lambda: keeper.count == 2 and other.number == 1, 20)
    return keeper, other


def leave(keeper, other):
    other.leave()
    keeper.leave()
    assert other.has_ended()
    assert keeper.has_ended()


def test_a_round_is_short_while_a_host_of_it_is_silent(monkeypatch):
    monkeypatch.setattr(channel_module, "LOST_AFTER", 1.0)
    keeper, other = channels_of_two(watches=False)
    monkeypatch.setattr(other, "_turn", lambda: None)
    eventually(lambda: 1 in keeper._gone, 20)
    assert not keeper.is_short(), "the silent one is in no round"
    # The round may begin after the loss: nobody is asked who has been in it.
    keeper.begin_round([0, 1])
    assert keeper.is_short()
    monkeypatch.undo()
    eventually(lambda: not keeper.is_short(), 20, "it was only slow")
    other.leave()
    eventually(keeper.is_short, 20, "it has left")
    keeper.begin_round([0])
    assert not keeper.is_short()
    keeper.leave()
    assert other.has_ended() and keeper.has_ended()


def test_a_job_that_needs_all_hosts_ends_with_the_first_that_is_silent(monkeypatch):
    monkeypatch.setattr(channel_module, "LOST_AFTER", 1.0)
    keeper, other = channels_of_two(watches=True)
    keeper.begin_round([0, 1])
    monkeypatch.setattr(other, "_turn", lambda: None)
    eventually(lambda: "no sign of life" in keeper._job.lost, 20)
    assert not keeper.is_short()
    monkeypatch.undo()
    leave(keeper, other)


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
