"""Who gets in over TLS: certificates of our authority for the right part, valid now, not revoked; nobody else, and both sides say why."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from online_ends import LOOPBACK, QUICK_CLIENT, QUICK_SERVER, Cable, Kept, sending, serving, tls_directories, until

from msprobe_engine.accuracy.online.certificates.authority import Authority
from msprobe_engine.accuracy.online.certificates.certificate import read_certificate, read_revocations
from msprobe_engine.accuracy.online.certificates.tls import CLIENT, SERVER, Credentials
from msprobe_engine.accuracy.online.events import Event
from msprobe_engine.accuracy.online.options import Address, TlsOptions
from msprobe_engine.accuracy.online.tcp.client import Client
from msprobe_engine.accuracy.online.tcp.server import Server
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import MissingExtraError, SettingsError, UsageError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of hosts; not to be changed."""
    return tls_directories(tmp_path_factory.mktemp("tls"))


def _with(directory: Path, target: Path, **files: Path) -> Path:
    """A copy of a host's files with some of them replaced ("client_crt": client.crt)."""
    shutil.copytree(directory, target)
    for name, source in files.items():
        shutil.copy(source, target / name.replace("_", "."))
    return target


def test_both_ends_with_certificates_talk_and_the_server_knows_the_name(made: dict[str, Path]) -> None:
    """TLS 1.2 or newer, large and small messages, resumed after a broken connection."""
    kept, events = Kept(), []
    with serving(kept, tls=TlsOptions(made["bench"])) as server:
        client = sending(server.port, events, tls=TlsOptions(made["trainer"]))
        data = os.urandom(3_000_000)
        for i in range(5):
            client.send({"i": i}, [data, b"x" * i])
        counts = client.close(60.0)
        assert counts.acknowledged == 5
        assert server.sessions()[0].peer.name == "trainer"
    assert [payload for _, _, payload in kept.messages[client.session]] == [data + b"x" * i for i in range(5)]


def _stranger(made: dict[str, Path], _: Path) -> Path:
    return made["stranger"]


def _stranger_who_trusts_us(made: dict[str, Path], tmp: Path) -> Path:
    return _with(made["stranger"], tmp / "tls", ca_crt=made["bench"] / "ca.crt", crl_pem=made["bench"] / "crl.pem")


def _server_files_as_client(made: dict[str, Path], tmp: Path) -> Path:
    return _with(made["trainer"], tmp / "tls", client_crt=made["bench"] / "server.crt", client_key=made["bench"] / "server.key")


def _dated(made: dict[str, Path], tmp: Path, begin: datetime, end: datetime) -> Path:
    """A client of our authority with other days."""
    target = _with(made["trainer"], tmp / "tls")
    own = x509.load_pem_x509_certificate((target / "client.crt").read_bytes())
    signer = load_pem_private_key((made["ca"] / "ca.key").read_bytes(), None)
    builder = x509.CertificateBuilder(own.issuer, own.subject, own.public_key(), x509.random_serial_number(), begin, end)
    for extension in own.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    signed = builder.sign(signer, SHA256())  # type: ignore[arg-type]
    (target / "client.crt").write_bytes(signed.public_bytes(Encoding.PEM))
    return target


def _expired(made: dict[str, Path], tmp: Path) -> Path:
    return _dated(made, tmp, datetime(2020, 1, 1, tzinfo=timezone.utc), datetime(2020, 2, 1, tzinfo=timezone.utc))


