"""``msprobe code_mapping``: IR files of every layout, kernel dumps by tensor and by statistic, and what is none."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.tensors.kernel_files import kernel_directories, kernel_files, parse_name, rank_and_step
from msprobe_engine.report.code_mapping.ir import Node, read_nodes
from msprobe_engine.report.code_mapping.mapping import Lookup, map_code

NEW = """\
# IR entry: @kernel_graph0

subgraph instance: kernel_graph0 : 0x563b4b3a6a80
# In file net.py:10~19, 4~16/    def construct(self, x):/
subgraph @kernel_graph0() {
  %0(equiv_9_CNode_447) = Load(%para1_fc1.weight, UMonad[U]) cnode_attrs: {checkpoint: Bool(1)}
      : (<Ref[Tensor[Float32]], (8, 8)>, <UMonad, NoShape>) -> (<Tensor[Float32], (8, 8)>)
      # Fullname with scope: (Default/Load-op0)
  %1(equiv_8_x) = PrimFunc_MatMul(%para2_x, %0, Bool(0), Bool(1)) {instance name: matmul} cnode_primal_attrs: {unique_id: "8478"}
      : (<Tensor[Float32], (2, 8)>) -> (<Tensor[Float32], (2, 8)>)
      # Fullname with scope: (Default/fc1-Dense/MatMul-op1)
      # In file net.py:10~19, 4~16/    def construct(self, x):/
      # In file net.py:12, 8~30/        x = self.fc1(x)/<~~This line of code can be shared by multiple nodes, and may be duplicated./
  %2(CNode_5$a) = PrimFunc_AddExt(%1, %1)
      : (<Tensor[Float32], (2, 8)>) -> (<Tensor[Float32], (2, 8)>)
      # Fullname with scope: (Default/AddExt-op10)
      # Corresponding code candidate:
  %3(CNode_570) = PrimFunc_MatMul(%2, %para2_x) cnode_primal_attrs: {forward_node_name: "MatMul_8478", forward_unique_id: "8478"}
      : (<Tensor[Float32], (2, 8)>) -> (<Tensor[Float32], (8, 8)>)
      # Fullname with scope: (Gradients/Default/fc1-Dense/Grad_MatMul/MatMul-op1)
  Return(%3)
      : (<Tensor[Float32], (8, 8)>)
      # Fullname with scope: (Default/Return-op0)
}
# Order:
#   1: @kernel_graph0:CNode_583{[0]: ValueNode<Primitive> Return, [1]: CNode_582}
"""
"""As MindSpore 2.10 writes it; the layouts below are those of its documentation, versions 1.5 to 2.0."""

OLD = {
    "1.5": """\
subgraph @0_5_1_construct_wrapper.12() {
  %24(equivoutput) = Conv2D(%22, %23) {instance name: conv2d} primitive_attrs: {pad_mode: 2, group: 1}
       : (<Tensor[Float32]x[const vector][32, 128, 13, 13]>) -> (<Tensor[Float16]x[const vector][32, 192, 13, 13]>)
       : (<Float16xNC1HWC0[const vector][32, 8, 13, 13, 16]>) -> (<Float16xNC1HWC0[const vector][32, 12, 13, 13, 16]>)
       : (Default/network-WithLossCell/_backbone-AlexNet/conv3-Conv2d/Conv2D-op107)
       # In file src/alexnet.py(175)/        x = self.conv3(x)/
}
""",
    "2.0": """\
subgraph @0_5_1_construct_wrapper.12() {
  %24(equivoutput) = Conv2D(%22, %23) {instance name: conv2d} primitive_attrs: {group: 1}
       : (<Tensor[Float32], (32, 256, 13, 13)>) -> (<Tensor[Float32], (32, 384, 13, 13)>)
       : full_name_with_scope: (Default/network-WithLossCell/_backbone-AlexNet/conv3-Conv2d/Conv2D-op107)
       # In file src/alexnet.py(175)/        x = self.conv3(x)/
}
""",
    "before names": """\
