"""``msprobe ckpt`` as users type it: verdicts, exit codes, reports, the gate, manifests, and a run that was killed."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402 - torch is asked for first

from msprobe_engine.cli.main import main  # noqa: E402
from msprobe_engine.core.errors import UsageError  # noqa: E402
from msprobe_engine.find.checkpoint import diff as diff_module  # noqa: E402
from msprobe_engine.find.checkpoint.diff import Options, diff  # noqa: E402
from msprobe_engine.find.checkpoint.resume import Journal  # noqa: E402
from msprobe_engine.report.checkpoint.files import existing_form  # noqa: E402

Weights = dict[str, "torch.Tensor"]


def weights() -> Weights:
    """A model of two layers, in two element types."""
    generator = torch.Generator().manual_seed(0)
    made: Weights = {}
    for layer in range(2):
        for name, shape in (
            ("self_attn.q_proj.weight", (32, 16)),
            ("mlp.up_proj.weight", (64, 16)),
            ("mlp.experts.1.down_proj.weight", (16, 64)),
            ("input_layernorm.weight", (16,)),
        ):
            made[f"model.layers.{layer}.{name}"] = torch.randn(shape, generator=generator).bfloat16()
    made["lm_head.weight"] = torch.randn(50, 16, generator=generator)
    return made


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``a``, the same as ``same.pt``, and ``b`` with planted differences."""
    root = tmp_path_factory.mktemp("stored")
    a = weights()
    for name in ("a", "b"):
        (root / name).mkdir()
    save_file(a, root / "a" / "model.safetensors")
    torch.save(a, root / "same.pt")
    b = {name: value.clone() for name, value in a.items()}
    b["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    b["model.layers.0.self_attn.q_proj.weight"] *= 1.01
    b["model.layers.0.input_layernorm.weight"] = torch.zeros(17, dtype=torch.bfloat16)
    b["lm_head.weight"][7, 1] = float("nan")
    del b["model.layers.1.input_layernorm.weight"]
    b["=cmd|' /C calc'!A0"] = torch.zeros(2)
    save_file(b, root / "b" / "model.safetensors")
    torch.save(b, root / "b.pt")
    return root


def test_the_same_weights_in_two_formats_are_equal(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """safetensors against torch.save: exit code 0 and a verdict that says on what it rests."""
    assert main(["ckpt", "diff", str(stored / "a"), str(stored / "same.pt")]) == 0
    assert capsys.readouterr().out.startswith("equal: 9 tensors (same bits)\n")


def test_exactly_what_was_planted_is_reported(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict first, exit code 1; JSON, CSV and HTML say the same, and the journal of the run is gone."""
    assert main(["ckpt", "diff", str(stored / "a"), str(stored / "b"), "-o", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    only = "1 tensor only in the run, 1 tensor only in the golden run"
    assert out.startswith(f"different: lm_head.weight holds NaN in the golden run, 4 of 8 tensors differ, {only}\n")
    data = json.loads((tmp_path / "ckpt_diff.json").read_text())
    assert (data["equal"], data["exit_code"]) == (False, 1)
    assert {entry["name"] for entry in data["different"]} == {
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    }
    assert data["only_in_a"] == ["model.layers.1.input_layernorm.weight"]
    assert data["only_in_b"] == ["=cmd|' /C calc'!A0"]
    one = data["tensors"]["model.layers.1.mlp.up_proj.weight"]
    assert (one["changed"], one["max_at"], one["layer"], one["kind"]) == (1, [3, 4], 1, "mlp")
    assert data["tensors"]["lm_head.weight"]["nan_b"] == 1
    rows = list(csv.DictReader((tmp_path / "ckpt_diff.csv").read_text().splitlines()))
    assert {row["status"] for row in rows} == {"equal", "different", "shape", "only in the run", "only in the golden run"}
    assert not any(cell.startswith("=") for row in rows for cell in row.values())
    page = (tmp_path / "ckpt_diff.html").read_text()
    assert "<title>different: lm_head.weight holds NaN in the golden run, 4 of 8" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt_diff.csv", "ckpt_diff.html", "ckpt_diff.json"]


def test_lists_are_cut_on_request(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json - prints the report; --only-different leaves equal tensors out, --top the nearer ones."""
    code = main(["ckpt", "diff", str(stored / "a"), str(stored / "b"), "--json", "-", "--only-different", "--top", "2"])
    data = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [entry["status"] for entry in data["different"]] == ["shape", "different"]
    assert data["different_count"] == 4
    assert "tensors" not in data


def test_the_gate_lets_small_differences_pass(tmp_path: Path) -> None:
    """Within --atol and --rtol exit code 0, and the verdict says how many are within; just beyond 1. NaN is always beyond."""
    a = {"w": torch.ones(100), "v": torch.zeros(4)}
    b = {"w": torch.ones(100) * 1.001, "v": torch.zeros(4)}
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    paths = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert main(["ckpt", "diff", *paths]) == 1
    assert main(["ckpt", "diff", *paths, "--rtol", "1e-2"]) == 0
    assert main(["ckpt", "diff", *paths, "--atol", "1e-4"]) == 1
    assert "1 within atol 0, rtol 0.01" in diff(*paths, Options(rtol=1e-2)).verdict()
    b["v"][1] = float("nan")
    torch.save(b, tmp_path / "b.pt")
    assert main(["ckpt", "diff", *paths, "--rtol", "1e-2"]) == 1


@pytest.mark.parametrize(
    ("run", "golden", "said"),
    [
        ({"v": "nan"}, {}, "different: v holds NaN in the run, 1 of 3 tensors differ"),
        ({}, {"w": "-inf"}, "different: w holds Inf in the golden run, 1 of 3 tensors differ"),
        ({"v": "nan", "w": "inf"}, {}, "different: v holds NaN in the run, 1 tensor more with NaN or Inf, 2 of 3 tensors differ"),
        ({"v": "nan"}, {"v": "nan"}, "equal: 3 tensors (same bits)"),
    ],
)
def test_the_first_line_says_which_side_has_a_number_that_is_none(
    run: dict[str, str], golden: dict[str, str], said: str, tmp_path: Path
) -> None:
    """Whatever else differs, this comes first; what both sides have is no difference."""
    for name, planted in (("run", run), ("golden", golden)):
        tensors = {key: torch.ones(8) for key in ("u", "v", "w")}
        for key, value in planted.items():
            tensors[key][3] = float(value)
        torch.save(tensors, tmp_path / f"{name}.pt")
    assert diff(tmp_path / "run.pt", tmp_path / "golden.pt").verdict() == said


def test_another_element_type_with_the_same_values_is_equal(tmp_path: Path) -> None:
    """bfloat16 beside its float32: equal, by values; what the rounding of float32 lost is a difference that is called so."""
    values = torch.randn(1000)
    torch.save({"w": values}, tmp_path / "wide.pt")
    torch.save({"w": values.bfloat16()}, tmp_path / "narrow.pt")
    torch.save({"w": values.bfloat16().float()}, tmp_path / "back.pt")
    found = diff(tmp_path / "narrow.pt", tmp_path / "back.pt")
    assert (found.code, found.tensors[0].by) == (0, "values")
    rounded = diff(tmp_path / "wide.pt", tmp_path / "narrow.pt")
    assert rounded.code == 1
    assert rounded.tensors[0].rounded
    assert "rounded to bfloat16" in rounded.tensors[0].hint


ODD_TENSORS = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "quantized to int32": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint32),
    "quantized by channel": lambda x: torch.quantize_per_channel(x[None], torch.tensor([0.1]), torch.tensor([0]), 0, torch.quint8),
    "storage": lambda x: x.untyped_storage(),
    "storage with a type": lambda x: x._typed_storage(),
    "list of storages": lambda x: [x.untyped_storage()],
    "sparse": lambda x: x.to_sparse(),
    "sparse by rows": lambda x: x[None].to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "complex": lambda x: torch.polar(torch.ones(3), x),
    "conjugate": lambda x: torch.polar(torch.ones(3), x).conj(),
    "unsigned": lambda x: x.to(torch.uint64),
    "array": lambda x: x.numpy(),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_one_element_of_a_tensor_of_any_kind_counts(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside an ordinary tensor that is the same. Scale, layout and the other elements are the same, too."""
    for name, last in (("a", 4.0), ("again", 4.0), ("b", 5.0)):
        torch.save({"w": torch.ones(3), "odd": ODD_TENSORS[kind](torch.tensor([1.0, 2.0, last]))}, tmp_path / f"{name}.pt")
    codes = [main(["ckpt", "diff", str(tmp_path / f"{name}.pt"), str(tmp_path / "a.pt")]) for name in ("again", "b")]
    assert codes == [0, 1], "".join(capsys.readouterr())


def test_a_manifest_stands_for_its_checkpoint(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ckpt digest, then diff against it: equal to the checkpoint in another format, and what changed by name; two manifests too."""
    manifest = tmp_path / "a.digests.json"
    assert main(["ckpt", "digest", str(stored / "a"), "-o", str(manifest)]) == 0
    assert main(["ckpt", "diff", str(manifest), str(stored / "same.pt")]) == 0
    assert "(same digest)" in capsys.readouterr().out
    found = diff(manifest, stored / "b")
    assert {t.name for t in found.different} == {
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    }
    assert diff(manifest, manifest).code == 0
    assert main(["ckpt", "show", str(manifest), "--tensors"]) == 0
    for damaged in (manifest.read_text()[:-200], '{"kind": "msprobe checkpoint digests", "a":' + "[" * 200_000):
        manifest.write_text(damaged)
        assert main(["ckpt", "diff", str(manifest), str(stored / "a")]) == 2


def test_quick_reads_only_what_has_another_crc(stored: Path) -> None:
    """torch.save leaves a CRC-32 behind every storage: equal ones are not read, and the verdict says so; others get their numbers."""
    full, quick = (diff(stored / "same.pt", stored / "b.pt", Options(quick=quick)) for quick in (False, True))
    assert [t.name for t in quick.different] == [t.name for t in full.different]
    assert quick.nbytes < full.nbytes
    assert {t.by for t in quick.tensors if t.equal} == {"crc32"}
    same = diff(stored / "same.pt", stored / "same.pt", Options(quick=True))
    assert (same.nbytes, same.code) == (0, 0)
    assert "same CRC-32, not read" in same.verdict()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.zeros(100)}, stored / "without0.pt")
        torch.save({"w": torch.ones(100)}, stored / "without1.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert diff(stored / "without0.pt", stored / "without1.pt", Options(quick=True)).code == 1


def test_what_cannot_be_told_is_neither_equal_nor_different(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3: nothing in common; 2 where one side cannot be read at all: no checkpoint, a file cut off behind its header."""
    assert main(["ckpt", "diff", str(stored / "a"), str(tmp_path)]) == 2
    assert "no checkpoint is recognised" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert main(["ckpt", "diff", str(stored / "a"), str(tmp_path / "pipe")]) == 2
    (tmp_path / "pipe").unlink()
    torch.save({"other": torch.zeros(3)}, tmp_path / "other.pt")
    capsys.readouterr()
    assert main(["ckpt", "diff", str(stored / "a"), str(tmp_path / "other.pt")]) == 3
    assert "no tensor that is called alike (9 only in the run, 1 only in the golden one)" in capsys.readouterr().out
    (tmp_path / "other.pt").unlink()
    data = (stored / "a" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) - 100])
    assert main(["ckpt", "diff", str(stored / "a"), str(tmp_path / "model.safetensors")]) == 2


def test_the_form_of_the_existing_tool(stored: Path) -> None:
    """``config_check --compare``: weights of both sides with l2, cos, numel and shape; lists of both where shapes differ."""
    found = existing_form(diff(stored / "a", stored / "b"))
    assert found["lm_head.weight"].keys() == {"l2", "cos", "numel", "shape"}
    assert found["model.layers.1.mlp.experts.1.down_proj.weight"] == {"l2": 0.0, "cos": 1.0, "numel": 1024, "shape": [16, 64]}
    assert found["model.layers.0.input_layernorm.weight"] == {"l2": None, "cos": None, "numel": [16, 17], "shape": [[16], [17]]}
    assert "model.layers.1.input_layernorm.weight" not in found


SLOW = (
    "import sys, time\nfrom msprobe_engine.find.checkpoint import resume\nadd = resume.Journal.add\n"
    "def slowly(self, *args):\n    add(self, *args)\n    time.sleep(0.3)\nresume.Journal.add = slowly\n"
    "from msprobe_engine.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
)


@pytest.mark.parametrize(("ended", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_killed_run_is_gone_on_with(tmp_path: Path, ended: signal.Signals, code: int) -> None:
    """kill -9 or Ctrl-C in the middle: the next run takes over what was done, reads only the rest, and comes to the same report."""
    count, numel = 12, 1 << 18
    a = {f"layers.{k}.w": torch.full((numel,), float(k)) for k in range(count)}
    torch.save(a, tmp_path / "a.pt")
    a["layers.7.w"][5] = 9
    torch.save(a, tmp_path / "b.pt")
    out = tmp_path / "report"
    words = ["ckpt", "diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "-o", str(out), "--workers", "1"]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    journal = out / "ckpt_diff.progress.jsonl"
    for _ in range(400):
        if journal.exists() and journal.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.05)
    process.send_signal(ended)
    said = process.communicate(timeout=240)[1]
    assert process.returncode == code, said
    done = journal.read_bytes().count(b"\n") - 1
    assert 3 <= done < count
    with journal.open("ab") as file:
        file.write(b'{"pair": 3, "result": {"na')  # what a line looks like that was not finished
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt", Options(output=out))
    assert found.resumed == done
    assert found.nbytes == (count - done) * numel * 4 * 2
    assert [t.name for t in found.different] == ["layers.7.w"]
    assert len(found.tensors) == count
    again = diff(tmp_path / "a.pt", tmp_path / "b.pt", Options(output=out, atol=0.5))
    assert again.resumed == 0


def test_two_comparisons_do_not_share_a_journal(stored: Path, tmp_path: Path) -> None:
    """The second one says that the directory is in use; when the first is done it is free."""
    with Journal(tmp_path, "mark"), pytest.raises(UsageError, match="another comparison"):
        diff(stored / "a", stored / "b", Options(output=tmp_path))
    assert diff(stored / "a", stored / "b", Options(output=tmp_path)).code == 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Two sparse files of 768 MB within 192 MiB, the interpreter with it."""
    numel = 192 << 20
    header = json.dumps({"w": {"dtype": "F32", "shape": [numel // 4096, 4096], "data_offsets": [0, 4 * numel]}}).encode()
    header += b" " * (-len(header) % 8)
    for name in ("a", "b"):
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 4 * numel)
    script = (
        "import re, sys\nfrom msprobe_engine.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print('peak', re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1], 'code', code)\n"
    )
    words = ["ckpt", "diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--memory_mb", "192", "--workers", "8"]
    out = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True).stdout
    peak = re.search(r"peak (\d+) code 0", out)
    assert peak is not None, out
    assert int(peak[1]) < 192 << 10


def test_values_that_json_lacks_reach_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN, Inf and keys that are no text among the values, Inf among the numbers: valid JSON, and a manifest that compares equal."""
    state = {"model": {"w": torch.tensor([1e300, 1.0], dtype=torch.float64)}, "loss": math.nan, "scale": math.inf, "best": {(1, 2): 3}}
    torch.save(state, tmp_path / "a.pt")
    torch.save({**state, "model": {"w": torch.tensor([-1e300, 1.0], dtype=torch.float64)}, "scale": 1.0}, tmp_path / "b.pt")

    def refuse(token: str) -> None:
        raise AssertionError(token)

    assert main(["ckpt", "diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--json", "-"]) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert data["tensors"]["w"]["max_abs"] == 2e300
    assert data["tensors"]["w"]["l2"] is None
    assert main(["ckpt", "show", str(tmp_path / "a.pt"), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert main(["ckpt", "digest", str(tmp_path / "a.pt"), "-o", str(tmp_path / "m.json")]) == 0
    assert main(["ckpt", "diff", str(tmp_path / "m.json"), str(tmp_path / "a.pt")]) == 0


def test_a_file_that_changes_while_it_is_read_is_a_problem(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that saves over the checkpoint: the verdict is open, and the file is named."""
    for name in ("a", "b"):
        shutil.copy(stored / "same.pt", tmp_path / f"{name}.pt")
    plain = diff_module.compare

    def saved_over(*args: Any, **words: Any) -> Any:
        found = plain(*args, **words)
        os.utime(tmp_path / "b.pt", ns=(1, 1))
        return found

    monkeypatch.setattr(diff_module, "compare", saved_over)
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.code == 3
    assert found.problems == [f"{tmp_path / 'b.pt'} was changed while it was read"]


def test_results_do_not_depend_on_the_order_of_threads(stored: Path) -> None:
    """The same numbers to the last bit with one thread and with eight."""
    one, many = (diff(stored / "a", stored / "b", Options(workers=workers)) for workers in (1, 8))
    assert [t.to_json() for t in one.tensors] == [t.to_json() for t in many.tensors]


def test_wrong_settings_say_what_is_allowed(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too little memory, no threads, a tolerance below 0: exit code 2 and the range."""
    for words in (["--memory_mb", "10"], ["--workers", "0"], ["--atol", "-1"], ["--top", "-1"]):
        assert main(["ckpt", "diff", str(stored / "a"), str(stored / "b"), *words]) == 2
        assert words[1].lstrip("-") in capsys.readouterr().err


def test_numpy_does_the_same_without_the_kernel(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without a compiler comes to the same results."""
    with_kernel = diff(stored / "a", stored / "b")
    monkeypatch.setattr("msprobe_engine.measure.stored.tensors._kernel", None)
    without = diff(stored / "a", stored / "b")
    for one, other in zip(with_kernel.tensors, without.tensors):
        assert (one.name, one.status, one.changed, one.max_at, one.max_abs) == (
            other.name,
            other.status,
            other.changed,
            other.max_at,
            other.max_abs,
        )
        if one.l2 is not None and other.l2 is not None:
            assert np.isclose(one.l2, other.l2, rtol=1e-9)
