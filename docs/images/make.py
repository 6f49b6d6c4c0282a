"""Makes the pictures of the documentation: trains small models with and without a fault, writes every page, and takes screenshots.

    python docs/images/make.py                 # all, into docs/images
    python docs/images/make.py diagnosis       # those whose names begin so

Needs what `pip install 'msprobe-integrations[test]'` brings, and a chromium. Look at what it made before it is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Shot:
    """One picture.

    Attributes:
        page: what it shows, a key of `pages`.
        width, height: of the window, CSS pixels.
        look: what is done with the page before, a playwright `Page`.
    """

    name: str
    page: str
    theme: str = "light"
    language: str = "en-US"
    width: int = 1280
    height: int = 800
    look: Callable[[Any], None] = id


def choose_rows(page: Any) -> None:
    """Some rows of a table, one of them whole."""
    page.get_by_label("Search").fill("masked_fill")
    page.locator("tr.bad").first.click()
    page.evaluate("scrollTo(0, 0)")


def search(page: Any) -> None:
    """What a search finds, and the first of it chosen."""
    page.locator("#graph-search").fill("type:linear layers.1")
    page.wait_for_timeout(300)
    page.locator("#graph-search").press("Enter")


def keys(*pressed: str) -> Callable[[Any], None]:
    """Keys pressed one after the other, as a user of the graph does."""

    def press(page: Any) -> None:
        for key in pressed:
            page.keyboard.press(key)
            page.wait_for_timeout(200)

    return press


def filters(page: Any) -> None:
    """Backward calls that differ much."""
    page.keyboard.press("f")
    page.locator(".chip", has_text="Backward").click()
    page.locator(".chip", has_text="1,024").click()


def first_in_time(page: Any) -> None:
    """What differs, in order of execution, and the third of it chosen."""
    page.keyboard.press("2")
    page.get_by_label("Order").select_option("time")
    page.locator(".worst-row").nth(2).click()


SHOTS = (
    Shot("diagnosis", "diagnosis"),
    Shot("diagnosis-dark", "diagnosis", theme="dark", language="zh-CN"),
    Shot("config-check", "config"),
    Shot("checkpoint-diff", "checkpoint", height=900),
    Shot("compare-table", "table", look=choose_rows),
    Shot("graph", "graph"),
    Shot("graph-dark", "graph", theme="dark", language="zh-CN"),
    Shot("graph-search", "graph", look=search),
    Shot("graph-filters", "graph", look=filters),
    Shot("graph-worst", "graph", look=first_in_time),
    Shot("graph-ranks", "graph", theme="dark", look=keys("3")),
    Shot("graph-nan", "graph_nan", width=1920, height=1000, look=keys("p")),
    Shot("graph-nan-dark", "graph_nan", theme="dark", language="zh-CN", look=keys("2")),
    Shot("trends", "trends", height=900),
    Shot("trends-two-dark", "trends_two", theme="dark", language="zh-CN", height=900),
)


def too_large(training: Any) -> None:
    """A weight of rank 1 that no product fits into a float any more."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        with torch.no_grad():
            training.model.layers[2].mlp.up.weight[0] = 3e38


def two_runs(root: Path) -> dict[str, Path]:
    """A transformer on two ranks, tensor parallel, in bfloat16, beside one whose scores are not scaled."""
    from fault_cases import CASES
    from fault_dumps import dump
    from fault_model import Shape

    from msprobe_engine.cli.main import main

    plant = next(case.plant for case in CASES if case.name == "scores not scaled")
    shape = Shape(parallel="tp", layers=4)
    dump(root / "golden", shape, id)
    dump(root / "today", shape, plant)
    dump(root / "overflow", shape, too_large)
    both = [str(root / "today"), str(root / "golden")]
    main(["compare", *both, "-o", str(root / "out"), "--html"])
    main(["diagnose", *both, "-o", str(root / "out")])
    main(["graph", *both, "-o", str(root / "graph"), "--format", "html"])
    main(["graph", str(root / "overflow"), "-o", str(root / "graph_nan"), "-oc", "--format", "html"])
    table = sorted((root / "out").rglob("compare_result_rank0_*.html"))[0]
    graphs = {name: next((root / name).glob("*.html")) for name in ("graph", "graph_nan")}
    return {"diagnosis": root / "out" / "diagnosis.html", "table": table} | graphs