def _of_tomorrow(made: dict[str, Path], tmp: Path) -> Path:
    return _dated(made, tmp, datetime(2098, 1, 1, tzinfo=timezone.utc), datetime(2099, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    ("files", "client_says", "server_says"),
    [
        (_stranger, "authority", "another authority|alert|unknown ca"),
        (_stranger_who_trusts_us, "another authority|unknown ca", "another authority"),
        (_server_files_as_client, "other end's part", "other end's part"),
        (_expired, "expired", "has expired"),
        (_of_tomorrow, "certificate", "compare the clocks"),
    ],
)
def test_a_wrong_certificate_stays_outside(
    made: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Callable[[dict[str, Path], Path], Path],
    client_says: str,
    server_says: str,
) -> None:
    """Also when the client does not check its own files: the server does, and nothing of the message comes through."""
    import re

    directory = files(made, tmp_path)
    kept, events = Kept(), []
    with serving(kept, tls=TlsOptions(made["bench"])) as server:
        monkeypatch.setattr(Credentials, "_check", lambda _: None)
        client = sending(server.port, events, tls=TlsOptions(directory))
        assert client.send({"i": 0}, [b"secret"])
        assert until(lambda: events and "refused" in kept.kinds())
        counts = client.close(0.2)
        assert server.sessions() == []
    assert counts.acknowledged == 0
    assert counts.lost == 1
    assert not kept.messages
    assert any(re.search(server_says, e.message) for e in kept.events), kept.events
    assert any(re.search(client_says, e.message) for e in events), events


def test_our_own_wrong_files_are_told_before_the_training_begins(made: dict[str, Path], tmp_path: Path) -> None:
    """Expired, for the other part, of another key, readable by all, missing, encrypted: one sentence each that says what to do."""

    def problem(directory: Path, role: str = CLIENT) -> str:
        with pytest.raises(SettingsError) as caught:
            Credentials(TlsOptions(directory), role)
        return str(caught.value)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert "was valid until 2020-02-01" in problem(_expired(made, tmp_path / "a"))
    assert "set the clock" in problem(_of_tomorrow(made, tmp_path / "b"))
    assert "is for server, not for a client" in problem(_server_files_as_client(made, tmp_path))
    assert "cannot be used together" in problem(_with(made["trainer"], tmp_path / "k", client_key=made["former"] / "client.key"))
    assert "cannot be read" in problem(made["trainer"], SERVER)
    opened = _with(made["trainer"], tmp_path / "o")
    (opened / "client.key").chmod(0o644)
    assert "chmod 600" in problem(opened)
    damaged = _with(made["trainer"], tmp_path / "d")
    text = (damaged / "client.crt").read_text()
    (damaged / "client.crt").write_text(text.replace("M", "A", 3))
    assert "damaged" in problem(damaged)


def test_a_revoked_client_is_thrown_out_of_a_running_server(tmp_path: Path) -> None:
    """As soon as the new crl.pem is in its tls_path; others go on without a loss."""
    made = tls_directories(tmp_path)
    kept, events, others = Kept(), [], []
    with serving(kept, tls=TlsOptions(made["bench"])) as server:
        former = sending(server.port, events, tls=TlsOptions(made["former"]))
        other = sending(server.port, others, tls=TlsOptions(made["trainer"]), rank=1)
        for i in range(3):
            former.send({"i": i}, [])
            other.send({"i": i}, [])
        assert until(lambda: kept.numbers(former.session) == kept.numbers(other.session) == [0, 1, 2])
        authority = Authority(made["ca"])
        assert authority.revoke("former") == 1
        authority.copy(made["bench"])
        assert until(lambda: any("was revoked" in e.message for e in events)), events
        former.send({"i": 3}, [])
        other.send({"i": 3}, [])
        assert other.close(60.0).acknowledged == 4
        assert former.close(0.2).lost == 1
    assert kept.numbers(former.session) == [0, 1, 2]
    assert kept.said("was revoked")


def test_a_client_believes_only_the_server_it_asked_for(made: dict[str, Path], tmp_path: Path) -> None:
    """A server of another authority, a client's certificate as a server's, and one of another host are not talked to."""
    wrong = _with(made["bench"], tmp_path / "w", server_crt=made["former"] / "client.crt", server_key=made["former"] / "client.key")
    elsewhere = tmp_path / "e"
    Authority(made["ca"]).issue(elsewhere, "elsewhere", ["192.0.2.1", "other.example"])
    for directory, why in ((made["stranger"], "another authority"), (wrong, "other end's part"), (elsewhere, "IP address")):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "server.crt", directory / "server.key")
        listener = socket.create_server((LOOPBACK, 0))
        events: list[Event] = []
        client = sending(listener.getsockname()[1], events, tls=TlsOptions(made["trainer"]))
        client.send({"i": 0}, [b"secret"])
        accepted, _ = listener.accept()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(accepted, server_side=True).recv(1)
        assert until(lambda events=events: events)
        assert why in events[0].message
        client.close(0.1)
        listener.close()
    kept = Kept()
    with serving(kept, tls=TlsOptions(elsewhere)) as server:
        client = sending(server.port, [], tls=TlsOptions(made["trainer"], check_host=False))
        client.send({"i": 0}, [])
        assert client.close(60.0).acknowledged == 1


def test_tls_on_one_end_only_says_so(made: dict[str, Path]) -> None:
    """Both ends name tls_path."""
    kept, events = Kept(), []
    with serving(kept, tls=TlsOptions(made["bench"])) as server:
        client = sending(server.port, events)
        client.send({"i": 0}, [b"x" * 100])
        assert until(lambda: kept.events and events)
        client.close(0.1)
    assert kept.said("set tls_path on both hosts")
    assert any("set tls_path on both hosts" in e.message for e in events), events
    kept, events = Kept(), []
    with serving(kept) as server:
        client = sending(server.port, events, tls=TlsOptions(made["trainer"]))
        assert until(lambda: kept.events and events)
        client.close(0.1)
    assert kept.said("set tls_path on both hosts")
    assert any("set tls_path on both hosts" in e.message for e in events), events


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_client_without_a_certificate_and_old_tls_stay_outside(made: dict[str, Path]) -> None:
    """What any program can do by itself is not enough."""
    kept = Kept()
    with serving(kept, tls=TlsOptions(made["bench"])) as server:
        for oldest in (None, ssl.TLSVersion.TLSv1_1):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(made["bench"] / "ca.crt")
            if oldest is not None:
                context.set_ciphers("ALL:@SECLEVEL=0")
                context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, oldest
                context.load_cert_chain(made["trainer"] / "client.crt", made["trainer"] / "client.key")
            with socket.create_connection((LOOPBACK, server.port), timeout=3.0) as raw, contextlib.suppress(ssl.SSLError, ConnectionError):
                assert not context.wrap_socket(raw, server_hostname=LOOPBACK).recv(100)
        assert until(lambda: len(kept.events) >= 2)
        assert server.sessions() == []


