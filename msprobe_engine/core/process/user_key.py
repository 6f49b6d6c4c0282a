"""The user's key: of the digests that stand where values are not written, so that two of them can be compared.

One key serves configuration packs and redacted dumps; what is signed begins with another word in each (``msprobe variable``,
``msprobe digest``), so that a digest of one says nothing of the other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import read_input

KEY, KEY_FILE = "MSPROBE_KEY", "MSPROBE_KEY_FILE"
SHORTEST, LONGEST = 16, 4096
"""Bytes; what is shorter could be found by trying."""


def read_key(file: str | Path | None = None, environ: Mapping[str, str] | None = None) -> bytes:
    """The key in `file`, else in the variable `KEY`, else in the file that the variable `KEY_FILE` names; empty: there is none.

    Raises:
        UsageError: the file cannot be read, or the key is too short or too long.
    """
    variables = os.environ if environ is None else environ
    key, where = variables.get(KEY, "").strip().encode("utf-8", "surrogateescape"), f"the variable {KEY}"
    file = file or ("" if key else variables.get(KEY_FILE, ""))
    if file:
        where = f"the key file {file}"
        try:
            key = read_input(file, LONGEST + 2).strip()
        except OSError as error:
            raise UsageError(f"{where} cannot be read: {error.strerror or error}; there would be no digests") from error
    if not key and not file:
        return b""
    if not SHORTEST <= len(key) <= LONGEST:
        raise UsageError(
            f"{where} holds {len(key)} bytes; {SHORTEST} to {LONGEST} are allowed, made by chance: 'openssl rand -hex 32' makes a key"
        )
    return key
