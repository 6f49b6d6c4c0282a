"""`ConfigChecker` under its existing name and arguments, for any framework."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.pack.background import flush_all
from msprobe_engine.core.errors import MissingExtraError, SinkError, UsageError
from msprobe_engine.core.io.claims import Claim, claim_directory
from msprobe_engine.core.log import one_line, warn_once
from msprobe_integrations.common.config.run import usable_key

if TYPE_CHECKING:
    from msprobe_engine.find.config.comparison import Comparison

_FRAMEWORKS = {
    "pytorch": ("torch", "msprobe_integrations.torch.config.checker", "TorchConfigChecker"),
    "mindspore": ("mindspore", "msprobe_integrations.mindspore.config.checker", "MindSporeConfigChecker"),
}


class ConfigChecker:
    """Collects into a pack what decides the numbers of a training before its first step; two packs are compared before the numbers are.

        ConfigChecker.apply_patches()                              # first of all: counts random calls
        ConfigChecker(model, ["run.sh"], "pack.zip")               # when the model is there
        ConfigChecker.compare("pack_a.zip", "pack_b.zip", "out")   # on one machine, later

    The pack gets the environment (without secrets), packages, drivers, the settings that the training's framework has resolved, those in
    `shell_path`, and at chosen forward passes digests of all weights and inputs, statistics as the existing tool has them, and the
    random calls so far. All ranks may name one path. Only wrong arguments raise; what fails besides (a full disk, a file there that is
    no pack) is said once, nothing is collected, and the training goes on.

    Args:
        model: a module or cell, a list or tuple of them (chunks of a virtual pipeline), or None: no weights, inputs and random calls.
        shell_path: launch scripts and settings files, read and never run.
        output_zip_path: ends in ``.zip``. An earlier run's pack there is replaced.
        fmk: ``pytorch`` or ``mindspore``.
        micro_steps: forward passes that are collected: a number n (the first n), a list of numbers from 0, or ``"all"``, as the
            existing tool does.
        evaluation: forward passes of evaluation count as well (the model is in eval mode, without gradients).
        environment: names and patterns (``MY_*``) of variables whose values are collected beside those that are known to matter.
        key_file: holds a key; values that are not collected are compared by digests then. None: ``MSPROBE_KEY`` or
            ``MSPROBE_KEY_FILE`` of the environment, else no digests.
        statistics: False: digests of weights without the existing tool's statistics, which take four more passes over them.

    Raises:
        UsageError: an argument is wrong.
        DumpFormatError: a file of `shell_path` cannot be read.
        MissingExtraError: the framework is not installed.
    """

    def __init__(
        self,
        model: Any = None,
        shell_path: Sequence[str | Path] | None = None,
        output_zip_path: str | Path = "./config_check_pack.zip",
        fmk: str = "pytorch",
        *,
        micro_steps: int | Sequence[int] | str = 1,
        evaluation: bool = False,
        statistics: bool = True,
        environment: Sequence[str] = (),
        key_file: str | Path | None = None,
    ) -> None:
        module = _module_of(fmk)
        checker = getattr(module, _FRAMEWORKS[fmk][2])
        if isinstance(environment, str):
            raise UsageError(f"environment is {environment!r}; allowed: a list of names and patterns, also for one name")
        static = _static(shell_path, environment, usable_key(key_file))
        self._checker: Any = None
        self._claim: Claim | None = None
        given = Path(output_zip_path)
        try:
            if given.suffix == ".zip":
                self._claim = claim_directory(given.parent, None, by_process=True)
            self._checker = checker(
                model,
                static,
                given if self._claim is None else self._claim.path / given.name,
                micro_steps=micro_steps,
                evaluation=evaluation,
                statistics=statistics,
                environment=environment,
                key_file=key_file,
            )
        except (SinkError, OSError) as fault:
            module.undo_patches()
            warn_once(
                f"config check {output_zip_path}", f"config check: nothing is collected, the training goes on: {one_line(str(fault))}"
            )

    def flush(self) -> None:
        """Wait until all that was collected so far is in the pack."""
        if self._checker is not None:
            self._checker.flush()

    def close(self) -> None:
        """Collect no more, and finish the pack; done at the end of the process too."""
        if self._checker is not None:
            self._checker.close()
        if self._claim is not None:
            self._claim.release()

    @staticmethod
    def apply_patches(fmk: str = "pytorch") -> None:
        """Count calls of random functions from now on; also those that modules have imported by name before. A second call changes
        nothing. It ends when the first forward pass is collected, or with `undo_patches`.

        Raises:
            UsageError: `fmk` is unknown.
            MissingExtraError: the framework is not installed.
        """
        _module_of(fmk).apply_patches()

    @staticmethod
    def undo_patches(fmk: str = "pytorch") -> None:
        """Put the functions back; what was counted stays. Errors: as `apply_patches`."""
        _module_of(fmk).undo_patches()

    @staticmethod
    def compare(bench_zip_path: str | Path, cmp_zip_path: str | Path, output_path: str | Path, fmk: str = "pytorch") -> Comparison:
        """Compare two packs and write ``result.xlsx`` and the other reports to the directory `output_path`.

        Args:
            fmk: accepted as before; a pack knows its framework.

        Returns:
            the comparison.

        Raises:
            UsageError: `fmk` is unknown.
            DumpFormatError: one of the packs cannot be read.
            SinkError: the reports cannot be written.
        """
        _check(fmk)
        flush_all()
        from msprobe_engine.find.config.packs import compare_packs
        from msprobe_engine.report.config.files import write_results

        result = compare_packs(bench_zip_path, cmp_zip_path)
        write_results(result, output_path)
        return result


def _check(fmk: str) -> None:
    if fmk not in _FRAMEWORKS:
        raise UsageError(f"fmk is {fmk!r}; allowed: {', '.join(map(repr, _FRAMEWORKS))}")


def _module_of(fmk: str) -> ModuleType:
    _check(fmk)
    package, module, _ = _FRAMEWORKS[fmk]
    if find_spec(package) is None:
        raise MissingExtraError(package, package, f"ConfigChecker with fmk={fmk!r}")
    return importlib.import_module(module)


def _static(shell_path: Sequence[str | Path] | None, added: Sequence[str], key: bytes) -> dict[str, Any]:
    """Entries of what the scripts say."""
    if not shell_path:
        return {}
    if isinstance(shell_path, (str, Path)) or not all(isinstance(path, (str, Path)) for path in shell_path):
        raise UsageError(f"shell_path is {shell_path!r}; allowed: a list of paths, also for one file")
    from msprobe_engine.config.collect.pack import static_entries
    from msprobe_engine.config.launch_scripts.static import collect_static

    return static_entries(collect_static(list(shell_path)), added=added, key=key)
