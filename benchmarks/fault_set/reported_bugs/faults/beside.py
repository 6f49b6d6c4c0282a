"""Faults in what stands beside the numbers: launch scripts, what a run was started with, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reported_bugs.training import Setting

Two = Callable[[Path, str], None]
"""Makes a side in a directory: ``good`` or ``bad``."""
TOOL = str(Path(sys.executable).with_name("msprobe"))
SCRIPT, PACK, CHECKPOINT = "script", "pack", "checkpoint"
BESIDE = Setting("beside", "-")


@dataclass(frozen=True)
class Beside:
    """Two sides, and what must be said of them: `truth` is a pattern of the first lines, `codes` are the exit codes that are right."""

    name: str
    level: str
    make: Two
    truth: str
    codes: tuple[int, ...] = (1,)
    seen: str = ""
    options: tuple[str, ...] = ()
    setting: Setting = BESIDE
    healthy: bool = False

    @property
    def levels(self) -> tuple[str, ...]:
        return (self.level,)


def ask(case: Beside, where: Path) -> tuple[int, str]:
    """Exit code and words of the command that compares the sides."""
    sides = {side: where / side for side in ("good", "bad")}
    for side, path in sides.items():
        if not path.exists():
            path.mkdir(parents=True)
            case.make(path, side)
    if case.level == CHECKPOINT:
        command = [TOOL, "ckpt", "diff", str(sides["good"]), str(sides["bad"])]
    elif case.level == SCRIPT:
        packs = [str(path / "pack.zip") for path in sides.values()]
        for path in sides.values():
            _tool("config_check", "-d", "run.sh", "-o", "pack.zip", cwd=path)
        command = [TOOL, "config_check", "-c", *packs, "-o", str(where / "result")]
    else:
        command = [TOOL, "config_check", str(sides["bad"] / "out"), str(sides["good"] / "out"), "-o", str(where / "result")]
    done = subprocess.run([*command, *case.options], capture_output=True, text=True, check=False, timeout=200)
    return done.returncode, done.stdout + done.stderr


def _tool(*words: str, cwd: Path, **environment: str) -> None:
    done = subprocess.run([TOOL, *words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")


def scripts(good: str, bad: str, **files: tuple[str, str]) -> Two:
    """Two launch scripts, with files beside them: `_` in a name is a dot."""

    def make(where: Path, side: str) -> None:
        (where / "run.sh").write_text(good if side == "good" else bad)
        for name, texts in files.items():
            (where / name.replace("_", ".")).write_text(texts[side == "bad"])

    return make


TRAIN = """
import random, torch
from torch import nn
import helper
random.seed(1)
torch.manual_seed(helper.SEED)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=helper.RATE, betas=(0.9, 0.95))
for step in range(4):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def trained(
    helper: str = "SEED, RATE = 1, 1e-3\n", commit: str = "", words: tuple[str, ...] = (), stay: bool = True, **environment: str
) -> Two:
    """A training under ``msprobe run`` in a repository; the bad side has another `helper`, committed where `commit` is given."""

    def make(where: Path, side: str) -> None:
        work = where / "work"
        work.mkdir()
        (work / "train.py").write_text(TRAIN)
        (work / "helper.py").write_text("SEED, RATE = 1, 1e-3\n")
        (work / "notes.md").write_text("notes\n")

        def git(*args: str) -> None:
            who = ["-c", "user.name=a", "-c", "user.email=a@b"]
            when = {**os.environ, "GIT_COMMITTER_DATE": "2026-01-01T00:00:00"}
            subprocess.run(["git", *who, *args], cwd=work, check=True, capture_output=True, env=when)

        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "first", "--date", "2026-01-01T00:00:00")
        if side == "bad":
            (work / "helper.py").write_text(helper)
            if commit:
                git("commit", "-qam", commit)
        _tool(
            "run",
            "--output-dir",
            str(where / "out"),
            "--",
            sys.executable,
            "train.py",
            *(words if side == "bad" else ()),
            cwd=work,
            **(environment if side == "bad" else {}),
        )

    return make


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    found = {"embed.weight": torch.randn(32, 16, generator=draw)}
    for layer in range(2):
        for name, shape in (("q", (16, 16)), ("k", (16, 16)), ("v", (16, 16)), ("o", (16, 16)), ("up", (32, 16)), ("down", (16, 32))):
            found[f"layers.{layer}.{name}.weight"] = torch.randn(shape, generator=draw) * 0.02
        found[f"layers.{layer}.norm.weight"] = torch.ones(16)
    return found