subgraph @0_5_1_construct_wrapper.12() {
  %24(out) = Conv2D(%22, %23) {instance name: conv2d} {in_strategy: ((1, 1), (8, 1))}
      : (<Tensor[Float32], (32, 256, 13, 13)>) -> (<Tensor[Float32], (32, 384, 13, 13)>)
      # scope: (Default/network-WithLossCell/_backbone-AlexNet/conv3-Conv2d)
      # In file src/alexnet.py(175)/        x = self.conv3(x)/
}
""",
}


def ir(tmp_path: Path, text: str = NEW) -> Path:
    """An IR file."""
    path = tmp_path / "trace_code_graph_0133"
    path.write_text(text, encoding="utf-8")
    return path


def dump(directory: Path, *names: str) -> Path:
    """Files of a kernel dump, all empty: nothing reads them."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / f"{name}.npy").touch()
    return directory


def table(path: Path) -> list[list[str]]:
    """Rows of a csv file."""
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def test_nodes_have_their_lines_or_those_of_the_forward_node_or_of_a_neighbour(tmp_path: Path) -> None:
    """What is not the operator's own line is said to be another's."""
    load, matmul, add, gradient = read_nodes(ir(tmp_path))
    assert (load.op, load.scope, load.has_source) == ("Load", "Default/Load-op0", True)
    assert load.lines == ["No line of its own; the function of its graph:", "In file net.py:10~19, 4~16/    def construct(self, x):"]
    assert matmul.lines[1].startswith("In file net.py:12, 8~30/        x = self.fc1(x)")
    assert matmul.unique_id == "8478"
    assert add.lines == ["No line of its own; it takes the result of Default/fc1-Dense/MatMul-op1:", *matmul.lines]
    assert gradient.lines == ["Corresponding forward node candidate:", *matmul.lines]


@pytest.mark.parametrize("version", OLD)
def test_older_layouts_map_too(version: str, tmp_path: Path) -> None:
    """Full names with and without their label, lines with the number in brackets, and paths without names."""
    name = "Default_network-WithLossCell__backbone-AlexNet_conv3-Conv2d_Conv2D-op107"
    found = Lookup(read_nodes(ir(tmp_path, OLD[version]))).find(name, "Conv2D")
    assert [node.lines for node in found.nodes] == [["In file src/alexnet.py(175)/        x = self.conv3(x)"]]
    assert found.exact is (version != "before names")


def test_op1_is_not_op10() -> None:
    """A name that only contains that of a node is the node's when the number ends there."""
    lookup = Lookup([Node("Add", "Default/Add-op1", lines=["In file a"]), Node("Add", "Default/Add-op10", lines=["In file b"])])
    assert [node.lines for node in lookup.find("Default_Add-op10").nodes] == [["In file b"]]
    assert [node.lines for node in lookup.find("trans_Default_Add-op1_cast").nodes] == [["In file a"]]
    assert not lookup.find("Default_Add-op100").nodes
    assert not lookup.find("Default_Add-op").nodes


