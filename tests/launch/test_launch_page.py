"""docs/guide/launch.md: every example runs. Launchers are stand-ins that start their program as the real ones do, with the environment that
those hand on; test_jobs.py has real ones."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import launching as ln
import pytest
import yaml
from page_blocks import block, blocks

from msprobe_engine.core.settings.load import load_settings

PAGE = "docs/guide/launch.md"
LAUNCHER = """\
#!{python}
import os, sys
words = sys.argv[1:]
keep = dict(os.environ)
name = os.path.basename(sys.argv[0])
if name == "docker":
    keep = {{k: v for k, v in os.environ.items() if not k.startswith("MSPROBE")}}
    keep.update(w.split("=", 1) for f, w in zip(words, words[1:]) if f == "-e")
if name == "mpirun":
    handed = [w for f, w in zip(words, words[1:]) if f == "-x"]
    keep = {{k: v for k, v in os.environ.items() if not k.startswith("MSPROBE") or k in handed}}
os.execve({python!r}, [{python!r}, *words[words.index("train.py"):]], keep)
"""
"""Drops its own options and becomes the program."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Settings of the page, a program, a script, and stand-ins for the launchers."""
    (tmp_path / "probe.yaml").write_text(blocks(PAGE, "yaml")[0])
    (tmp_path / "train.py").write_text(ln.SEEN)
    (tmp_path / "pretrain.sh").write_text("python train.py\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "docker"):
        (tools / name).write_text(LAUNCHER.format(python=sys.executable))
    (tools / "msprobe").write_text(f"#!{sys.executable}\nimport sys\nfrom msprobe_engine.cli.main import main\nsys.exit(main())\n")
    (tools / "python").symlink_to(sys.executable)
    for tool in tools.iterdir():
        if not tool.is_symlink():
            tool.chmod(0o755)
    return tmp_path


def shell(line: str, here: Path) -> subprocess.CompletedProcess[str]:
    path = f"{here / 'tools'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(["bash", "-c", line], cwd=here, capture_output=True, text=True, check=False, env=ln.environment(PATH=path))


def lines(under: str) -> list[str]:
    return [line for text in blocks(PAGE, "bash", under) for line in text.splitlines()]


ASKING = [
    *lines("## One command in front"),
    *lines("## One variable"),
    *lines("**Slurm**"),
    *lines("**Open MPI**"),
    *lines("**Containers**"),
]
LIKE_TORCHRUN = ("deepspeed", "accelerate", "srun")
"""Launchers whose stand-in hands everything on, as torchrun's does."""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] * any(launcher in line.split() for launcher in LIKE_TORCHRUN))
        for line in ASKING
        if "--dry-run" not in line
    ],
)
def test_lines_that_ask(here: Path, line: str) -> None:
    """Each launch line of the page reaches the training process: it waits for a framework, with the page's settings."""
    words = shlex.split(line)
    done = shell(line, here)
    (one,) = ln.reports(done)
    expected = "/config/probe.yaml" if "docker" in line else str(here / "probe.yaml")
    assert one["config"] == expected
    changes = [after for option, after in pairwise(words) if option == "--set"]
    if "--output-dir" in line:
        changes.append(f"output_dir={json.dumps(str(here / 'runs/second'))}")
    assert one["changes"] == changes
    assert one["waits"]


def test_dry_run(here: Path) -> None:
    """The line of the page prints the environment and the launch line."""
    (line,) = [line for line in ASKING if "--dry-run" in line]
    done = shell(line, here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torchrun --nproc_per_node 8 train.py"
    assert f"MSPROBE_CONFIG={here / 'probe.yaml'}" in done.stdout


def test_settings(here: Path) -> None:
    """All settings of the page load."""
    assert load_settings(here / "probe.yaml").output_dir == "runs/today"
    (here / "probe.yaml").write_text(block(PAGE, "yaml", "## How it ends"))
    assert load_settings(here / "probe.yaml").exit_patience == 10


def test_deepspeed_on_several_nodes() -> None:
    """DeepSpeed's launcher exports PYTHONPATH and reads the file of the page."""
    runner = pytest.importorskip("deepspeed.launcher.runner", exc_type=ImportError)
    assert any("PYTHONPATH".startswith(prefix) for prefix in runner.EXPORT_ENVS)
    assert not any("MSPROBE_CONFIG".startswith(prefix) for prefix in runner.EXPORT_ENVS)
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert block(PAGE, "ini", "**DeepSpeed on several nodes**").strip().split("=") == ["MSPROBE_CONFIG", "/shared/probe.yaml"]


def test_kubernetes() -> None:
    """The fragment is YAML, and its variable names a file of its mount."""
    document = yaml.safe_load(block(PAGE, "yaml", "**Kubernetes**"))
    (variable,), (mount,) = document["env"], document["volumeMounts"]
    assert variable["name"] == "MSPROBE_CONFIG"
    assert variable["value"].startswith(mount["mountPath"] + "/")


def test_switching_off(here: Path) -> None:
    """The line of the page starts the program without a probe."""
    (line,) = lines("## Switch it off")
    done = shell(line, here)
    assert done.returncode == 0
    assert not json.loads(done.stdout)["waits"]


def test_frameworks(here: Path) -> None:
    """The command of the page finds torch."""
    (line,) = lines("## Is everything here?")
    done = shell(line, here)
    assert done.stdout.startswith("PyTorch"), done.stderr
