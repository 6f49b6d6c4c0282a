"""The C modules; everything else about the package is in pyproject.toml.

All of them are optional: without a C compiler the installation goes on, and Python and the framework's own kernels do the same work.
"""

import sysconfig

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=gnu11"]
HAS_STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Builds of Python without the interpreter lock have no limited API."""


def stable(name: str, depends: list[str] | None = None) -> Extension:
    """A module of the limited API of Python 3.10: one binary for that version and all later ones."""
    macros = [("Py_LIMITED_API", "0x030A0000")] if HAS_STABLE_ABI else []
    return module(name, depends, define_macros=macros, py_limited_api=HAS_STABLE_ABI)


def module(name: str, depends: list[str] | None = None, **options) -> Extension:
    """A module whose only source has its name."""
    source = name.replace(".", "/") + ".c"
    return Extension(name, [source], depends=depends or [], extra_compile_args=FLAGS, optional=True, **options)


HEADERS = [f"msprobe_engine/native/{name}.h" for name in ("_checksums", "_rowmoments", "_pairs", "_pairs_calls")]

setup(
    ext_modules=[
        stable("msprobe_engine.native._rowstats", HEADERS),
        stable("msprobe_engine.native._siderows"),
        stable("msprobe_engine.native._filewrite"),
        stable("msprobe_engine.native._tensordiff"),
        # For one version of Python each: buffers of other objects are in the limited API since 3.11 only, and reading tuples and lists
        # without a call per item is not in it at all. The walk over frames (PyFrame_GetBack, PyFrame_GetLasti) is not in it either.
        module("msprobe_engine.native._dumptext", ["msprobe_engine/native/_numbertext.h"]),
        module("msprobe_engine.native._tabletext", ["msprobe_engine/native/_numbertext.h"]),
        module("msprobe_engine.native._pickletree"),
        module("msprobe_integrations.common._stackwalk"),
    ]
)
