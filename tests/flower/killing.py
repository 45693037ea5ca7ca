"""Kill a process of a federation as a power cut would."""

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill(processes, name):
    """Kill a process and its children at once."""
    process = processes.started[name]
    for pid in family(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def family(pid):
    """A process, its children, grandchildren and so on."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        children = []
    return [pid, *(each for child in children for each in family(int(child)))]
