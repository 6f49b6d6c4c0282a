"""Configuration of the dumps that torchair makes, and what needs an NPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msprobe.pytorch import AclGraphDumper, acl_save, set_fx_dump_config, set_ge_dump_config
from msprobe_engine.errors import SinkError, UsageError
from msprobe_integrations.torch.graph_modes import fill_fx, fill_ge


def empty(**graph_dump: Any) -> Any:
    """An object with the attributes that torchair's configuration has."""
    debug = SimpleNamespace(graph_dump=SimpleNamespace(**graph_dump), data_dump=SimpleNamespace(path=None))
    return SimpleNamespace(debug=debug, fusion_config=SimpleNamespace(), dump_config=SimpleNamespace())


@pytest.mark.parametrize("attribute", ["_path", "path"])
def test_ge(tmp_path: Path, attribute: str) -> None:
    """The dump is switched on with path, mode, steps and layers in the words of torchair; older versions name the path otherwise."""
    switches = tmp_path / "fusion.json"
    switches.write_text("{}")
    config = fill_ge(empty(**{attribute: None}), str(tmp_path), "output", str(switches), [1, 3], ["layer.0", "layer.1"])
    directory = str(tmp_path.resolve() / "msprobe_ge_dump")
    assert vars(config.debug.graph_dump) == {"type": "txt", attribute: directory}
    assert vars(config.fusion_config) == {"fusion_switch_file": str(switches)}
    assert vars(config.dump_config) == {
        "enable_dump": True,
        "dump_mode": "output",
        "dump_path": directory,
        "dump_step": "1|3",
        "dump_layer": "layer.0 layer.1",
    }
    assert Path(directory).is_dir()


def test_ge_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments everything is dumped below the working directory; what is not asked for is not set. Old files are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "msprobe_ge_dump").mkdir()
    (tmp_path / "msprobe_ge_dump/old").write_text("x")
    config = fill_ge(empty(), "")
    assert config.dump_config.dump_path == str(tmp_path.resolve() / "msprobe_ge_dump")
    assert set(vars(config.dump_config)) == {"enable_dump", "dump_mode", "dump_path"}
    assert vars(config.fusion_config) == {}
    assert "holds files already" in capsys.readouterr().err


def test_fx(tmp_path: Path) -> None:
    """Operators are kept by part of their name, whatever its case."""
    config = fill_fx(empty(), str(tmp_path), ["MatMul"])
    assert config.debug.data_dump.type == "npy"
    assert config.debug.data_dump.path == str(tmp_path.resolve() / "msprobe_fx_dump")
    op = SimpleNamespace(name="aten_matmul_3")
    assert config.debug.data_dump.filter(op) is op
    assert config.debug.data_dump.filter(SimpleNamespace(name="add")) is None
    assert not hasattr(fill_fx(empty(), str(tmp_path)).debug.data_dump, "filter")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dump_mode": "none"}, "dump_mode is 'none'"),
        ({"dump_token": [-1]}, "dump_token"),
        ({"dump_token": 3}, "dump_token is 3"),
        ({"dump_layer": "layer"}, "dump_layer is 'layer'"),
        ({"fusion_switch_file": "/no/such"}, "is no file"),
    ],
)
def test_ge_arguments(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    """A wrong argument is named, and nothing is created."""
    with pytest.raises(UsageError, match=said):
        fill_ge(empty(), str(tmp_path), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_places(tmp_path: Path) -> None:
    """Operator names are a list, the path a text that can be a directory."""
    with pytest.raises(UsageError, match="op_list is 'add'"):
        fill_fx(empty(), str(tmp_path), "add")
    with pytest.raises(UsageError, match="dump_path is 3"):
        fill_fx(empty(), 3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="file"):
        fill_fx(empty(), str(tmp_path / "file"))


def test_what_is_missing_is_named() -> None:
    """Where there is no NPU software, each function says in one line what it needs."""
    for call in (set_ge_dump_config, set_fx_dump_config):
        with pytest.raises(UsageError, match="torch_npu and torchair"):
            call()


def test_programs_that_use_acl_graphs_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """The calls that vllm-ascend makes in its graph mode do nothing; that nothing is saved is said once for each name."""
    model, x = torch.nn.Linear(2, 2), torch.ones(2)
    for _ in range(2):
        dumper = AclGraphDumper("config.json")
        dumper.start(model)
        dumper.step(dump=False)
        dumper.step()
        dumper.stop()
        assert acl_save(x, "x") is x
    said = capfd.readouterr().err
    assert said.count("AclGraphDumper saves nothing") == 1
    assert said.count("acl_save saves nothing") == 1
