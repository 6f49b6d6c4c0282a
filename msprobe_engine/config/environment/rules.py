"""What variables of the environment do to the numbers: the table in ``rules.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from msprobe_engine.config.severity import HARMLESS, SHORT
from msprobe_engine.core.process.processes import OWNER
from msprobe_engine.core.process.variables import LAUNCH_LINE
from msprobe_engine.core.text.sentences import Sentence

OF_PROCESS = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "RANK_ID", "DEVICE_ID"),
        *("CROSS_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "HOSTNAME", "PWD", "OMPI_COMM_WORLD_RANK"),
        *(
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_NODE_RANK",
            "PMI_RANK",
            "PMIX_RANK",
            "ASCEND_DEVICE_ID",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
        ),
        *("MS_NODE_ID", "MASTER_PORT", "MASTER_ADDR"),
        # what `msprobe run` and a probe leave for the processes they start
        *(OWNER, "MSPROBE_CONFIG", "MSPROBE_SET", "MSPROBE_LAUNCH", LAUNCH_LINE),
    )
)
"""Variables that differ from rank to rank, or from start to start, in every job."""


@dataclass(frozen=True)
class Rule:
    """One row of the table; see the head of ``rules.yaml``."""

    names: re.Pattern[str]
    severity: str
    why: str
    default: tuple[str, ...] = ()
    partner: str = ""
    exact: frozenset[str] = frozenset()
    by_name: bool = False


class EnvironmentRules:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self.rules: list[Rule] = []
        for row in data["rules"]:
            names = row["names"]
            pattern = re.compile("|".join(translate(name) for name in names))
            default = tuple(str(value).lower() for value in row.get("default", ()))
            self.rules.append(
                Rule(
                    pattern,
                    SHORT[row["severity"]],
                    Sentence(row["why"]),
                    default,
                    row.get("partner", ""),
                    frozenset(names),
                    row.get("by_name", False),
                )
            )
        self._found: dict[str, Rule] = {}

    def reasons(self) -> set[str]:
        """All that may be said of a variable that differs."""
        return {rule.why for rule in self.rules}

    def of(self, name: str) -> Rule:
        """The rule of a variable; a rule that names it goes before one with a star."""
        rule = self._found.get(name)
        if rule is None:
            fits = [rule for rule in self.rules if rule.names.match(name)]
            rule = self._found[name] = next((one for one in fits if name in one.exact), fits[0])
        return rule

    def is_known(self, name: str) -> bool:
        """Does a row but the last, which takes everything, name the variable?"""
        return self.of(name) is not self.rules[-1]

    def may_change(self, name: str) -> bool:
        """Is the variable known to matter to numbers? Of one that is in no row nobody knows."""
        return self.is_known(name) and self.of(name).severity != HARMLESS


def same_value(rule: Rule, golden: str | None, target: str | None) -> bool:
    """Do two values of a variable mean the same? None: not set, which is one of the defaults."""
    golden_word, target_word = (None if value is None or not value.strip() else value.strip().lower() for value in (golden, target))
    if target_word == golden_word:
        return True
    unset = (None, *rule.default)
    if target_word in unset and golden_word in unset:
        return True
    return (
        target_word is not None
        and golden_word is not None
        and _number(target_word) is not None
        and _number(target_word) == _number(golden_word)
    )


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{1,15})?", text) else None


@lru_cache(maxsize=1)
def environment_rules() -> EnvironmentRules:
    """The table of this package."""
    text = files("msprobe_engine.config.environment").joinpath("rules.yaml").read_text(encoding="utf-8")
    return EnvironmentRules(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