def test_a_dump_of_tensors_becomes_a_table_in_order_of_execution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of the existing tool; files whose name is a number are found through mapping.csv; parameters are no operators."""
    graph = ir(tmp_path)
    where = dump(
        tmp_path / "d" / "rank_0" / "Net" / "0" / "0",
        "MatMul.Gradients_Default_fc1-Dense_Grad_MatMul_MatMul-op1.0.0.30.output.0.DefaultFormat.Float32",
        "MatMul.Default_fc1-Dense_MatMul-op1.0.0.10.input.0.DefaultFormat.Float32",
        "Parameter.fc1_weight.0.0.90.output.0.DefaultFormat.Float32",
        "Sub.Default_Sub-op3.0.0.40.output.0.DefaultFormat.Float32",
        "12345678901234567890",
    )
    (where / "mapping.csv").write_text("12345678901234567890.npy,AddExt.Default_AddExt-op10.0.0.20.output.0.0.DefaultFormat.npy\n")
    assert main(["-f", "mindspore", "code_mapping", "--ir", str(graph), "--dump_data", str(tmp_path / "d"), "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "5 rows: 2 with source lines, 1 with those of a neighbour" in said
    assert "1 operators are not in the graph (Default_Sub-op3)" in said
    (path,) = tmp_path.glob("code_mapping_*.csv")
    assert os.stat(path).st_mode & 0o777 == 0o640
    header, *rows = table(path)
    assert header == ["File Path", "Code Stack", "Scope Name"]
    assert [row[2] for row in rows] == [
        "Default/fc1-Dense/MatMul-op1",
        "Default/AddExt-op10",
        "Gradients/Default/fc1-Dense/Grad_MatMul/MatMul-op1",
        "",
        "fc1_weight",
    ]
    assert rows[0][1].split("\n")[-1].startswith("In file net.py:12, 8~30/")


STATISTIC = """\
Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value,Min Value,L2Norm Value
MatMul,Default_fc1-Dense_MatMul-op1,0,0,10,input,0,64,float32,"(2,8)",3,-3,3,
AddExt,Default/AddExt-op10,0,0,20,output,0,64,float32,"(2,8)",1,1,1,
"""


def test_a_statistic_table_gets_two_columns(tmp_path: Path) -> None:
    """The user's file stays as it is, unless --in_place; MindSpore's comma at the end of rows makes no column; twice is as once."""
    graph = ir(tmp_path)
    given = tmp_path / "statistic.csv"
    given.write_text(STATISTIC)
    (written,) = map_code([graph], given, tmp_path / "out").files
    assert given.read_text() == STATISTIC
    header, *rows = table(written)
    assert header[-3:] == ["L2Norm Value", "Code Stack", "Scope Name"]
    assert {len(row) for row in rows} == {len(header)}
    assert [row[-1] for row in rows] == ["Default/fc1-Dense/MatMul-op1", "Default/AddExt-op10"]
    for _ in range(2):
        assert map_code([tmp_path], given, tmp_path / "out", in_place=True).files == [given]
        assert table(given) == table(written)


def test_graphs_of_an_iteration_are_told_in_one(tmp_path: Path) -> None:
    """By time over all graphs, iteration after iteration by number; an operator without a line is counted."""
    graph = ir(tmp_path, NEW.replace("# In file net.py:10~19, 4~16/    def construct(self, x):/\nsubgraph", "subgraph"))
    name = "AddExt.Default_AddExt-op10.0.0.{}.output.0.DefaultFormat.Float32"
    for number, (first, second) in {"2": (10, 20), "10": (40, 50)}.items():
        dump(tmp_path / "d" / "Net" / "1" / number, name.format(second))
        dump(tmp_path / "d" / "Net" / "0" / number, name.format(first), "Load.Default_Load-op0.0.0.99.output.0.DefaultFormat.Float32")
    found = map_code([graph], tmp_path / "d", tmp_path / "out")
    times = [row[0].split(".0.0.")[1].split(".")[0] for row in table(found.files[0])[1:]]
    assert times == ["10", "20", "99", "40", "50", "99"]
    assert (found.near, found.without) == (4, 2)
    assert "2 rows are of operators that the graph has no line for" in found.text()


def test_what_is_none_is_said(tmp_path: Path) -> None:
    """No graph, no dump, a graph of another run: each with what to give instead; nothing is written."""
    graph, where = ir(tmp_path), dump(tmp_path / "d" / "rank_0", "Sub.Other_Sub-op3.0.0.40.output.0.DefaultFormat.Float32", "stray")
    (tmp_path / "empty").mkdir()
    (tmp_path / "noir").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "statistic.csv").write_text("a,b\n1,2\n")
    for path, data, error, words in (
        (tmp_path / "gone", where, UsageError, "no such file"),
        (tmp_path / "empty", where, UsageError, "trace_code_graph_"),
        (tmp_path / "noir", where, DumpFormatError, "no node of a graph"),
        (graph, tmp_path / "gone", UsageError, "no such file"),
        (graph, tmp_path / "empty", UsageError, "no tensor file"),
        (graph, where / "stray.npy", UsageError, "is no tensor file"),
        (graph, tmp_path / "statistic.csv", DumpFormatError, "Op Name"),
        (graph, where, DumpFormatError, "knows none of the 1 operators"),
    ):
        with pytest.raises(error, match=words):
            map_code([path], data, tmp_path / "out")


def test_cells_are_no_formulas(tmp_path: Path) -> None:
    """A name or a source line out of a hostile graph is text in a spreadsheet."""
    graph = ir(tmp_path, NEW.replace("Default/fc1-Dense/MatMul-op1", '=cmd|"/c calc"!A0-op1'))
    found = map_code([graph], dump(tmp_path / "d", 'MatMul.=cmd|"_c calc"!A0-op1.0.0.10.input.0.F.Float32'), tmp_path / "out")
    assert table(found.files[0])[1][2].startswith("'=cmd")


def test_a_hostile_graph_costs_little(tmp_path: Path) -> None:
    """Lines of megabytes, thousands of brackets and of source lines: read in a moment, and cut."""
    deep = "%9(x) = PrimFunc_X(" + "(%1, " * 400_000 + "\n"
    many = "      # In file a.py:1, 2~3/ x/\n" * 50_000
    text = NEW.replace("  Return(%3)\n", f"  {deep}      # Fullname with scope: (Default/X-op0)\n{many}  Return(%3)\n")
    start = time.perf_counter()
    node = read_nodes(ir(tmp_path, text))[-1]
    Lookup([node]).find("_" * 100_000 + "-op1" * 10_000)
    assert time.perf_counter() - start < 60
    assert node.scope == "Default/X-op0"
    assert len(node.lines) == 1_000


@hypothesis.given(
    st.lists(st.sampled_from([*NEW.splitlines(keepends=True), "}\n", "%", "  %1 = (\n", "subgraph @\n", "\x00\xff\n", "# In file \n"]))
)
def test_any_order_of_lines_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    """A damaged graph gives nodes or one clean error."""
    path = tmp_path_factory.mktemp("ir") / "g.ir"
    path.write_text("".join(lines), encoding="utf-8")
    try:
        assert all(isinstance(node.scope, str) for node in read_nodes(path))
    except DumpFormatError:
        return


def test_names_of_both_forms_are_taken_apart(tmp_path: Path) -> None:
    """With slot and format (asynchronous dumps of devices), with format and dtype (CPU); other names are none."""
    new = parse_name(Path("MatMul.Default_a.b_MatMul-op0.3.7.1795350331738120.input.2.DefaultFormat.Float32.npy"))
    assert new is not None
    assert new[:8] == ("MatMul", "Default_a.b_MatMul-op0", 3, 7, 1795350331738120, "input", 2, "Float32")
    old = parse_name(Path("MatMul.Default_MatMul-op0.3.7.1795350331738120.output.0.0.ND.npy"))
    assert old is not None
    assert old[5:8] == ("output", 0, "")
    for name in ("x.npy", "a.b.c.d.e.input.0.npy", "a.b.1.2.3.input.npy", "a.b.1.2.٣.input.0.F.npy", "...input..npy"):
        assert parse_name(Path(name)) is None
    assert kernel_directories(tmp_path) == []
    assert kernel_files(tmp_path) == ([], [])


def test_rank_and_step_come_from_the_path() -> None:
    """Directories of the framework, of a debugger, and a path that begins inside."""
    assert rank_and_step(Path("/d/rank_3/Net/1/7"), Path("/d")) == (3, 7, "1")
    assert rank_and_step(Path("/d/rank_3/Net/1/7"), Path("/d/rank_3/Net/1/7")) == (3, 7, "1")
    assert rank_and_step(Path("/d/step5/rank2/Net/0/0"), Path("/d")) == (2, 5, "0")
    assert rank_and_step(Path("/d/x"), Path("/d")) == (None, None, "")
