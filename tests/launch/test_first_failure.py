"""Who failed first, and what is said about it."""

from __future__ import annotations

import json

from hapi.distributed.launch.failures import Failure, describe, first_of, ranges, read_error, tail_of, was_caused


def failure(rank, message="", code=1, time=0.0, host="h0", **fields):
    traceback = f"Traceback\n{message}" if message else ""
    return Failure(rank, host, code, time, message, fields.pop("traceback", traceback), **fields)


def test_time_decides_between_faults():
    assert first_of([failure(0, "ValueError: a", time=2.0), failure(1, "ValueError: b", time=1.9)]).rank == 1
    assert first_of([failure(0, code=3, time=2.0), failure(1, code=-9, time=1.9)]).status == 137
    assert first_of([]) is None


def test_who_lost_the_connection_is_never_the_cause():
    for message in (
        "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5123",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0",
        "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1",
        "RuntimeError: Timed out waiting 6000ms for recv operation to complete",
        "RuntimeError: Broken pipe",
    ):
        assert first_of([failure(0, message, time=1.0), failure(1, "KeyError: 'x'", time=9.0)]).rank == 1
        assert first_of([failure(0, message, time=1.0), failure(1, code=3, time=9.0)]).status == 3
        assert first_of([failure(0, message, time=1.0), failure(1, message, time=2.0)]).rank == 0


def test_a_stop_that_was_asked_for_is_no_fault(tmp_path):
    assert was_caused(None)
    assert was_caused({"type": "KeyboardInterrupt"})
    assert not was_caused({"type": "ValueError"})


def test_error_files(tmp_path):
    path = tmp_path / "error.json"
    assert read_error(path) is None
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "ValueError: torch's own", "extraInfo": extra}}))
    assert read_error(path)["message"] == "ValueError: torch's own"
    path.write_text(json.dumps({"message": "a text"}))
    assert read_error(path)["traceback"] == "a text"
    path.write_text("{")
    assert "cannot be read" in read_error(path)["message"]


def test_failures_travel():
    sent = failure(3, "ValueError: ü", notes=("rank 1 is stopped (SIGSTOP)",), log="log/workerlog.3", tail="t")
    assert Failure.from_json(sent.to_json()) == sent


def test_the_report():
    first = failure(2, "ValueError: boom", log="log/workerlog.2")
    others = [failure(rank, "ValueError: boom") for rank in (0, 1, 3)]
    other = failure(5, "KeyError: 'y'")
    lost = failure(4, "RuntimeError: Connection closed by peer")
    text = describe(first, [*others, first, lost, other], already_shown=False)
    assert text.splitlines() == [
        "rank 2 on h0 raised ValueError: boom",
        "Traceback",
        "ValueError: boom",
        "The same on ranks 0-1, 3.",
        "rank 5 on h0 raised KeyError: 'y'",
        "All that rank 2 wrote: log/workerlog.2",
    ]
    assert "Traceback\n" not in describe(first, [first], already_shown=True)
    killed = failure(1, code=-9, log="log/workerlog.1", tail="a\nb", notes=("note",))
    assert describe(killed, [killed], already_shown=False).splitlines() == [
        "rank 1 on h0 was ended by SIGKILL (the system does that where memory runs out)",
        "note",
        "The last lines of log/workerlog.1:",
        "  a",
        "  b",
        "All that rank 1 wrote: log/workerlog.1",
    ]


def test_ranges():
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_the_tail_of_a_log(tmp_path):
    log = tmp_path / "workerlog.1"
    assert tail_of(log) == "" == tail_of(None)
    log.write_bytes(b"\xff" * 20000 + b"\n" + b"".join(b"line %d\n" % i for i in range(100)) + b"\rbar 1\rbar 2\n\n")
    assert tail_of(log).splitlines()[-4:] == ["line 98", "line 99", "bar 1", "bar 2"] or "bar 2" in tail_of(log)
    assert len(tail_of(log).splitlines()) == 20
