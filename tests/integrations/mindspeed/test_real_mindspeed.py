"""Real MindSpeed on real Megatron-LM (core_v0.12.1; MindSpeed core_r0.16.0: core_v0.16.1), and real MindSpeed-LLM on both, with nothing but
the NPU left out.

Opt-in: MSPROBE_MINDSPEED and MSPROBE_MEGATRON_LM name the checkouts, MSPROBE_MINDSPEED_LLM that of MindSpeed-LLM. They want packages
that this project does not need (scipy, einops, six, sentencepiece, regex; MindSpeed-LLM also peft): MSPROBE_MINDSPEED_PATH is put on the
path in front.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUNNER = Path(__file__).with_name("real_mindspeed.py")
CONFIG = """
output_dir: {output}
strict: true
monitor: {{gradients: true, parameters: true, optimizer_states: true, activations: true, collectives: true, replica_check: {{interval: 1}}}}
"""
MEGATRON = Path(os.environ.get("MSPROBE_MEGATRON_LM", "")) / "megatron" / "core" / "package_info.py"
NEWER = MEGATRON.is_file() and "MINOR = 16" in MEGATRON.read_text()
VERSION = "core_r0.16.0 (Megatron core_v0.16.1)" if NEWER else "master (Megatron core_v0.12.1)"
LAYOUTS = {
    "TP 2, 2 ranks": "--tensor-model-parallel-size 2",
    "TP 2 with sequence parallelism, 2 ranks": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP 2, 2 ranks": "--pipeline-model-parallel-size 2",
    "DP 2, distributed optimizer, bf16, 2 ranks": "--use-distributed-optimizer --bf16",
    "EP 2, 2 ranks": "--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall",
}


def checkouts(llm: bool) -> list[str]:
    """Directories for the path; the script's own comes last."""
    names = ["MSPROBE_MINDSPEED", "MSPROBE_MEGATRON_LM", *(["MSPROBE_MINDSPEED_LLM"] if llm else [])]
    for name in names:
        if not os.environ.get(name):
            pytest.skip(f"{name} does not say where a checkout is")
    return [os.environ[name] for name in names]


def train(tmp_path: Path, arguments: str, probe: Path | None = None, *, llm: bool = False, by: str = "flag", **set_in: str) -> str:
    """Three iterations in two ranks; returns what they print. `by`: how the probe is asked for."""
    places = checkouts(llm)
    extra = os.environ.get("MSPROBE_MINDSPEED_PATH", "")
    path = os.pathsep.join([*([extra] if extra else []), *places, str(ROOT)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MSPROBE_CONFIG": "", "MSPROBE_BY_HAND": "1" if probe else ""}
    environment |= set_in
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(RUNNER)]
    command += [f"{places[-1]}/pretrain_gpt.py", *arguments.split()]
    if probe is not None and by == "flag":
        command += ["--msprobe-config", str(probe)]
    elif probe is not None:
        command = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", str(probe), "--", *command]
        environment["MSPROBE_BY_HAND"] = ""
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def numbers(text: str) -> list[tuple[str, ...]]:
    """What Megatron prints of its iterations and evaluations."""
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)", text)
    return found + re.findall(r"(validation loss .*?) \| lm loss value: (\S+)", text)


def rows(output: Path, family: str, rank: int) -> list[dict[str, str]]:
    (file,) = (output / "monitor").glob(f"*rank{rank}*/{family}_*.csv")
    with file.open() as stream:
        return list(csv.DictReader(stream))


def probe_file(tmp_path: Path, text: str = CONFIG) -> Path:
    file = tmp_path / "probe.yaml"
    file.write_text(text.format(output=tmp_path / "out"))
    return file


@pytest.mark.framework
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mindspeed(tmp_path: Path, layout: str) -> None:
    """``pretrain_gpt.py`` on MindSpeed prints the same digits with the probe and without, and every step of both ranks is there."""
    plain = train(tmp_path, LAYOUTS[layout])
    probed = train(tmp_path, LAYOUTS[layout], probe_file(tmp_path))
    assert len(numbers(plain)) >= 4
    assert numbers(probed) == numbers(plain)
    check(tmp_path / "out", probed)


@pytest.mark.framework
@pytest.mark.parametrize("by", ["flag", "msprobe run"])
def test_mindspeed_llm(tmp_path: Path, by: str) -> None:
    """The same for MindSpeed-LLM, with its own list of features and its own loop, which has taken `train_step` by name."""
    layout = "TP 2, 2 ranks"
    plain = train(tmp_path, LAYOUTS[layout], llm=True)
    probed = train(tmp_path, LAYOUTS[layout], probe_file(tmp_path), llm=True, by=by)
    assert len(numbers(plain)) >= 4
    assert numbers(probed) == numbers(plain)
    check(tmp_path / "out", probed)
    layout = f"MindSpeed-LLM, {layout}"


