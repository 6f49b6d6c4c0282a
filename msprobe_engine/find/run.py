"""``msprobe diagnose``: two runs, or one, step after step until something is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.core.errors import NothingCapturedError, UsageError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.text.ranges import steps_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import config_and_checkpoint, detect, findings, run_directory, saved_variables
from msprobe_engine.find.config.difference import Difference
from msprobe_engine.find.detect import Run
from msprobe_engine.find.difference.noise.calibration import Floats, of_ranks
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.launch_line import again_both, with_launch_lines
from msprobe_engine.find.monitor.one_monitor import diagnose_monitor
from msprobe_engine.find.monitor.two_monitors import diagnose_two_monitors
from msprobe_engine.find.nonfinite.load import read_step
from msprobe_engine.find.nonfinite.one_side import add_later_nonfinite, add_nonfinite_of_one_side, files_without
from msprobe_engine.find.step_loop import AlreadyBegun, BothSides, Movements, StepLoop
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import missing_steps, steps_on_one_side
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump
from msprobe_engine.formats.dump.replicas.reader import KEPT, StepTables


def diagnose(
    target: str | Path,
    golden: str | Path | None = None,
    calibration: Sequence[str | Path] = (),
    mappings: Mappings | None = None,
    exact: bool = False,
    scheduler: str = "",
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        target: the run in question: the root of a dump, a step, a rank directory, a dump.json, or an incident directory; or
            monitor output; or an output directory with several of these, which are all looked at.
        golden: a run that is right, of the same kind; None: only what a run can say about itself.
        calibration: further dumps of the golden training, moved by one rounding unit: differences are counted in what they show.
        mappings: what modules and functions of the target are called on the golden side.
        exact: round-off is a finding, too: the first number that is not the same on both sides; and so are calls that one run alone makes.
        scheduler: address of a Dask scheduler (``tcp://host:8786``) whose workers read the dumps; "": they are read here.

    Raises:
        MissingExtraError: Dask is not installed.
        UsageError: a mapping that cannot be read, a calibration or a mapping without a golden run, two things of different kinds, or
            something else than those; no cluster answers at `scheduler`, or it is given with a mapping.
        DumpFormatError: there is nothing to read at a path.
        NothingCapturedError: the two runs have no step or rank in common.
    """
    if calibration and golden is None:
        raise UsageError("a calibration needs a golden run to be measured from: msprobe diagnose RUN GOLDEN --calibration DIR")
    if mappings and golden is None:
        raise UsageError("a mapping says what names are on the golden side; give two runs: msprobe diagnose RUN GOLDEN -cm FILE")
    if exact and golden is None:
        raise UsageError("--exact compares two runs: msprobe diagnose RUN GOLDEN --exact")
    if mappings and scheduler:
        raise UsageError("--scheduler reads ranks that are the same once, and a mapping changes each of them; leave one of them out")
    tables = StepTables(KEPT if golden is not None else 0, scheduler)  # one run alone is read once
    differences: list[Difference] = []
    target_run, golden_run = Run(Path(target)), None if golden is None else Run(Path(golden))
    further = [open_dump(path) for path in calibration]

    def compare_kind(kind: str, target_part: Run, golden_part: Run | None) -> Diagnosis:
        return _one_kind(kind, target_part, golden_part, further, mappings, exact, tables)

    if target_run.several or (golden_run is not None and golden_run.several):
        diagnosis = run_directory.look_at_all(target_run, golden_run, compare_kind)
    else:
        diagnosis = compare_kind(detect.common(target_run, golden_run), target_run, golden_run)
    packs = target_run.config, None if golden_run is None else golden_run.config
    if diagnosis.finding not in (findings.CONFIG, findings.CHECKPOINT) and (golden_run is None or golden_run.config is not None):
        lines, problems, differences = config_and_checkpoint.started_otherwise(*packs)
        diagnosis.evidence += lines
        diagnosis.problems += problems
        config_and_checkpoint.blame_settings(diagnosis, differences)
        diagnosis.problems += config_and_checkpoint.gradients_averaged_otherwise(diagnosis, *packs)
        if golden is None and lines and target_run.config is not None and diagnosis.finding == findings.NONE:
            config_and_checkpoint.blame_ranks(diagnosis, target_run.config)
    if golden is None and diagnosis.finding == findings.DESYNC and target_run.config is not None:
        diagnosis.next.insert(0, config_and_checkpoint.compare_ranks(target_run.config))
    if golden_run is not None and not (target_run.has_monitor and golden_run.has_monitor):
        _say_steps(diagnosis, [side for side in (target_run, golden_run) if side.has_monitor])
    config_and_checkpoint.blame_settings_alone(diagnosis, differences)
    diagnosis.next = with_launch_lines(diagnosis.next, *packs)
    return diagnosis


def _say_steps(diagnosis: Diagnosis, monitored: Sequence[Run]) -> None:
    """Records of the dumped steps agree, which says nothing of the steps without a dump: the headline names the steps, and `next` looks at
    all of them.

    Args:
        monitored: what says how many steps a run had, if anything.
    """
    if diagnosis.finding != findings.NONE or diagnosis.nothing or not diagnosis.steps:
        return
    total = max((len(run.monitor.recorded_steps(rank)[0]) for run in monitored for rank in run.monitor.ranks), default=0)
    if total == len(diagnosis.steps):
        return
    if not diagnosis.problems and total > len(diagnosis.steps):
        diagnosis.nothing = Sentence("No difference beyond round-off in {0} of {1}", steps_text(diagnosis.steps), total)
    elif not diagnosis.problems:
        diagnosis.nothing = Sentence("No difference beyond round-off in {0}", steps_text(diagnosis.steps))
    diagnosis.next += again_both("--preset watch")


