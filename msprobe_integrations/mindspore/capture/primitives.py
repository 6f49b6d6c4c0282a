"""Primitives that are members of Cells (``self.matmul = ops.MatMul()``): records ``Primitive.{attribute}.{Class}.{N}``.

Their calls are seen where the class has its ``__call__``; the objects keep their class, and the graph compiler, which does not call
them, sees nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindspore.ops import Primitive

from msprobe_integrations.mindspore.capture.api import ApiCapture
from msprobe_integrations.patching import FunctionPatches


class PrimitiveCapture:
    """Sees calls of the primitives of some Cells while it is installed."""

    def __init__(self, api: ApiCapture) -> None:
        self._api = api
        self._patches = FunctionPatches()
        self._known: dict[int, tuple[Any, str, str, type]] = {}

    def install(self, cells: Iterable[Any]) -> None:
        """Start seeing calls; nothing happens when it has begun."""
        if self._patches:
            return
        self._known = known = {}
        for cell in cells:
            own = getattr(cell, "_primitives", None)  # which a Cell keeps; a module of MSAdapter has them among its attributes
            for name, member in (vars(cell) if own is None else own).items():
                if isinstance(member, Primitive) and id(member) not in known:
                    entrance = next(c for c in type(member).__mro__ if "__call__" in vars(c))
                    known[id(member)] = (member, f"Primitive.{name}", type(member).__name__, entrance)
        for entrance in dict.fromkeys(found[3] for found in known.values()):
            self._patches.add(entrance, "__call__", self._handler(entrance))

    def remove(self) -> None:
        self._patches.close()
        self._known = {}

    def _handler(self, entrance: type) -> Callable[..., Any]:
        api = self._api

        def called(following: Callable[..., Any], primitive: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._known.get(id(primitive))
            if found is None or found[3] is not entrance or not api.sees():
                return following(primitive, *args, **kwargs)
            return api.around(found[1], found[2], following, (primitive, *args), kwargs, skip=1)

        return called
