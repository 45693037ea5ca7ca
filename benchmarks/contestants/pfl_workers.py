"""Several workers of pfl-research in a race: `python pfl_workers.py WORKERS JOB THREADS`. The first takes the turns."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path


def main(workers: str, *arguments: str) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(int(workers))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    command = [sys.executable, str(Path(__file__).with_name("pfl_contestant.py")), *arguments]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(int(workers))
    ]
    processes[0].wait()
    for process in processes[1:]:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