def test_a_passphrase_comes_from_the_environment_and_is_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal a missing or wrong one is an error; a right one works for the authority and for hosts."""
    monkeypatch.setenv("MSPROBE_CA_PASSPHRASE", "of the authority")
    authority = Authority.create(tmp_path / "ca", "cluster")
    monkeypatch.setenv("MSPROBE_TLS_PASSPHRASE", "of the host")
    authority.issue(tmp_path / "t", "t")
    assert "ENCRYPTED" in (tmp_path / "t" / "client.key").read_text()
    Credentials(TlsOptions(tmp_path / "t"), CLIENT)
    monkeypatch.setenv("MSPROBE_TLS_PASSPHRASE", "wrong")
    with pytest.raises(SettingsError, match="MSPROBE_TLS_PASSPHRASE"):
        Credentials(TlsOptions(tmp_path / "t"), CLIENT)
    monkeypatch.delenv("MSPROBE_TLS_PASSPHRASE")
    with pytest.raises(SettingsError, match="is encrypted"):
        Credentials(TlsOptions(tmp_path / "t"), CLIENT)
    monkeypatch.delenv("MSPROBE_CA_PASSPHRASE")
    with pytest.raises(UsageError, match="MSPROBE_CA_PASSPHRASE"):
        authority.issue(tmp_path / "u", "u")
    assert not (tmp_path / "u" / "client.key").exists()


def test_certs_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init, host, show, revoke and crl as a user types them; exit code 1 of show when something does not work."""
    ca, bench, trainer = str(tmp_path / "ca"), str(tmp_path / "bench"), str(tmp_path / "trainer")
    assert main(["certs", "init", ca, "--name", "lab"]) == 0
    assert main(["certs", "host", ca, "bench", "--serve", "10.0.0.9", "bench.lab", "::1", "-o", bench]) == 0
    assert main(["certs", "host", ca, "trainer", "-o", trainer, "--days", "10"]) == 0
    assert sorted(os.listdir(bench)) == ["ca.crt", "crl.pem", "server.crt", "server.key"]
    assert read_certificate(tmp_path / "bench" / "server.crt").addresses == ("10.0.0.9", "bench.lab", "::1")
    assert (tmp_path / "trainer" / "client.key").stat().st_mode & 0o777 == 0o600
    capsys.readouterr()
    assert main(["certs", "show", bench]) == 0
    assert "'bench' (server, for 10.0.0.9, bench.lab, ::1) of 'lab'" in capsys.readouterr().out
    assert main(["certs", "show", trainer]) == 1
    assert "valid for 9 more days only" in capsys.readouterr().out
    assert main(["certs", "revoke", ca, "trainer"]) == 0
    assert len(read_revocations(tmp_path / "ca" / "crl.pem").revoked) == 1
    assert main(["certs", "crl", ca, "--days", "20"]) == 0
    assert len(read_revocations(tmp_path / "ca" / "crl.pem").revoked) == 1
    assert main(["certs", "show", ca]) == 0
    for wrong in (
        ["init", ca],
        ["host", ca, "a b"],
        ["host", ca, "x", "--serve", "a,DNS:b"],
        ["revoke", ca, "nobody"],
        ["show", "/nowhere"],
    ):
        assert main(["certs", *wrong]) == 2
        assert "msprobe certs" in capsys.readouterr().err
    (tmp_path / "bench" / "server.key").write_bytes((tmp_path / "trainer" / "client.key").read_bytes())
    assert main(["certs", "show", bench]) == 1


