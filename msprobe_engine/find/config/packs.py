"""Two packs: checker by checker, rank by rank where both know ranks."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.config.collect.pack import collect
from msprobe_engine.config.collect.resolved import CODE, DEFAULT
from msprobe_engine.config.launch_scripts.shell.context import NOT_SET
from msprobe_engine.config.pack.reader import Pack, read_pack
from msprobe_engine.config.settings.pack_settings import PackSettings
from msprobe_engine.config.severity import ERROR, MAY, WARNING
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.core.text.words import some
from msprobe_engine.find.config import completeness, difference
from msprobe_engine.find.config.arguments import compare_arguments, with_arguments
from msprobe_engine.find.config.compare_settings import compare_settings
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.config.difference import NO_RANK, ONLY_BENCH, ONLY_CMP, SIDES, Difference, Sheet, merge_ranks
from msprobe_engine.find.config.environment import compare_env
from msprobe_engine.find.config.pack_settings import DYNAMIC_FILE, STATIC_FILE, PackSide
from msprobe_engine.find.config.packages import compare_packages
from msprobe_engine.find.config.random_calls import compare_random
from msprobe_engine.find.config.system import compare_system
from msprobe_engine.find.config.tensors import LATER, compare_dataset, compare_weights

_PLAIN = ("torch", "mindspore")
"""Origins of settings that are read from the objects of a program, not from the arguments it was started with."""
_CONTENT = {difference.DATASET: Sentence("samples"), difference.RANDOM: Sentence("random calls")}


def compare_packs(bench: str | Path | Pack, cmp: str | Path | Pack, *, only: tuple[str, ...] | None = None) -> Comparison:
    """Compare two packs of this tool or the existing one, in any mixture.

    Args:
        bench: the run that is right.
        cmp: the run in question.
        only: the checkers to look at; None: all that a pack has. A checker that one pack has alone is a difference then.

    Raises:
        DumpFormatError: a path is no pack.
    """
    sides = [PackSide(pack if isinstance(pack, Pack) else read_pack(pack)) for pack in (bench, cmp)]
    return _Work(sides[0], sides[1], only).run()


class _Work:
    def __init__(self, bench: PackSide, cmp: PackSide, only: tuple[str, ...] | None) -> None:
        self.bench, self.cmp, self.only = bench, cmp, only
        self.out = Comparison(os.fspath(bench.pack.path), os.fspath(cmp.pack.path))
        sizes = bench.world_size, cmp.world_size
        self.other_ranks = None not in sizes and sizes[0] != sizes[1]
        self.other_cut = self.other_ranks or _find_parallel_sizes(bench) != _find_parallel_sizes(cmp)

    def run(self) -> Comparison:
        checkers: dict[str, Callable[[], Sheet]] = {
            difference.ENV: self._env,
            difference.PIP: lambda: compare_packages(self.bench.packages(), self.cmp.packages()),
            difference.DATASET: lambda: compare_dataset(
                self.bench.tensors(difference.DATASET), self.cmp.tensors(difference.DATASET), other_ranks=self.other_ranks
            ),
            difference.WEIGHTS: lambda: compare_weights(
                self.bench.tensors(difference.WEIGHTS),
                self.cmp.tensors(difference.WEIGHTS),
                other_ranks=self.other_ranks,
                other_cut=self.other_cut,
            ),
            difference.SETTINGS: self._settings,
            difference.RANDOM: self._random,
            difference.SYSTEM: lambda: compare_system(self.bench.system(), self.cmp.system()),
        }
        found: dict[str, Sheet] = {}
        for name in (
            *[name for name in checkers if name != difference.SETTINGS],
            difference.SETTINGS,
        ):  # settings may point to what was compared
            if self._is_in_both_packs(name, found):
                self.found = found
                found[name] = checkers[name]()
                self.out.notes += found[name].notes
        self.out.sheets = {name: found[name] for name in difference.CHECKERS if name in found}
        self._arguments()
        self._later_weights()
        self._ranks()
        neither = [name for name in (difference.DATASET, difference.RANDOM) if not self.bench.has(name) and not self.cmp.has(name)]
        if neither and self.only is None and None not in (self.bench.world_size, self.cmp.world_size):
            self.out.notes.append(
                Sentence(
                    "neither pack has {0}; ConfigChecker in the program collects that",
                    join_sentences(" and ", (_CONTENT[n] for n in neither)),
                )
            )
        if self.only is None:
            self.out.problems += completeness.of_one_side(self.bench, self.cmp)
        nothing = [name for name, sheet in found.items() if not (sheet.compared or sheet.differences or sheet.not_shown)]
        self.out.problems += [f"{name}: nothing in the packs could be compared" for name in nothing]
        if self.out.unknown:
            names = ", ".join(self.out.unknown)
            self.out.problems.append(f"what may change the numbers cannot be compared, see the notes: {names}")
        for who, side in (("bench", self.bench), ("cmp", self.cmp)):
            self.out.problems += [f"{SIDES[who]}: {problem}" for problem in side.problems]
            self.out.sides[who] = {"path": os.fspath(side.pack.path), "ours": side.pack.ours, **_describe_pack(side)}
        return self.out

    def _is_in_both_packs(self, name: str, found: dict[str, Sheet]) -> bool:
        """Do both packs have it? What only one has is a difference of its own."""
        has = self.bench.has(name), self.cmp.has(name)
        if self.only is not None and name not in self.only:
            return False
        if all(has):
            return True
        if any(has):
            side = "bench" if has[0] else "cmp"
            why = Sentence("only the {0} pack has {1}, so it is not compared", SIDES[side], name)
            self.out.not_compared[name] = why
            if self.only is None and not self._of_other_tool(name):
                names = (name, "") if has[0] else ("", name)
                found[name] = Sheet(name, differences=[Difference(name, *names, "", "", MAY, why, level=WARNING)])
        return False

    def _of_other_tool(self, name: str) -> bool:
        """The existing tool does not know it."""
        return name == difference.SYSTEM and not (self.bench.pack.ours and self.cmp.pack.ours)

    def _env(self) -> Sheet:
        by_rank = all(len(side.pack.by_rank("env")) > 0 for side in (self.bench, self.cmp))
        return compare_env(self.bench.env(by_rank), self.cmp.env(by_rank))

    def _random(self) -> Sheet:
        (golden_calls, golden_entries), (target_calls, target_entries) = self.bench.random(), self.cmp.random()
        return compare_random(golden_calls, target_calls, (golden_entries, target_entries))

    def _settings(self) -> Sheet:
        sheet = Sheet(difference.SETTINGS)
        content = {word: True for word, name in (("data", difference.DATASET), ("weights", difference.WEIGHTS)) if self._content(name)}
        golden_files, target_files = self.bench.settings_files(), self.cmp.settings_files()
        files = [(name, name) for name in (STATIC_FILE, DYNAMIC_FILE) if name in golden_files and name in target_files]
        for name in sorted(set(golden_files) ^ set(target_files)) if files else ():
            who = "bench" if name in golden_files else "cmp"
            self.out.problems.append(f"only the {SIDES[who]} pack has {name}, so these settings are not compared")
        for golden_file, target_file in files or [(golden_files[-1], target_files[-1])]:
            by_rank = golden_file == target_file == DYNAMIC_FILE and self.bench.ranks_with_settings() and self.cmp.ranks_with_settings()
            sides = self.bench.settings(golden_file, by_rank), self.cmp.settings(target_file, by_rank)
            if golden_file == STATIC_FILE != target_file and self.cmp.ranks_with_settings():  # the script speaks for every rank of the run
                sides = _for_every_rank(sides[0], self.cmp)
            elif target_file == STATIC_FILE != golden_file and self.bench.ranks_with_settings():
                sides = _for_every_rank(sides[1], self.bench)[::-1]
            differences_by_rank: list[tuple[tuple[int, ...], Difference]] = []
            both = sorted(set(sides[0]) & set(sides[1]))
            ranks_by_settings: dict[tuple[int, int], list[int]] = {}
            for rank in both:
                ranks_by_settings.setdefault((id(sides[0][rank]), id(sides[1][rank])), []).append(rank)
            for ranks in ranks_by_settings.values():
                settled = compare_settings(
                    sides[0][ranks[0]],
                    sides[1][ranks[0]],
                    golden_file if golden_file == target_file else f"{golden_file} / {target_file}",
                    content,
                )
                differences = (
                    settled.differences
                    if golden_file == target_file
                    else self._comparable(settled.differences, golden_file, sides[0][ranks[0]], sides[1][ranks[0]])
                )
                differences_by_rank += [(tuple(ranks), one_difference) for one_difference in differences]
                sheet.compared = max(sheet.compared, settled.compared)
                self.out.derived.update(settled.derived)
                self.out.notes += [note for note in settled.notes if note not in self.out.notes]
                sheet.unknown = tuple(sorted({*sheet.unknown, *settled.unknown}))
                sheet.not_shown = len(sheet.unknown)
            sheet.differences += merge_ranks(differences_by_rank, tuple(both))
        return sheet

    def _comparable(self, differences: list[Difference], file: str, bench: PackSettings, cmp: PackSettings) -> list[Difference]:
        """Of a run's settings against a script's: without those that no script says, because the program sets them.

        Args:
            file: which file of the bench pack was compared.
        """
        run, which, word = (cmp, 1, ONLY_CMP) if file == STATIC_FILE else (bench, 0, ONLY_BENCH)
        inside = {
            difference_of_setting.name
            for difference_of_setting in run.settings.values()
            if difference_of_setting.origin == CODE
            or (difference_of_setting.origin == DEFAULT and difference_of_setting.framework in _PLAIN)
        }
        out, names = [], []
        for difference_of_setting in differences:
            name, other = (difference_of_setting.bench_name, difference_of_setting.cmp_name)[:: -1 if which else 1]
            if difference_of_setting.matters and other == word and name in inside:
                names.append(name)
            else:
                out.append(difference_of_setting)
        if names:
            shown = some(names)
            run_side, script_side = ("target", "golden") if which else ("golden", "target")
            self.out.not_compared[difference.SETTINGS] = (
                f"settings that the program of the {run_side} side sets and the scripts of the {script_side} side do not say: {shown}"
            )
        return out

    def _arguments(self) -> None:
        """What the programs were started with; a pack of the command line has no program but msprobe itself."""
        sides = self.bench, self.cmp
        if self.only is not None or any(side.world_size is None for side in sides):
            return
        settings = [side.settings(DYNAMIC_FILE, True) if side.ranks_with_settings() else {} for side in sides]
        reported = self.out.sheets[difference.SETTINGS].differences if difference.SETTINGS in self.out.sheets else []
        files = _own_files(self.bench), _own_files(self.cmp)
        compared = compare_arguments(_programs(self.bench), _programs(self.cmp), (settings[0], settings[1]), reported, files)
        if compared.masked:
            self.out.notes.append(
                Sentence("arguments that are masked were not compared: {0} ({1})", len(compared.masked), some(sorted(compared.masked)))
            )
        if compared.differences or compared.unknown:
            sheet = self.out.sheets.setdefault(difference.SETTINGS, Sheet(difference.SETTINGS))
            sheet.differences += compared.differences
            sheet.unknown = tuple(sorted({*sheet.unknown, *compared.unknown}))
            sheet.not_shown = len(sheet.unknown)

    def _content(self, name: str) -> bool:
        return name in self.found and self.found[name].compared > 0

    def _later_weights(self) -> None:
        """Weights that were equal at first follow from something else, if there is something else."""
        others = [one for one in self.out.differences if one.term != LATER]
        sheet = self.out.sheets.get(difference.WEIGHTS)
        if sheet is None or not others:
            return
        sheet.differences = [
            replace(one, severity=MAY, why=Sentence("{0}; it follows from the other differences", one.why)) if one.term == LATER else one
            for one in sheet.differences
        ]

    def _ranks(self) -> None:
        """Ranks that wrote into one pack only; a pack of the command line is of none."""
        golden_ranks, target_ranks = set(self.bench.places()), set(self.cmp.places())
        if (
            None in (self.bench.world_size, self.cmp.world_size)
            or not golden_ranks
            or not target_ranks
            or golden_ranks == target_ranks
            or self.only is not None
        ):
            return
        if self.other_ranks:
            self.out.notes.append(
                Sentence(
                    "the run has {0} ranks, the golden one {1}; ranks {2} are compared",
                    self.cmp.world_size,
                    self.bench.world_size,
                    format_ranges(golden_ranks & target_ranks),
                )
            )
            return
        sheet = self.out.sheets.setdefault(difference.SYSTEM, Sheet(difference.SYSTEM))
        for side, ranks in (("bench", golden_ranks - target_ranks), ("cmp", target_ranks - golden_ranks)):
            if ranks:
                names = ("rank", "") if side == "bench" else ("", "rank")
                why = Sentence("only the {0} pack has anything of these ranks", SIDES[side])
                sheet.differences.append(Difference(difference.SYSTEM, *names, "", "", MAY, why, ranks=tuple(sorted(ranks)), level=ERROR))


def _find_parallel_sizes(side: PackSide) -> set[tuple[str, Any]]:
    """How the model is dealt out to the ranks, as far as the settings say it."""
    ranks = side.settings(DYNAMIC_FILE, True).values() if side.ranks_with_settings() else ()
    return {(name, one.value) for settings in ranks for name, one in settings.settings.items() if name.endswith("_model_parallel_size")}


def _for_every_rank(script: dict[int, PackSettings], run: PackSide) -> tuple[dict[int, PackSettings], dict[int, PackSettings]]:
    """Settings of scripts, which are one for all, beside those that each rank of a run has resolved or was started with."""
    programs = _programs(run)
    known: dict[tuple[int, str], PackSettings] = {}
    ranks: dict[int, PackSettings] = {}
    for rank, side in run.settings(DYNAMIC_FILE, True).items():
        program = programs.get(rank, {})
        key = id(side), repr(program.get("arguments"))
        if key not in known:
            known[key] = with_arguments(side, program)
        ranks[rank] = known[key]
    return dict.fromkeys(ranks, script[NO_RANK]), ranks


def _programs(side: PackSide) -> dict[int, dict[str, Any]]:
    """Rank to script, arguments and commit."""
    return {rank: one["program"] for rank, one in side.system().items() if isinstance(one.get("program"), dict)}


def _own_files(side: PackSide) -> set[str]:
    """Names of the pack and of the files whose settings are in it."""
    files = side.static.get("files")
    names = files if isinstance(files, list) else []
    return {side.pack.path.name, *(Path(name).name for name in names if isinstance(name, str))}


def _describe_pack(side: PackSide) -> dict[str, object]:
    """Where a pack is from, for the head of a report."""
    meta = {key: side.meta[key] for key in ("framework", "world_size", "host", "created") if side.meta.get(key)}
    return meta | {"ranks": len(side.pack.ranks)}


STARTED = (difference.ENV, difference.PIP, difference.SETTINGS, difference.SYSTEM)
"""What is there before a training runs."""


def verify(
    good: str | Path,
    paths: Sequence[str | Path] = (),
    pack: str | Path | None = None,
    arguments: Sequence[str] | None = None,
    *,
    added: Sequence[str] = (),
    key: bytes = b"",
) -> Comparison:
    """Compare a good pack with another one, or with this environment and these scripts as they are now.

    What the good pack has and cannot be there before the training runs (weights, samples, random calls) is not compared, which is said
    and is no difference.

    Args:
        good: a saved pack.
        paths: launch scripts and settings files; used when there is no `pack`.
        pack: a pack to be verified.
        arguments: what the scripts would be called with; None: not known.
        added, key: see `environment.collect`.

    Raises:
        DumpFormatError: a path is no pack, or a script cannot be read.
    """
    first = read_pack(good)
    if pack is not None:
        return compare_packs(first, read_pack(pack))
    with tempfile.TemporaryDirectory(prefix="msprobe_verify_") as place:
        now, notes = collect(paths, Path(place) / "now.zip", arguments, added=added, key=key)
        comparison = compare_packs(first, read_pack(now), only=STARTED)
        comparison.cmp = "now"
        comparison.sides["cmp"] = {**comparison.sides.get("cmp", {}), "path": "this environment, now"}
    side = PackSide(first)
    for name in (difference.DATASET, difference.WEIGHTS, difference.RANDOM):
        if side.has(name):
            comparison.not_compared[name] = f"{name} of the good pack: there are none before the training runs"
    comparison.notes += notes
    return comparison


def compare_scripts(bench: str | Path, cmp: str | Path) -> Comparison:
    """Compare what two launch scripts or settings files set, as they would start here.

    Raises:
        DumpFormatError: one of them cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="msprobe_scripts_") as place:
        key = secrets.token_bytes(32)  # values that are not shown are compared by digests that nobody keeps
        collected = [
            collect([script], Path(place) / f"{side}.zip", key=key, of_scripts=True) for side, script in (("bench", bench), ("cmp", cmp))
        ]
        packs = [read_pack(pack) for pack, _ in collected]
        variables = any(one.values or one.withheld for pack in packs for one in PackSide(pack).env(False).values())
        comparison = compare_packs(*packs, only=(*([difference.ENV] if variables else []), difference.SETTINGS))
    comparison.bench, comparison.cmp = os.fspath(bench), os.fspath(cmp)
    for side, script in (("bench", bench), ("cmp", cmp)):
        comparison.sides[side] = {**comparison.sides.get(side, {}), "path": os.fspath(script)}
    comparison.not_compared["packages"] = "packages, machine and variables that no script sets: -d collects a pack of them where each runs"
    notes = [note for _, notes in collected for note in notes]
    comparison.notes += dict.fromkeys(notes)
    assumed = [note for note in notes if NOT_SET in note]
    if assumed and comparison.equal and (line := _first_other_line(Path(bench), Path(cmp))):
        comparison.problems.append(
            f"{os.fspath(cmp)}, line {line}: here the scripts differ, and what that changes was not seen; it may depend on what was "
            f"{assumed[0].partition(': ')[2]} (set it in both, or compare packs of runs)"
        )
    return comparison


def _first_other_line(bench: Path, cmp: Path) -> int:
    """The first line of `cmp` that is not in `bench` at its place, comments and empty lines aside; 0 where all are the same."""
    codes = [
        [(number, line.strip()) for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)] for path in (bench, cmp)
    ]
    golden, target = ([(number, line) for number, line in code if line and not line.startswith("#")] for code in codes)
    for (_, expected), (number, line) in zip(golden, target):
        if line != expected:
            return number
    longer = target[len(golden) :] or golden[len(target) :]
    return longer[0][0] if longer else 0
