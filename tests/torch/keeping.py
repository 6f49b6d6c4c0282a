"""Helpers of the tests of saved tensors: a keeper in a directory, and what it saved."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.formats.dump.writing.step_files import Saved
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver, template

FORMATS = ("files", "packed")


class Keeping:
    """One keeper that saves everything into step directories below `root`.

    Attributes:
        lost: what the hooks counted as lost.
    """

    def __init__(self, root: Path, form: str, *, strict: bool = True, slices: Any = None, saves: Any = None, **options: Any) -> None:
        self.root = root
        self.lost: dict[str, int] = {}
        self.counted: dict[str, int] = {}
        self.backend = TorchBackend()
        self.faults = Faults(strict)
        self.store = TensorStore(
            Options(saves=saves or (lambda _: True)), template, self.faults, packed=form == "packed", count=self._count, **options
        )
        self.keeper = TensorSaver(self.backend, self.store, self.faults, self._lose, slices and slices(self.backend))
        self.entries: list[Entry] = []

    def _lose(self, reason: str) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + 1

    def lost_now(self) -> dict[str, int]:
        """What the hooks lost since this was asked last."""
        lost, self.lost = self.lost, {}
        return lost

    def _count(self, name: str, count: int) -> None:
        self.counted[name] = self.counted.get(name, 0) + count

    def directory(self, step: int) -> Path:
        """The rank directory of a step."""
        return self.root / f"step{step}" / "rank0"

    def begin(self, step: int = 0) -> None:
        self.directory(step).mkdir(parents=True)
        self.store.begin_step(step, str(self.directory(step)))
        self.keeper.begin_step(step)
        self.entries = []

    def save(self, name: str, *tensors: torch.Tensor) -> list[TensorRef]:
        """A record with these tensors as output."""
        refs = [self.keeper.reduce(t) for t in tensors]
        self.entries.append(Entry(name, {"output": refs}))
        self.keeper.hand_over(self.entries[-1])
        return refs

    def end(self, step: int = 0) -> Saved:
        self.keeper.end_step(self.entries)
        self.backend.finish_step()
        return self.store.finish(step)

    def files(self, step: int = 0) -> TensorFiles:
        return TensorFiles(self.directory(step))

    def load(self, step: int = 0) -> dict[str, torch.Tensor]:
        """All tensors of a step by file name."""
        files = self.files(step)
        return {name: files.load(name, self.backend) for name in files.names()}


def saved(root: Path, form: str, tensors: Iterable[torch.Tensor], then: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
    """What is read back of these tensors when `then` runs right after the copies were taken."""
    keeping = Keeping(root, form)
    keeping.begin()
    n = len(keeping.save("Functional.f.0.forward", *tensors))
    then()
    keeping.end()
    found = keeping.load()
    return [found[f"Functional.f.0.forward.output.{i}.pt"] for i in range(n)]


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
