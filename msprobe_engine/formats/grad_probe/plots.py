"""Pictures of similarities over steps. One figure is drawn again and again: making one costs more than drawing it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import needs_extra
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.formats.grad_probe.layout import file_stem


def write_plots(
    steps: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    directory: Path,
    progress: Callable[[Iterable[Any], str], Iterable[Any]],
) -> None:
    """Write ``{name}_similarities.png`` of each curve.

    Args:
        steps: x axis.
        curves: name to one value per step.

    Raises:
        MissingExtraError: matplotlib is not installed.
        SinkError: a file cannot be written.
    """
    with needs_extra("matplotlib", "plots", "a picture of similarities"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    make_directory(directory, "pictures of similarities")
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (line,) = axes.plot(steps, [0.0] * len(steps), marker="." if len(steps) < 50 else "")
    axes.set_xlabel("steps")
    axes.set_ylabel("similarities")
    for name, values in progress(list(curves.items()), "drawing"):
        line.set_ydata(values)
        axes.relim()
        axes.autoscale_view()
        axes.set_title(f"{name}_similarities", parse_math=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        replace_file(directory / f"{file_stem(name)}_similarities.png", picture.getvalue())
