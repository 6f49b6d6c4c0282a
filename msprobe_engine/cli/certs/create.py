"""Make a certificate authority: ca.key, which signs and stays where it is, ca.crt and crl.pem. With the environment variable
MSPROBE_CA_PASSPHRASE set, ca.key is encrypted with it, and the other commands need it too. Needs the package cryptography (extra tls)."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("authority", metavar="DIRECTORY", type=Path, help="new directory of the authority; who can read it can sign")
    parser.add_argument("--name", default="msprobe", help="its name in certificates (default: %(default)s)")
    parser.add_argument("--days", type=int, default=3650, metavar="N", help="how long it is valid (default: %(default)s)")
    parser.epilog = "exit codes: 0 done, 2 wrong usage"


def run(args: argparse.Namespace) -> int:
    from msprobe_engine.accuracy.online.certificates.authority import Authority

    Authority.create(args.authority, args.name, args.days)
    print(f"{args.authority}: ca.key signs and stays here; now make the files of every host: msprobe certs host {args.authority} NAME")
    return 0
