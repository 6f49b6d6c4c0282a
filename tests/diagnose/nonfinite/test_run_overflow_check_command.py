"""``run_overflow_check``: the calls of a dump run again, and each overflow is called normal or abnormal for the right reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_engine.cli.main import main
from msprobe_engine.find.nonfinite.overflow_table import ABNORMAL, NORMAL, NOT_RUN, Row
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.torch.op_tools.accuracy.arguments import draw_tensor
from msprobe_integrations.torch.op_tools.accuracy.resolve import find
from msprobe_integrations.torch.op_tools.overflow_rerun import rerun


def item(tensor: torch.Tensor, name: str = "") -> dict[str, Any]:
    """A tensor as dump.json has it."""
    wide = tensor.double()
    found = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "requires_grad": True}
    found |= {"Max": wide.max().item(), "Min": wide.min().item(), "Mean": wide.mean().item(), "Norm": wide.norm().item()}
    return found | ({"data_name": name} if name else {})


class Dump:
    """A hand-made overflow dump with saved tensors."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, {}  # type: ignore[var-annotated]
        (root / "dump_tensor_data").mkdir(parents=True)

    def call(self, name: str, *args: Any, saved: bool = True, **kwargs: Any) -> None:
        def one(n: int, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value if isinstance(value, (dict, list)) else {"type": type(value).__name__, "value": value}
            file = f"{name}.input.{n}.pt"
            torch.save(value, self.root / "dump_tensor_data" / file)
            return item(value, file if saved else "")

        inputs = [one(n, value) for n, value in enumerate(args)]
        self.data[name] = {"input_args": inputs, "input_kwargs": {k: one(99, v) for k, v in kwargs.items()}, "output": []}

    def rows(self) -> dict[str, Row]:
        path = self.root / "dump.json"
        path.write_text(json.dumps({"task": "overflow_check", "level": "L1", "data": self.data}))
        return {row.name: row for row in rerun(path)}


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    return Dump(tmp_path)


def test_normal_and_abnormal(dump: Dump) -> None:
    """A product that does not fit float16 is normal. A product of four that fits, and whose parts do not, is abnormal."""
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    dump.call("Torch.mul.0.forward", big, big)
    dump.call("Torch.add.0.forward", torch.ones(2), torch.ones(2))
    dump.call("Torch.logsumexp.0.forward", torch.ones(2), 0)
    dump.call("Tensor.__truediv__.0.forward", torch.ones(2), torch.zeros(2))
    # 3e38 * 3e38 leaves float32 on the way; the product of all four fits
    dump.call("Torch.prod.0.forward", torch.tensor([3e38, 3e38, 1e-30, 1e-30], dtype=torch.float32))
    rows = dump.rows()
    assert {name: (row.verdict, row.overflow) for name, row in rows.items()} == {
        "Torch.mul.0.forward": (NORMAL, True),
        "Torch.add.0.forward": (NORMAL, False),
        "Torch.logsumexp.0.forward": (NORMAL, False),
        "Tensor.__truediv__.0.forward": (NORMAL, True),
        "Torch.prod.0.forward": (ABNORMAL, True),
    }
    assert all(row.inputs == "saved" for row in rows.values())
    assert rows["Torch.prod.0.forward"].log_lines()[0] == "The Torch.prod.0.forward overflow is an abnormal overflow."
    assert rows["Torch.mul.0.forward"].log_lines()[0] == "The Torch.mul.0.forward overflow is a normal overflow."


def test_backward(dump: Dump) -> None:
    """The gradient of sqrt at 0 is infinite in every type: normal, the forward call shows nothing. A saved gradient is used."""
    dump.call("Torch.sqrt.0.forward", torch.zeros(2))
    dump.call("Torch.mul.0.forward", torch.full((2,), 1e30), torch.full((2,), 2.0))
    gradient = torch.full((2,), 1e30)
    torch.save(gradient, dump.root / "dump_tensor_data" / "g.pt")
    dump.data["Torch.mul.0.backward"] = {"input": [item(gradient, "g.pt")], "output": []}
    rows = dump.rows()
    assert (rows["Torch.sqrt.0.forward"].overflow, rows["Torch.sqrt.0.forward"].backward_overflow) == (False, True)
    assert rows["Torch.sqrt.0.forward"].backward == NORMAL
    assert rows["Torch.mul.0.forward"].gradient == "saved or drawn"
    assert rows["Torch.mul.0.forward"].backward_overflow  # 1e30 * 1e30
    assert set(rows) == {"Torch.sqrt.0.forward", "Torch.mul.0.forward"}


def test_drawn_inputs(dump: Dump) -> None:
    """Without saved tensors they are drawn between the recorded extremes, which occur; the same twice; type and shape are kept."""
    wanted = {"dtype": "torch.float16", "shape": [3, 5], "Max": 6.0, "Min": -2.0}
    a, b = draw_tensor(wanted, "x"), draw_tensor(wanted, "x")
    assert torch.equal(a, b)
    assert (a.dtype, list(a.shape), a.max().item(), a.min().item()) == (torch.float16, [3, 5], 6.0, -2.0)
    assert torch.isinf(draw_tensor(wanted | {"Max": "Infinity"}, "x")).sum() == 1
    whole = draw_tensor({"dtype": "torch.int64", "shape": [4], "Max": 9, "Min": 3}, "x")
    assert (whole.min().item(), whole.max().item()) == (3, 9)
    assert draw_tensor({"dtype": "torch.float32", "shape": [0], "Max": None, "Min": None}, "x").numel() == 0
    for wrong in ({"dtype": "torch.load"}, {"shape": [1 << 40, 1 << 20]}, {"shape": [-1]}, {"shape": "x"}):
        with pytest.raises(CannotRun):
            draw_tensor(wanted | wrong, "x")
    dump.call("Functional.linear.0.forward", torch.randn(2, 3), torch.randn(4, 3), saved=False)
    assert dump.rows()["Functional.linear.0.forward"].inputs == "drawn from statistics"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Functional.linear.0.forward", torch.nn.functional.linear),
        ("Torch.matmul.3.forward", torch.matmul),
        ("Tensor.view.0.forward", torch.Tensor.view),
        ("Tensor.__matmul__.0.forward", torch.Tensor.__matmul__),
        ("VF.lstm.0.forward", torch.lstm),
    ],
)
def test_names_are_found(name: str, function: Callable[..., Any]) -> None:
    """Names of records lead back to torch's functions."""
    assert find(name) is function or find(name) == function


