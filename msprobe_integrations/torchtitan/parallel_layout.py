"""What torchtitan's `ParallelDims` say of this rank."""

from __future__ import annotations

from typing import Any

_MESHES = {"dp": "batch", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""Our name of a kind of parallelism, and torchtitan's of its mesh."""


def sharing(dims: Any) -> int:
    """Ranks that share the batch."""
    return int(getattr(dims, "dp_replicate", 1)) * int(getattr(dims, "dp_shard", 1)) * int(getattr(dims, "cp", 1))


def places(dims: Any) -> dict[str, int]:
    """This rank's place: ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` where there is more than one rank."""
    get = getattr(dims, "get_optional_mesh", None)
    meshes = {} if get is None else {ours: get(theirs) for ours, theirs in _MESHES.items()}
    return {name: int(mesh.get_local_rank()) for name, mesh in meshes.items() if mesh is not None and mesh.size() > 1}
