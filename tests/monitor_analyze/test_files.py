"""Reading both kinds of alerts, the file that is written, the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.cli.monitor import analyze as monitor_analyze
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Frame
from msprobe_engine.formats.monitor.alert_order import analyze, summary
from msprobe_engine.probe.sinks.anomaly import AnomalySink
from msprobe_engine.probe.sinks.run_files import alert_lines


def record(word: str, rank: int = 0, step: int = 2, call: int = -1, name: str = "1.mlp.2.bias", rule: str = "AnomalyNan") -> dict[str, Any]:
    """One record as 8.1.1 writes it."""
    tag = f"0:{name}/rank{rank}/{word}"
    message = f"Rule {rule} reports anomaly signal in ('{tag}', 'norm') at step {step}, current value nan, history mean 0.1."
    return {
        "rank": rank, "step": step, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": call, "tag_name": tag, "message": message,
        "group_mates": [0, 1],
    }  # fmt: skip


def existing(root: Path, records: dict[int, list[dict[str, Any]]]) -> Path:
    """A directory anomaly_detected of the existing tool."""
    for rank, found in records.items():
        (root / f"rank{rank}").mkdir(parents=True)
        content = {f"{r['tag_name']}_step_{r['step']}_call_{r['call_id']}": r for r in found}
        (root / f"rank{rank}" / "anomaly.json").write_text(json.dumps(content))
    return root


def alert(name: str, family: str, order: int, **fields: Any) -> Alert:
    extra = {"family": family, **fields.pop("extra", {})}
    made = {"rule": "nan_inf", "severity": "critical", "kind": "grad", "step": 3, "rank": 0, "value": float("nan"), "expected": "finite"}
    return Alert(**{**made, "name": name, "message": f"{name} is bad", "order": order, "extra": extra, **fields})


def run_of(root: Path, alerts: list[Alert], pp: dict[int, int] | None = None) -> Path:
    """Directories of ranks as the CSV sink makes them."""
    for rank in sorted({a.rank for a in alerts} | set(pp or {0: 0})):
        place = root / "monitor" / f"Dec03_21-34-40-rank{rank}-1a2b3c4d"
        place.mkdir(parents=True)
        (place / "alerts.jsonl").write_text(alert_lines([a for a in alerts if a.rank == rank]))
        info = {"rank": rank, "rank_info": {"pp": (pp or {}).get(rank, 0), "dp": 0, "tp": 0}, "started_unix": 1.0}
        (place / "run.json").write_text(json.dumps(info))
        (place / "scalars_0-99.csv").write_text("step,name,value\n" + "".join(f"{step},loss,1.0\n" for step in range(10)))
    return root


def test_existing_files(tmp_path: Path) -> None:
    """Records of the existing tool: wobbling parameters after the update of another step no longer hide the NaN; the records are kept."""
    root = existing(tmp_path / "anomaly_detected", {
        0: [record("param_updated", rule="AnomalyTurbulence"), record("post_grad", call=80), record("actv_grad", call=40, name="1.mlp")],
        1: [record("post_grad", rank=1, call=80), record("param_origin", step=3, rank=1, rule="AnomalyTurbulence")],
    })  # fmt: skip
    result = analyze(root)
    written = json.loads((root / "anomaly_analyse.json").read_text())
    assert list(written) == [
        "0:1.mlp/rank0/actv_grad_step_2_call_40", "0:1.mlp.2.bias/rank0/post_grad_step_2_call_80",
        "0:1.mlp.2.bias/rank0/param_updated_step_2_call_-1", "0:1.mlp.2.bias/rank1/param_origin_step_3_call_-1",
    ]  # fmt: skip
    first = written["0:1.mlp/rank0/actv_grad_step_2_call_40"]
    original = record("actv_grad", call=40, name="1.mlp")
    assert {key: first[key] for key in original} == original
    assert written["0:1.mlp.2.bias/rank0/post_grad_step_2_call_80"]["ranks"] == [0, 1]
    assert summary(result).startswith("First alert: step 2 in the backward pass: 1.mlp on rank 0")


def test_our_alerts(tmp_path: Path) -> None:
    """Alerts of our files: stages come from run.json, the ends of lasting alerts are left out, what is known is said."""
    run = run_of(
        tmp_path,
        [
            alert("layer.0", "actv", 4, rank=1, micro_step=1, kind="activation", extra={"meaning": "It overflowed.", "next": "Dump it."}),
            alert("layer.9", "actv", 2, micro_step=1, kind="activation"),
            alert("layer.9", "actv", 1, step=0, extra={"over": True}),
            alert("w", "grad_reduced", 9, step=1, severity="warning", rule="turbulence", extra={"op": "norm", "phase": "unscaled"}),
        ],
        pp={0: 1, 1: 0},
    )
    result = analyze(run, tmp_path / "out")
    assert [(g.first.name, g.first.word, g.first.pp_stage, g.first.mates) for g in result.groups] == [
        ("w", "unscaled_grad", 1, (0, 1)), ("layer.0", "actv", 0, (0, 1)), ("layer.9", "actv", 1, (0, 1)),
    ]  # fmt: skip
    text = summary(result)
    assert text.startswith("First alert: step 3 in the forward pass of micro step 1: layer.0 on rank 1 (pipeline stage 0).")
    assert "What it usually means: It overflowed." in text
    assert "What to do next: Dump it." in text
    assert "1 warnings came before it" in text
    assert json.loads((tmp_path / "out/anomaly_analyse.json").read_text())["0:layer.0:1/rank1/actv_step_3_call_4"]["value"] == "NaN"


def test_our_anomaly_json(tmp_path: Path) -> None:
    """anomaly.json of our own sink is read where there is nothing else; several statistics of a tensor stay apart."""
    sink = AnomalySink(output_dir=tmp_path, rank=0)
    found = [alert("w", "grad_reduced", 5, extra={"op": op}) for op in ("min", "max")]
    sink.write(Frame(step=3, rank=0, rows=None), found)  # type: ignore[arg-type]
    sink.close()
    result = analyze(tmp_path)
    assert [(g.first.op, g.first.critical, g.first.rule) for g in result.groups] == [("max", True, "nan_inf"), ("min", True, "nan_inf")]
    assert len(json.loads(result.path.read_text())) == 2


def test_warnings_only(tmp_path: Path) -> None:
    """Without anything critical the first warning is what is named, and called that."""
    run = run_of(tmp_path, [alert("w", "update", 1, severity="warning"), alert("v", "param_origin", 1, severity="warning")])
    text = summary(analyze(run))
    assert text.startswith("First alert: step 3 before the forward pass, in the parameters as the last update left them: v on rank 0.")
    assert "It is a warning" in text


def test_damage_is_counted(tmp_path: Path) -> None:
    """Broken files, records that are none and links do not stop the analysis; each is said."""
    root = existing(tmp_path / "anomaly_detected", {0: [record("actv")], 1: [], 2: [], 3: []})
    (root / "rank1/anomaly.json").write_text('{"a": {"step": 1}, "b": 3, "c": {"tag_name": 3, "step": 1}}')
    (root / "rank2/anomaly.json").write_text("{")
    (root / "rank3/anomaly.json").unlink()
    (root / "rank3/anomaly.json").symlink_to(root / "rank0/anomaly.json")
    result = analyze(root)
    assert result.count == 1
    assert sorted(result.found.problems.values()) == [1, 1, 3]


def test_nothing(tmp_path: Path) -> None:
    """No run is an error, a run without alerts is none."""
    with pytest.raises(UsageError, match=r"no monitor has written here|no such directory"):
        analyze(tmp_path / "none")
    (tmp_path / "dumped/dump/step0/rank0").mkdir(parents=True)
    (tmp_path / "dumped/dump/step0/rank0/dump.json").touch()
    with pytest.raises(UsageError, match="it holds a dump, of which msprobe diagnose"):
        analyze(tmp_path / "dumped")
    assert summary(analyze(run_of(tmp_path, [], {0: 0, 1: 0, 2: 0}))).splitlines()[0] == "No alerts on ranks 0-2."
    assert summary(analyze(existing(tmp_path / "x/anomaly_detected", {0: []}))) == "No alerts on rank 0."


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-k, -s in both spellings, -o; exit codes; control characters of names do not reach the terminal."""
    run = run_of(tmp_path, [alert(f"w\x1b{s}", "actv", s, step=s) for s in range(5)])
    out = tmp_path / "out"
    for steps in ("1,3", "[1, 3]"):
        assert main(["monitor", "analyze", str(run), "-o", str(out), "-k", "1", "-s", steps]) == 1
        text = capsys.readouterr().out
        assert "First alert: step 1" in text
        assert "The first 1 of 2 alerts" in text
        assert "\x1b" not in text
    assert len(json.loads((out / "anomaly_analyse.json").read_text())) == 1
    assert main(["monitor", "analyze", str(run), "-o", str(out), "-s", "9"]) == 0
    assert main(["monitor", "analyze", str(tmp_path / "none")]) == 2
    for wrong in (["-k", "0"], ["-s", "a"]):
        with pytest.raises(SystemExit) as end:
            main(["monitor", "analyze", str(run), *wrong])
        assert end.value.code == 2


