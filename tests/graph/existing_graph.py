"""What the existing tool made of the fixture dumps (`tests/fixtures/make_existing_graph.py`), and the dumps themselves.

    for case in cases("26.2.0"):
        target, golden = unpack(case, tmp_path)       # directories, golden None of a build
        for pair in outcome(case).pairs: ...          # one per step and rank: pair.npu["Module.x..."]["precision_index"]

Both file formats become the same dictionaries: node name -> fields under the names of the database (``sub_nodes``, ``matched_node_link``,
``input_data`` ... as values, not as text).
"""

from __future__ import annotations

import json
import lzma
import tarfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = ("8.1.1", "26.2.0")
FAULTS = ("same", "bf16", "eps", "gradient", "nan", "inf", "more", "fewer", "shape", "dtype", "arguments", "grad_flag")


@dataclass(frozen=True)
class Case:
    """One run of the existing tool's graph command.

    Attributes:
        version: of the tool; dumps of `tests/fixtures/compare` and `nan_*` are those that the same version made.
        name: unique for a version.
        target, golden: ``archive:directory``; a golden of "" is a build.
        flags: of 26.2.0 (``-fm`` becomes ``-f`` for 8.1.1).
        mapping: content of a yaml file for ``-lm``; with none that flag stands alone.
        framework: of ``-f`` in 8.1.1.
    """

    version: str
    name: str
    target: str
    golden: str = ""
    flags: tuple[str, ...] = ()
    mapping: str = ""
    framework: str = "pytorch"


Node = dict[str, Any]