@pytest.mark.parametrize(
    "name",
    [
        "Torch.load.0.forward",
        "Torch.save.0.forward",
        "Torch.from_file.0.forward",
        "Torch.compile.0.forward",
        "Torch.hub.0.forward",
        "Torch.__import__.0.forward",
        "Tensor.__reduce_ex__.0.forward",
        "Tensor.__class__.0.forward",
        "Tensor.register_hook.0.forward",
        "Functional.os.0.forward",
        "Functional.warnings.0.forward",
        "os.system.0.forward",
        "Torch.nn.functional.linear.forward",
        "Mint.add.0.forward",
    ],
)
def test_what_is_no_operation_is_not_found(name: str) -> None:
    """A hostile dump reaches nothing that reads files, unpickles, imports or compiles."""
    assert find(name) is None


def test_command(dump: Dump, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log lines of the existing tool, a table, JSON, counts of what is unknown or cannot be made; modules and collectives are no APIs."""
    dump.call("Torch.mul.0.forward", torch.full((2,), 3e38), torch.full((2,), 3e38))
    dump.call("Torch.load.0.forward", {"type": "str", "value": "/etc/passwd"})
    dump.call("Torch.abs.0.forward", {"type": "Weird", "value": "x"})
    dump.call("Torch.matmul.0.forward", torch.ones(2, 3), torch.ones(2, 3))
    dump.call("Module.fc.Linear.forward.0", torch.ones(2))
    dump.call("Distributed.all_reduce.0.forward", torch.ones(2))
    rows = dump.rows()
    assert [row.verdict for row in rows.values()] == [NORMAL, NOT_RUN, NOT_RUN, NOT_RUN]
    out = tmp_path / "out"
    assert main(["-f", "pytorch", "run_overflow_check", "-api_info", str(dump.root / "dump.json"), "-j", "-d", "0", "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert "4 calls: 0 abnormal overflow, 1 normal, 3 not run (1 of them unknown APIs)" in said.out
    (file,) = out.glob("overflow_check_*.json")
    written = json.loads(file.read_text())
    assert [call["note"] for call in written["calls"]][:2] == ["", "unknown API"]
    assert "argument of type Weird" in written["calls"][2]["note"]
    assert "RuntimeError" in written["calls"][3]["note"]


def test_a_dump_of_the_existing_tool() -> None:
    """Statistics of a real model: most calls run again, none is unknown, and the random state stays as it is."""
    path = Path(__file__).parents[2] / "fixtures" / "8.1.1" / "L1" / "step0" / "rank" / "dump.json"
    before = torch.random.get_rng_state()
    rows = rerun(path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(rows) > 20
    assert [row.name for row in rows if row.note == "unknown API"] == []
    assert sum(row.verdict != NOT_RUN for row in rows) >= 0.8 * len(rows), [(row.name, row.note) for row in rows if row.verdict == NOT_RUN]


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file, no dump: code 2 and a sentence."""
    assert main(["run_overflow_check", "-api_info", str(tmp_path / "none.json")]) == 2
    (tmp_path / "x.json").write_text("[]")
    assert main(["run_overflow_check", "-api_info", str(tmp_path / "x.json")]) == 2
    assert "this is no dump file" in capsys.readouterr().err


def test_the_end_names_the_calls_that_overflow(dump: Dump, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of many clean calls the ones with NaN or Inf, the one where it begins first; and what the dump itself holds."""
    big, small = torch.full((4,), 60000.0, dtype=torch.float16), torch.ones(4)
    for n in range(8):
        dump.call(f"Torch.add.{n}.forward", small, small)
    dump.call("Torch.exp.0.forward", torch.full((4,), float("inf")))
    dump.call("Torch.mul.0.forward", big, big)
    dump.data["Torch.mul.0.forward"]["output"] = [item(big * big)]
    dump.rows()
    main(["run_overflow_check", "-api_info", str(dump.root / "dump.json"), "-o", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("2 of 10 calls that were run give NaN or Inf, 1 of them from finite inputs; the first:")
    assert lines[at + 1 : at + 3] == [
        "  Torch.mul.0.forward: its inputs are finite",
        "  Torch.exp.0.forward: its inputs have NaN or Inf",
    ]
    assert lines[at + 3] == "In the dump itself 1 of 10 calls have NaN or Inf in their results, 1 of them from finite inputs; the first:"
    assert lines[-1].startswith("Details: ")
