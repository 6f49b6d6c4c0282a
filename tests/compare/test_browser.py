"""The pages of a comparison and of a diagnosis in a real browser (headless Chromium): drawn, coloured, and no markup of a dump in them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from driver_dumps import pair

from msprobe_engine.cli.main import main

HOSTILE = "</script><img src=x onerror=document.title='run'><script>document.title='run'</script>"


def _dom(page: Path, browser: str, profile: Path) -> str:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [browser, *options, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=120, check=True, encoding="utf-8"
    )
    return done.stdout


def test_tables_and_diagnosis_in_a_browser(binary: Callable[[str], str], tmp_path: Path) -> None:
    """The table shows its first page of rows, those that are off in colour; names of the dump are text in both."""
    target, golden = pair(tmp_path, 1, wrong=3, calls=100)
    for root in (target, golden):
        for name in ("dump.json", "construct.json", "stack.json"):
            file = root / "step0/rank0" / name
            file.write_text(file.read_text().replace("linear.3.", json.dumps(f"linear{HOSTILE}")[1:-1] + ".3."))
    assert main(["compare", "-tp", str(target), "-gp", str(golden), "-o", str(tmp_path / "out"), "--html"]) == 1
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path / "out")]) == 1
    browser = binary("chromium")
    table = _dom(next((tmp_path / "out").glob("compare_result_*.html")), browser, tmp_path / "profile")
    assert "1 to 200 of 400" in table
    assert table.count('<tr class="error">') == 1
    assert '<tr class="warning">' in table
    page = _dom(tmp_path / "out" / "diagnosis.html", browser, tmp_path / "profile")
    assert "The numbers part" in page
    for dom in (table, page):
        assert "<img" not in dom
        assert "<title>run" not in dom
        assert "&lt;img src=x" in dom
