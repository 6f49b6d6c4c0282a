"""Make crl.pem, the list of revoked certificates, anew: it is valid for so many days, and with an expired one nobody is let in."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("authority", metavar="AUTHORITY", type=Path, help="directory made with msprobe certs init")
    parser.add_argument("--days", type=int, default=3650, metavar="N", help="how long it is valid (default: %(default)s)")
    parser.epilog = "exit codes: 0 done, 2 wrong usage"


def run(args: argparse.Namespace) -> int:
    from msprobe_engine.accuracy.online.certificates.authority import Authority

    Authority(args.authority).renew_revocations(args.days)
    print(f"{args.authority / 'crl.pem'} is new; copy it into tls_path of all hosts")
    return 0
