"""Tensors that stay in a dump (`keep`), and tokens that do not (`redact`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import ms_programs
import numpy as np
import pytest
from mindspore import Tensor, mint
from safetensors import safe_open

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_engine.formats.dump.writing.step_files import Saved
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.formats.tensors.reader import TensorFiles, not_saved
from msprobe_engine.formats.tensors.saved_file import numpy_of
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.dump.tensor_saver import TensorSaver
from msprobe_integrations.mindspore.tensors import npy
from msprobe_integrations.mindspore.tensors.memory import KERNEL

TYPES = [*KERNEL, "HiFloat8"]


class Run:
    """One step whose tensors are saved.

    Attributes:
        lost: what could not be saved, counted.
    """

    def __init__(self, root: Path, form: str = "files", saves: Callable[[str], bool] = lambda _: True, **options: Any) -> None:
        self.root = root
        self.lost: dict[str, int] = {}
        self.backend = MindSporeBackend()
        self.faults = Faults(strict=True)
        self.store = TensorStore(
            Options(saves=saves, suffix=TensorSaver.suffix), TensorSaver.template, self.faults, packed=form == "packed", **options
        )
        self.keeper = TensorSaver(self.backend, self.store, self.faults, self._lose)
        self.entries: list[Entry] = []
        self.store.begin_step(0, str(root))
        self.keeper.begin_step(0)

    def _lose(self, what: str) -> None:
        self.lost[what] = self.lost.get(what, 0) + 1

    def take(self, name: str, *tensors: Any) -> None:
        """A record with these inputs."""
        entry = Entry(f"Cell.{name}.X.forward.0", {"input_args": [self.keeper.reduce(tensor) for tensor in tensors]})
        self.entries.append(entry)
        self.keeper.hand_over(entry)

    def end(self) -> Saved:
        """Everything is written."""
        self.keeper.end_step(self.entries)
        self.backend.finish_step()
        saved = self.store.finish(0)
        self.store.close()
        return saved

    def files(self) -> TensorFiles:
        """What was saved."""
        return TensorFiles(self.root)


def tensor_of(dtype: str) -> Any:
    """[2, 3], every byte another one."""
    size = host_kernel.ITEMSIZE[KERNEL[dtype]] if dtype in KERNEL else 1
    raw = (np.arange(1, 6 * size + 1) % (2 if dtype == "Bool" else 256)).astype(np.uint8)
    return npy.from_bytes(raw.tobytes(), dtype, (2, 3))


@pytest.mark.parametrize("form", ["files", "packed"])
def test_every_type_is_read_back(tmp_path: Path, form: str) -> None:
    """Each element type, empty and 0-d tensors and views are read back with numpy as what they were; nothing is lost, and the files
    are for owner and group. Packed tensors come back as the very type."""
    run = Run(tmp_path, form)
    base = Tensor(np.arange(24, dtype=np.float32).reshape(4, 6))
    tensors = {name: tensor_of(name) for name in TYPES} | {
        "empty": Tensor(np.zeros((0, 3), np.float32)),
        "empty_strange": mint.transpose(Tensor(np.zeros((0, 3), np.float32)), 0, 1),
        "number": Tensor(3.5),
        "transposed": base.T,
        "part": base[1:3],
        "columns": base[:, 1:4],
        "repeated": base[0:1].expand((3, 6)),
        "half": mint.transpose(base.astype(mindspore.bfloat16), 0, 1),
    }
    for name, tensor in tensors.items():
        run.take(name, tensor)
    saved = run.end()
    assert (run.lost, saved.late, not_saved(tmp_path)) == ({}, {}, [])
    for name, tensor in tensors.items():
        data_name = f"Cell.{name}.X.forward.0.input.0.npy"
        if form == "packed":
            loaded = run.files().load(data_name, run.backend)
            assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape), name
            assert npy.bytes_of(loaded).tobytes() == npy.bytes_of(tensor).tobytes(), name
            if name == "HiFloat8":
                continue
        found = numpy_of(run.files(), data_name)
        np.testing.assert_array_equal(found, npy.array_of(tensor), err_msg=name)
        assert found.shape == tuple(tensor.shape)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "dump_tensor_data").iterdir()}
    assert modes == {0o640}


def test_packed_tensors_have_their_types_for_other_programs(tmp_path: Path) -> None:
    """A shard is a safetensors file whose tensors have the types that safetensors knows; the metadata says that they are MindSpore's."""
    run = Run(tmp_path, "packed")
    run.take("a", Tensor([1.5, -2.0], mindspore.bfloat16), Tensor(np.arange(6).reshape(2, 3), mindspore.int64))
    run.end()
    with safe_open(tmp_path / "dump_tensor_data" / "pack-00000.safetensors", framework="np") as shard:
        assert shard.metadata()["format"] == "ms"
        assert shard.get_tensor("Cell.a.X.forward.0.input.1.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert shard.get_slice("Cell.a.X.forward.0.input.0.npy").get_dtype() == "BF16"


def test_what_is_kept_is_what_was_there(tmp_path: Path) -> None:
    """A change after the hook does not reach the file, although MindSpore counts no version; the changed tensor has a file of its own,
    and a tensor that comes again unchanged is one file with two names."""
    run = Run(tmp_path)
    tensor = Tensor(np.arange(6, dtype=np.float32))
    run.take("first", tensor)
    run.take("again", tensor)
    tensor[0], tensor[5] = 5.0, 0.0  # the same statistics
    run.take("changed", tensor)
    flags = rows.as_int64(run.backend.so_far())[:, rows.FLAGS]
    assert not (flags & rows.HAS_DIGEST).any()  # told by digests, which nobody asked to see
    run.end()
    directory = tmp_path / "dump_tensor_data"
    paths = [directory / f"Cell.{name}.X.forward.0.input.0.npy" for name in ("first", "again", "changed")]
    assert [np.load(path).tolist()[0] for path in paths] == [0.0, 0.0, 5.0]
    assert paths[0].samefile(paths[1])
    assert not paths[0].samefile(paths[2])


def test_only_wanted_records_have_files(tmp_path: Path) -> None:
    """Of records that are not selected nothing stays on the disk."""
    run = Run(tmp_path, saves=lambda name: "yes" in name)
    run.take("yes", Tensor([1.0]))
    run.take("no", Tensor([2.0]))
    run.end()
    assert [path.name for path in (tmp_path / "dump_tensor_data").iterdir()] == ["Cell.yes.X.forward.0.input.0.npy"]


def test_a_disk_quota_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    """bfloat16 takes four bytes in its file: what does not fit is left out, listed and counted."""
    run = Run(tmp_path, quota=25_000)
    for number in range(4):
        run.take(f"n{number}", Tensor(np.full(2500, number), mindspore.bfloat16))
    run.end()
    sizes = [path.stat().st_size for path in (tmp_path / "dump_tensor_data").iterdir() if path.suffix == ".npy"]
    assert sizes == [128 + 10_000] * 2
    assert run.store.quota.used == sum(sizes)
    assert len(not_saved(tmp_path)) == 2


def test_what_has_no_values_has_no_file(tmp_path: Path) -> None:
    """A tensor that is not initialised has neither row nor file, and that is no fault."""
    run = Run(tmp_path)
    run.take("lazy", Tensor(shape=(2, 2), dtype=mindspore.float32, init=mindspore.common.initializer.One()))
    run.end()
    assert list((tmp_path / "dump_tensor_data").glob("*.npy")) == []
    assert run.backend.unsupported == {"not initialised": 1}


def test_the_error_of_the_training_comes_through(tmp_path: Path) -> None:
    """A failed operator of the training is raised as it is, and is no lost tensor."""
    run = Run(tmp_path)
    broken = mint.cumsum(Tensor(np.ones(4, np.float32)), 0)
    with pytest.raises(RuntimeError, match="Cumsum"):
        run.take("broken", broken)
    assert run.lost == {}
    run.end()


MONITOR = {"activations": True, "ops": ["norm", "min", "max", "mean", "digest"]}
SINKS = {name: {"enabled": True} for name in ("csv", "jsonl", "sqlite")}
CASES = {
    "L0": ("dump", {"task": "tensor", "level": "L0", "tensor": {"summary_mode": "md5"}}),
    "mix": ("dump", {"task": "tensor", "level": "mix", "tensor": {"summary_mode": "md5"}}),
    "monitor": ("monitor", {"monitor": MONITOR, "sinks": SINKS}),
}


PROGRAM = Path(__file__).parents[1] / "token_program.py"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cells("mix")
def test_no_token_is_written(case: str, tmp_path: Path) -> None:
    """No id and no text of a prompt, as a value or in a name; the same loss."""
    from artifact_search import finds
    from token_program import IDS, PROMPT

    way, settings = CASES[case]
    losses = []
    for name, redact in (("redacted", {"redact": ["tokens"]}), ("open", {})):
        settings_text = json.dumps({**settings, **redact})
        env = {**os.environ, "MSPROBE_KEY": "a key that was made by chance"}
        run = ms_programs.run(PROGRAM, settings_text, tmp_path / name, way, env=env, check=True)
        losses.append(next(line for line in run.stdout.splitlines() if line.startswith("loss")))
    assert losses[0] == losses[1]
    assert way == "monitor" or list((tmp_path / "redacted").rglob("not_saved.json"))
    assert any((tmp_path / "redacted").rglob("*"))
    assert finds(tmp_path / "redacted", IDS, [PROMPT]) == []
    assert finds(tmp_path / "open", IDS, [])
    assert finds(tmp_path / "open", IDS[:1], [PROMPT])
