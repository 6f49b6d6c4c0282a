"""Launches that have written into one place: of one run that was started again, or of several runs.

A launch goes on with what is there when its launcher says that it has started the job again, or when its first step comes after the first
one that is there. One that begins anew, at that step or before it, is another run: the last one is read, and the others are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msprobe_engine.formats.monitor.series import whole


class Launch(NamedTuple):
    """What is known of one.

    Attributes:
        key: tells it from others; empty: the files do not say.
        started: when, as run.json has it; empty: unknown.
        restart: the launcher has started the job again.
        first: its first step; None: it has none, or does not say.
    """

    key: str
    started: str = ""
    restart: bool = False
    first: int | None = None


def launch_of(info: Mapping[str, Any]) -> Launch:
    """The launch that run.json is of."""
    key, started = (str(info.get(name) or "") for name in ("launch", "started"))
    return Launch(key, started, info.get("restart") is True, whole(info.get("first_step")))


def begins_anew(launch: Launch, before: Iterable[Launch]) -> bool:
    """Is a launch that has begun no continuation of those before it?"""
    there = [one.first for one in before if one.first is not None]
    return bool(launch.key) and not launch.restart and launch.first is not None and bool(there) and launch.first <= min(there)


def of_other_runs(launches: Iterable[Launch]) -> list[Launch]:
    """Of launches in the order in which they began, those that the last run has not gone on with."""
    others: list[Launch] = []
    chain: list[Launch] = []
    for launch in launches:
        if begins_anew(launch, chain):
            others += chain
            chain = []
        chain.append(launch)
    return others


def said(other: Launch, read: Launch) -> str:
    """What is said of a launch that was left out."""
    one, two = (launch.started or "at an unknown time" for launch in (other, read))
    return f"another run, which started {one}, is here and is not looked at; the one that is read started {two}"


def stored_launch(row: Iterable[Any]) -> Launch:
    """A row of the table ``launches`` of a trend data base, whatever is in it: key, started, restart, first step."""
    key, started, restart, first = row
    return Launch(str(key), str(started or ""), restart == 1, whole(first))
