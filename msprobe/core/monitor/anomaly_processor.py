"""``python -m msprobe.core.monitor.anomaly_processor -d DIR``, under the existing module name; the same as ``msprobe monitor analyze``."""

import sys

from msprobe_engine.cli.monitor.analyze import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