def saved(change: Callable[[dict[str, Any]], Any], kind: str = "pt") -> Two:
    """Weights of both sides; the bad one's are changed."""

    def make(where: Path, side: str) -> None:
        found: dict[str, Any] = weights()
        if side == "bad":
            found = change(found) or found
        if kind == "safetensors":
            from safetensors.torch import save_file

            save_file(found, where / "model.safetensors")
        elif kind == "dcp":
            import torch.distributed.checkpoint as dcp

            dcp.save({"model": found, "step": torch.tensor(7)}, checkpoint_id=where / "dcp")
        else:
            torch.save(found, where / "model.pt")

    return make


def saved_as(kind: str) -> Two:
    """The same weights in another format on the bad side."""
    return lambda where, side: saved(lambda _w: None, kind if side == "bad" else "pt")(where, side)


def swapped(first: str, second: str) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found[first], found[second] = found[second], found[first]

    return change


def with_optimizer(change: Callable[[dict[str, Any]], None]) -> Two:
    """A model and AdamW after two steps; the bad side's state is changed."""

    def make(where: Path, side: str) -> None:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
        if side == "bad":
            change(state)
        torch.save(state, where / "state.pt")

    return make


def sharded(change: Callable[[Path], None]) -> Two:
    """A distributed checkpoint of two files; the bad side is changed on the disk."""

    def make(where: Path, side: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": weights(), "step": torch.tensor(7), "scale": torch.tensor(1.5)}, checkpoint_id=where / "dcp")
        if side == "bad":
            change(where / "dcp")

    return make


def cut(path: Path) -> None:
    file = max(path.glob("*.distcp"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-3000])


def flipped(path: Path) -> None:
    file = max(path.glob("*.distcp"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    file.write_bytes(bytes(data))


def other_step(state: dict[str, Any]) -> None:
    """The moments of one weight are of another step."""
    state["optimizer"]["state"][2]["exp_avg"] *= 0.9
    state["optimizer"]["state"][2]["step"] -= 1


def tensor_parallel(order: tuple[int, int], axis_up: int = 0) -> Two:
    """Megatron's two tensor-parallel files against each other: the bad side has them the other way round or split otherwise."""

    def make(where: Path, side: str) -> None:
        whole = weights()
        for rank in (0, 1):
            part = {}
            for name, value in whole.items():
                if name.endswith(("up.weight", "q.weight", "k.weight", "v.weight")):
                    part[name] = value.chunk(2, 0)[order[rank] if side == "bad" else rank].clone()
                elif name.endswith(("down.weight", "o.weight")):
                    part[name] = value.chunk(2, 1)[rank].clone()
                else:
                    part[name] = value
            folder = where / "iter_0000002" / f"mp_rank_{rank:02d}"
            folder.mkdir(parents=True)
            torch.save({"model": part, "iteration": 2, "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
        (where / "latest_checkpointed_iteration.txt").write_text("2")

    return make


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: [found.pop(name) for name in names] and None


def shift(name: str, by: float) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found[name] = found[name].clone()
        found[name].view(-1)[3] += by

    return change


def script(name: str, good: str, bad: str, truth: str, codes: tuple[int, ...] = (1,), **files: tuple[str, str]) -> Beside:
    return Beside(f"script: {name}", SCRIPT, scripts(good, bad, **files), truth, codes)


def checkpoint(name: str, make: Two, truth: str, codes: tuple[int, ...] = (1,), options: tuple[str, ...] = ()) -> Beside:
    return Beside(f"checkpoint: {name}", CHECKPOINT, make, truth, codes, options=options)


CASES = (
    script(
        "an array joined by IFS",
        'A=(1e-4 2)\nIFS=,\ntorchrun train.py --lr-and-warmup "${A[*]}"\n',
        'A=(1e-4 3)\nIFS=,\ntorchrun train.py --lr-and-warmup "${A[*]}"\n',
        r"lr.and.warmup.*1e-4,2.*1e-4,3",
    ),
    script(
        "an array lost an element",
        'A=(--lr 1e-4 --clip-grad 1.0)\ntorchrun train.py "${A[@]}"\n',
        'A=(--lr 1e-4 --clip-grad 1.0)\ntorchrun train.py "${A[@]:0:2}"\n',
        r"clip.grad",
        codes=(3,),  # 1.0 is what Megatron takes without it, and nothing says whether train.py is of Megatron
    ),
    script(
        "a backslash with a space behind it",
        "torchrun train.py --lr 1e-4 \\\n  --weight-decay 0.1\n",
        "torchrun train.py --lr 1e-4 \\ \n  --weight-decay 0.1\n",
        r"weight.decay",
    ),
    script(
        "a comment in continued lines",
        "torchrun train.py --lr 1e-4 \\\n --seed 3 \\\n --bf16\n",
        "torchrun train.py --lr 1e-4 \\\n # --seed 3 \\\n --bf16\n",
        r"bf16|seed",
    ),
    script(
        "a default hides a misspelt variable",
        "LR=3e-4\ntorchrun train.py --lr ${LR:-1e-4}\n",
        "Lr=3e-4\ntorchrun train.py --lr ${LR:-1e-4}\n",
        r"\blr\b.*3e-4.*1e-4",
    ),
    script(
        "a sourced file",
        ". ./env.sh\ntorchrun train.py --lr $LR\n",
        ". ./env.sh\ntorchrun train.py --lr $LR\n",
        r"\blr\b.*1e-4.*2e-4",
        env_sh=("LR=1e-4\n", "LR=2e-4\n"),
    ),
    script(
        "a variable that is not exported", "export NCCL_ALGO=Ring\ntorchrun train.py\n", "NCCL_ALGO=Ring\ntorchrun train.py\n", r"NCCL_ALGO"
    ),
    script("the last flag wins", "torchrun train.py --lr 1e-4\n", "torchrun train.py --lr 1e-4 --lr 2e-4\n", r"\blr\b.*2e-4"),
    script(
        "a condition not decided",
        "torchrun train.py --lr $(if grep -q x /nowhere/file; then echo 1e-4; else echo 2e-4; fi) --seed 1\n",
        "torchrun train.py --lr $(if grep -q x /nowhere/file; then echo 1e-4; else echo 2e-4; fi) --seed 2\n",
        r"seed",
    ),
    script(
        "a branch by the hour",
        "if [ $(date +%H) -lt 12 ]; then LR=1e-4; else LR=2e-4; fi\ntorchrun train.py --lr $LR\n",
        "LR=2e-4\ntorchrun train.py --lr $LR\n",
        r"\blr\b",
        (1, 3),
    ),
    script(
        "eval of a command",
        'CMD="torchrun train.py --lr 1e-4"\neval $CMD\n',
        'CMD="torchrun train.py --lr 1e-4"\nCMD="$CMD --fp16"\neval $CMD\n',
        r"fp16",
    ),
    script(
        "a here document",
        'cat > c.json <<EOF\n{"lr": 1e-4}\nEOF\ndeepspeed train.py --deepspeed_config c.json\n',
        'cat > c.json <<EOF\n{"lr": 5e-4}\nEOF\ndeepspeed train.py --deepspeed_config c.json\n',
        r"\blr\b|c\.json",
    ),
    Beside("pack: another commit", PACK, trained("SEED, RATE = 1, 1e-3  # moved\n", commit="moved"), r"(?i)commit|revision|git"),
    Beside(
        "pack: a file changed and not committed", PACK, trained("SEED, RATE = 1, 1e-3  # edited\n"), r"(?i)git|not committed|changed|helper"
    ),
    Beside(
        "pack: learning rate in the code",
        PACK,
        trained("SEED, RATE = 1, 2e-3\n", commit="rate"),
        r"(?i)\blr\b|learning rate|revision|commit",
    ),
    Beside("pack: another seed", PACK, trained("SEED, RATE = 2, 1e-3\n"), r"(?i)seed|weight|git|commit"),
    Beside("pack: an environment variable", PACK, trained(NVTE_FLASH_ATTN="0"), r"NVTE_FLASH_ATTN"),
    Beside("pack: TF32 by variable", PACK, trained(NVIDIA_TF32_OVERRIDE="1"), r"NVIDIA_TF32_OVERRIDE"),
    Beside("pack: one more word", PACK, trained(words=("--lr", "1")), r"\blr\b|argument"),
    checkpoint("q and k swapped", saved(swapped("layers.1.q.weight", "layers.1.k.weight")), r"layers\.1\.(q|k)"),
    checkpoint(
        "a matrix transposed",
        saved(lambda w: w.update({"layers.0.o.weight": w["layers.0.o.weight"].t().contiguous()})),
        r"layers\.0\.o.*|transpos",
    ),
    checkpoint(
        "rounded to bf16", saved(lambda w: {k: v.bfloat16().float() for k, v in w.items()}, "safetensors"), r"(?i)bf16|bfloat16|round"
    ),
    checkpoint("one element off", saved(shift("layers.1.down.weight", 1e-4), "dcp"), r"layers\.1\.down"),
    checkpoint(
        "prefix and one norm off",
        saved(lambda w: {f"module.{k}": (v * 1.01 if k == "layers.0.norm.weight" else v) for k, v in w.items()}),
        r"layers\.0\.norm",
    ),
    checkpoint("a layer missing", saved(drop("layers.1.up.weight")), r"layers\.1\.up"),
    checkpoint(
        "layers in another order",
        saved(
            lambda w: {
                k.replace("layers.0", "layers.X").replace("layers.1", "layers.0").replace("layers.X", "layers.1"): v for k, v in w.items()
            }
        ),
        r"layers\.[01]|order|swapped",
    ),
    checkpoint("moments of another step", with_optimizer(other_step), r"exp_avg|step"),
    checkpoint(
        "state of one parameter missing",
        with_optimizer(lambda s: s["optimizer"]["state"].pop(1) and None),
        r"(?i)exp_avg|state|1\.bias|0\.bias|optimizer",
    ),
    checkpoint("a file cut short", sharded(cut), r"distcp", (2,)),
    checkpoint("a byte flipped", sharded(flipped), r"layers|embed|distcp", (1, 2)),
    checkpoint("tensor-parallel files in another order", tensor_parallel((1, 0)), r"(?i)layers\.0\.(up|q|k|v)|half|halves|parts|rank"),
    checkpoint(
        "without optimizer, model only",
        with_optimizer(lambda s: s["optimizer"]["state"].clear() or s["model"].update({"0.bias": s["model"]["0.bias"] + 1e-3})),
        r"0\.bias",
        (1,),
        ("--model-only",),
    ),
)


def same(name: str, level: str, make: Two, options: tuple[str, ...] = ()) -> Beside:
    return Beside(f"{level}: {name}", level, make, "", (0,), options=options, healthy=True)


HEALTHY = (
    same(
        "other words for the same flags",
        SCRIPT,
        scripts('A="--lr 1e-4 --bf16"\ntorchrun train.py $A\n', 'A=(--lr 1e-4)\nA+=(--bf16)\ntorchrun train.py "${A[@]}"\n'),
    ),
    same(
        "a loop for a line",
        SCRIPT,
        scripts("torchrun train.py --layers 1 2 3\n", 'L=""\nfor i in 1 2 3; do L="$L $i"; done\ntorchrun train.py --layers $L\n'),
    ),
    same("another place", PACK, trained()),
    same("another prefix", CHECKPOINT, saved(lambda w: {f"module.model.{k}": v for k, v in w.items()})),
    same("safetensors for pt", CHECKPOINT, saved_as("safetensors")),
    same("a distributed checkpoint for pt", CHECKPOINT, saved_as("dcp"), ("--model-only",)),
    same("optimizer missing, model only", CHECKPOINT, with_optimizer(lambda s: s.pop("optimizer") and None), ("--model-only",)),
)