def watch(root: Path, name: str, steps: int, loss_of: Callable[[int, Any], Any], before: Callable[[int, Any], None]) -> None:
    """A training with the monitor; `before` may change the model of a step, `loss_of` its loss."""
    import torch
    from fault_model import Shape, Training

    from msprobe.pytorch import TorchProbe

    settings: dict[str, Any] = {
        "output_dir": str(root / name),
        "monitor": {"gradients": True, "parameters": True, "updates": True, "activations": name != "today"},
        "rules": [{"rule": "recommended"}],
        "sinks": {"csv": {"enabled": True}},
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{name}.json").write_text(json.dumps(settings))
    training = Training(Shape(layers=8))
    probe = TorchProbe.from_config(str(root / f"{name}.json"))
    probe.attach(training.model, training.optimizer)
    for step in range(steps):
        probe.begin_step(step)
        before(step, training.model)
        tokens, labels = training.batch(step)
        loss = loss_of(step, training.loss(training.model(tokens), labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e6)
        training.optimizer.step()
        training.optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()


def monitored(root: Path) -> dict[str, Path]:
    """A training that is watched and comes off its feet; and two of which one has another epsilon from step 30 on."""
    from msprobe_engine.cli.main import main

    def runs_away(step: int, loss: Any) -> Any:
        if 70 <= step < 76:
            loss = loss * 6.0 ** (step - 69)  # a loss scale that runs away
        return loss * float("inf") if step == 113 else loss

    def epsilon(step: int, model: Any) -> None:
        model.layers[3].norm2.eps = 1e-2 if step >= 30 else 1e-5

    watch(root, "today", 120, runs_away, lambda _step, _model: None)
    watch(root, "golden", 60, lambda _step, loss: loss, lambda _step, _model: None)
    watch(root, "changed", 60, lambda _step, loss: loss, epsilon)
    main(["trends", str(root / "today"), "-o", str(root / "trends.html")])
    main(["trends", str(root / "golden"), str(root / "changed"), "-o", str(root / "trends_two.html")])
    return {"trends": root / "trends.html", "trends_two": root / "trends_two.html"}


def checkpoints(root: Path) -> dict[str, Path]:
    """A checkpoint beside one that went through a conversion with mistakes."""
    import torch
    from fault_model import Shape, Training
    from safetensors.torch import save_file

    from msprobe_engine.cli.main import main

    good = {name: value.clone() for name, value in Training(Shape(layers=8)).model.state_dict().items()}
    bad = {name: value.bfloat16().float() if ".5." in name else value.clone() for name, value in good.items()}
    bad["layers.2.attention.proj.weight"] = good["layers.2.attention.proj.weight"].T.contiguous()
    bad["layers.3.mlp.up.weight"] = good["layers.3.mlp.up.weight"] * 1.01
    bad["layers.6.mlp.down.weight"][7, 40] += 1e-4
    bad["layers.7.attention.qkv.weight"] = good["layers.6.attention.qkv.weight"].clone()
    bad["head.weight"][3, 5] = torch.nan
    del bad["layers.4.norm2.bias"]
    for name, weights in (("before", good), ("after", bad)):
        (root / name).mkdir(parents=True)
        save_file(weights, root / name / "model.safetensors")
    main(["ckpt", "diff", str(root / "before"), str(root / "after"), "-o", str(root / "out")])
    return {"checkpoint": root / "out" / "ckpt_diff.html"}


def settings(root: Path) -> dict[str, Path]:
    """Packs of the existing tool with planted differences."""
    from msprobe_engine.cli.main import main

    packs = ROOT / "tests" / "fixtures" / "config_packs" / "26.2.0"
    main(["config_check", "-c", str(packs / "base.zip"), str(packs / "planted.zip"), "-o", str(root)])
    return {"config": root / "result.html"}


def pages(root: Path) -> dict[str, Path]:
    """Every page, by its name."""
    return two_runs(root / "runs") | monitored(root / "runs_watched") | checkpoints(root / "checkpoints") | settings(root / "settings")


def take(shots: list[Shot], found: dict[str, Path], into: Path) -> None:
    """Make the pictures."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for shot in shots:
            context = browser.new_context(
                viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.theme, locale=shot.language, offline=True
            )
            page = context.new_page()
            page.goto(found[shot.page].resolve().as_uri())
            page.wait_for_timeout(800)
            shot.look(page)
            page.wait_for_timeout(300)
            picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
            # 256 colours are enough for these pages and a third of the size; rare ones (of a legend) have to stay what they are
            picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(into / f"{shot.name}.png", optimize=True)
            context.close()
        browser.close()


if __name__ == "__main__":
    wanted = [shot for shot in SHOTS if not sys.argv[1:] or shot.name.startswith(tuple(sys.argv[1:]))]
    directory = Path(tempfile.mkdtemp(prefix="training-"))  # no TemporaryDirectory: the ends of forked ranks would remove it
    try:
        os.chdir(directory)  # pages show paths as they were given
        shutil.copytree(ROOT / "benchmarks" / "fault_set", "train")
        sys.path[:0] = [str(ROOT), "train"]
        take(wanted, pages(Path()), HERE)
    finally:
        shutil.rmtree(directory)