def check(output: Path, printed: str) -> None:
    """Steps 0, 1, 2 on both ranks, with the loss that was printed for the last one."""
    for rank in (0, 1):
        for family in ("grad_reduced", "param_updated"):
            assert {row["step"] for row in rows(output, family, rank)} == {"0", "1", "2"}
    scalars = [row for rank in (0, 1) for row in rows(output, "scalars", rank)]
    last = [loss for number, loss, _ in (found for found in numbers(printed) if len(found) == 3) if number == "3"]
    (ours,) = [float(row["value"]) for row in scalars if row["name"] == "loss" and row["step"] == "2"][:1]
    assert ours == pytest.approx(float(last[0]), rel=1e-6)


@pytest.mark.framework
@pytest.mark.parametrize("llm", [False, True], ids=["MindSpeed", "MindSpeed-LLM"])
def test_npu_datadump(tmp_path: Path, llm: bool) -> None:
    """``--npu-datadump`` of MindSpeed imports our `PrecisionDebugger`, with the config.json inside of its package (statistics, L1, step 0,
    rank 0), and beside our monitor both are written; with a dump in our settings only that one is."""
    monitored = train(tmp_path, "--npu-datadump", probe_file(tmp_path), llm=llm)
    assert "config.json in the package mindspeed" in monitored
    dumps = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("dump.json"))
    assert dumps == ["dump_path/step0/rank0/dump.json"]
    assert '"Functional.linear' in (tmp_path / dumps[0]).read_text() or '"Torch.matmul' in (tmp_path / dumps[0]).read_text()
    check(tmp_path / "out", monitored)
    again = tmp_path / "again"
    again.mkdir()
    ours = train(
        again, "--npu-datadump", probe_file(again, "output_dir: {output}\nstrict: true\ndump: {{level: L0, step: [1]}}\n"), llm=llm
    )
    assert "--npu-datadump is left out" in ours
    assert not (again / "dump_path").exists()
    assert len(list((again / "out").rglob("dump.json"))) == 2


FUSED = "--tensor-model-parallel-size 2 --use-flash-attn --use-fused-rotary-pos-emb --normalization RMSNorm --use-fused-rmsnorm --swiglu "
FUSED += "--use-fused-swiglu"
DUMP = "output_dir: {output}\nstrict: true\ndump: {{level: mix, step: [1]}}\n"
OPERATORS = {
    "NPU.npu_rms_norm",
    "NPU.npu_swiglu",
    "NPU.npu_fusion_attention",
    "MindSpeed.npu_rotary_position_embedding",
    "MindSpeed.npu_matmul_add_fp32",
}


@pytest.mark.framework
@pytest.mark.parametrize("llm", [False, True], ids=["MindSpeed", "MindSpeed-LLM"])
def test_operators(tmp_path: Path, llm: bool) -> None:
    """A dump at level mix of a training on fused operators: they are there by the names of the existing tool, with numbers, and the
    training prints the same digits; the same records and digits after ``transfer_to_npu``, which puts the NPU behind CUDA's names.

    MSPROBE_TORCH_NPU: the directory of an unpacked wheel of torch_npu, whose own module is then used, not the tests'.
    """
    place = os.environ.get("MSPROBE_TORCH_NPU") or str(Path(__file__).parents[1] / "ascend" / "like_wheel")
    plain = train(tmp_path, FUSED, llm=llm)
    assert len(numbers(plain)) >= 4
    found = []
    for which in ("", place):
        directory = tmp_path / f"transfer{bool(which)}"
        directory.mkdir()
        dumped = train(directory, FUSED, probe_file(directory, DUMP), llm=llm, MSPROBE_TRANSFER=which)
        assert numbers(dumped) == numbers(plain)
        found.append({path.parent.name: json.loads(path.read_text())["data"] for path in directory.rglob("dump.json")})
    off, on = found
    assert sorted(off) == sorted(on) == ["rank0", "rank1"]
    for rank, records in off.items():
        assert {name.rpartition(".")[0].rpartition(".")[0] for name in records if name.startswith(("NPU.", "MindSpeed."))} == OPERATORS
        assert list(on[rank]) == list(records)
        assert all(one["output"][0]["Mean"] is not None for name, one in records.items() if name.startswith("NPU.") and "forward" in name)
