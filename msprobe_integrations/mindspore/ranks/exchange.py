"""The ranks of a MindSpore job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine.core.log import warn_once
from msprobe_engine.probe.rules.base import Rule
from msprobe_integrations.common.ranks.directory_channel import DirectoryChannel
from msprobe_integrations.common.ranks.replica_channel import Channel
from msprobe_integrations.mindspore.ranks import job


class JobRanks:
    """The ranks that the communication joins.

    Args:
        output_dir: of the probe, seen by all ranks.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir

    def rank(self) -> int | None:
        """This one, None before the communication is started."""
        return int(mindspore.communication.get_rank()) if job.is_initialized() else None

    def members(self, group: Any) -> Sequence[int]:
        """Global ranks of a group; that without a name is everybody."""
        if not group:
            return range(int(mindspore.communication.get_group_size()))
        found = mindspore.communication.get_process_group_ranks(group)
        return [int(rank) for rank in found]

    def channel(self, ranks: Sequence[int], contents: Sequence[str]) -> Channel:
        """Connect these ranks, through the output directory: a collective operation of MindSpore that one rank does not join would hold
        up the training of all others for good."""
        return DirectoryChannel(self._output_dir / "replicas", int(mindspore.communication.get_rank()), ranks, contents)


def watch_ranks(rules: Sequence[Rule], ranks: Sequence[int]) -> Any:
    """Numbers of the ranks are not put beside each other while the training runs."""
    del ranks
    if any(rule.name == "outlier_rank" for rule in rules):
        warn_once("outlier_rank", "rule outlier_rank has no effect with MindSpore; compare the files of the ranks: msprobe monitor")
