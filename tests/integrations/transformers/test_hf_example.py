"""The example and the page about Trainers: the launch line as it is, the blocks of the page as they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.frameworks import transformers_trainer as hf
from harness.run import ranks, write_settings

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests" / "monitor_pages"))
from page_blocks import blocks, run  # noqa: E402


@pytest.mark.slow
def test_example(tmp_path: Path) -> None:
    """run.sh trains two ranks of an unchanged script; the files that its README names are there, evaluation is in none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MASTER_PORT": str(port), "MSPROBE_OUTPUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
    script = ROOT / "examples" / "transformers" / "run.sh"
    done = subprocess.run(["bash", script, tmp_path / "ck"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        (scalars,) = (tmp_path / "out").glob(f"monitor/*-rank{rank}-*/scalars_0-99.csv")
        rows = [line.split(",") for line in scalars.read_text().splitlines()[1:]]
        assert {row[0] for row in rows} == {str(step) for step in range(6)}
        assert {"loss", "grad_norm", "learning_rate"} <= {row[1] for row in rows}
        assert list((tmp_path / "out").glob(f"monitor/*-rank{rank}-*/grad_reduced_0-99.csv"))
        assert (tmp_path / "out" / "dump" / "step1" / f"rank{rank}" / "dump.json").is_file()


def test_page(tmp_path: Path) -> None:
    """The callback blocks of docs/frameworks/trainers.md run."""

    def job(folder: Path, kind: str) -> Any:
        os.chdir(folder)
        write_settings(folder)
        text = next(each for each in blocks("docs/frameworks/trainers.md", "python") if f".{kind}.callback" in each)
        if kind == "transformers":
            made = hf.make_trainer(folder)
            names = {"Trainer": type(made), "model": made.model, "arguments": made.args, "data": hf.Samples()}
        else:
            import lightning.pytorch as pl
            from harness.frameworks import lightning_trainer

            names = {"Trainer": pl.Trainer, "module": lightning_trainer.make_module(), "data": lightning_trainer.make_loader()}
        after = run(text, "docs/frameworks/trainers.md", names)
        return len(after["trainer"].callbacks[0].observer.probe.frames if kind == "lightning" else _frames(after["trainer"]))

    assert ranks(1, job, tmp_path, "transformers") == [3]
    assert ranks(1, job, tmp_path, "lightning") == [8]


def _frames(trainer: Any) -> Any:
    from msprobe_integrations.transformers.callback import MsprobeCallback

    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, MsprobeCallback)).observer.probe.frames
