"""Which names the targets of the monitor mean. Wrappers are no part of a name: a module is called the same with and without DDP, FSDP1,
activation checkpointing and `torch.compile`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

INNER = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
"""Wrappers under whose name the module inside of them is called."""
_WITHIN = INNER | {"_fsdp_wrapped_module"}
OUTER = "module"
"""What wrappers around a model call it."""


class Named(NamedTuple):
    """A module that can be watched.

    Attributes:
        chunk: virtual pipeline chunk, 0 when there is one model.
        name: without wrappers; ``""`` for the model itself.
        module: what has the parameters.
        hooked: what is called: a compiled module has its hooks outside of what was compiled.
        root: the model itself, without the wrappers around it.
        sealed: inside a compiled or scripted module, where no hook runs.
    """

    chunk: int
    name: str
    module: Any
    hooked: Any
    root: Any
    sealed: bool


def matches(name: str, targets: Sequence[str], vpp_stage: int = 0) -> bool:
    """Is `name` one of the targets? A target is whole path components (``layers.1`` is not ``layers.10``), and everything below it
    counts; ``*`` and ``?`` allowed; ``"1:layers.0"`` is only meant for virtual pipeline chunk 1. Without targets everything is."""
    return not targets or any(_within(name, target, vpp_stage) for target in targets)


def is_named(name: str, targets: Sequence[str], vpp_stage: int = 0) -> bool:
    """Is exactly this module meant, and not one above it? Without targets nothing is."""
    for target in targets:
        stage, bare = _split_target(target)
        if stage in (-1, vpp_stage) and (name == bare or fnmatch.fnmatchcase(name, bare)):
            return True
    return False


def _within(name: str, target: str, vpp_stage: int) -> bool:
    stage, bare = _split_target(target)
    if stage not in (-1, vpp_stage):
        return False
    return name == bare or name.startswith(f"{bare}.") or fnmatch.fnmatchcase(name, bare) or fnmatch.fnmatchcase(name, f"{bare}.*")


def _split_target(target: str) -> tuple[int, str]:
    """The chunk a target is meant for, -1 for all, and its name without wrappers."""
    first, colon, rest = target.partition(":")
    stage, bare = (int(first), rest) if colon and first.isdigit() else (-1, target)
    while bare.startswith(f"{OUTER}."):  # names as `named_modules` of a wrapped model gives them
        bare = bare[len(OUTER) + 1 :]
    return stage, plain(bare)


def plain(path: str) -> str:
    """A module path without activation checkpointing, FSDP1 and compilation in it."""
    parts = path.split(".")
    return ".".join(part for part in parts if part not in _WITHIN) if not _WITHIN.isdisjoint(parts) else path


def find_unmatched(targets: Iterable[str], names: Sequence[Iterable[str]]) -> dict[str, list[str]]:
    """Targets that nothing is called, each with the names that look most like it.

    Args:
        targets: as the settings have them.
        names: per chunk, what there is: modules, parameters.
    """
    lists = [sorted(set(chunk)) for chunk in names]
    unmatched: dict[str, list[str]] = {}
    for target in targets:
        if not any(_within(name, target, chunk) for chunk, known in enumerate(lists) for name in known):
            everything = sorted({name for known in lists for name in known if name})
            close = difflib.get_close_matches(_split_target(target)[1], everything, n=3, cutoff=0.3)
            unmatched[target] = close or everything[:3]
    return unmatched
