"""Runs operator scripts in a process where this package cannot be imported; prints exit status and output of each as JSON.

Arguments: further modules that cannot be imported (names with commas), a directory of scripts, then arguments that every script gets."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import warnings
from pathlib import Path

ABSENT = (*sys.argv[1].split(","), "msprobe", "msprobe_engine", "msprobe_integrations", "tabulate")
warnings.simplefilter("ignore")
sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]  # an import of None fails

found = {}
for file in sorted(Path(sys.argv[2]).glob("*.py")):
    spec = importlib.util.spec_from_file_location("script", file)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["script"] = script
    spec.loader.exec_module(script)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        arguments, sys.argv = sys.argv, [str(file), *sys.argv[3:]]
        status = script.main(script.CASE, script.call)
        sys.argv = arguments
    found[file.stem] = (status, output.getvalue())
json.dump(found, sys.stdout)
