"""What the rows of a backend hold besides the statistics that every row has."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import host_kernel

CHECKSUMS = {"md5": "crc32", "xor": "xor"}
"""What `RowOptions.want_checksum` has to be for a ``summary_mode``; other modes need none."""
_CHECKSUMS = {"": 0, "crc32": host_kernel.WANT_CRC, "xor": host_kernel.WANT_XOR}


class RowOptions:
    """The part of a backend that chooses the words of its rows. Setting what is set already costs nothing; a change holds for
    the rows that are made from then on."""

    _want: int
    _step: Any

    @property
    def want_digest(self) -> bool:
        """Also fill the DIGEST word."""
        return bool(self._want & host_kernel.WANT_DIGEST)

    @want_digest.setter
    def want_digest(self, wanted: bool) -> None:
        self._set_want(host_kernel.WANT_DIGEST if wanted else 0, host_kernel.WANT_DIGEST)

    @property
    def want_checksum(self) -> str:
        """Also fill the CRC word (``crc32``) or the XOR word (``xor``); ``""``: neither. The bytes of what the statistics are of, as
        they are at the call. Row words and text: `msprobe_engine.core.statistics.rows`, `msprobe_engine.formats.dump.writing.text`."""
        return next(name for name, bit in reversed(_CHECKSUMS.items()) if self._want & bit == bit)

    @want_checksum.setter
    def want_checksum(self, wanted: str) -> None:
        if wanted not in _CHECKSUMS:
            raise UsageError(f"want_checksum is {wanted!r}; allowed: {', '.join(repr(name) for name in _CHECKSUMS)}")
        if wanted and self.want_moments:
            raise UsageError(f"want_checksum is {wanted!r} with want_moments; a row has place for one of both")
        self._set_want(_CHECKSUMS[wanted], host_kernel.WANT_CRC | host_kernel.WANT_XOR)

    @property
    def want_moments(self) -> bool:
        """Also fill the words SUM3 and SUM4, which the kurtosis needs."""
        return bool(self._want & host_kernel.WANT_MOMENTS)

    @want_moments.setter
    def want_moments(self, wanted: bool) -> None:
        if wanted and self.want_checksum:
            raise UsageError(f"want_moments with want_checksum {self.want_checksum!r}; a row has place for one of both")
        self._set_want(host_kernel.WANT_MOMENTS if wanted else 0, host_kernel.WANT_MOMENTS)

    @property
    def below(self) -> float:
        """Also fill the word BELOW: elements with an absolute value below this; 0: not. For underflow the limit is
        `msprobe_engine.core.statistics.rows.underflow_limit`."""
        return 0.0 if self._want & host_kernel.WANT_EPS else host_kernel.limit_of(self._want)

    @below.setter
    def below(self, limit: float) -> None:
        self._count_below(limit, as_zeros=False)

    @property
    def eps(self) -> float:
        """Also fill the word BELOW, and let it stand for zeros: elements with an absolute value below this; 0: exact zeros."""
        return host_kernel.limit_of(self._want) if self._want & host_kernel.WANT_EPS else 0.0

    @eps.setter
    def eps(self, limit: float) -> None:
        self._count_below(limit, as_zeros=True)

    def _count_below(self, limit: float, *, as_zeros: bool) -> None:
        other = self.below if as_zeros else self.eps
        if limit and other:
            raise UsageError(f"below and eps are both set ({limit!r} and {other!r}); a row counts below one limit")
        if limit or not other:
            self._set_want(host_kernel.want_below(limit, as_zeros=as_zeros) if limit else 0, host_kernel.WANT_LIMIT)

    def _set_want(self, bits: int, among: int) -> None:
        want = self._want & ~among | bits
        if want != self._want:
            self._want = want
            self._step.seen.clear()  # rows made so far lack what is wanted now
