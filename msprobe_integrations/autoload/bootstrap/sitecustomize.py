"""First on the path below ``msprobe run``: loads the probe, then whatever other ``sitecustomize`` the environment has."""

import importlib
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_package = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]

try:
    try:
        from msprobe_integrations.autoload import install
    except ImportError:  # another interpreter than the one that has the probe installed
        sys.path.append(_package)
        from msprobe_integrations.autoload import install

    install()
except Exception as error:
    print(f"msprobe: not loaded, the program goes on: {type(error).__name__}: {error}", file=sys.stderr)

_own = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    if _own is not None:
        sys.modules["sitecustomize"] = _own
