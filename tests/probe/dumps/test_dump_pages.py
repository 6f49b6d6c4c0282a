"""The pages docs/guide/read-a-dump.md and docs/guide/how-big.md say what the tool does: every example runs as it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from small_transformer import train

from msprobe_engine.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(page: str, namespace: dict[str, object]) -> None:
    """The Python blocks of a page, one after the other in one namespace."""
    found = blocks(page, "python")
    assert found
    for code in found:
        exec(compile(code, page, "exec"), namespace)


def labels(table: str) -> list[str]:
    """First column of a printed estimate, without the assumptions."""
    return re.findall(r"^ *[a-zA-Z][a-z. ]*?(?=  +|:|,|$)", table.partition("\nassumptions\n")[0], re.MULTILINE)


def test_read_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All examples run on a dump of two steps with tensors, and print what their comments say."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    train({"task": "tensor", "level": "mix", "dump_path": "out", "rank": [], "step": [0, 1], "tensor": {}})
    capsys.readouterr()
    namespace: dict[str, object] = {}
    run("guide/read-a-dump.md", namespace)
    out = capsys.readouterr().out
    assert out.startswith("[0, 1] [0]\ntensor mix ")
    assert "\nmodule forward blocks.0.mlp.0\nModule.blocks.0.mlp.Sequential.forward.0\n" in out
    assert "\nNone False\n" in out
    assert "\n(128, 32) torch.float32 " in out
    assert "was cut off" not in out
    table = namespace["table"]
    assert len(table) > 50  # type: ignore[arg-type]


def test_every_search_of_the_page_finds_something(tmp_path: Path) -> None:
    """The searches shown are not empty on the model that the page has in mind, but for the one for softmax, which is fused there."""
    (directory,) = train(
        {"task": "statistics", "level": "mix", "dump_path": str(tmp_path / "out"), "rank": [], "step": [1], "statistics": {}}
    )
    from msprobe import dump

    snapshot = dump.read(directory)[1]
    searches = re.findall(r"^snapshot\.find\((.*?)\)  #", "\n".join(blocks("guide/read-a-dump.md", "python")), re.MULTILINE)
    assert len(searches) == 5
    for arguments in searches:
        found = eval(f"snapshot.find({arguments})", {"snapshot": snapshot})
        assert found or "softmax" in arguments, arguments


def test_how_big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of the page make the dump that it needs; its commands and its Python example run on it; the table it shows has the
    lines that the tool prints."""
    monkeypatch.chdir(tmp_path)
    (settings,) = blocks("guide/how-big.md", "json")
    train(json.loads(settings))
    Path("config.json").write_text(
        json.dumps({"task": "tensor", "level": "mix", "dump_path": "out2", "rank": [], "step": [], "tensor": {}})
    )
    first, second = (shlex.split(block.split("||")[0])[1:] for block in blocks("guide/how-big.md", "bash"))
    capsys.readouterr()
    assert main(first) == 0
    printed = capsys.readouterr().out
    (shown,) = blocks("guide/how-big.md", "text")
    assert labels(shown) == labels(printed)
    assert "the run itself noted which tensors are the same one; they are counted once" in printed
    assert main(second) == 1
    assert "this would fit" in capsys.readouterr().out
    run("guide/how-big.md", {})
    assert capsys.readouterr().out.startswith("True ")
