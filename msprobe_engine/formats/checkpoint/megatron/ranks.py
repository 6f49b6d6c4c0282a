"""The files of a Megatron ``torch`` checkpoint: which ranks wrote one, and which should have.

``mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt``: the second number is there with pipeline stages, the third with expert
parallelism; with the latter alone it is the second. Source: ``get_checkpoint_name`` and ``save_checkpoint`` of Megatron-LM
(megatron/training/checkpointing.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.log import one_line

WEIGHTS, DISTRIBUTED = "model_optim_rng.pt", "distrib_optim.pt"
_DIRECTORY = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")


class Rank(NamedTuple):
    """Tensor-parallel, pipeline-parallel and expert-parallel rank."""

    tp: int
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes: tensor, pipeline, expert, tensor of experts, context; chunks of a stage of the virtual pipeline."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1

    def directory(self, rank: Rank) -> str:
        """Name of a rank's directory."""
        text = f"mp_rank_{rank.tp:02d}"
        text += f"_{rank.pp:03d}" if self.pp > 1 else ""
        return text + (f"_{rank.ep:03d}" if self.ep > 1 else "")

    def list_writing_ranks(self) -> list[Rank]:
        """The ranks that write a file.

        The first data-parallel rank of the dense parameters writes, and the first of the experts; a process has tensor-parallel rank
        ``n % tp`` and expert-parallel rank ``n // etp % ep`` among the processes of a stage.
        """
        count = max(self.tp * self.cp, self.etp * self.ep)
        pairs = dict.fromkeys((n % self.tp, n // self.etp % self.ep) for n in range(count))
        return [Rank(tp, pp, ep) for pp in range(self.pp) for tp, ep in sorted(pairs, key=lambda pair: (pair[1], pair[0]))]

    def __str__(self) -> str:
        return f"tensor parallel {self.tp}, pipeline parallel {self.pp}, expert parallel {self.ep} (experts' tensor parallel {self.etp})"


def directories(path: Path) -> dict[str, tuple[int, ...]]:
    """Rank directories of an iteration, and the numbers in their names.

    Raises:
        DumpFormatError: there is none.
    """
    found = {}
    for entry in sorted(path.iterdir()):
        match = _DIRECTORY.fullmatch(entry.name)
        if match is not None and entry.is_dir():
            found[entry.name] = tuple(int(number) for number in match.groups() if number is not None)
    if not found:
        raise DumpFormatError(
            f"{path}: has no directory mp_rank_*; an iteration of a Megatron torch checkpoint has one for every model rank"
        )
    return found


def sizes_of(path: Path, args: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], pipelined: bool | None) -> Sizes:
    """Parallel sizes: of the arguments in the files, else of the directories' names.

    Args:
        path: for messages.
        args: of a file; may lack everything.
        found: as `directories` gives it.
        pipelined: whether a second number is that of a pipeline stage; asked only where `args` do not say; None: it cannot be told.

    Raises:
        DumpFormatError: the names do not belong to the sizes, or do not tell them.
    """
    numbers = list(found.values())
    depth = {len(some) for some in numbers}
    if len(depth) > 1:
        raise DumpFormatError(
            f"{path}: holds rank directories of two layouts ({', '.join(list(found)[:6])}); move those that do not belong to it away"
        )
    count = depth.pop()
    tp, pp = _size(args, "tensor_model_parallel_size"), _size(args, "pipeline_model_parallel_size")
    ep = _size(args, "expert_model_parallel_size") or _size(args, "expert_parallel_size")
    if tp is None or pp is None:
        highest = [max(some[i] for some in numbers) + 1 for i in range(count)]
        if count == 2 and pipelined is None:
            raise DumpFormatError(
                f"{path}: the second number of {next(iter(found))} is that of a pipeline stage or of an expert-parallel rank; the files "
                "hold no `args` that would say which"
            )
        as_stage = count == 3 or (count == 2 and bool(pipelined))
        tp, pp = highest[0], highest[1] if as_stage else 1
        ep = highest[count - 1] if count == 3 or (count == 2 and not as_stage) else 1
        return Sizes(tp, pp, ep, tp)
    ep = ep or 1
    etp = _size(args, "expert_tensor_parallel_size") or tp
    sizes = Sizes(tp, pp, ep, etp, _size(args, "context_parallel_size") or 1)
    named = 1 + (pp > 1) + (ep > 1)
    if named != count:
        raise DumpFormatError(
            f"{path}: the files' args say {sizes}, so directories should be called {sizes.directory(Rank(0))}, not "
            f"{one_line(next(iter(found)))}; files of two runs are mixed up, or directories were renamed"
        )
    return sizes


def _size(args: Mapping[str, Any], name: str) -> int | None:
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20 else None


def rank_of(numbers: Sequence[int], sizes: Sizes) -> Rank:
    """The rank that the numbers of a directory's name mean."""
    pp = numbers[1] if sizes.pp > 1 else 0
    return Rank(numbers[0], pp, numbers[-1] if sizes.ep > 1 else 0)


def in_words(names: Collection[str]) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(one_line(name) for name in list(names)[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
