"""``-o name.html`` where the output is a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.cli.main import main


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (("graph", "a"), ""),
        (("graph_visualize", "-tp", "a"), ""),
        (("diagnose", "a"), ""),
        (("compare", "a", "b"), ""),
        (("ckpt", "diff", "a", "b"), "--html"),
        (("config_check", "-c", "a", "b"), "--html"),
    ],
)
@pytest.mark.parametrize("name", ["new.html", "new.HTM"])
def test_a_directory_is_not_named_as_a_page(
    words: tuple[str, ...], page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is read or made, in one line that has the name to give and the option for a page where there is one."""
    monkeypatch.chdir(tmp_path)
    assert main([*words, "-o", name]) == 2
    said = capsys.readouterr().err
    assert f"-o {name}: is the name of a page, and the page goes into a directory; name that one: -o new" in said
    assert (f"or the page with {page} {name}" in said) == bool(page)
    assert len(said.splitlines()) == 1
    assert not any(tmp_path.iterdir())
