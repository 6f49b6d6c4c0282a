"""Patches are registered by the dotted name of a function. A new function whose name ends in ``wrapper`` or ``decorator`` decorates, in
order of registration; any other replaces, once. What was found at the first `apply_patches` is remembered as the original."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class Patch:
    def __init__(self, path: str) -> None:
        self.place, self.name = path.rsplit(".", 1)
        self.owner: Any = None
        self.original: Any = None
        self.final: Any = None
        self.patch_func: Any = None
        self.wrappers: list[Any] = []
        self.applied = False

    def add(self, function: Any, force: bool) -> None:
        if function.__name__.endswith(("wrapper", "decorator")):
            if function not in self.wrappers:
                self.wrappers.append(function)
        elif self.patch_func is not None and not force:
            raise RuntimeError(f"the patch of {self.name} exist !")
        else:
            self.patch_func = function
        self.applied = False

    def apply(self) -> None:
        if self.applied:
            return
        owner = importlib.import_module(self.place)
        found = getattr(owner, self.name)
        if self.owner is None:
            self.owner, self.original = owner, found
        final = self.patch_func or self.original
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.owner, self.name, final)
        self._sweep(found, final)
        self.applied, self.final = True, final

    def remove(self) -> None:
        self._sweep(self.final, self.original)
        self.patch_func = self.final = None
        self.applied = False
        self.wrappers.clear()

    def _sweep(self, old: Any, new: Any) -> None:
        for key, module in sys.modules.copy().items():
            if "mindspeed" not in key and old is not None and getattr(module, self.name, None) is old:
                setattr(module, self.name, new)


class MindSpeedPatchesManager:
    patches_info: dict[str, Patch] = {}

    @staticmethod
    def register_patch(orig_func_name: str, new_func: Any = None, force_patch: bool = False, **_: Any) -> None:
        MindSpeedPatchesManager.patches_info.setdefault(orig_func_name, Patch(orig_func_name)).add(new_func, force_patch)

    @staticmethod
    def apply_patches() -> None:
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply()

    @staticmethod
    def remove_patches() -> None:
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove()
