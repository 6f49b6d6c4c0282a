"""Checks every call of the dumps of `tests/fixtures/precheck_existing.tar.xz` with ``--compat`` (arguments: directory of the
unpacked archive, directory of the results, cases). A process of its own, for its kernels: those of `any_processor`."""

from __future__ import annotations

import sys
from pathlib import Path

from msprobe_engine.accuracy.precheck.calls import read_calls
from msprobe_engine.accuracy.precheck.options import Work
from msprobe_engine.accuracy.precheck.worker import make_check
from msprobe_engine.accuracy.result_files import ResultFiles
from msprobe_engine.accuracy.result_forms import form_of

CASES = ("transformer_float32", "transformer_bfloat16", "sweep_float32", "sweep_bfloat16")
VERSIONS = ("8.1.1", "26.2.0")


def main(dumps: Path, out: Path, cases: list[str]) -> None:
    """``<out>/<case>/<version>/result.csv`` and ``details.csv`` of all."""
    import torch

    print("CPU capability", torch.backends.cpu.get_cpu_capability())
    for case in cases:
        dump = read_calls(dumps / case / "rank0" / "dump.json")
        for version in VERSIONS:
            work = Work(
                framework=dump.framework, directory=str(dump.file.parent), device="cpu", dtype=None, compiled=False, bench="cpu",
                bench_dtype="raised", jit_compile=False, seed=1, condition=False, compat=version, error_data="", quantized=(), threads=1,
            )  # fmt: skip
            check = make_check(work)
            place = out / case / version
            place.mkdir(parents=True)
            with ResultFiles.new(place, form_of(version)) as files:
                for call in dump.calls:
                    files.append(check(call.name, call.record, call.backward))
            files.result_path.rename(place / "result.csv")
            files.details_path.rename(place / "details.csv")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
