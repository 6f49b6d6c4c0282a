"""Runs a training of the set under ``msprobe run``, as people start theirs: a process of its own, or `torchrun`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reported_bugs.case import Case, Plant
    from reported_bugs.training import Setting

PRESETS = ("watch", "nan")
"""Levels that are presets of ``msprobe run``."""


def made(where: Path, name: str, level: str, role: str) -> None:
    """Leave a watched run at `where`, unless it is there: `role` is ``run`` or ``golden``.

    Raises:
        RuntimeError: the training failed.
    """
    if (where / "done").exists():
        return
    ranks = _side(name, role)[0].ranks
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    tools = Path(sys.executable).parent
    start = [sys.executable] if ranks == 1 else [str(tools / "torchrun"), "--standalone", f"--nproc_per_node={ranks}"]
    command = [str(tools / "msprobe"), "run", "--preset", level, "--output-dir", str(where / "monitor"), "--"]
    with (where / "log.txt").open("w") as log:
        done = subprocess.run([*command, *start, __file__, name, role, str(where)], stdout=log, stderr=log, check=False, timeout=280)
    if done.returncode:
        raise RuntimeError(f"{where.name}: exit code {done.returncode}; see {where}/log.txt")
    (where / "done").touch()


def _side(name: str, role: str) -> tuple[Setting, Plant]:
    from reported_bugs.every_case import FAULTS, HEALTHY

    cases: tuple[Case, ...] = (*FAULTS, *HEALTHY)
    case = next(case for case in cases if case.name == name)
    return (case.setting, case.golden) if role == "golden" else (case.other or case.setting, case.plant)


def _train(name: str, role: str, where: Path) -> None:
    import torch
    import torch.distributed as dist
    from reported_bugs.runs import program_of

    setting, plant = _side(name, role)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if setting.ranks > 1:
        dist.init_process_group("gloo")
    program = program_of(setting, rank)
    plant(program)
    program.build()
    if setting.form == "trainer":
        _trainer(program, where)
    else:
        for number in range(setting.steps):
            program.step(number)
    (where / f"losses{rank}.json").write_text(json.dumps(program.losses))
    if setting.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _trainer(program: Any, where: Path) -> None:
    """The Trainer of Transformers over the same rows."""
    import torch
    import transformers

    setting, rows = program.setting, []
    for step in range(setting.steps):
        found = program.rows_of(step)
        labels = torch.cat([torch.full_like(found["labels"][:, :1], -100), found["labels"][:, :-1]], 1)
        rows += [{"input_ids": found["tokens"][i], "attention_mask": found["mask"][i], "labels": labels[i]} for i in range(setting.rows)]
    arguments = transformers.TrainingArguments(
        output_dir=str(where / "trainer"),
        per_device_train_batch_size=setting.rows,
        max_steps=setting.steps,
        learning_rate=setting.lr,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )

    transformers.Trainer(program.model, arguments, train_dataset=rows).train()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    _train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
