"""Online pre-check as users run it: trainings and a benchmark host, each a process of its own; two hosts are two network namespaces where
root may make them, loopback elsewhere."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from online_ends import CLI, free_port, tls_directories
from online_ends import wait_until as until

from msprobe_engine.cli.main import main
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

TRAINING = Path(__file__).parents[1] / "online_training.py"
BENCH, TRAINER = "10.77.0.1", "10.77.0.2"


@dataclass
class Hosts:
    """Two hosts: what a command on each begins with, where the benchmark listens, and the cable between them."""

    root: Path
    bench: list[str] = field(default_factory=list)
    trainer: list[str] = field(default_factory=list)
    address: str = "127.0.0.1"
    tls: dict[str, Path] = field(default_factory=dict)
    cut: Callable[[bool], None] = lambda _cut: None

    def settings(self, side: str) -> dict[str, object]:
        """How they find each other."""
        found: dict[str, object] = {"host": self.address, "port": self.port}
        return found | ({"tls_path": str(self.tls[side])} if self.tls else {})

    port: int = 0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two namespaces with a cable and TLS, or this host twice."""
    root = tmp_path_factory.mktemp("online")
    port = free_port()
    names = [f"msprobe{os.getpid()}{side}" for side in "bt"]
    if os.geteuid() or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        yield Hosts(root, port=port)
        return
    links = [f"mp{os.getpid() % 100000}{side}" for side in "bt"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", names[1])
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for name, link, address in zip(names, links, (BENCH, TRAINER)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")

        def cut(down: bool) -> None:
            ip("-n", names[1], "link", "set", links[1], "down" if down else "up")

        inside = [["ip", "netns", "exec", name] for name in names]
        yield Hosts(root, *inside, BENCH, tls_directories(root, BENCH), cut, port)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def config(path: Path, content: dict[str, object]) -> str:
    """A settings file."""
    path.write_text(json.dumps(content))
    return str(path)


def serve(hosts: Hosts, out: Path, log: Path, **settings: object) -> subprocess.Popen[str]:
    """A benchmark host with one process that checks."""
    content = {"run_ut": {"is_online": True, "keep_spool": True, **hosts.settings("bench"), **settings}}
    command = [*hosts.bench, *CLI, "run_ut", "-config", config(out.with_suffix(".json"), content), "-o", str(out), "-n", "1"]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, text=True)


def train(hosts: Hosts, name: str, log: Path, *words: str, rank: int = 0, world: int = 1, **settings: object) -> subprocess.Popen[str]:
    """A training whose calls are sent."""
    online = {"online_run_ut": True, **hosts.settings("trainer"), **settings}
    path = config(hosts.root / f"{name}.json", {"task": "tensor", "level": "L1", "tensor": online})
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hosts.port + 1 & 0xFFFF | 1024)}
    with log.open("w") as file:
        command = [*hosts.trainer, sys.executable, str(TRAINING), path, *words]
        return subprocess.Popen(command, stdout=file, stderr=file, text=True, env={**os.environ, **(ranks if world > 1 else {})})


