"""The sessions that a server remembers: a bounded number, whatever comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from msprobe_engine.accuracy.online.events import Counts
from msprobe_engine.accuracy.online.tcp.session import Session, SessionState


class SessionTable:
    """Sessions by name, in the order in which they came. Not safe for threads by itself.

    Who is connected stays. Of the others, those without a single message (odd greetings, trainings that ended before their first
    step) are forgotten beyond `most_empty`, the oldest first; and beyond `most` sessions in all, those that have ended, then those that
    have been away longest. The counts of what is forgotten are kept, added up by rank.
    """

    def __init__(self, most_empty: int, most: int) -> None:
        self._most_empty = most_empty
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._past: dict[int, SessionState] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def add(self, session: Session) -> None:
        """A new one; it has a connection."""
        self._sessions[session.peer.session] = session
        self.forget()

    def forget(self) -> None:
        """Keep to the bounds; to be called when a connection is over."""
        away = [session for session in self if session.connection is None]
        empty = sorted((s for s in away if s.is_empty), key=lambda s: s.seen)
        victims = empty[: max(0, len(empty) - self._most_empty)]
        excess = len(self._sessions) - len(victims) - self._most
        if excess > 0:
            chosen = {id(session) for session in victims}
            idle = [session for session in away if session.idle and id(session) not in chosen]
            victims += sorted(idle, key=lambda s: (not s.is_empty, s.final is None, s.seen))[:excess]
        for session in victims:
            del self._sessions[session.peer.session]
            self._remember(session.state())

    def past(self) -> list[SessionState]:
        """What was forgotten, one state per rank; its `final` counts are sums."""
        return list(self._past.values())

    def _remember(self, state: SessionState) -> None:
        final = state.final or Counts(lost=state.peer.lost)
        known = self._past.pop(state.peer.rank, None)
        if known is None and len(self._past) >= self._most:
            known = self._past.pop(next(iter(self._past)))
        if known is not None:
            assert known.final is not None
            sums = {f.name: getattr(known.final, f.name) + getattr(final, f.name) for f in fields(Counts)}
            final = Counts(**sums)
            for name in ("received", "bytes", "refused", "missing"):
                state = replace(state, **{name: getattr(state, name) + getattr(known, name)})
        self._past[state.peer.rank] = replace(state, final=final)
