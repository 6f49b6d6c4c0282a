"""What one rank does to the shared file system: creates, renames, directories, opens and bytes, counted by strace, per step and incident.

    python benchmarks/file_operations.py
    python benchmarks/file_operations.py --show incident

Two ranks train a small network with data parallelism; rank 1 runs under strace. Only what is below the output directory counts: that is
what lies on the file system of the training. Steps are told apart by a question for a file that is not there. In one step all calls
are dumped, and in one the loss of rank 0 is no number, which is an incident with its ring and capture. The files that are made of what all
ranks say of it are counted apart: in a job of thousands few ranks write them.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, DUMPED, NAN = 40, 12, 24
MARK = "/msprobe-step-"
WORKER = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from msprobe_integrations.torch.monitor.probe import TorchProbe

rank, init, config, steps, nan = int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), int(sys.argv[5])
os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
probe = TorchProbe.from_config(config)
probe.attach(model, optimizer)
for step in range(steps):
    os.access(f"/msprobe-step-{step}", os.F_OK)
    probe.begin_step(step)
    loss = model(torch.randn(4, 32) + step / steps).square().mean() * (float("nan") if step == nan and rank == 0 else 1.0)
    loss.backward()
    if step != nan:
        optimizer.step()
    optimizer.zero_grad()
    probe.end_step({"loss": loss.detach()})
    dist.barrier()
    import time; time.sleep(0.05)
os.access(f"/msprobe-step-{steps}", os.F_OK)
probe.close()
"""
CONFIG = """
output_dir: {output}
monitor: {{gradients: true, parameters: true, updates: true, optimizer_states: true, replica_check: {{interval: 5}}}}
dump: {{level: mix, step: [{dumped}]}}
rules: [{{rule: recommended}}]
sinks: {{csv: {{enabled: true}}, {sinks}}}
incident: {{enabled: true, ring_steps: 2, level: "{level}"}}
"""
_CALL = re.compile(r"(?:\[pid +\d+\] )?(\d+ +)?(\w+)\((.*)$")
_KINDS = {"rename": "rename", "renameat": "rename", "renameat2": "rename", "mkdir": "mkdir", "mkdirat": "mkdir", "unlink": "unlink"}
_KINDS |= {"unlinkat": "unlink", "rmdir": "unlink", "link": "rename", "linkat": "rename", "symlink": "create", "symlinkat": "create"}
_MERGED = re.compile(r"/(\.?incident\.json|\.?summary\.md)")
_PATH = re.compile(r'<(/[^>]*)>|"(/[^"]*)"')
_SIZE = re.compile(r"st_size=(\d+)")
_LOOKS = (
    "stat", "fstat", "newfstatat", "lstat", "access", "faccessat", "faccessat2", "readlink", "readlinkat", "statx", "statfs", "utimensat",
)  # fmt: skip
_WRITES = ("write", "pwrite64", "writev", "ftruncate")
COLUMNS = ("create", "rename", "mkdir", "unlink", "open", "look", "write", "bytes")


def classify(line: str, output: str) -> tuple[str, int] | None:
    """What a line of strace does below `output`, and the bytes that it writes."""
    call = _CALL.match(line)
    if call is None or output not in line:
        return None
    name, arguments = call[2], call[3]
    if "= -1" in line and name not in _LOOKS:
        return "look", 0
    if name in ("open", "openat", "creat"):
        return ("create" if "O_CREAT" in arguments else "open"), 0
    if name in _WRITES:
        size = line.rsplit("= ", 1)[-1].split()[0]
        return "write", int(size) if size.isdecimal() else 0
    return ("look", 0) if name in _LOOKS else (_KINDS[name], 0) if name in _KINDS else None


def run(sinks: str, level: str) -> dict[str, collections.Counter[str]]:
    """Operations by part of the run, and the lines of each part."""
    with tempfile.TemporaryDirectory() as place:
        output, log = Path(place, "out"), Path(place, "strace")
        Path(place, "config.yaml").write_text(CONFIG.format(output=output, dumped=DUMPED, sinks=sinks, level=level))
        Path(place, "worker.py").write_text(WORKER)
        arguments = [f"{place}/init", f"{place}/config.yaml", str(STEPS), str(NAN)]
        traced = ["strace", "-f", "-y", "-s", "256", "-e", "trace=%file,%desc", "-o", str(log)]
        worker = [sys.executable, f"{place}/worker.py"]
        with subprocess.Popen([*worker, "0", *arguments]), subprocess.Popen([*traced, *worker, "1", *arguments]):
            pass
        return count(log.read_text(errors="replace").splitlines(), str(output))


def count(lines: list[str], output: str) -> dict[str, collections.Counter[str]]:
    """Operations by part of the run: ``start``, ``step``, ``dumped step``, ``incident``, ``end``; a part's lines are under ``lines``."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    part = "start"
    known: set[str] = set()
    for line in lines:
        if MARK in line:
            step = int(line.split(MARK)[1].split('"')[0])
            part = part_of(step)
            found[part]["steps"] += 1
        elif (what := classify(line, output)) is not None:
            kind, path = what[0], _path(line)
            where = "its merged files" if _MERGED.search(path) else part
            if kind == "create":
                kind = "open" if path in known and "O_EXCL" not in line else "create"
                known.add(path)
            elif kind == "look" and path + " size" not in known and path in known and (size := _SIZE.search(line)):
                known.add(path + " size")
                if int(size[1]) and "O_EXCL" not in line:  # it was there: another rank has made it, this one appends
                    found[where].update({"create": -1, "open": 1})
            if kind in ("write", "rename"):
                known.add(path + " size")
            found[where][kind] += 1
            found[where]["bytes"] += what[1]
            found[where + " lines"][line.split(" ", 1)[-1].replace(output, "")[:160]] += 1
    return found


def _path(line: str) -> str:
    """The file that a call is about: of what is open, or by its name."""
    return next((path for hit in _PATH.finditer(line.replace("AT_FDCWD<", "<x")) if (path := hit[1] or hit[2])), "")


def part_of(step: int) -> str:
    """The frame of a step comes a step later, and an incident goes on until its capture is written."""
    if step >= STEPS:
        return "end"
    if step < 4:
        return "start"
    if DUMPED <= step < DUMPED + 3:
        return "dumped step"
    return "incident" if NAN <= step < NAN + 8 else "step"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sinks", default="prometheus: {enabled: true, port: 0}", help="of the settings, beside CSV")
    parser.add_argument("--show", help="print the calls of this part")
    parser.add_argument("--level", default="", choices=("", "L0", "L1", "mix"), help="calls in the ring of an incident")
    options = parser.parse_args()
    found = run(options.sinks, options.level)
    print(f"{'part':<18}" + "".join(f"{name:>9}" for name in COLUMNS))
    for part in ("start", "step", "dumped step", "incident", "its merged files", "end"):
        counts = found[part]
        share = counts["steps"] if part == "step" else 1
        print(f"{part:<18}" + "".join(f"{counts[name] / max(1, share):9.1f}" for name in COLUMNS))
    if options.show:
        for line, times in found[options.show + " lines"].most_common(200):
            print(f"{times:5} {line}")


if __name__ == "__main__":
    main()
