"""Read a checkpoint once and write a manifest: a digest of each tensor that does not depend on the parallel layout, with counts of NaN and
Inf. msprobe ckpt diff takes a manifest in place of a checkpoint: it says what changed, not by how much."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  msprobe ckpt digest run_a/iter_0001000 -o iter_0001000.digests.json
  msprobe ckpt diff iter_0001000.digests.json run_b/iter_0001000

exit codes: 0 done, 2 damaged, refused or wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A checkpoint, and where its manifest goes."""
    parser.add_argument("path", metavar="PATH", type=Path, help="checkpoint, or directory of a run")
    parser.add_argument("-o", "--output_path", type=Path, required=True, metavar="FILE", help="the manifest (JSON)")
    parser.add_argument("--trust", nargs="+", action="extend", default=[], metavar="CLASS", help="as msprobe ckpt diff has it")
    parser.add_argument("--workers", type=int, metavar="N", help="threads that read (default: by the number of cores)")
    parser.add_argument("--memory_mb", "--memory-mb", type=int, default=2048, metavar="MIB", help="most memory (default: %(default)s)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0, or 2 when a part could not be read; errors are raised as `ProbeError`."""
    import time

    from msprobe_engine.cli.options.outputs import JSON, refuse_overwriting
    from msprobe_engine.core.log import one_line, warning
    from msprobe_engine.core.text.words import size
    from msprobe_engine.find.checkpoint.diff import Options, digest_checkpoint
    from msprobe_engine.find.checkpoint.digests import write_manifest
    from msprobe_engine.find.checkpoint.result import format_count
    from msprobe_engine.formats.checkpoint.open import meant

    refuse_overwriting([("-o", args.output_path)], meant(args.path), {"-o": JSON})
    begin = time.monotonic()
    checkpoint, digests, nbytes = digest_checkpoint(args.path, Options(trust=args.trust, workers=args.workers, memory_mb=args.memory_mb))
    write_manifest(args.output_path, checkpoint, digests)
    bad = [digest for digest in digests if digest.trouble or digest.missing]
    for digest in bad:
        warning(f"{one_line(digest.name)}: {one_line(digest.trouble) or f'{digest.missing} elements are in no file'}")
    for problem in checkpoint.problems:
        warning(one_line(problem))
    seconds = time.monotonic() - begin
    print(f"{format_count(len(digests), 'tensor')}, {size(nbytes)} in {seconds:.1f} s: {args.output_path}")
    return 2 if bad or checkpoint.problems else 0
