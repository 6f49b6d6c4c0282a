"""What the commands do, as functions: `diagnose`, `nan_analyze`, `compare_dumps`, `collect_static`; `open_run` reads what a monitor
wrote."""

from msprobe_engine.config.launch_scripts.static import collect_static
from msprobe_engine.find.nonfinite.whole_run import nan_analyze_run as nan_analyze
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.report.table.api import compare_dumps

__all__ = ["collect_static", "compare_dumps", "diagnose", "nan_analyze", "open_run"]
