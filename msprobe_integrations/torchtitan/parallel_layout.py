"""What torchtitan's `ParallelDims` say of this rank."""

from __future__ import annotations

import math
from typing import Any

from msprobe_integrations.requirements import need, optional

_MESHES = {"dp": "batch", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""Our name of a kind of parallelism, and torchtitan's of its mesh."""


def sharing(dims: Any) -> int:
    """Ranks that share the batch.

    Raises:
        MissingNameError: this version does not say.
    """
    return math.prod(int(need(dims, name, for_="the loss of this rank")) for name in ("dp_replicate", "dp_shard", "cp"))


def places(dims: Any) -> dict[str, int]:
    """This rank's place: ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` where there is more than one rank."""
    get = optional(dims, "get_optional_mesh", because="ranks of older versions are told by their groups alone")
    meshes = {} if get is None else {ours: get(theirs) for ours, theirs in _MESHES.items()}
    return {name: int(mesh.get_local_rank()) for name, mesh in meshes.items() if mesh is not None and mesh.size() > 1}
