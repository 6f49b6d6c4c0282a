"""Names of the entries of a pack.

Those of the existing tool: ``env``, ``pip``, ``hyperparameters/...``, ``dataset/step{k}/rank{r}/dataset.json``,
``weights/step{k}/rank{r}/weight.json``, ``random/rank{r}.json``. Steps are forward passes of the process, from 0. Ours are below
``msprobe/``, which the existing tool does not look at.
"""

from __future__ import annotations

import re

FORMAT = 2
"""2: with the list of what was withheld of the environment, see `completeness`."""
ENV, PIP = "env", "pip"
STATIC, DYNAMIC = "hyperparameters/hyperparameters_static.json", "hyperparameters/hyperparameters_dynamic.json"
META = "msprobe/meta.json"
SAME = "same"
STATIC_SETTINGS = "msprobe/static.json"
"""Settings read from scripts, with file and line of each; of the command line."""

_SAME = re.compile(r"msprobe/same/rank[0-9]{1,9}\.json")
_RANKED = re.compile(r"msprobe/(ranks|env|withheld|system|hyperparameters|random)/rank([0-9]{1,9})\.json")
_STEPPED = re.compile(r"msprobe/(weights|dataset)/step([0-9]{1,18})/rank([0-9]{1,9})\.json")
_EXISTING = re.compile(r"(weights|dataset)/step([0-9]{1,18})/rank([0-9]{1,9})/(?:weight|dataset)\.json|random/rank([0-9]{1,9})\.json")


def of_rank(part: str, rank: int) -> str:
    """Entry of one rank: ``ranks`` (who wrote), ``env``, ``withheld`` (of ``env``), ``system``, ``hyperparameters`` or ``random``;
    ``same``: which of these it has in common with another rank."""
    return f"msprobe/{part}/rank{rank}.json"


def of_step(part: str, step: int, rank: int) -> str:
    """Digests of one forward pass: ``weights`` or ``dataset``."""
    return f"msprobe/{part}/step{step}/rank{rank}.json"


def weights(step: int, rank: int) -> str:
    """The existing tool's statistics of the parameters."""
    return f"weights/step{step}/rank{rank}/weight.json"


def dataset(step: int, rank: int) -> str:
    """The existing tool's statistics of what the model was called with."""
    return f"dataset/step{step}/rank{rank}/dataset.json"


def random(rank: int) -> str:
    """The existing tool's counts and stacks of random calls."""
    return f"random/rank{rank}.json"


def is_same(name: str) -> bool:
    """An entry that says which entries are those of other ranks."""
    return _SAME.fullmatch(name) is not None


def ranks_of(name: str) -> tuple[str, int] | None:
    """(part, rank) of `of_rank`'s names, else None."""
    m = _RANKED.fullmatch(name)
    return (m[1], int(m[2])) if m else None


def steps_of(name: str) -> tuple[str, int, int] | None:
    """(part, step, rank) of `of_step`'s names, else None."""
    m = _STEPPED.fullmatch(name)
    return (m[1], int(m[2]), int(m[3])) if m else None


def existing_of(name: str) -> tuple[str, int, int] | None:
    """(part, step, rank) of the existing tool's names by rank, else None; random calls have step -1."""
    m = _EXISTING.fullmatch(name)
    if m is None:
        return None
    return ("random", -1, int(m[4])) if m[4] is not None else (m[1], int(m[2]), int(m[3]))
