"""Take the certificates of a host back, and make crl.pem anew. Copy crl.pem into tls_path of the benchmark host: a server that runs looks
at it, and lets nobody in, or stay, who was revoked."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Authority and name."""
    parser.add_argument("authority", metavar="AUTHORITY", type=Path, help="directory made with msprobe certs init")
    parser.add_argument("name", metavar="NAME", help="as given to msprobe certs host")
    parser.epilog = "exit codes: 0 done, 2 wrong usage"


def run(args: argparse.Namespace) -> int:
    from msprobe_engine.accuracy.online.certificates.authority import Authority

    count = Authority(args.authority).revoke(args.name)
    certificates = "1 certificate" if count == 1 else f"{count} certificates"
    print(f"{certificates} of {args.name} revoked; copy {args.authority / 'crl.pem'} into tls_path of all hosts")
    return 0
