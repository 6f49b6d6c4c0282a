"""First on the path below ``msprobe run``: loads the probe, then whatever other ``sitecustomize`` the environment has.

Every Python that the launch line starts reads this file, of any version and environment, so it is written for all of them.
"""

# mypy: ignore-errors

import importlib
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_beside = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]


class _Packages(object):  # noqa: UP004 - see above
    """Finds the probe's own packages, and nothing else that is installed beside them: it may be of another Python."""

    @staticmethod
    def find_spec(name, _path=None, target=None):
        """As of any finder."""
        if name not in ("msprobe", "msprobe_engine", "msprobe_integrations"):
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [_beside], target)


if sys.version_info >= (3, 8):  # noqa: UP036 - see above
    try:
        sys.meta_path.append(_Packages)
        from msprobe_integrations.autoload import install

        install()
    except Exception as error:
        sys.stderr.write("msprobe: not loaded, the program goes on: %s: %s\n" % (type(error).__name__, error))  # noqa: UP031

_own = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
    if _own is not None:
        sys.modules["sitecustomize"] = _own
