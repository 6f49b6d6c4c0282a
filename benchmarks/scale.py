"""CPU seconds, memory and output of the commands, by the number of ranks of the run that they look at.

A real run of 8 ranks (megatron-core on the CPU) is repeated to N ranks; every command looks at it in a process of its own. Memory is the
largest sum of the resident sets of that process and its children; the exponent is that of CPU seconds between two neighbouring numbers of
ranks (1: linear). A command that is not done after `--limit` CPU seconds is stopped, and not tried with more ranks.

    python benchmarks/scale.py --ranks 8 64 --scratch /tmp/scale
    python benchmarks/scale.py --ranks 64 512 1024 --only "diagnose, one bad rank" --only nan_analyze
    python benchmarks/scale.py --ranks 512 4096 --only "incident, merged once" --json figures.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import scale_runs as runs

SAMPLE_SECONDS = 0.05
Prepare = Callable[[Path, Path, int], Path]
"""(run of eight, directory to make, ranks) -> what was made."""


@dataclass(frozen=True)
class Figures:
    """Of one command and number of ranks.

    Attributes:
        code: exit code; negative: ended by that signal.
        written: bytes of files.
        longest: characters of the longest line on the console.
    """

    case: str
    ranks: int
    code: int
    cpu_seconds: float
    memory_mib: float
    written: int
    lines: int
    longest: int


class Artifacts:
    """What commands look at: made when it is asked for first, once for each number of ranks."""

    def __init__(self, base: Path, scratch: Path, ranks: int) -> None:
        self.base, self.scratch, self.ranks = base, scratch / str(ranks), ranks

    def path(self, name: str) -> Path:
        path = self.scratch / name
        if not path.exists():
            MADE[name](self.base, path, self.ranks)
        return path

    def output(self, name: str) -> Path:
        path = self.scratch / "output" / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


MADE: dict[str, Prepare] = {
    "right": runs.replicate_dump,
    "one bad rank": lambda base, path, ranks: runs.replicate_dump(base, path, ranks, runs.larger_on_one),
    "fault on all": lambda base, path, ranks: runs.replicate_dump(base, path, ranks, runs.larger_output),
    "nan": lambda base, path, ranks: runs.replicate_dump(base, path, ranks, runs.nan_on_one),
    "monitor": runs.replicate_monitor,
    "incident": runs.replicate_incident,
}
Case = Callable[[Artifacts, Path], None]
"""(what there is, directory for output): runs in the process that is measured."""


def command(*words: str) -> Case:
    """A command line; ``@name`` is a thing of `MADE`, ``OUT`` the directory for output."""

    def run(artifacts: Artifacts, output: Path) -> None:
        from msprobe_engine.cli.main import main

        places = [str(artifacts.path(word[1:])) if word.startswith("@") else str(output) if word == "OUT" else word for word in words]
        sys.exit(main(places))

    return run


def merge_incident(artifacts: Artifacts, output: Path) -> None:
    """Put the files of all ranks together, once."""
    from msprobe_engine.probe.incident.merge import merge

    merge(artifacts.path("incident"))
    for name in ("incident.json", "summary.md"):
        (artifacts.path("incident") / name).rename(output / name)


def finish_incident(artifacts: Artifacts, output: Path) -> None:
    """All ranks finish their files one after another, and merge when it is their turn."""
    from msprobe_engine.probe.incident.files import rank_file
    from msprobe_engine.probe.incident.merge import finish

    for rank in range(artifacts.ranks):
        os.link(rank_file(artifacts.path("incident"), rank), rank_file(output, rank))
        finish(output, rank, artifacts.ranks)


def write_pack(artifacts: Artifacts, output: Path) -> None:
    runs.write_pack(artifacts.base, output / "pack.zip", artifacts.ranks)


CASES: dict[str, Case] = {
    "diagnose, alone": command("diagnose", "@right", "-o", "OUT"),
    "diagnose, one bad rank": command("diagnose", "@one bad rank", "@right", "-o", "OUT"),
    "diagnose, fault on all": command("diagnose", "@fault on all", "@right", "-o", "OUT"),
    "nan_analyze": command("nan_analyze", "-i", "@nan", "-o", "OUT"),
    "compare": command("compare", "-tp", "@one bad rank", "-gp", "@right", "-o", "OUT"),
    "graph": command("graph", "@right", "-o", "OUT", "--format", "html"),
    "graph, two runs": command("graph", "@one bad rank", "@right", "-o", "OUT", "--format", "html"),
    "graph, merged": command("graph", "@right", "-o", "OUT", "--format", "html", "--merge", "auto"),
    "monitor analyze": command("monitor", "analyze", "@monitor", "-o", "OUT"),
    "diagnose, monitor": command("diagnose", "@monitor", "-o", "OUT"),
    "incident, merged once": merge_incident,
    "incident, all ranks": finish_incident,
    "config pack, all ranks": write_pack,
}


def measure(name: str, artifacts: Artifacts, limit: float) -> Figures:
    """Run one case in a process of its own."""
    for word in _needed(name):
        artifacts.path(word)
    output = artifacts.output(name)
    with tempfile.TemporaryFile() as console:
        pid = os.fork()
        if not pid:
            _child(CASES[name], artifacts, output, console.fileno())
        peak, status, usage = 0.0, 0, None
        while usage is None:
            peak = max(peak, _resident(pid))
            if _cpu_seconds(pid) > limit:
                os.killpg(pid, signal.SIGKILL)
            done, status, spent = os.wait4(pid, os.WNOHANG)
            usage = spent if done else None
            time.sleep(0 if usage else SAMPLE_SECONDS)
        console.seek(0)
        lines = console.read().splitlines()
    written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    shutil.rmtree(output)
    cpu, longest = usage.ru_utime + usage.ru_stime, max(map(len, lines), default=0)
    return Figures(
        name, artifacts.ranks, os.waitstatus_to_exitcode(status), round(cpu, 2), round(peak / 2**20, 1), written, len(lines), longest
    )


def _needed(name: str) -> list[str]:
    """Things of `MADE` that a case looks at."""
    if CASES[name] in (merge_incident, finish_incident):
        return ["incident"]
    closure = getattr(CASES[name], "__closure__", None) or ()
    return [word[1:] for cell in closure for word in cell.cell_contents if word.startswith("@")]


def _child(case: Case, artifacts: Artifacts, output: Path, console: int) -> None:
    code = 4
    try:
        os.setpgid(0, 0)
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.chdir(output)
        case(artifacts, output)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _processes(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _processes(int(child))


def _resident(pid: int) -> int:
    """Bytes that a process and its children hold, a page that several share once for each."""
    pages = 0
    for process in _processes(pid):
        with contextlib.suppress(OSError, IndexError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_seconds(pid: int) -> float:
    ticks = 0
    for process in _processes(pid):
        with contextlib.suppress(OSError, IndexError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def exponent(small: Figures, large: Figures) -> float:
    """Of CPU seconds, between two numbers of ranks."""
    return math.log(max(large.cpu_seconds, 1e-3) / max(small.cpu_seconds, 1e-3)) / math.log(large.ranks / small.ranks)


def line(now: Figures, before: Figures | None) -> str:
    power = f"{exponent(before, now):8.2f}" if before else " " * 8
    return (
        f"{now.case:24}{now.ranks:7,}{now.code:6}{now.cpu_seconds:10.1f}{now.memory_mib:10,.0f}{power}"
        f"{now.written / 1e6:12,.2f}{now.lines:8,}{now.longest:9,}"
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="numbers of ranks, multiples of 8, ascending")
    parser.add_argument("--only", action="append", choices=list(CASES), help="a case; may be given again; default: all")
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds of one case and number of ranks")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "msprobe_scale", help="2 MB a rank; kept with --keep")
    parser.add_argument("--base", type=Path, help="the run of eight ranks, made where there is none; default: in --scratch")
    parser.add_argument("--keep", action="store_true", help="keep what was made")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    base = runs.train((options.base or options.scratch / "base").resolve())
    print(f"{'case':24}{'ranks':>7}{'exit':>6}{'CPU s':>10}{'MiB':>10}{'exponent':>8}{'written MB':>12}{'lines':>8}{'longest':>9}")
    figures: list[Figures] = []
    for name in options.only or CASES:
        before: Figures | None = None
        for ranks in sorted(options.ranks):
            now = measure(name, Artifacts(base, options.scratch.resolve(), ranks), options.limit)
            print(line(now, before), flush=True)
            figures.append(now)
            before = now
            if now.code < 0:
                break
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")
    if not options.keep:
        for ranks in options.ranks:
            shutil.rmtree(options.scratch / str(ranks), ignore_errors=True)


if __name__ == "__main__":
    main()
