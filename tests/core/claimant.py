"""Claims a directory and says where it may write; then obeys lines of its input: ``fork`` (a child that holds what it inherits, behind
Python's back), ``child`` (another claimant, whose answer is printed), ``release``, ``claim``, ``end``.
Arguments: directory, rank (``-``: none)."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time

from msprobe_engine.core.io.claims import claim_directory
from msprobe_engine.core.process.processes import OWNER


def main() -> None:
    root, rank = sys.argv[1:3]
    claim = claim_directory(root, None if rank == "-" else int(rank), by_process=True)
    print(json.dumps({"pid": os.getpid(), "path": str(claim.path), "owner": os.environ.get(OWNER)}), flush=True)
    for line in sys.stdin:
        if line.strip() == "fork":
            if not ctypes.CDLL(None).fork():
                os.closerange(0, 3)
                time.sleep(60)
                os._exit(0)
            print("{}", flush=True)
        elif line.strip() == "python fork":
            if not (pid := os.fork()):
                print(
                    json.dumps({"path": str(claim_directory(root, None if rank == "-" else int(rank), by_process=True).path)}), flush=True
                )
                os._exit(0)
            os.waitpid(pid, 0)
        elif line.strip() == "child":
            done = subprocess.run([sys.executable, __file__, root, rank], input="end\n", capture_output=True, text=True, check=True)
            print(done.stdout.strip(), flush=True)
        elif line.strip() == "claim":
            claim = claim_directory(root, None if rank == "-" else int(rank), by_process=True)
            print(json.dumps({"path": str(claim.path)}), flush=True)
        elif line.strip() == "release":
            claim.release()
            print(json.dumps({"owner": os.environ.get(OWNER)}), flush=True)
        else:
            break


if __name__ == "__main__":
    main()
