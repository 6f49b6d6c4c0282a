"""Make the files of one host, to be copied there and named with tls_path: client.key and client.crt for a training; with --serve
server.key and server.crt for a benchmark host; ca.crt and crl.pem for both. With the environment variable MSPROBE_TLS_PASSPHRASE set,
the keys are encrypted with it, and training and server need it too."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Authority, name, and what the host does."""
    parser.add_argument("authority", metavar="AUTHORITY", type=Path, help="directory made with msprobe certs init")
    parser.add_argument("name", metavar="NAME", help="of the host; stands in messages, and is what is revoked")
    parser.add_argument(
        "--serve",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="the benchmark host: all names and IP addresses under which trainings reach it",
    )
    parser.add_argument("--client", action="store_true", help="with --serve: a training's files too")
    parser.add_argument("-o", "--output_path", "--output-path", type=Path, metavar="DIRECTORY", help="default: a directory named NAME")
    parser.add_argument("--days", type=int, default=825, metavar="N", help="how long they are valid (default: %(default)s)")
    parser.epilog = "exit codes: 0 done, 2 wrong usage"


def run(args: argparse.Namespace) -> int:
    from msprobe_engine.accuracy.online.certificates.authority import Authority

    output = args.output_path or Path(args.name)
    client = args.client or not args.serve
    made = Authority(args.authority).issue(output, args.name, args.serve, client=client, days=args.days)
    print(f"{output}: {', '.join(path.name for path in made)}; copy them to the host by a safe way and give the directory as tls_path")
    return 0