@dataclass
class Pair:
    """The graphs of one step and rank: node name -> fields."""

    step: int
    rank: int
    npu: dict[str, Node] = field(default_factory=dict)
    bench: dict[str, Node] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What the tool wrote for a case, or why it did not.

    Attributes:
        error: the last lines of its log when it ended with an error.
        raw: file name without time -> content: of .vis the document, of .vis.db table -> {"columns": [...], "rows": [...]}, and
            ``schema``; of merged json files the document.
    """

    case: Case
    error: str
    raw: dict[str, Any]

    @property
    def pairs(self) -> list[Pair]:
        """By step and rank."""
        found: dict[tuple[int, int], Pair] = {}
        for name, content in self.raw.items():
            if name.endswith(".vis"):
                one = _pair_of_vis(name, content)
                found[one.step, one.rank] = one
            elif name.endswith(".vis.db"):
                found.update(_pairs_of_database(content))
        return [found[key] for key in sorted(found)]


def cases(version: str) -> list[Case]:
    """All cases of a version."""
    found: list[Case] = []

    def add(name: str, target: str, golden: str = "", flags: tuple[str, ...] = (), mapping: str = "", framework: str = "pytorch") -> None:
        found.append(Case(version, name, target, golden, flags, mapping, framework))

    for group, faults in (("statistics_mix", FAULTS), ("statistics_L0", ("bf16", "nan", "more", "shape")), ("md5_mix", FAULTS)):
        for fault in faults if group != "md5_mix" else faults[1:]:
            add(f"{group}-{fault}", f"{group}:{fault}", f"{group}:golden", ("-oc",) if fault in ("nan", "inf") else ())
    for fault in FAULTS[1:]:
        add(f"tensor_mix-{fault}", f"tensor_mix:{fault}", "tensor_mix:golden", ("-oc",) if fault == "nan" else ())
    for fault in ("more", "fewer", "shape", "dtype"):
        for group in ("statistics_mix", "md5_mix", "tensor_mix"):
            add(f"{group}-{fault}-fuzzy", f"{group}:{fault}", f"{group}:golden", ("-fm",))
    add("statistics_mix-build", "statistics_mix:nan", "", ("-oc",))
    add("statistics_mix-stacks", "statistics_mix:golden", "", ("-cs",) if version == "8.1.1" else ())
    add("statistics_L0-build", "statistics_L0:golden")
    add("statistics_L1-build", "statistics_L1:golden")
    add("two_ranks-nan", "two_ranks:nan", "two_ranks:golden", ("-oc",))
    add("two_ranks-build", "two_ranks:golden")
    add("nan-before", "nan:before/bad/step0", "nan:before/clean/step0", ("-oc",))
    add("nan-after", "nan:after/bad/step0", "", ("-oc",))
    add("job-build", "job:clean", "", ("-oc",))
    add("job-nan", "job:nan/step1", "job:clean/step1", ("-oc",))
    add("job-recompute", "job:recompute", "job:inplace")
    add("job-mapped", "job:inplace/step1/rank0", "job:clean/step0/rank0", ("-lm",), mapping=MODULE_INSIDE)
    add("job-by-name", "job:recompute/step1/rank0", "job:inplace/step1/rank0", ("-lm",))
    add("job-structure", "job:structure/step1")
    add("job-structures", "job:structure/step1", "job:structure/step1")
    add("mindspore-build", "mindspore:transformer/step0", framework="mindspore")
    add("mindspore-compare", "mindspore:half/step0", "mindspore:transformer/step0", framework="mindspore")
    add("mindspore-mapped", "mindspore:transformer/step0", "job:inplace/step1", ("-lm",), mapping=TWO_FRAMEWORKS, framework="mindspore")
    add("megatron-build", "megatron:tp1/step0")
    add("megatron-compare", "megatron:tp2_scaled/step0", "megatron:tp2/step0", ("-oc",))
    add("megatron-pipeline", "megatron:micro/step0")
    add("own-build", "own:golden")
    add("own-nan", "own:nan", "own:golden", ("-oc",))
    if version == "26.2.0":
        one = ("--rank_size", "1", "--tp", "1", "--pp", "1")
        for name, target, sizes, golden, more in MERGES:
            flags = ("--rank_size", sizes[0], "--tp", sizes[1], "--pp", sizes[2], *(("--vpp", sizes[3]) if len(sizes) > 3 else ()), *more)
            add(f"merge-{name}", f"megatron:{target}/step0", "", flags)
            if golden:
                sides = zip((*sizes, "1")[:4], (*[v for v in one if v.isdigit()], "1"))
                words = [[word, *pair] for word, pair in zip(("--rank_size", "--tp", "--pp", "--vpp"), sides)]
                flags = tuple(one for word in words for one in word)
                add(f"merge-{name}-compare", f"megatron:{target}/step0", f"megatron:{golden}/step0", flags)
        add(
            "merge-tp2-scaled",
            "megatron:tp2_scaled/step0",
            "megatron:tp2/step0",
            ("--rank_size", "2", "2", "--tp", "2", "2", "--pp", "1", "1"),
        )
    return found


MODULE_INSIDE = """\
TopLayer:
  blocks: module.blocks
  tokens: module.tokens
  positions: module.positions
  head: module.head
"""
TWO_FRAMEWORKS = """\
TopLayer:
  tokens: tokens
Attention:
  q: qkv
