"""Which files of a DeepSpeed checkpoint are missing, left over, or of another step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msprobe_engine.core.text.words import some
from msprobe_engine.formats.checkpoint.deepspeed.files import Listing
from msprobe_engine.formats.checkpoint.deepspeed.model import ModelFile
from msprobe_engine.formats.checkpoint.model import StoredTensor


def find_missing_files(path: Path, files: Listing, mp_size: int, dp_size: int, stage: int) -> list[str]:
    """Sentences on files that should be there and are not.

    Args:
        mp_size, dp_size: model and data parallel ranks that saved.
    """
    gone: list[str] = []
    prefix = next(iter(files.optimizer.values())).name.partition("zero_pp_rank_")[0] if files.optimizer else ""
    for mp in range(mp_size):
        if stage == 3:
            gone += [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in range(dp_size) if (mp, dp) not in files.model]
        elif (mp, None) not in files.model:
            gone.append(f"mp_rank_{mp:02d}_model_states.pt")
        if files.optimizer:
            gone += [
                f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for dp in range(dp_size) if (mp, dp) not in files.optimizer
            ]
    if not gone:
        return []
    return [
        f"{path}: {some(gone)} {'is' if len(gone) == 1 else 'are'} missing ({mp_size} model parallel times {dp_size} data parallel ranks "
        "saved here); what they hold cannot be compared. Was the run or the copy cut off?"
    ]


def left_over(path: Path, files: Listing, dp_size: int, stage: int) -> list[str]:
    """Sentences on files that another run left in the directory."""
    names = [file.name for (_, dp), file in files.optimizer.items() if dp >= dp_size]
    names += [file.name for (_, dp), file in files.model.items() if (dp is not None and dp >= dp_size) or (dp is None) == (stage == 3)]
    names += files.doubled
    if not names:
        return []
    return [
        f"{path}: {some(sorted(names))} {'does' if len(names) == 1 else 'do'} not belong to ZeRO {stage} on {dp_size} data parallel "
        "ranks; another run saved into this directory before. They are not compared"
    ]


def other_steps(models: Sequence[ModelFile]) -> list[str]:
    """Sentences on files of the model that are of another step than the others."""
    for key in ("global_steps", "global_samples", "skipped_steps"):
        seen = [file.number(key) for file in models]
        if len(set(seen)) > 1:
            usual = max(set(seen), key=seen.count)
            odd = [f"{file.file.name} has {number}" for file, number in zip(models, seen) if number != usual]
            tie = seen.count(usual) * 2 <= len(seen)
            rest = f"{sum(n == usual for n in seen)} others {usual}; {'some are' if tie else 'stale:'} left over from another step"
            return [f"{models[0].file.parent}: the model's files disagree in {key}: {some(odd)}, {rest}"]
    return []


def without_weights(path: Path, optimized: Iterable[str], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """A sentence on parameters that the optimizer has and the model's files do not."""
    gone = [name for name in optimized if name not in tensors]
    if not gone:
        return []
    return [f"{path}: the weights of {len(gone)} parameters that the optimizer has are in none of the files: {some(gone)}"]
