"""``python -m msprobe_engine.cli`` is the ``msprobe`` command, also where the package is not installed."""

from __future__ import annotations

import sys

from msprobe_engine.cli.main import main

sys.exit(main())
