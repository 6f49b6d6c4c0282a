"""Say what a certificate, a directory of tls_path or an authority holds: names, roles, addresses, last days, what was revoked, and
whether keys and certificates belong together. Nothing secret is shown."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
exit codes: 0 all of it works, 1 something is expired, revoked, ends within 30 days or does not fit, 2 nothing to show there"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a .crt file, a directory of tls_path, or the directory of an authority")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0, or 1 when something does not work; errors are raised as `ProbeError`."""
    from msprobe_engine.accuracy.online.certificates.text import describe
    from msprobe_engine.core.log import one_line

    lines, troubles = describe(args.path)
    for line in lines:
        print(one_line(line))
    for trouble in troubles:
        print(f"trouble: {one_line(trouble)}")
    return 1 if troubles else 0