def _one_kind(
    kind: str,
    target: Run,
    golden: Run | None,
    calibration: Sequence[DumpDirectory],
    mappings: Mappings | None,
    exact: bool,
    tables: StepTables,
) -> Diagnosis:
    """One thing of a kind, or two."""
    if kind == detect.MONITOR:
        return diagnose_monitor(target.monitor) if golden is None else diagnose_two_monitors(target.monitor, golden.monitor, exact)
    if kind == detect.CONFIG:
        pack, other = target.config or target.path, None if golden is None else golden.config or golden.path
        return config_and_checkpoint.diagnose_pack(pack) if other is None else config_and_checkpoint.diagnose_packs(pack, other)
    if kind == detect.CHECKPOINT and golden is not None:
        return config_and_checkpoint.diagnose_checkpoints(target.path, golden.path)
    if golden is None:
        from msprobe_engine.find.single_run import diagnose_alone

        return diagnose_alone(target, tables)
    finite = set[Path]()
    diagnosis = _pair(target, golden, calibration, mappings, exact, finite, tables)
    add_nonfinite_of_one_side(diagnosis, target, golden, tables)
    add_later_nonfinite(diagnosis, target, golden, tables, finite)
    return diagnosis


def _pair(
    target: Run,
    golden: Run,
    calibration: Sequence[DumpDirectory],
    mappings: Mappings | None,
    exact: bool,
    finite: set[Path],
    tables: StepTables,
) -> Diagnosis:
    """`finite`, `tables`: take up the files that were read and have no NaN and no infinity, and what was read."""
    target_dump, golden_dump = target.need_dump(), golden.need_dump()
    steps = sorted(set(target_dump.steps) & set(golden_dump.steps))
    if not steps and len(target_dump.steps) == len(golden_dump.steps) == 1:
        steps = [target_dump.steps[0]]
    if not steps:
        raise NothingCapturedError(
            f"{target} has steps {target_dump.steps[:8]}, {golden} has {golden_dump.steps[:8]}: none in common; "
            "dump the same steps of both runs"
        )

    def sides(step: int, problems: list[str]) -> tuple[dict[int, DumpTable], dict[int, DumpTable]]:
        reader = None if mappings else tables.of(step)
        target_ranks = read_step(target_dump, step, problems, reader)
        golden_ranks = read_step(golden_dump, step if step in golden_dump.steps else golden_dump.steps[0], problems, reader)
        if mappings:
            mappings.apply_all(target_ranks, golden_ranks)
        finite.update(files_without(target_ranks) | files_without(golden_ranks))
        return target_ranks, golden_ranks

    def measure_movements(step: int, golden_tables: Mapping[int, DumpTable], problems: list[str]) -> dict[int, Floats]:
        golden_step = step if step in golden_dump.steps else golden_dump.steps[0]
        return of_ranks(golden_tables, [read_step(dump, golden_step, problems) for dump in calibration if golden_step in dump.steps])

    diagnosis = compare_steps(steps, sides, f"{target} and {golden}", measure_movements if calibration else None, exact=exact)
    diagnosis.problems += missing_steps(target_dump) + missing_steps(golden_dump) + steps_on_one_side(target_dump, golden_dump)
    if steps[0] not in golden_dump.steps:
        diagnosis.other_steps = steps[0], golden_dump.steps[0]
        diagnosis.evidence.append(
            f"Step {steps[0]} was compared with step {golden_dump.steps[0]} of the golden run: each has one step only."
        )
    more = bool(set(target_dump.steps) - set(steps)) or (target.path / layout.RERUN).is_dir() or bool(target.samples)
    diagnosis.unseen = diagnosis.unseen or more
    return diagnosis


@np.errstate(all="ignore")  # the numbers of a dump may be anything
def compare_steps(
    steps: Sequence[int],
    sides: BothSides,
    what: str,
    moved: Movements | None = None,
    begun: AlreadyBegun | None = None,
    exact: bool = False,
) -> Diagnosis:
    """Step after step until something is off.

    Args:
        steps: ascending.
        sides: step, and where to put sentences about what cannot be read -> the ranks of the target and of the golden run.
        what: the two runs, for messages.
        moved: step, golden ranks, and where to put sentences -> what each row of a rank moves by round-off; None: as the dtypes say.
        begun: step -> what has been done of its ranks.
        exact: round-off is a finding, too.

    Raises:
        NothingCapturedError: no record could be compared.
    """
    loop = StepLoop(moved, begun, exact)
    with bar("diagnose", len(steps)) as advance:
        for step in steps:
            target, golden = sides(step, loop.found.problems)
            if target and golden:
                loop.looked.append(step)
                if saved_variables.only_saved(target, golden):
                    loop.saved_values(step, target, golden)
                else:
                    loop.step(step, target, golden)
            if loop.ends:
                break
            advance(f"step {step}")
    return loop.conclusion(what)
