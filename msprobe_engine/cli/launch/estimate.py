"""What a dump will cost before it is made: disk, files and time, from one step of an existing dump and the settings of the new one.
Of a run that was monitored and not dumped, what the monitor will write in a whole training.
Says whether it fits, and what would when it does not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EPILOG = """\
examples:
  msprobe estimate out/dump --task tensor --level mix --steps 10 --ranks 8
  msprobe estimate out/dump/step0 --config config.json --measure-disk
  msprobe estimate out/dump --config probe.yaml --tensor-format packed --json
  msprobe estimate msprobe_output/latest --steps 500000 --ranks 64     of a monitored run: its files in a whole training

First dump one step with task structure, level mix: a few MB, from which every task and level follows exactly. A dump of task
statistics does too, with a range for tensor files; so does a dump of the existing tool.

exit codes: 0 fits, 1 does not fit, 2 wrong usage, settings or input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``msprobe estimate``."""
    add = parser.add_argument
    add("path", type=Path, help="dump of at least one step, or a monitored run")
    add("-c", "--config", type=Path, metavar="FILE", help="settings of the dump to come; flags override it")
    add(
        "--steps",
        type=int,
        metavar="N",
        help="steps that will be dumped (default: those of the settings, else 1) or monitored (100,000)",
    )
    add("--ranks", type=int, metavar="N", help="ranks that will dump (default: those of the settings, else of the dump)")
    add("--task", metavar="TASK", help="statistics, tensor or structure")
    add("--level", metavar="LEVEL", help="L0, L1 or mix (default without --config: that of the dump)")
    add("--summary-mode", metavar="MODE", help="statistics, md5, xor or digest")
    add("--tensor-format", metavar="FORMAT", help="files or packed")
    add("--list", nargs="+", metavar="NAME", help="only these records, written as in the settings")
    add("--data-mode", nargs="+", metavar="MODE", help="all, or some of input, output, forward, backward")
    add("--max-disk-gb", type=float, metavar="GB", help="limit of files per rank")
    add(
        "--dump-path",
        type=Path,
        metavar="DIR",
        help="where the dump will be written (default: that of the settings)",
    )
    add("--from-step", type=int, metavar="N", help="step of the dump to go by (default: the first finished one)")
    add("--measure-disk", action="store_true", help="measure the disk with up to 64 MiB (3 s at most)")
    add("--disk-speed", type=float, metavar="MB/S", help="speed of the disk in 10**6 bytes per second (default: 500)")
    add("--json", action="store_true", help="print JSON: bytes, seconds, ranges as [low, high]")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0: it fits, 1: it does not; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.formats.dump.find_dumps import IN_RUN, holds_dump
    from msprobe_engine.probe.estimate import estimate
    from msprobe_engine.probe.estimate.monitored import estimate_monitor

    if args.path.is_dir() and not holds_dump(args.path) and not holds_dump(args.path / IN_RUN) and _is_monitored(args.path):
        of_monitor = estimate_monitor(args.path, args.steps, args.ranks, None if args.max_disk_gb is None else args.max_disk_gb * 1e9)
        print(json.dumps(of_monitor.to_json(), indent=2) if args.json else of_monitor)
        return 0 if of_monitor.fits else 1
    made = estimate(
        args.path,
        args.config,
        steps=args.steps,
        ranks=args.ranks,
        from_step=args.from_step,
        disk_speed=None if args.disk_speed is None else args.disk_speed * 1e6,
        measure_disk=args.measure_disk,
        task=args.task,
        level=args.level,
        summary_mode=args.summary_mode,
        tensor_format=args.tensor_format,
        list=args.list,
        data_mode=args.data_mode,
        max_disk_gb=args.max_disk_gb,
        dump_path=None if args.dump_path is None else str(args.dump_path),
    )
    print(json.dumps(made.to_json(), indent=2) if args.json else made)
    return 0 if made.fits else 1


def _is_monitored(path: Path) -> bool:
    from msprobe_engine.core.errors import ProbeError
    from msprobe_engine.formats.monitor.reader import open_run

    try:
        return bool(open_run(path).ranks)
    except ProbeError:
        return False
