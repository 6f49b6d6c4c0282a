"""setuptools' build backend, with one more file in every wheel: ``msprobe_autoload.pth``, which lies beside the packages and makes
interpreters load the probe when MSPROBE_CONFIG or a launch argument asks for it. setuptools itself has no way to say so.

Format of the wheel's RECORD: PEP 376 and the binary distribution format of PyPA (``path,sha256=<urlsafe base64, no padding>,size``).
"""

import base64
import functools
import hashlib
import os
import sys
import zipfile

import setuptools
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - a backend is a module with these functions

NEEDED = 77
"""Version of setuptools: older ones do not know the form in which pyproject.toml names the license, and say nothing of use about it."""
NAME = "msprobe_autoload.pth"
LINE = (
    "import os, sys; exec('try:\\n from msprobe_integrations.autoload import install\\n install()\\nexcept Exception as error:\\n"
    ' if os.environ.get("MSPROBE_CONFIG") and vars(sys).setdefault("_msprobe_fault", error) is error and sys.stderr:\\n'
    '  sys.stderr.write("msprobe: not loaded: %s\\\\n" % error)\')\n'
)
"""One line: Python executes those that begin with ``import``. Says something only to who asked for a probe, and once: in a virtual
environment some versions of Python read the file twice."""


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """As setuptools' own, with the file."""
    _require_setuptools()
    return _added(wheel_directory, build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """As setuptools' own, with the file."""
    _require_setuptools()
    return _added(wheel_directory, build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def _checked(name):
    """A function of setuptools' backend, behind the question whether it is new enough."""
    function = getattr(build_meta, name)

    @functools.wraps(function)
    def call(*args, **kwargs):
        _require_setuptools()
        return function(*args, **kwargs)

    return call


def _require_setuptools():
    if int(setuptools.__version__.partition(".")[0]) < NEEDED:
        sys.exit(
            f"msprobe is built with setuptools {NEEDED} or later, and {setuptools.__version__} is installed here: run 'pip install "
            f'"setuptools>={NEEDED}"\', or build without --no-build-isolation, which fetches it'
        )


build_sdist = _checked("build_sdist")
get_requires_for_build_wheel = _checked("get_requires_for_build_wheel")
get_requires_for_build_sdist = _checked("get_requires_for_build_sdist")
get_requires_for_build_editable = _checked("get_requires_for_build_editable")
prepare_metadata_for_build_wheel = _checked("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _checked("prepare_metadata_for_build_editable")


def _added(directory, wheel):
    path = os.path.join(directory, wheel)
    with zipfile.ZipFile(path) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    data = LINE.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in members:
            if info.filename.endswith(".dist-info/RECORD"):
                archive.writestr(NAME, data)
                content += f"{NAME},sha256={digest},{len(data)}\n".encode()
            archive.writestr(info, content)
    return wheel