def test_existing_module_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The existing tool's command and its long options; as there the exit code is 0 when there are alerts."""
    root = existing(tmp_path / "anomaly_detected", {0: [record("actv", step=s) for s in range(4)]})
    command = [
        sys.executable,
        "-m",
        "msprobe.core.monitor.anomaly_processor",
        "-d",
        str(root),
        "-o",
        str(tmp_path),
        "-k",
        "2",
        "-s",
        "[1,2,3]",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "First alert: step 1 in the forward pass" in done.stdout
    assert len(json.loads((tmp_path / "anomaly_analyse.json").read_text())) == 2
    assert monitor_analyze.main(["--data_path", str(root), "--out_path", str(tmp_path), "--topk", "1", "--step", "[]"]) == 0
    assert "The first 1 of 4 alerts" in capsys.readouterr().out
    assert monitor_analyze.main(["-d", str(tmp_path / "none")]) == 2


def test_the_incidents_of_the_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The earliest incident is where to go on; the others are counted, what is none is not."""
    run = run_of(tmp_path, [alert("w", "update", 1)])
    assert main(["monitor", "analyze", str(run)]) == 1
    assert "Incident" not in capsys.readouterr().out
    for name in ("step30-nan_inf", "step4-nan_inf", "other"):
        (run / "incidents" / name).mkdir(parents=True)
        (run / "incidents" / name / "summary.md").touch()
    assert main(["monitor", "analyze", str(run)]) == 1
    assert f"Incident, with what to run next: {run}/incidents/step4-nan_inf/summary.md, 1 more\n" in capsys.readouterr().out
