"""A small certificate authority for one cluster: TLS between trainings and the benchmark host of the online pre-check (tls_path)."""

from __future__ import annotations

from msprobe_engine.cli.main import Command

COMMANDS = {
    "init": Command("certs.create", "make the authority: once, on a host that you trust"),
    "host": Command("certs.host", "make the files of one host: its tls_path"),
    "show": Command("certs.show", "say what a certificate, a tls_path or an authority holds, and whether it works"),
    "revoke": Command("certs.revoke", "take a host's certificates back"),
    "crl": Command("certs.crl", "make the list of revoked certificates anew"),
}

EXAMPLES = """\
examples:
  msprobe certs init ca
  msprobe certs host ca bench --serve 10.0.0.9 bench.cluster -o bench_tls
  msprobe certs host ca trainer1 -o trainer1_tls
  msprobe certs show trainer1_tls
  msprobe certs revoke ca trainer1"""
