"""Launch lines of unchanged scripts. Ranks are forked from a process that has imported what scripts import (`launch_server`), which takes a
fourth of the time of torchrun; `torchrun` is the launcher itself."""

from __future__ import annotations

import atexit
import csv
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "megatron"


def launch(
    script: str, arguments: list[str], *, ranks: int = 2, probe: Path | None = None, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `script` on some ranks.

    Args:
        probe: settings file; without one the script runs alone.
        path: comes first on the path of imports.
    """
    arguments = [script, *(["--msprobe-config", str(probe)] if probe else []), *arguments]
    with tempfile.TemporaryDirectory() as output:
        request = {"ranks": ranks, "arguments": arguments, "path": path, "probe": probe is not None, "output": output}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of launches has ended; what it said is above"
        codes = json.loads(answer)
        out, err = (Path(output, name).read_text() for name in ("stdout", "stderr"))
    ends = "".join(f"rank {rank} exitcode : {code}\n" for rank, code in enumerate(codes))
    return subprocess.CompletedProcess(arguments, int(any(codes)), out, err + ends if any(codes) else err)


def torchrun(
    script: str, arguments: list[str], *, ranks: int = 2, probe: Path | None = None, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """The same with the launcher of torch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += ["-m", "msprobe_integrations.megatron", script, "--msprobe-config", str(probe)] if probe else [script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in (path, str(ROOT)) if p)}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=150, check=False)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, or when that is gone: its stdin is a pipe from here."""
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("launch_server.py")), os.environ.get("MCORE19_ENVIRONMENT", "")]
    server = subprocess.Popen(command, env={**os.environ, **fixed}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def rows(tmp_path: Path, family: str, rank: int) -> list[dict[str, str]]:
    """Rows of the CSV files of a family that a rank has written."""
    (file,) = (tmp_path / "out" / "monitor").glob(f"*rank{rank}*/{family}_*.csv")
    with file.open() as stream:
        return list(csv.DictReader(stream))