def cells(directory: Path, which: str, ending: str = "") -> list[list[str]]:
    """Rows of the one result file of this kind, the header first."""
    (path,) = directory.glob(f"accuracy_checking_{which}_*{ending}.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def two_ranks(hosts: Hosts) -> tuple[Path, str, list[str]]:
    """One run of two ranks, with a cable that is cut in between: result directory, what the benchmark said, what the ranks said."""
    out, log = hosts.root / "out", hosts.root / "bench.log"
    server = serve(hosts, out, log)
    until(lambda: "waiting for trainings" in log.read_text())
    logs = [hosts.root / f"rank{rank}.log" for rank in (0, 1)]
    ranks = [train(hosts, "ranks", logs[rank], "2", "0.5", rank=rank, world=2) for rank in (0, 1)]
    until(lambda: "step 0" in logs[0].read_text())
    hosts.cut(True)
    time.sleep(1.0)
    hosts.cut(False)
    assert [process.wait(120) for process in ranks] == [0, 0], logs[0].read_text()
    assert server.wait(120) == 0, log.read_text()
    return out, log.read_text(), [path.read_text() for path in logs]


@pytest.mark.slow
@pytest.mark.framework
def test_verdicts_are_those_of_the_offline_check(two_ranks: tuple[Path, str, list[str]], tmp_path: Path) -> None:
    """What the benchmark host says of every call is what acc_check says of the same data, cell by cell."""
    out, _, _ = two_ranks
    dump = out / "online_spool/step0/rank1/dump.json"
    assert main(["acc_check", str(dump), "-d", "cpu", "-n", "1", "-o", str(tmp_path)]) == 0
    for which in ("result", "details"):
        online, offline = cells(out / "step0", which, "_rank1"), cells(tmp_path, which)
        assert len(online) > 30
        status = online[0].index("Status" if which == "details" else "Forward Test Success")
        for mine, other in zip(online, offline, strict=True):
            if ".dropout." in mine[0]:  # it draws anew offline: other elements are left
                assert (mine[0], mine[status]) == (other[0], other[status])
            else:
                assert mine == other


@pytest.mark.slow
@pytest.mark.framework
def test_every_rank_and_step_has_its_files(two_ranks: tuple[Path, str, list[str]]) -> None:
    """Result files are named by rank, in a directory per step; every forward record of the training has its row."""
    out, said, _ = two_ranks
    dump = open_dump(out / "online_spool")
    assert dump.steps == [0, 1]
    for step in (0, 1):
        for rank in (0, 1):
            entries = dump.load(step, rank).entries
            forward = [name.removesuffix(".forward") for name in entries if name.endswith(".forward")]
            assert [row[0] for row in cells(out / f"step{step}", "result", f"_rank{rank}")[1:]] == forward
    assert "rank 0:" in said
    assert "rank 1:" in said
    assert "not everything" not in said


@pytest.mark.slow
@pytest.mark.framework
def test_nothing_is_lost_on_the_way(two_ranks: tuple[Path, str, list[str]]) -> None:
    """Every tensor that a record names has arrived, cable or not, and both ends say so."""
    out, _, told = two_ranks
    for directory in (out / "online_spool").glob("step*/rank*"):
        assert not (directory / "not_saved.json").exists()
        assert not (directory / ".incomplete").exists()
    assert all("not everything" not in text for text in told)


@pytest.mark.framework
@pytest.mark.slow
def test_the_training_is_the_same_without_a_benchmark(tmp_path: Path) -> None:
    """Nobody listens: the training goes on, has the bits that it has without the probe, and says what was lost."""
    logs = tmp_path / "with.log", tmp_path / "without.log"
    with logs[1].open("w") as file:
        without = subprocess.Popen([sys.executable, str(TRAINING), "-", "2"], stdout=file)
    nobody = Hosts(tmp_path, port=free_port())
    assert train(nobody, "nobody", logs[0], "2", online_longest_wait=1.0).wait(120) == 0
    assert without.wait(120) == 0
    said = logs[0].read_text()
    assert logs[1].read_text().splitlines()[-1] in said
    assert "tried again, the training goes on" in said
    assert "not everything is there" in said


def rows(out: Path) -> int:
    """Result rows so far."""
    return sum(len(path.read_text().splitlines()) - 1 for path in out.glob("step*/accuracy_checking_result_*.csv"))


@pytest.mark.framework
@pytest.mark.slow
def test_a_killed_benchmark_and_a_killed_training(tmp_path: Path) -> None:
    """The benchmark host comes late, is killed and started again: no row is missing and none is there twice. The training is killed:
    what came of it is checked, and the end says so."""
    local = Hosts(tmp_path, port=free_port())
    out, log, told = tmp_path / "out", tmp_path / "bench.log", tmp_path / "training.log"
    training = train(local, "killed", told, "1000", "2")  # steps that are made until the end have all to be checked
    until(lambda: "step 0" in told.read_text())
    first = serve(local, out, log)
    until(lambda: rows(out) > 20)
    first.kill()
    first.wait()
    again = serve(local, out, log, end_patience=2.0)
    until(lambda: log.read_text().count("is connected") == 1)
    training.send_signal(signal.SIGKILL)
    training.wait()
    assert again.wait(120) == 3, log.read_text()
    assert "rank 0 went away without a last word" in log.read_text()
    spool = open_dump(out / "online_spool")
    for step in spool.steps:
        entries = spool.load(step, 0).entries
        forward = [name.removesuffix(".forward") for name in entries if name.endswith(".forward")]
        assert [row[0] for row in cells(out / f"step{step}", "result")[1:]] == forward


@pytest.mark.framework
def test_flags_that_have_no_meaning_online(tmp_path: Path) -> None:
    """What is about a dump is refused with the reason."""
    settings = config(tmp_path / "s.json", {"run_ut": {"is_online": True, "port": free_port()}})
    for words, says in ((["-api_info", "dump.json"], "leave -api_info out"), (["--dtype", "bfloat16"], "--dtype: is not possible")):
        done = subprocess.run([*CLI, "run_ut", "-config", settings, "-o", str(tmp_path), *words], capture_output=True, text=True)
        assert done.returncode == 2
        assert says in done.stderr


# Functions that the user registered, in the online pre-check.


def test_registered_functions_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`register_custom_api`: calls of the function go to the benchmark, forward and backward, under its own name."""

    monkeypatch.setattr(PrecisionDebugger, "_instance", None)

    class Owner:
        share = staticmethod(lambda x: x.exp() / x.exp().sum(-1, keepdim=True))

    (tmp_path / "shared").mkdir()
    own = {"online_run_ut": True, "nfs_path": str(tmp_path / "shared")}
    settings = {"task": "tensor", "dump_path": str(tmp_path / "out"), "level": "L1", "step": [0], "rank": [], "tensor": own}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    around = PrecisionDebugger(str(tmp_path / "config.json"))
    around.register_custom_api(Owner, "share")
    model = torch.nn.Linear(4, 4)
    around.start(model)
    Owner.share(model(torch.randn(3, 4))).sum().backward()
    around.stop()
    around.step()
    around.run.extras.close()
    sent = b"".join(path.read_bytes() for path in (tmp_path / "shared").rglob("*.msg"))
    assert b'"Owner.share.0.forward"' in sent
    assert b'"Owner.share.0.backward"' in sent
