"""Copies of a model on different ranks: their weights should be the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msprobe_engine.formats.dump.dump_table import PARAMETERS
from msprobe_engine.report.graph.merge import device_mesh
from msprobe_engine.report.graph.nodes.model import Comparison, Graph

if TYPE_CHECKING:
    from msprobe_engine.report.graph.work import Part


def weights(made: Graph | Comparison) -> dict[str, bytes]:
    """Name of a parameter -> its statistics where it is first shown, of the target; nothing of ranks of which it is not known whether they
    hold the same."""
    graph = made.target if isinstance(made, Comparison) else made
    side = graph.side
    found: dict[str, bytes] = {}
    if side is not None and device_mesh.mesh_of_header(side.header) is not None:
        for row, role in enumerate(side.role):
            if role == PARAMETERS:
                found.setdefault(side.name[row], side.numbers[4 * row : 4 * row + 4].tobytes())
    return found


def unlike(parts: Iterable[Part]) -> list[str]:
    """Sentences about copies whose weights differ, one per step."""
    firsts: dict[int, Part] = {}
    found: dict[int, list[str]] = {}
    for part in parts:
        if not part.weights:
            continue
        first = firsts.setdefault(part.job.step, part)
        names = [name for name, numbers in part.weights.items() if first.weights.get(name, numbers) != numbers]
        if names:
            found.setdefault(part.job.step, []).append(
                f"that of rank {part.job.rank} in {len(names):,} parameters (the first is {names[0]})"
            )
    return [
        f"step {step}: copies of the model differ from that of rank {firsts[step].job.rank}: {'; '.join(texts)}."
        for step, texts in sorted(found.items())
    ]