def test_openssl_takes_what_was_made(tmp_path: Path, binary: Callable[[str], str]) -> None:
    """Another program finds certificates and list of the authority in order, strictly read, and a revoked one revoked."""
    made = tls_directories(tmp_path)
    ca, crl = made["ca"] / "ca.crt", made["ca"] / "crl.pem"

    def verify(path: Path, purpose: str) -> str:
        command = [binary("openssl"), "verify", "-x509_strict", "-CAfile", ca, "-CRLfile", crl, "-crl_check", "-purpose", purpose, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        return done.stdout + done.stderr

    assert "OK" in verify(made["bench"] / "server.crt", "sslserver")
    assert "OK" in verify(made["trainer"] / "client.crt", "sslclient")
    assert "OK" not in verify(made["trainer"] / "client.crt", "sslserver")
    Authority(made["ca"]).revoke("trainer")
    assert "revoked" in verify(made["trainer"] / "client.crt", "sslclient")
    assert "OK" in verify(made["former"] / "client.crt", "sslclient")


def test_a_revocation_outlives_its_list(tmp_path: Path) -> None:
    """When crl.pem was deleted or is of before, the books still know who was revoked; the order of the books is that of making."""
    authority = Authority.create(tmp_path / "ca", "cluster")
    for name in ("a", "b", "c"):
        authority.issue(tmp_path / name, name)
    before = (tmp_path / "ca" / "crl.pem").read_bytes()
    authority.revoke("b")
    for lost in (lambda: (tmp_path / "ca" / "crl.pem").unlink(), lambda: (tmp_path / "ca" / "crl.pem").write_bytes(before)):
        lost()
        authority.renew_revocations()
        assert [(certificate.subject, revoked) for certificate, revoked in authority.list_certificates()] == [
            ("a", False),
            ("b", True),
            ("c", False),
        ]


def test_without_the_package_the_error_holds_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the command and for tls_path."""
    directories = tls_directories(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    for use in (lambda: Authority.create(tmp_path / "new", "x"), lambda: Credentials(TlsOptions(directories["trainer"]), CLIENT)):
        with pytest.raises(MissingExtraError, match=r"pip install 'msprobe-integrations\[tls\]'"):
            use()


def test_what_ends_soon_is_told(tmp_path: Path) -> None:
    """A certificate in its last 30 days is a warning at the start, on both ends."""
    Authority.create(tmp_path / "ca", "c").issue(tmp_path / "t", "t", [LOOPBACK], client=True, days=5)
    kept, events = Kept(), []
    with serving(kept, tls=TlsOptions(tmp_path / "t")) as server:
        Client(Address(LOOPBACK, server.port), replace(QUICK_CLIENT, tls=TlsOptions(tmp_path / "t")), events.append).close(3.0)
    assert any(e.kind == "expiring" and "(4 days)" in e.message for e in events)
    assert kept.said("4 days")


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_whatever_happens_to_cable_and_server_all_bytes_arrive_once_and_in_order(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """Connections broken, cut off inside of frames, silent, damaged, the server ended and begun again: each of it twice, in random order
    and under traffic, until the client has a new connection. The rule: every trouble ends in a new connection, and nothing is lost."""
    monkeypatch.setattr("msprobe_engine.accuracy.online.tcp.client.is_loopback", lambda _: False)  # checksums where there is no TLS
    dice, kept, events, sent = random.Random(5), Kept(), [], []
    server_options = replace(QUICK_SERVER, tls=TlsOptions(made["bench"]) if tls else None)
    server = Server(Address(LOOPBACK, 0), kept, server_options, kept.events.append, kept.last)
    port = server.port
    cable = Cable(port)
    client = sending(cable.port, events, tls=TlsOptions(made["trainer"]) if tls else None, plain=True, longest_wait=30.0)

    def send_until(condition: Callable[[], object]) -> bool:
        """Traffic goes on meanwhile: a byte is only damaged, and a broken connection only noticed, when something is sent."""

        def send_and_look() -> object:
            sent.append(dice.randbytes(dice.choice([0, 10, 1000, 40_000])))
            assert client.send({"i": len(sent) - 1}, [sent[-1]])
            return condition()

        return until(send_and_look, 100.0)

    assert send_until(lambda: client.counts().connections == 1)
    troubles = ["pull", "flip", "stop", "silence", "restart"] * 2
    dice.shuffle(troubles)
    for trouble in troubles:
        before, told = client.counts().connections, len(events)
        if trouble == "pull":
            cable.pull()
        elif trouble == "flip":
            cable.flip_at = cable.passed + dice.randrange(100_000)
        elif trouble == "stop":
            cable.stop_after = cable.passed + dice.randrange(100_000)
        elif trouble == "silence":
            cable.cut = True
            assert send_until(lambda told=told: len(events) > told)
            cable.cut = False
        else:
            server.close(2.0)
            server = Server(Address(LOOPBACK, port), kept, server_options, kept.events.append, kept.last)
        assert send_until(lambda before=before: client.counts().connections > before), trouble
    counts = client.close(100.0)  # the rule is that all arrives; how soon depends on what else the machine does
    server.close()
    cable.close()
    assert [payload for _, _, payload in kept.messages[client.session]] == sent
    assert counts.acknowledged == len(sent)
    assert counts.connections > len(troubles)
