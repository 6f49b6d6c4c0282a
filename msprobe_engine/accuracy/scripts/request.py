"""``config_op.json``: what the existing tool's ``op_generate`` is told."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.scripts.source import BACKWARD, BOTH, FORWARD
from msprobe_engine.core.errors import DumpFormatError, SettingsError
from msprobe_engine.formats.dump.rank_files import parse_json, read_bytes

KEYS = ("dump_json_path", "api_name", "extract_api_path", "propagation", "data_mode", "random_seed", "iter_times")
REAL, RANDOM = "real_data", "random_data"
MOST_ITERATIONS = 1000
_LONGEST_SEED = 1 << 63


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        dump: dump.json that the call is taken from; None: from `extracted`.
        api: ``Torch.matmul.0``; may be empty when `extracted` says it.
        extracted: file that holds the records of this call alone; with `dump` it is written.
        direction: ``forward``, ``backward`` or ``both``.
        real: saved tensors are wanted, not drawn ones.
        seed, iterations: of drawn ones.
    """

    dump: str | None
    api: str
    extracted: str | None
    direction: str
    real: bool
    seed: int
    iterations: int


def read_request(file: Path) -> Request:
    """Read a ``config_op.json``.

    Raises:
        SettingsError: all that is wrong with it, a line each.
    """
    try:
        document = parse_json(read_bytes(file), file)
    except FileNotFoundError:
        raise SettingsError(f"{file}: is not there; give a config_op.json, or --dump and --api") from None
    except DumpFormatError as error:
        raise SettingsError(str(error)) from None
    if not isinstance(document, dict):
        raise SettingsError(f"{file}: must hold a JSON object with the keys {', '.join(KEYS)}")
    problems = [_unknown(str(key)) for key in document if key not in KEYS]
    texts = {key: _text(document, key, problems) for key in KEYS[:3]}
    direction = _one_of(document, "propagation", (FORWARD, BACKWARD, BOTH), FORWARD, problems)
    real = _one_of(document, "data_mode", (REAL, RANDOM), RANDOM, problems) == REAL
    seed = _integer(document, "random_seed", 1234, 0, _LONGEST_SEED - 1, problems)
    iterations = _integer(document, "iter_times", 1, 1, MOST_ITERATIONS, problems)
    if not texts["dump_json_path"] and not texts["extract_api_path"]:
        problems.append("dump_json_path or extract_api_path must name the file that holds the call")
    if texts["dump_json_path"] and not texts["api_name"]:
        problems.append("api_name says which call of the dump is meant, as Torch.matmul.0")
    if problems:
        raise SettingsError("\n".join(f"{file}: {problem}" for problem in problems))
    return Request(texts["dump_json_path"] or None, texts["api_name"], texts["extract_api_path"] or None, direction, real, seed, iterations)


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, n=1)
    return f"{key[:80]!r} is no key; {f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(KEYS)}"


def _text(document: Mapping[str, Any], key: str, problems: list[str]) -> str:
    value = document.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    problems.append(f"{key} is {str(value)[:60]!r}; allowed: a text")
    return ""


def _one_of(document: Mapping[str, Any], key: str, allowed: tuple[str, ...], default: str, problems: list[str]) -> str:
    value = document.get(key, default)
    if isinstance(value, str) and value in allowed:
        return value
    problems.append(f"{key} is {str(value)[:60]!r}; allowed: {', '.join(allowed)}")
    return default


def _integer(document: Mapping[str, Any], key: str, default: int, low: int, high: int, problems: list[str]) -> int:
    value = document.get(key, default)
    if type(value) is int and low <= value <= high:
        return value
    problems.append(f"{key} is {str(value)[:60]!r}; allowed: a whole number from {low} to {high}")
    return default