"""
MERGES: tuple[tuple[str, str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    ("tp2", "tp2", ("2", "2", "1"), "tp1", ()),
    ("pp2", "pp2", ("2", "1", "2"), "tp1", ()),
    ("vpp2", "vpp2", ("2", "1", "2", "2"), "tp1_4", ()),
    ("tp2pp2", "tp2pp2", ("4", "2", "2"), "tp1", ()),
    ("dp2", "dp2", ("2", "1", "1"), "", ()),
    ("tp2-json", "tp2", ("2", "2", "1"), "", ("--file_type", "json")),
    ("order", "tp2pp2", ("4", "2", "2"), "", ("--order", "tp-cp-ep-pp-dp")),
)
"""Name, dump, rank_size, tp, pp and vpp, the dump of one rank to compare with, further flags."""


def archive(case: Case, name: str) -> Path:
    """The file that holds ``name:...``."""
    if name == "nan":
        return FIXTURES / f"nan_{case.version}.tar.gz"
    kept = FIXTURES / "compare" / case.version / f"{name}.tar.xz"
    return kept if kept.exists() else FIXTURES / "graph" / f"{name}.tar.xz"


def unpack(case: Case, out: Path) -> tuple[Path, Path | None]:
    """Lay the dumps of a case under `out`: target and golden directories. A stack.json that a fixture left out is empty."""
    return _unpacked(case, case.target, out), _unpacked(case, case.golden, out) if case.golden else None


def _unpacked(case: Case, place: str, out: Path) -> Path:
    name, _, directory = place.partition(":")
    root = out / name
    if not root.exists():
        with tarfile.open(archive(case, name)) as tar:
            tar.extractall(root, filter="data")
        for dump in root.rglob("dump.json"):
            for other in ("stack.json", "construct.json"):
                beside = dump.with_name(other)
                if not beside.exists():
                    beside.write_text("{}")
                beside.chmod(0o640)
            dump.chmod(0o640)
    return root / directory if directory else root


def kept_in(case: Case) -> Path:
    """The file with the outcome of a case."""
    return FIXTURES / "graph" / f"existing_{case.version}_{case.name.partition('-')[0]}.json.xz"


@lru_cache(1)
def _kept(path: Path) -> dict[str, Any]:
    with lzma.open(path) as file:
        kept: dict[str, Any] = json.load(file)
    return kept


def outcome(case: Case) -> Outcome:
    """What the tool made of a case."""
    kept = _kept(kept_in(case))[case.name]
    return Outcome(case, kept["error"], kept["files"])


def _pair_of_vis(name: str, document: dict[str, Any]) -> Pair:
    numbers = dict.fromkeys(("step", "rank"), 0)
    for part in name.removesuffix(".vis").split("_"):
        for word in numbers:
            if part.startswith(word) and part.removeprefix(word).isdigit():
                numbers[word] = int(part.removeprefix(word))
    graphs = document if "NPU" in document else {"NPU": document}
    pair = Pair(numbers["step"], numbers["rank"], config={k: v for k, v in document.items() if k not in ("NPU", "Bench", "node")})
    for side, nodes in (("NPU", pair.npu), ("Bench", pair.bench)):
        for node_name, node in graphs.get(side, {"node": {}})["node"].items():
            nodes[node_name] = {
                "node_type": node["node_type"],
                "up_node": _up(node["upnode"]),
                "sub_nodes": node["subnodes"],
                "precision_index": node["data"].get("precision_index"),
                "overflow_level": node["data"].get("overflow_level"),
                "micro_step_id": node.get("micro_step_id"),
                "matched_node_link": node["matched_node_link"],
                "stack": node["stack_info"],
                "matched_distributed": node.get("matched_distributed", {}),
                "input_data": node["input_data"],
                "output_data": node["output_data"],
            }
    return pair


def _pairs_of_database(tables: dict[str, Any]) -> dict[tuple[int, int], Pair]:
    stacks = {row[0]: json.loads(row[1]) for row in tables["tb_stack"]["rows"]}
    config = dict(zip(tables["tb_config"]["columns"], tables["tb_config"]["rows"][0], strict=True))
    columns = tables["tb_nodes"]["columns"]
    found: dict[tuple[int, int], Pair] = {}
    for row in sorted(tables["tb_nodes"]["rows"], key=lambda row: row[columns.index("node_order")]):
        node = dict(zip(columns, row, strict=True))
        key = int(node["step"]), int(node["rank"])
        pair = found.setdefault(key, Pair(*key, config=config))
        for column in ("sub_nodes", "matched_node_link", "parallel_merge_info", "matched_distributed", "input_data", "output_data"):
            text = node[column]
            node[column] = json.loads(text) if isinstance(text, str) and text[:1] in ("[", "{") else text
        node["up_node"] = _up(node["up_node"])
        node["stack"] = stacks.get(node["stack_id"], [])
        (pair.npu if node["data_source"] == "NPU" else pair.bench)[node["node_name"]] = node
    return found


def _up(name: str | None) -> str:
    return "" if name in (None, "None") else str(name)
