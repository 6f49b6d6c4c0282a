"""`msprobe op_generate` for torch: scripts of real dumps, run where there is nothing but torch."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import warm

from msprobe_engine.accuracy.verdict import condition as engine_condition
from msprobe_engine.accuracy.verdict import judge as engine_judge
from msprobe_engine.cli.main import main
from msprobe_engine.core.dtypes import FLOAT32, float_type
from msprobe_engine.core.errors import ProbeError
from msprobe_integrations.torch.op_tools.accuracy.scripts import support as script_support
from msprobe_integrations.torch.op_tools.accuracy.scripts import verdict as script_verdict

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program dumped once with tensors and once with statistics."""
    places = {task: tmp_path_factory.mktemp(task) / "dump" for task in ("tensor", "statistics")}
    words = [word for pair in places.items() for word in pair]
    done = warm.run(warm.script(HERE / "operators_program.py"), *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return places


@pytest.fixture(scope="module")
def dump(dumps: dict[str, Path]) -> Path:
    return dumps["tensor"]


@pytest.fixture(scope="module")
def statistics(dumps: dict[str, Path]) -> Path:
    return dumps["statistics"]


def records(dump: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(dump.glob("step0/*/dump.json")).read_text())["data"]
    return found


def one_of_each(dump: Path) -> list[str]:
    """The first call of every API that the program made itself."""
    first: dict[str, str] = {}
    for name in records(dump):
        if name.endswith(".forward"):
            first.setdefault(name.rsplit(".", 2)[0], name.removesuffix(".forward"))
    return list(first.values())


def generate(dump: Path, out: Path, calls: list[str], *options: str) -> int:
    return main(["op_generate", "--dump", str(dump), "-o", str(out), *[word for call in calls for word in ("--api", call)], *options])


def run_bare(directory: Path, *arguments: str) -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, HERE / "bare_scripts.py", "numpy", directory, *arguments],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("script", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts of one call of every API; the dump is moved away before they run."""
    out = tmp_path_factory.mktemp("scripts")
    assert generate(dump, out, one_of_each(dump)) == 1  # dropout and bernoulli have none
    return out


@pytest.fixture(scope="module")
def runs(scripts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    moved = tmp_path_factory.mktemp("elsewhere") / "scripts"
    shutil.copytree(scripts, moved)
    return run_bare(moved, "--exact")


@pytest.mark.slow
def test_recorded_results_come_out_bit_for_bit(runs: dict[str, tuple[int, str]]) -> None:
    """More than 50 operators, forward and backward, without numpy and this package, in another directory: what was recorded, same bits."""
    assert len(runs) > 80
    wrong = {
        name: text for name, (_, text) in runs.items() if "but not what was recorded" in text or "cannot run" in text or " differ " in text
    }
    assert not wrong, "\n".join(wrong.values())
    assert sum("gradient of input" in text for _, text in runs.values()) > 50
    compared = [name for name, (_, text) in runs.items() if "same bits" in text]
    assert len(compared) > 80, sorted(set(runs) - set(compared))


@pytest.mark.slow
def test_right_operators_pass(runs: dict[str, tuple[int, str]]) -> None:
    """What torch computes itself passes; kernels that round intermediate results to bfloat16 may be warned of."""
    errors = {name: text for name, (status, text) in runs.items() if f"{text.rpartition(': ')[2].strip()}" == "error" or status == 2}
    assert not errors, "\n".join(errors.values())


@pytest.mark.slow
def test_layouts_are_found(runs: dict[str, tuple[int, str]]) -> None:
    """A transposed argument sums in another order: the layout that gives the recorded bits is found and said."""
    assert "same bits (input_0 (1, 0))" in runs["Tensor.mean.0"][1]


def test_a_wrong_operator_is_an_error(scripts: Path) -> None:
    """Faults planted into the device's side of a script: scale, NaN, transposition, bfloat16 accumulation."""

    def planted(name: str, fault: Any) -> str:
        module = loaded(scripts / f"{name}.py")
        right = module.call

        def call(*args: Any, dtype: Any, **kwargs: Any) -> Any:
            found = right(*args, dtype=dtype, **kwargs)
            return found if dtype(torch.float32) is torch.float64 else fault(found)

        rows = module.check(module.CASE, call, torch.device("cpu"), "recorded", 0)
        return next(str(row["verdict"]) for row in rows if row["tensor"] == "output.0")

    assert planted("Torch.exp.0", lambda out: out * 1.01) == "error"
    assert planted("Torch.exp.0", lambda out: out.bfloat16().float()) == "error"
    assert planted("Torch.tanh.0", lambda out: out.index_fill(0, torch.tensor([1]), float("nan"))) == "error"
    assert planted("Torch.flip.0", lambda out: out.roll(1, 2)) == "error"
    assert planted("Torch.argmax.0", lambda out: out + 1) == "error"
    assert planted("Torch.matmul.0", lambda out: out) == "pass"


@pytest.mark.slow
def test_drawn_inputs_have_the_recorded_statistics(statistics: Path, tmp_path: Path) -> None:
    """Without tensors a script draws them: extremes, mean and norm are those of the record, NaN and Inf as many, integers in range."""
    assert generate(statistics, tmp_path, one_of_each(statistics), "--seed", "3") == 1
    found = run_bare(tmp_path)
    assert not {name: text for name, (status, text) in found.items() if status == 2}
    assert sum(status == 0 for status, _ in found.values()) > 0.95 * len(found)
    module = loaded(tmp_path / "Functional.linear.0.py")
    for spec in (*module.INPUTS.values(), *loaded(tmp_path / "Torch.isnan.0.py").INPUTS.values()):
        drawn = module.draw_tensor(spec, torch.Generator().manual_seed(1))
        finite = drawn[drawn.isfinite()]
        assert list(drawn.shape) == spec["shape"]
        assert drawn.dtype == spec["dtype"]
        assert int(drawn.isnan().sum()) == spec.get("nan", 0)
        assert int(drawn.isinf().sum()) == spec.get("inf", 0)
        if "nan" not in spec:
            assert (float(finite.min()), float(finite.max())) == pytest.approx((spec["min"], spec["max"]), rel=1e-6)
            assert float(finite.mean()) == pytest.approx(spec["mean"], abs=0.3)
            assert float(finite.norm()) == pytest.approx(spec["norm"], rel=0.3)
    ids = loaded(tmp_path / "Functional.embedding.0.py").build_tensors(
        module.CASE, loaded(tmp_path / "Functional.embedding.0.py").INPUTS, "random", 0
    )
    assert (int(ids["input_0"].min()), int(ids["input_0"].max())) == (0, 3)


def test_a_dump_is_not_pasted(tmp_path: Path) -> None:
    """Whatever a crafted dump says of names, types and values, a script is made without it or not at all."""
    hostile = "0)\nimport os; os.system('touch owned')  # "
    place = tmp_path / "step0" / "rank0"
    place.mkdir(parents=True)
    plain = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0}

    def made(args: list[Any], kwargs: dict[str, Any], name: str = "Torch.add.0") -> str | None:
        data = {f"{name}.forward": {"input_args": args, "input_kwargs": kwargs, "output": []}}
        (place / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
        if main(["op_generate", "--dump", str(place), "--api", name, "-o", str(tmp_path / "out")]):
            return None
        return (tmp_path / "out" / f"{name}.py").read_text()

    for item in (
        {"type": "torch.dtype", "value": hostile},
        {"type": "torch.dtype", "value": "load"},
        {"type": "torch.memory_format", "format": hostile},
        {"type": "torch.layout", "value": hostile},
        {"type": "torch.Size", "value": [hostile]},
        {"type": "slice", "value": [hostile, None, None]},
        {"type": "builtins.object", "value": hostile},
        {"type": hostile, "value": 1},
        {**plain, "dtype": hostile},
        {**plain, "shape": [hostile]},
        {**plain, "shape": [1 << 60]},
        {"type": "int", "value": 1 << 200},
    ):
        assert made([plain, item], {}) is None
        assert made([plain], {"alpha": item}) is None
    assert made([plain], {hostile: 1}) is None
    assert made([plain], {"class": 1}) is None
    assert made([plain], {}, "Torch.load.0") is None
    assert made([plain], {}, "Tensor.__reduce_ex__.0") is None
    for text in (hostile, "'''\"\"\"\\", "\u202e", "\0"):
        source = made([plain, {"type": "str", "value": text}], {"out": {"type": "float", "value": "nan"}})
        assert source is not None
        assert hostile not in source
        compile(source, "script", "exec")
        assert source.isascii()
    source = made([{**plain, "Max": hostile, "data_name": "../../../etc/passwd"}], {})
    assert source is not None
    assert hostile not in source
    assert '"file": "' not in source


@pytest.mark.slow
def test_directions_seed_and_saving(dump: Path, tmp_path: Path) -> None:
    """One direction has a script of its own; random inputs take a seed and runs; --save keeps what both sides gave."""
    assert generate(dump, tmp_path, ["Torch.exp.0"], "--direction", "backward") == 0
    assert generate(dump, tmp_path, ["Torch.exp.0"], "--direction", "forward", "--random", "--iterations", "3") == 0
    found = run_bare(tmp_path, "--save", str(tmp_path / "saved"))
    assert found["Torch.exp.0.backward"][0] == found["Torch.exp.0.forward"][0] == 0
    assert "output.0" not in found["Torch.exp.0.backward"][1]
    assert "gradient" not in found["Torch.exp.0.forward"][1]
    assert found["Torch.exp.0.forward"][1].count("random inputs") == 3
    saved = torch.load(tmp_path / "saved" / "Torch.exp.0.2.pt", weights_only=True)
    assert torch.equal(saved["input"]["input_0"].exp(), saved["device"]["output.0"])
    assert (os.stat(tmp_path / "Torch.exp.0.forward.py").st_mode & 0o777) == 0o640


@pytest.mark.slow
def test_pytest_takes_a_script(scripts: Path) -> None:
    """A script is a test as well."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(scripts / "Torch.exp.0.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scripts)
    assert "1 passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
def test_config_of_the_existing_tool(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config_op.json: the call is extracted and its script has the existing name; a second time it is made of the extracted file alone."""
    file, config = next(dump.glob("step0/*/dump.json")), tmp_path / "config_op.json"
    asked = {"dump_json_path": str(file), "api_name": "Functional.softmax.0", "extract_api_path": str(tmp_path / "one" / "softmax.json")}
    asked |= {"propagation": "backward", "data_mode": "real_data"}
    config.write_text(json.dumps(asked))
    assert main(["-f", "pytorch", "op_generate", "-i", str(config), "-o", str(tmp_path / "a")]) == 0
    extracted = json.loads((tmp_path / "one" / "softmax.json").read_text())
    assert list(extracted) == ["Functional.softmax.0.forward", "Functional.softmax.0.backward"]
    assert Path(extracted["Functional.softmax.0.forward"]["input_args"][0]["data_name"]).is_file()
    config.write_text(json.dumps({**asked, "dump_json_path": "", "random_seed": 7, "iter_times": 1}))
    assert main(["op_generate", "-i", str(config), "-o", str(tmp_path / "b")]) == 0
    first, second = (tmp_path / part / "Functional.softmax.0.backward.py" for part in "ab")
    assert first.read_text().replace("step 0", "a dump").replace("1234", "7") == second.read_text()
    assert run_bare(tmp_path / "b", "--exact")["Functional.softmax.0.backward"][0] in (0, 1)
    capsys.readouterr()
    for wrong, words in (
        ({"propagation": "sideways"}, "forward, backward, both"),
        ({"iter_times": 1001}, "from 1 to 1000"),
        ({"random_seed": True}, "whole number"),
        ({"api_nam": ""}, "did you mean api_name"),
        ({"data_mode": []}, "real_data, random_data"),
        ({"api_name": ""}, "which call of the dump"),
        ({"api_name": "Functional.softmx.0"}, "Functional.softmax.0"),
    ):
        config.write_text(json.dumps({**asked, **wrong}))
        assert main(["op_generate", "-i", str(config), "-o", str(tmp_path / "c")]) == 2
        assert words in capsys.readouterr().err
    assert main(["op_generate", "-o", str(tmp_path)]) == 2


def test_a_damaged_dump(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor file that is cut off is named; a tensor that was not saved is drawn, and that is said."""
    copy = tmp_path / "dump"
    shutil.copytree(dump, copy)
    file = next(copy.glob("step0/*/dump_tensor_data/Torch.exp.0.forward.input.0.pt"))
    file.write_bytes(file.read_bytes()[:100])
    assert generate(copy, tmp_path / "out", ["Torch.exp.0"]) == 2
    assert "Torch.exp.0.forward.input.0.pt" in capsys.readouterr().err
    file.unlink()
    assert generate(copy, tmp_path / "out", ["Torch.exp.0"]) == 0
    assert "drawn: input_0" in capsys.readouterr().out


CASES = ("exact", "rounded", "bits", "scaled", "nan", "inf", "biased", "noise", "zero", "overflow", "saturated", "subnormal")


@pytest.mark.parametrize(
    ("kind", "known", "name", "direction"),
    [
        (torch.float32, {"long_sums": True}, "conv2d", "backward"),
        (torch.float32, {"long_sums": True}, "conv2d", "forward"),
        (torch.bfloat16, {"long_sums": True}, "conv2d", "backward"),
        (torch.bfloat16, {"casts": True}, "to", "forward"),
        (torch.float32, {"casts": True}, "to", "forward"),
    ],
)
def test_limits_of_casts_and_long_sums_are_those_of_the_pre_check(
    kind: torch.dtype, known: dict[str, bool], name: str, direction: str
) -> None:
    """Casts of wider inputs are one rounding; only float32 gradients may have the error of a long sum."""
    case = {"hidden": False, "signs": False, "inside": ("forward",) if name in ("to", "conv2d") else ()} | known
    found = script_verdict.limits(kind, 2.0**-24, case, direction)
    float_kind = float_type(str(kind))
    assert float_kind is not None
    theirs = engine_judge._limits(name, f"Tensor.{name}.0.{direction}.output.0", float_kind, FLOAT32)
    assert found == tuple(theirs)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_verdict_is_that_of_the_pre_check(kind: torch.dtype) -> None:
    """The same status and units as `judge`, whatever is wrong; the same numbers in both."""
    for name in ("UNITS", "INSIDE", "COARSE_INSIDE", "COARSE", "HIDDEN", "LONG_SUMS"):
        assert getattr(script_verdict, name) == getattr(engine_judge, name)
    for name in (
        "BIAS",
        "BIASED",
        "CONSTANT",
        "CONSTANTS",
        "SPREAD",
        "SHIFT",
        "ALIKE",
        "NEIGHBOURS",
        "SHARE",
        "OF_ALL",
        "JUMP",
        "MOST",
        "UNMEASURED",
    ):
        assert getattr(script_verdict, name) == getattr(engine_condition, name)
    unit = torch.finfo(kind).eps / 2
    known = {"standard": "benchmark", "hidden": False, "signs": False, "decides": False, "inside": ("forward",)}
    for seed, case in enumerate(CASES * 3):
        random = torch.Generator().manual_seed(seed)
        bench = torch.randn(64, generator=random, dtype=torch.float64) * 10 ** torch.randint(-3, 3, (64,), generator=random)
        near = [bench * (1 + unit * (torch.randint(0, 2, (64,), generator=random) * 2 - 1)) for _ in range(2)]
        wide = torch.float64 if kind is torch.float64 else torch.float32
        device = bench.to(wide)
        if case == "bits":
            device = device * (1 + torch.finfo(wide).eps * torch.randint(-20, 20, (64,), generator=random))
        elif case == "scaled":
            device = device * 1.01
        elif case == "biased":
            device = device * (1 + 4 * unit)
        elif case == "noise":
            device = device + 0.01 * torch.randn(64, generator=random, dtype=wide)
        elif case == "zero":
            bench[5], device[5] = 0.0, 1e-3
            near = [other.index_fill(0, torch.tensor([5]), 0.0) for other in near]
        elif case == "overflow":
            bench[3] = torch.finfo(kind).max * (1.5 if kind is not torch.float64 else 1)
            device[3] = torch.tensor(bench[3].item(), dtype=torch.float64).to(wide)
        elif case == "saturated" and kind is not torch.float64:
            bench[3], device[3] = 1.5 * torch.finfo(kind).max, torch.finfo(kind).max
        elif case == "subnormal" and kind is torch.float16:
            bench = torch.arange(64, dtype=torch.float64) * 2.0**-24
            device, near = (bench + (seed % 3) * 2.0**-24).to(wide), [bench * (1 + unit), bench * (1 - unit)]
        elif case in ("nan", "inf"):
            device[7] = float(case)
        device = device.to(kind)
        near = near if seed % 4 else []
        ours = script_verdict.judge_result(device, bench, near, unit, known, "forward")
        plain = device.float().numpy() if kind is torch.bfloat16 else device.numpy()
        theirs = engine_judge.judge(
            "softmax", "Torch.softmax.0.forward.output.0", bench.numpy(), plain, "torch.float64", str(kind),
            changed=[other.numpy() for other in near], input_dtype=str(kind),
        )  # fmt: skip
        assert ours[0] == theirs.status, (case, ours, theirs.message)
        if theirs.units is not None and np.isfinite(theirs.units):
            assert ours[2]["units"] == pytest.approx(theirs.units, rel=1e-6)


def test_same_bits_tells_types_shapes_and_zeros_apart() -> None:
    """-0 is not 0, NaN is NaN, another type or shape is another thing."""
    one = torch.tensor([0.0, float("nan"), 1.0])
    assert script_support.same_bits(one, one.clone())
    assert not script_support.same_bits(one, torch.tensor([-0.0, float("nan"), 1.0]))
    assert not script_support.same_bits(one, one.double())
    assert not script_support.same_bits(one, one[None])


def test_errors_are_probe_errors(tmp_path: Path) -> None:
    """No dump, an empty one, a name that is not there: one message, status 2."""
    assert main(["op_generate", "--dump", str(tmp_path), "--api", "x.y.0", "-o", str(tmp_path)]) == 2
    (tmp_path / "dump.json").write_text('{"data": {}}')
    assert main(["op_generate", "--dump", str(tmp_path), "--api", "Torch.add.0", "-o", str(tmp_path)]) == 2
    assert issubclass(ProbeError, Exception)


def test_names_are_taken_without_their_number_and_misspelled_ones_told(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``Torch.softmax`` and ``softmax`` are all calls of it; for ``sofmax`` the nearest recorded name is said."""
    assert generate(statistics, tmp_path / "full", ["Functional.linear"]) == 0
    assert generate(statistics, tmp_path / "bare", ["linear"]) == 0
    written = sorted(path.name for path in (tmp_path / "full").glob("*.py"))
    assert written == sorted(path.name for path in (tmp_path / "bare").glob("*.py")) != []
    for wrong in ("linaer", "Functional.linaer.0", "functional.Linear"):
        assert generate(statistics, tmp_path / "none", [wrong]) == 2
        assert "did you mean Functional.linear" in capsys.readouterr().err


@pytest.mark.slow
def test_a_device_that_is_not_there_is_one_line(statistics: Path, tmp_path: Path) -> None:
    """Exit status 2, no traceback; and nothing is said of a numpy that the script does not need."""
    assert generate(statistics, tmp_path, ["Functional.linear.0"]) == 0
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('none', name='numpy')")
    devices = ("cuda:77", "npu", "nothing", "cpu")
    # Each as the main program of a process of its own, forked from one that has imported torch.
    (tmp_path / "each.py").write_text("""
import os, runpy, sys
import torch
for device in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(device + ".err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = ["Functional.linear.0.py", "--device", device]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
""")
    done = subprocess.run([sys.executable, "each.py", *devices], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [int(line) for line in done.stdout.splitlines() if line.isdigit()] == [2, 2, 2, 0]
    for device in devices[:-1]:
        said = (tmp_path / f"{device}.err").read_text()
        assert said.startswith(f"Functional.linear.0: --device {device}: there is no such device here")
        assert said.count("\n") == 1
    assert (tmp_path / "cpu.err").read_text() == ""
