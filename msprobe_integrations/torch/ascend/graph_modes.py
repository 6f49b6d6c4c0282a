"""Dumps of graph modes on an Ascend NPU.

torchair compiles a model for the NPU and dumps by itself when its configuration says so: `set_ge_dump_config` and `set_fx_dump_config`
fill that configuration. ACL graphs (`AclGraphDumper`, `acl_save`) record the NPU's own instructions; saving from inside one takes operators
that only a package built with the NPU's toolkit has. Both say once that they save nothing, and let serving and training go on.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import get_logger, warn_once

_log = get_logger()
_ACL_GRAPH = (
    "saves nothing: tensors inside a captured ACL graph can only be saved by operators built with the NPU's toolkit, which this package "
    "does not have. The program goes on. For a dump run it in eager mode (vLLM: cudagraph_mode NONE) with PrecisionDebugger"
)


def set_ge_dump_config(
    dump_path: str = "",
    dump_mode: str = "all",
    fusion_switch_file: str | None = None,
    dump_token: Sequence[int] | None = None,
    dump_layer: Sequence[str] | None = None,
    compiler_config: Any = None,
) -> Any:
    """A torchair configuration that dumps what the graph engine (GE) computes, into ``{dump_path}/msprobe_ge_dump``.

    Args:
        dump_mode: ``input``, ``output`` or ``all``.
        fusion_switch_file: JSON file that switches fusions off.
        dump_token: numbers of the calls of the graph that are dumped; None: all.
        dump_layer: names of the layers that are dumped; None: all.
        compiler_config: a ``CompilerConfig`` to fill; None: a new one.

    Raises:
        UsageError: torchair is not there, or an argument is wrong.
        SinkError: the directory cannot be created.
    """
    config = _compiler_config("set_ge_dump_config", compiler_config)
    return fill_ge(config, dump_path, dump_mode, fusion_switch_file, dump_token, dump_layer)


def set_fx_dump_config(dump_path: str = "", op_list: Sequence[str] | None = None, compiler_config: Any = None) -> Any:
    """A torchair configuration that dumps the operators of the FX graph in eager mode, into ``{dump_path}/msprobe_fx_dump``.

    Args:
        op_list: keep operators whose name contains one of these, upper and lower case alike; None: all.
        compiler_config: a ``CompilerConfig`` to fill; None: a new one.

    Raises:
        UsageError: torchair is not there, or an argument is wrong.
        SinkError: the directory cannot be created.
    """
    config = _compiler_config("set_fx_dump_config", compiler_config)
    return fill_fx(config, dump_path, op_list)


def fill_ge(
    config: Any,
    dump_path: str,
    dump_mode: str = "all",
    fusion_switch_file: str | None = None,
    dump_token: Sequence[int] | None = None,
    dump_layer: Sequence[str] | None = None,
) -> Any:
    """Fill a ``CompilerConfig`` for `set_ge_dump_config`; returns it."""
    where = "set_ge_dump_config"
    if dump_mode not in ("input", "output", "all"):
        raise UsageError(f"{where}: dump_mode is {dump_mode!r}; allowed: 'input', 'output', 'all'")
    if dump_token is not None and not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in _list(dump_token)):
        raise UsageError(f"{where}: dump_token is {dump_token!r}; allowed: a list of integers >= 0")
    if dump_layer is not None and not all(isinstance(name, str) for name in _list(dump_layer)):
        raise UsageError(f"{where}: dump_layer is {dump_layer!r}; allowed: a list of layer names")
    if fusion_switch_file is not None and not os.path.isfile(fusion_switch_file):
        raise UsageError(f"{where}: fusion_switch_file {fusion_switch_file!r} is no file")
    directory = _directory(where, dump_path, "msprobe_ge_dump")
    config.debug.graph_dump.type = "txt"  # the graph's text is what maps kernels to operators
    setattr(config.debug.graph_dump, "_path" if hasattr(config.debug.graph_dump, "_path") else "path", directory)
    if fusion_switch_file is not None:
        config.fusion_config.fusion_switch_file = fusion_switch_file
    config.dump_config.enable_dump = True
    config.dump_config.dump_mode = dump_mode
    config.dump_config.dump_path = directory
    if dump_token is not None:
        config.dump_config.dump_step = "|".join(str(t) for t in dump_token)
    if dump_layer is not None:
        config.dump_config.dump_layer = " ".join(dump_layer)
    return config


def fill_fx(config: Any, dump_path: str, op_list: Sequence[str] | None = None) -> Any:
    """Fill a ``CompilerConfig`` for `set_fx_dump_config`; returns it."""
    where = "set_fx_dump_config"
    if op_list is not None and not all(isinstance(name, str) for name in _list(op_list)):
        raise UsageError(f"{where}: op_list is {op_list!r}; allowed: a list of operator names")
    directory = _directory(where, dump_path, "msprobe_fx_dump")
    if op_list:
        words = [name.lower() for name in op_list]
        config.debug.data_dump.filter = lambda op: op if any(word in op.name.lower() for word in words) else None
    config.debug.data_dump.type = "npy"
    if hasattr(config.debug.data_dump, "path"):
        config.debug.data_dump.path = directory
    return config


def acl_save(x: Any, path: str) -> Any:
    """Would save one tensor from inside an ACL graph. Says once that nothing is saved, and gives `x` back unchanged."""
    del path
    warn_once("acl_save", f"acl_save {_ACL_GRAPH}")
    return x


class AclGraphDumper:
    """Would dump from inside a captured ACL graph. Says once that nothing is dumped; the calls of programs that use it (vllm-ascend) do
    nothing.

    Args:
        config_path: settings of the existing tool; not read.
    """

    def __init__(self, config_path: str | Path | None = None) -> None:
        del config_path
        warn_once("AclGraphDumper", f"AclGraphDumper {_ACL_GRAPH}")

    def start(self, model: Any = None) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    def step(self, dump: bool = True) -> None:
        """Nothing."""


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (None,)


def _compiler_config(where: str, given: Any) -> Any:
    missing = [package for package in ("torch_npu", "torchair") if find_spec(package) is None]
    if missing:
        raise UsageError(
            f"{where} fills the configuration of torchair, the compiler of Ascend NPUs, and needs {' and '.join(missing)}, "
            "not installed here; without torchair use PrecisionDebugger"
        )
    importlib.import_module("torch_npu")
    kind = importlib.import_module("torchair.configs.compiler_config").CompilerConfig
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise UsageError(f"{where}: compiler_config is a {type(given).__name__}; allowed: torchair's CompilerConfig")
    return given


def _directory(where: str, root: str, name: str) -> str:
    if not isinstance(root, str):
        raise UsageError(f"{where}: dump_path is {root!r}; allowed: a directory")
    path = os.path.realpath(os.path.join(root, name))
    try:
        make_directories(path)
        filled = bool(os.listdir(path))
    except OSError as error:
        raise SinkError(f"{where}: cannot use {path}: {error.strerror or error}; name another dump_path") from error
    if filled:
        _log.warning("%s: %s holds files already; a new dump mixes with them", where, path)
    return path
