"""What the machine is, for the head of the report; builds the C modules of a source tree where they are missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msprobe_engine import __version__
from msprobe_engine.core.process.cores import usable_cores

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("msprobe_engine/native/_*.c", "msprobe_integrations/common/_*.c")
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")


def describe(wanted: str) -> dict[str, str]:
    """Names and texts; ``device`` begins with the type that is checked.

    Args:
        wanted: type of the device, "" for the first that is there.
    """
    built = build_modules()
    import torch

    from msprobe_integrations.doctor.device import find_device

    kind = find_device(wanted)
    return {
        "device": f"{kind} ({_device_name(torch, kind)})",
        "driver": _driver(kind),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda}, HIP {torch.version.hip})",
        "Triton": _version("triton", "pytorch-triton", "triton-ascend"),
        "torch_npu": _version("torch_npu", "torch-npu"),
        "CANN": _cann() if kind == "npu" else "not asked",
        "Transformer Engine": _version("transformer_engine"),
        "Python": platform.python_version(),
        "numpy": importlib.import_module("numpy").__version__,
        "msprobe": _own_version(),
        "C modules": built,
    }


def build_modules() -> str:
    """Build, beside their sources, the C modules that cannot be imported; what was done."""
    missing = [source for pattern in _SOURCES for source in sorted(ROOT.glob(pattern)) if not _importable(source)]
    if not missing:
        return "there"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    compiler = next(filter(None, map(shutil.which, (compiler, "cc", "gcc", "clang"))), "")
    headers = sysconfig.get_paths()["include"]
    if not compiler:
        return "not there, no compiler: the fallbacks are used"
    if not (Path(headers) / "Python.h").is_file():
        return "not there, no headers of Python to build them: the fallbacks are used"
    with ThreadPoolExecutor(usable_cores()) as pool:
        errors = [error for error in pool.map(lambda source: _build(source, compiler, headers), missing) if error]
    importlib.invalidate_caches()
    failed = f"; {errors[0]}: the fallbacks are used" if errors else ""
    return f"{len(missing) - len(errors)} of {len(missing)} built in the source tree{failed}"


def _importable(source: Path) -> bool:
    """From beside its source: another installation may have one of the same name."""
    try:
        module = importlib.import_module(".".join(source.relative_to(ROOT).with_suffix("").parts))
    except ImportError:
        return False
    return Path(module.__file__ or "").is_relative_to(ROOT)


def _build(source: Path, compiler: str, headers: str) -> str:
    """What went wrong, "" when nothing did."""
    target = source.with_name(source.stem + str(sysconfig.get_config_var("EXT_SUFFIX")))
    made = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        process = subprocess.run(
            [compiler, *_FLAGS, f"-I{headers}", str(source), "-o", str(made)], capture_output=True, text=True, timeout=100, check=False
        )
        if process.returncode == 0:
            made.rename(target)
            return ""
        said = (process.stderr.strip().splitlines() or [f"{compiler} failed"])[-1][:200]
        return f"{source.name} cannot be compiled: {said} (install gcc, or name a compiler with CC)"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{source.name} cannot be compiled: {error}"
    finally:
        made.unlink(missing_ok=True)


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _own_version() -> str:
    project = ROOT / "pyproject.toml"
    match = re.search(r'^version = "([^"]+)"', project.read_text(encoding="utf-8"), re.MULTILINE) if project.is_file() else None
    return f"{match[1]} (source tree)" if match else __version__


def _device_name(torch: Any, kind: str) -> str:
    if kind == "cpu":
        return platform.processor() or platform.machine()
    module = getattr(torch, kind)
    memory = module.mem_get_info()[1]
    count = module.device_count()
    return (
        f"{module.get_device_name(0)}, {memory / 2**30:.0f} GiB, {count} of them"
        if count > 1
        else (f"{module.get_device_name(0)}, {memory / 2**30:.0f} GiB")
    )


def _driver(kind: str) -> str:
    commands = {
        "cuda": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "npu": ["npu-smi", "info", "-t", "board", "-i", "0"],
    }
    if kind not in commands:
        return "none"
    try:
        process = subprocess.run(commands[kind], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known ({type(error).__name__})"
    said = [line.strip() for line in process.stdout.splitlines() if kind == "cuda" or "oftware" in line]
    return said[0] if said and process.returncode == 0 else "not known"


def _cann() -> str:
    home = Path(os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH") or "/usr/local/Ascend/ascend-toolkit/latest")
    for file in (home / "version.cfg", *sorted(home.glob("*/ascend_toolkit_install.info"))):
        if file.is_file():
            match = re.search(r"(?:^version|Version)\s*=\s*\[?([\w.]+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if match:
                return match[1]
    return "not known"
