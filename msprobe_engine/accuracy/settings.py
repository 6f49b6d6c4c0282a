"""Settings of the pre-check: the section ``run_ut`` (``acc_check``) of the existing ``config.json``, or the flat ``config.yaml``.

Keys, types and defaults are those of the existing tool (8.1.1; ``quantization_api_list`` of 26.2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.settings import text, tree

SECTIONS = ("run_ut", "acc_check")
"""Names of the section in a config.json that has other sections too."""

BLOCKED_THERE = frozenset(("to",))
"""APIs that the existing tool does not check besides."""


def _rule(default: Any, help: str, **rule: Any) -> Any:
    return field(default=default, metadata={"help": help, **rule})


@dataclass(frozen=True, kw_only=True)
class PrecheckSettings:
    """What is checked and where things go; what the command line says besides is in `precheck.options.Options`."""

    white_list: tuple[str, ...] = _rule((), "only these APIs: bare names (softmax), or patterns of full ones (Torch.matmul.*); [] is all")
    black_list: tuple[str, ...] = _rule((), "not these; wins over white_list")
    error_data_path: str = _rule("./", "where ut_error_data{time} goes")
    precision: int = _rule(14, "decimals of numbers in result files", minimum=0, maximum=20)
    quantization_api_list: tuple[str, ...] = _rule(
        ("npu_rms_norm_dynamic_quant", "npu_dynamic_quant", "npu_quant_lightning_indexer"),
        "integer results of these may differ by 1",
    )
    is_online: bool = _rule(False, "wait for calls of a training instead of reading a dump")
    nfs_path: str = _rule("", "online: a directory that both sides see; empty: TCP")
    host: str = _rule("", "online: address to listen at; empty: loopback")
    port: int = _rule(-1, "online: port to listen at", minimum=-1, maximum=65535)
    rank_list: tuple[int, ...] = _rule((), "online: ranks whose calls are checked, [] is all", ranges=True, minimum=0, maximum=1_000_000)
    tls_path: str | None = _rule(
        None, "online: directory of server.key, server.crt, ca.crt, crl.pem; absent: './', on loopback no TLS; empty: no TLS, see plain_tcp"
    )
    plain_tcp: bool = _rule(False, "online: other hosts without TLS are meant: whoever is in the network can send calls")
    three_way: str = _rule(
        "auto",
        "online: results of a device here are a second opinion, and what it gets wrong too is no error; auto: if there is an accelerator",
        choices=("auto", "on", "off"),
    )
    spool_path: str = _rule("", "online: directory for what has come and is not checked yet; empty: online_spool in the output directory")
    spool_gb: float = _rule(50.0, "online: a larger spool makes trainings wait (10**9 bytes); 0: no limit", minimum=0)
    keep_spool: bool = _rule(False, "online: what was checked stays in the spool, as a dump with tensors")
    metrics_port: int = _rule(
        -1, "online: port of an endpoint for Prometheus on loopback, 0: a free one; -1: none", minimum=-1, maximum=65535
    )
    end_patience: float = _rule(60.0, "online: seconds that a training without a last word is waited for", minimum=0)


def load_precheck_settings(path: str | Path | Mapping[str, Any] | None) -> tuple[PrecheckSettings, list[str]]:
    """Read a ``config.json`` (its section of `SECTIONS`) or a flat JSON or YAML file; the settings, and remarks.

    Raises:
        SettingsError: all mistakes, one line each, with the nearest name that is known.
    """
    if path is None:
        return PrecheckSettings(), []
    source = "settings" if isinstance(path, Mapping) else str(path)
    node: Any = path if isinstance(path, Mapping) else text.read_file(Path(path))
    report = tree.Report(source)
    section, node = _section({} if node is None else node, report)
    settings = tree.build(PrecheckSettings, node, section, report)
    report.raise_errors()
    return settings, report.warnings


def _section(node: Any, report: tree.Report) -> tuple[str, Any]:
    """The part of a file that is ours, and its key path."""
    if not isinstance(node, Mapping):
        return "", node
    for name in SECTIONS:
        if name in node:
            return name, node[name]
    from msprobe_engine.core.settings.existing.config_json import DUMP_KEYS

    own_names = [key.name for key in tree.keys_of(PrecheckSettings)]
    if node and not any(name in own_names for name in node) and any(name in DUMP_KEYS for name in node if name != "precision"):
        report.warning(SECTIONS[0], "is not there; the defaults hold")
        return SECTIONS[0], {}
    return "", node
