"""``python -m msprobe``: the command line."""

import sys

from msprobe_engine.cli.main import main

sys.exit(main())
