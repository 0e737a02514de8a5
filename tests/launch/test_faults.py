"""A fault of one rank while another waits for it in a collective: who is blamed, and how soon all is over."""

from __future__ import annotations

import pytest
from launches import Launch, eventually, is_gone

SCRIPT = """
    import datetime, os, signal, sys, time
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    open(f"pid{rank}", "w").write(str(os.getpid()))
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 1:
        time.sleep(0.2)
        open("fault", "w").write(str(time.time()))
        FAULT
    dist.all_reduce(total)
"""
# The group's timeout and the grace for one that is stopped. The machine may be busy.
FAULTS = {
    "raise ValueError('boom')": (1, 9.0),
    "os._exit(3)": (3, 6.0),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, 6.0),
    "os.kill(os.getpid(), signal.SIGSTOP)": (1, 14.0),
}


# One that is stopped ends by timeouts alone, which are waited for.
@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] if "STOP" in f else []) for f in FAULTS])
def test_fault_in_a_collective(tmp_path, fault, record_property):
    code, limit = FAULTS[fault]
    launch = Launch(tmp_path, SCRIPT.replace("FAULT", fault), "--nproc_per_node", "2")
    assert launch.wait() == code, launch.err
    seconds = launch.since("fault")
    record_property("seconds", round(seconds, 2))
    print(f"{fault}: {seconds:.2f} s, exit code {code}")
    assert seconds < limit
    if "STOP" in fault:
        assert "rank 1 is stopped (SIGSTOP)" in launch.err
    else:
        assert "rank 1 on" in launch.err
    assert launch.err.count("ValueError: boom") == (2 if "boom" in fault else 0)
    assert launch.err.count("Traceback") == (1 if "boom" in fault else 0)
    assert all(eventually(lambda rank=rank: is_gone(int(launch.until(f"pid{rank}"))), 1) for rank in range(2))
