"""What a newcomer asks first: which frameworks are here, what the probe will see of them, what is in the way, what to type next.

Read from metadata of installed packages; nothing is imported, so that it takes a moment and a broken framework spoils nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msprobe_engine.core.distribution import NAME, install_command
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.core.text.words import size

COMMAND = "msprobe_engine.cli.main:main"
"""What the command ``msprobe`` is where it is ours."""
FOLLOWED = {
    "torch": "loops of plain torch, DDP, FSDP, pipelines",
    "megatron-core": "Megatron",
    "mindspeed": "MindSpeed",
    "deepspeed": "DeepSpeed",
    "transformers": "Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch-lightning": "Lightning",
    "torchtitan": "torchtitan",
}
"""Distributions whose trainings ``msprobe run`` finds without a word in the program, and what of them."""
NAMED = {"mindspore": "name the steps in the program: docs/frameworks/mindspore.md"}
"""Distributions that the probe knows where the program says what a step is."""
UNKNOWN = ("jax", "tensorflow", "paddlepaddle", "paddlepaddle-gpu")
EXISTING = "mindstudio-probe"
FOREIGN = (EXISTING, "msprobe")
"""Distributions with a package ``msprobe``: the existing tool, and the program of somebody else that indexes have under this name."""


@dataclass
class Greeting:
    """What was found.

    Attributes:
        followed, named, unknown: distribution to version, by what the probe sees of it.
        conflicts: what is in the way, a sentence each, with what to do.
        next: the command to try.
    """

    version: str
    python: str
    followed: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    next: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        said = [f"msprobe {self.version}, Python {self.python}"]
        if self.followed:
            said.append(f"found by msprobe run     {_list(self.followed)}")
        if self.named:
            said += [f"needs a word             {name} {version}: {NAMED[name]}" for name, version in self.named.items()]
        if self.unknown:
            said.append(f"not seen                 {_list(self.unknown)}: no integration")
        if not self.followed and not self.named:
            said.append(f"no framework is installed here that the probe knows: {', '.join((*FOLLOWED, *NAMED))}")
        said += [f"conflict                 {sentence}" for sentence in self.conflicts]
        said.append(f"this machine             {', '.join(self.limits)}")
        said.append(f"try next                 {self.next}")
        return [one_line(line) for line in said]


def greet(version: str) -> Greeting:
    """Look.

    Args:
        version: of this tool.
    """
    greeting = Greeting(version, platform.python_version())
    for names, into in ((FOLLOWED, greeting.followed), (NAMED, greeting.named), (UNKNOWN, greeting.unknown)):
        for name in names:
            if (installed := _version(name)) is not None:
                into[name] = installed
    greeting.conflicts = list(find_conflicts())
    greeting.limits = _limits()
    if greeting.followed:
        greeting.next = "msprobe run -- torchrun train.py   (the launch line as it is; msprobe frameworks says more of each)"
    elif greeting.named:
        greeting.next = (
            "docs/frameworks/mindspore.md: the probe in a training with MindSpore; msprobe diagnose RUN reads what was written elsewhere"
        )
    else:
        greeting.next = f"{install_command()} where the training runs; here msprobe diagnose RUN reads what was written there"
    return greeting


def find_conflicts() -> list[str]:
    """Other distributions that install a command or a package of our name, and where neither leads here."""
    said = find_foreign()
    for point in entry_points(group="console_scripts", name="msprobe"):
        named = point.dist.metadata["Name"] if point.dist is not None else ""
        if point.value != COMMAND and named not in FOREIGN:
            said.append(_of_another(point.dist))
    package, engine = find_spec("msprobe"), find_spec("msprobe_engine")
    if package is not None and engine is not None and package.origin and engine.origin:
        imported, own = Path(package.origin).resolve().parent, Path(engine.origin).resolve().parent.parent / "msprobe"
        if imported != own:
            said.append(f"import msprobe gives {imported}, not {own}: take the other one off sys.path (PYTHONPATH, the working directory)")
    command = shutil.which("msprobe")
    if command is not None and sys.prefix != sys.base_prefix and not Path(command).resolve().is_relative_to(Path(sys.prefix).resolve()):
        beside = Path(sys.prefix) / "bin" / "msprobe"
        if beside.exists():
            said.append(f"the command msprobe on PATH is {command}, of another environment than this one ({beside})")
    return said


def find_foreign() -> list[str]:
    """The two distributions that people install beside by mistake, a sentence each; looked up by name, in a millisecond."""
    said = []
    for name in FOREIGN:
        with suppress(PackageNotFoundError):
            package = distribution(name)
            if name == EXISTING or COMMAND not in (point.value for point in package.entry_points):
                said.append(_of_another(package))
            elif _version(NAME) is not None:
                said.append(
                    f"{name} {package.version} is an earlier version of this tool under its former name: run 'pip uninstall {name}', then "
                    f"'{install_command()}' again, because both have the same files"
                )
    return said


def _of_another(dist: Distribution | None) -> str:
    name, version = ("another package", "") if dist is None else (dist.metadata["Name"] or "", f" {dist.version}")
    return (
        f"{name}{version} is installed beside and has the same command and package 'msprobe': the one installed last has replaced files of "
        f"the other. Run 'pip uninstall {name} {NAME}', then '{install_command()}', or keep {name} in an environment of its own"
    )


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _list(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _limits() -> list[str]:
    """Cores, memory, room on the disk and open files that this process may have."""
    cores = usable_cores()
    said = [f"{cores} core" + ("s" if cores != 1 else "")]
    with suppress(ValueError, OSError):
        said.append(f"{size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory")
    try:
        said.append(f"{size(shutil.disk_usage('.').free)} free in this directory")
    except OSError:
        said.append("this directory cannot be looked at")
    if not os.access(".", os.W_OK):
        said.append("this directory cannot be written to: give --output-dir")
    with suppress(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY and files < 1024:
            said.append(f"only {files} open files (ulimit -n)")
    return said
