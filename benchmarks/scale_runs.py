"""What a run of N ranks leaves behind, made from a real run of eight: dumps, monitor files, an incident, the pack of its configuration.

The eight ranks train a mixture of experts with megatron-core on the CPU (TP 2, PP 2, EP 2 over the ranks of TP, DP 2). N ranks are N / 4
replicas of them: each file says the rank that it stands for, groups and peers are those of the large run, and what does not name a rank is
a hard link.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "megatron" / "train_gpt.py"
LAYOUT = "--tp 2 --pp 2 --ep 2 --experts 4 --sp --distopt --layers 4 --nmb 1 --steps 3 --fault-seed 3 --quiet"
SETTINGS = """\
output_dir: {directory}
dump: {{task: statistics, level: mix, step: [0]}}
monitor: {{gradients: true}}
rules: [{{rule: nan_inf}}]
incident: {{ring_steps: 2}}
"""
"""The dump is of a step that is right; later a NaN comes up, with alerts and an incident."""
BASE_RANKS, TP, PP = 8, 2, 2
FAULTY = "Functional.gelu.1.forward"
BAD_RANK = 5

_NUMBERS = re.compile(r'"group_ranks": \[\s*([0-9,\s]*?)\s*\],?(\s*"group_id": "[^"]*")?|"(peer|root)": (\d+)')

Edit = Callable[[int, str], str]
"""(rank, text of its records) -> the text that is written."""


def train(directory: Path) -> Path:
    """The run of eight ranks; one that is there is kept."""
    if (directory / "done").exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    settings = directory.with_suffix(".yaml")
    settings.write_text(SETTINGS.format(directory=directory))
    launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={BASE_RANKS}", str(EXAMPLE), *LAYOUT.split()]
    command = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", str(settings), "--", sys.executable, "-m", *launch]
    with (directory / "log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (directory / "done").touch()
    return directory


class Place:
    """Where one of N ranks stands, and which of the eight it repeats."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.dp_size = rank, ranks, ranks // (TP * PP)
        self.tp, self.dp, self.pp = rank % TP, rank // TP % self.dp_size, rank // (TP * self.dp_size)
        self.base = self.tp + TP * (self.dp % 2) + 2 * TP * self.pp

    def of(self, base: int) -> int:
        """The rank that this one has where the rank of the eight has `base`: in its own pair of replicas."""
        dp = self.dp & ~1 | base // TP % 2
        return base % TP + TP * dp + TP * self.dp_size * (base // (2 * TP))

    def group(self, base: list[int]) -> list[int]:
        """The group that a group of the eight is in the large run."""
        if len(base) == BASE_RANKS:
            return list(range(self.ranks))
        if len(base) == 2 and base[1] - base[0] == TP:
            return [self.tp + TP * dp + TP * self.dp_size * self.pp for dp in range(self.dp_size)]
        return [self.of(rank) for rank in base]


def replicate_dump(base: Path, directory: Path, ranks: int, edit: Edit | None = None) -> Path:
    """``step0`` of N ranks. A rank that is not edited is a link to that of the run beside it that is right, where there is one."""
    beside = directory.with_name("right")
    for rank in range(ranks):
        place = Place(rank, ranks)
        source, target = base / "dump" / "step0" / f"rank{place.base}", directory / "step0" / f"rank{rank}"
        target.mkdir(parents=True)
        head, parts = _parts(source / "dump.json")
        body = "".join(part if isinstance(part, str) else _replaced(part, place) for part in parts)
        text, unedited = edit(rank, body) if edit else body, beside / "step0" / f"rank{rank}" / "dump.json"
        if text is body and beside != directory and unedited.exists():
            os.link(unedited, target / "dump.json")
        else:
            (target / "dump.json").write_text(_header(head, place) + text)
        for name in ("stack.json", "construct.json"):
            os.link(source / name, target / name)
    return directory


@cache
def _parts(path: Path) -> tuple[str, list[str | re.Match[str]]]:
    """The header, and the records in parts, those that name ranks as matches."""
    text = path.read_text()
    at = text.index(' "data": {')
    head, body, parts, end = text[:at], text[at:], list[str | re.Match[str]](), 0
    for match in _NUMBERS.finditer(body):
        parts += [body[end : match.start()], match]
        end = match.end()
    return head, [*parts, body[end:]]


def _replaced(match: re.Match[str], place: Place) -> str:
    if match[3]:
        return f'"{match[3]}": {place.of(int(match[4]))}'
    group = place.group([int(rank) for rank in match[1].split(",")])
    name = f', "group_id": "{zlib.crc32(repr(group).encode()):08x}"' if match[2] else "," if match[0].endswith(",") else ""
    return f'"group_ranks": {group}{name}'


def _header(head: str, place: Place) -> str:
    head = re.sub(r'"rank": \d+', f'"rank": {place.rank}', head, count=1)
    head = re.sub(r'"world_size": \d+', f'"world_size": {place.ranks}', head, count=1)
    sizes = head.index('"size": {', head.index('"parallel"'))
    return re.sub(r'"dp": \d+', lambda found: f'"dp": {place.dp_size if found.start() > sizes else place.dp}', head)


def larger_output(_rank: int, body: str) -> str:
    """The result of one call 1.25 times as large."""
    return _in_output(body, lambda text: re.sub(r'"(Max|Norm)": ([-0-9.e]+)', lambda m: f'"{m[1]}": {float(m[2]) * 1.25!r}', text))


def larger_on_one(rank: int, body: str) -> str:
    """`larger_output`, of one rank."""
    return larger_output(rank, body) if rank == BAD_RANK else body


def nan_on_one(rank: int, body: str) -> str:
    """NaN in the result of one call of one rank."""
    nan = re.compile(r'"(Max|Min|Mean|Norm)": [^,\n]+')
    return _in_output(body, lambda text: nan.sub(r'"\1": NaN', text)) if rank == BAD_RANK else body


def _in_output(body: str, change: Callable[[str], str]) -> str:
    start = body.index('"output": [', body.index(f'"{FAULTY}"'))
    end = body.index('"requires_grad"', start)
    return body[:start] + change(body[start:end]) + body[end:]


def replicate_monitor(base: Path, directory: Path, ranks: int) -> Path:
    """Monitor output of N ranks, all with the alerts of the rank that they repeat."""
    sources = {json.loads((path / "run.json").read_text())["rank"]: path for path in (base / "monitor").iterdir()}
    for rank in range(ranks):
        place = Place(rank, ranks)
        source = sources[place.base]
        target = directory / re.sub(r"rank\d+", f"rank{rank}", source.name)
        target.mkdir(parents=True)
        for path in source.iterdir():
            if path.name == "run.json":
                facts = json.loads(path.read_text())
                facts |= {"rank": rank, "world_size": ranks, "rank_info": facts["rank_info"] | {"dp": place.dp}}
                (target / path.name).write_text(json.dumps(facts))
            elif path.name == "alerts.jsonl":
                (target / path.name).write_text(_renamed(path.read_text(), place))
            else:
                os.link(path, target / path.name)
    return directory


def _renamed(text: str, place: Place) -> str:
    text = re.sub(r'"rank": ?\d+', f'"rank": {place.rank}', text)
    return re.sub(r"\brank \d+ step", f"rank {place.rank} step", text)


def replicate_incident(base: Path, directory: Path, ranks: int) -> Path:
    """What the ranks have written of one incident, before anybody has put it together."""
    from msprobe_engine.probe.incident.files import rank_file

    source = next(path for path in (base / "incidents").iterdir() if path.is_dir())
    directory.mkdir(parents=True)
    for rank in range(ranks):
        place = Place(rank, ranks)
        *samples, said = rank_file(source, place.base).read_text().splitlines()
        piece = json.loads(said)
        event = piece["event"]
        piece = json.loads(_renamed(json.dumps(piece), place))
        piece |= {"world_size": ranks, "rank_info": piece["rank_info"] | {"dp": place.dp}, "event": event}
        rank_file(directory, rank).write_text("\n".join([*samples, json.dumps(piece)]) + "\n")
    return directory


def write_pack(base: Path, path: Path, ranks: int) -> None:
    """The configuration of N ranks, written one rank after another as they would in turn."""
    from msprobe_engine.config.pack.writer import PackWriter

    with zipfile.ZipFile(base / "config_check_pack.zip") as pack:
        entries = {name: pack.read(name) for name in pack.namelist()}
    path.parent.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        own = f"/rank{Place(rank, ranks).base}.json"
        mine = {name.replace(own, f"/rank{rank}.json"): json.loads(content) for name, content in entries.items() if name.endswith(own)}
        writer = PackWriter(path, rank=rank, world_size=ranks, framework="pytorch", run="scale")
        starting = {name: content for name, content in mine.items() if "/weights/" not in name and "/ranks/" not in name}
        writer.add(starting)
        writer.add({name: content for name, content in mine.items() if "/weights/" in name})
