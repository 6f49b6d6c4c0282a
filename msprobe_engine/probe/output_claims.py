"""The directories that a probe writes in, each claimed before anything is written (`msprobe_engine.core.io.claims`): a probe that is not
the first in one of them gets settings that lead elsewhere, so that no writer needs to know of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msprobe_engine.core.io.claims import Claim, claim_directory
from msprobe_engine.core.settings.schema import ProbeSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section", bound="DataclassInstance")


class OutputClaims:
    """What one probe has claimed, until `release`."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []

    def claim(self, root: str | os.PathLike[str], rank: int | None, *, by_process: bool = False) -> Path:
        """Where to write below `root`; as of `claim_directory`."""
        claim = claim_directory(root, rank, by_process=by_process)
        self._claims.append(claim)
        return claim.path

    def claim_part(self, root: Path, rank: int | None, *, of_output_dir: bool, by_process: bool = False) -> Path:
        """Where to write a part of the output, below `root`; `of_output_dir`: that is where it lies when the settings name no other
        place, and the whole output directory is claimed."""
        if not of_output_dir:
            return self.claim(root, rank, by_process=by_process)
        return self.claim(root.parent, rank, by_process=by_process) / root.name

    def place(self, settings: ProbeSettings, rank: int | None) -> ProbeSettings:
        """Claim every directory that a probe with these settings writes in.

        Args:
            rank: of this process, None when it is not known.

        Returns:
            settings that name the directories where it may.
        """

        def move(section: Section, key: str, otherwise: str = "") -> Section:
            given = getattr(section, key) or otherwise
            path = self.claim(given, rank) if given else Path()
            return replace(section, **{key: str(path)}) if given and path != Path(given) else section

        sinks, dump, incident, pack = settings.sinks, settings.dump, settings.incident, settings.config_check
        for name, sink in sinks.in_files().items():
            if name != "csv" or settings.monitor is not None:
                otherwise = os.environ.get("MONITOR_OUTPUT_DIR", "") if name == "csv" else ""
                sinks = replace(sinks, **{name: move(sink, "path", otherwise)})
        if dump is not None:
            dump = move(dump, "dump_path")
        if incident.enabled:
            incident = move(incident, "path")
        if pack.enabled and pack.path:
            given = Path(pack.path)
            pack = replace(pack, path=str(self.claim(given.parent, rank) / given.name))
        if writes_files(settings) or sinks.prometheus.enabled:
            settings = move(settings, "output_dir")
        return replace(settings, sinks=sinks, dump=dump, incident=incident, config_check=pack)

    def release(self) -> None:
        """The probe writes nothing more."""
        claims, self._claims = self._claims, []
        for claim in claims:
            claim.release()


def writes_files(settings: ProbeSettings) -> bool:
    """Does a probe with these settings leave anything in its output directory?"""
    sinks, monitored = settings.sinks, settings.monitor is not None
    files = sinks.anomalies or bool(sinks.in_files())
    incidents = settings.incident.enabled and (monitored or bool(settings.incident.level) or bool(settings.rules))
    return (monitored and files) or incidents or settings.dump is not None or settings.grad_probe is not None
