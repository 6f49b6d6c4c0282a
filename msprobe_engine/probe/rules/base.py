"""What looks at finished frames and raises alerts: the base of every rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.rules.tensor_kinds import KINDS

ORDER = "`msprobe monitor analyze RUN` lists the alerts in the order of execution; the first one is nearest to the cause"
"""What to do next where several alerts follow from one cause."""


class Rule(ABC):
    """Looks at one finished frame at a time, in step order; keeps what history it needs. Called on the training thread at a
    step boundary: work on the frame's columns with numpy and touch single records only when something fired.

    Class attributes:
        name: as in the settings.
        fires: when the rule fires, one line; the table of docs/guide/alerts.md is made of it.
        severity: what its alerts are unless the settings say otherwise.
        meaning: what an alert of it usually means.
        next: what to run or to look at next.
        recommended: part of the set ``recommended``.
        all_kinds: kinds it can look at.
        args_type: dataclass of its arguments.
        remark: under which key the files of the run have `passed_over`.

    Attributes:
        passed_over: what it has seen and raised no alert for, for the files of the run; grows while the run goes on.
    """

    name: str
    fires: ClassVar[str]
    severity: str = "warning"
    meaning: str
    next: str
    recommended: ClassVar[bool] = True
    all_kinds: ClassVar[tuple[str, ...]] = KINDS
    args_type: type[Any]
    remark: ClassVar[str] = ""
    args: Any
    passed_over: Mapping[str, Any] | None = None

    def __init__(self, args: Any = None, *, severity: str = "", kinds: Sequence[str] = (), layouts: LayoutCache | None = None) -> None:
        """
        Raises:
            SettingsError: a kind that this rule does not look at.
        """
        self.args = args or self.args_type()
        self.severity = severity or self.severity
        for kind in kinds:
            if kind not in self.all_kinds:
                raise SettingsError(f"rules: {self.name}.kinds = {kind!r}: expected some of {', '.join(self.all_kinds)}")
        self.kinds = tuple(kinds) or self.all_kinds
        self.layouts = layouts or LayoutCache()
        self.setup()

    def setup(self) -> None:
        """Make what the rule remembers."""

    @abstractmethod
    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame."""

    def bind(self, outlet: Callable[[Alert], None]) -> None:
        """Alerts that do not wait for a step go to `outlet`, on any thread."""

    def hold(self, held: bool) -> None:
        """Evaluation begins (True) or is over: no step is expected meanwhile."""

    def close(self) -> None:
        """The run is over."""

    @property
    def words(self) -> dict[str, str]:
        """What an alert usually means and what to run next, for `Alert.extra`."""
        return {"meaning": self.meaning, "next": self.next}

    def speak_as(self, rule: Rule) -> None:
        """Alerts are those of another rule, which this one is a part of."""
        self.name, self.meaning, self.next = rule.name, rule.meaning, rule.next
