"""How large a trends page of a long run is, how long it takes to make, and how quickly a browser shows it.

    python benchmarks/trends_page.py --targets 2000 --steps 10000 --ranks 64 --out /tmp/trends.html --browser /usr/bin/chromium

The run is made up in memory (a source of parts, no files), so what is measured is the page and not the reading of CSV.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from msprobe_engine.report.trends.page import write_trends
from msprobe_engine.report.trends.sources.source import Part, Progress, Target

_CHANGE = """(change) => new Promise((done) => {
  const box = document.querySelector(".t-heat"), was = box.dataset.ready;
  Trends.set(change);
  const look = () => box.dataset.ready !== was ? requestAnimationFrame(done) : setTimeout(look, 2);
  look();
})"""
_CHOOSE = """async () => {
  const out = [];
  for (let i = 0; i < 40; i++) {
    const begin = performance.now();
    Trends.set({ target: (i * 37) % Trends.metric().targets.length }, "pick");
    await new Promise(requestAnimationFrame);
    await new Promise((done) => setTimeout(done, 0));
    out.push(performance.now() - begin);
  }
  return out;
}"""


class MadeUp:
    """A run of any size: norms that fall, one spike, one rank with NaN in the end."""

    kinds: tuple[str, ...] = ("made up",)
    problems: Mapping[str, int] = {}

    def __init__(self, targets: int, steps: int, ranks: int) -> None:
        self.path = Path("made-up")
        self.ranks = list(range(ranks))
        self._targets = [Target(f"decoder.layers.{i // 12}.part{i % 12}.weight") for i in range(targets)]
        self._steps = steps

    def pieces(self) -> int:
        return 2 * len(self.ranks)

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        progress(f"rank {rank}")
        random = np.random.default_rng(rank)
        block = max(1, 4_000_000 // self._steps)  # targets at once: a table of a family, as the reader hands them on
        for begin in range(0, len(self._targets), block):
            mine = self._targets[begin : begin + block]
            values = np.exp(random.standard_normal((len(mine), self._steps), np.float32) * 0.1 - np.arange(self._steps) / self._steps)
            if begin == 0:
                values[5, self._steps // 2] *= 1e4
                values[7, self._steps // 3] = np.nan if rank == len(self.ranks) // 2 else values[7, self._steps // 3]
            ids = np.repeat(np.arange(len(mine)), self._steps)
            steps = np.tile(np.arange(self._steps), len(mine))
            yield Part(rank, "grad_reduced", mine, ids, steps, {"norm": values.reshape(-1).astype(np.float64)})


def in_browser(page: Path, browser: str) -> None:
    """Opens the page and prints how long things take."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        tab = started.new_page(viewport={"width": 1440, "height": 900})
        begin = time.perf_counter()
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector(".t-heat[data-ready]", timeout=120_000)
        tab.wait_for_selector(".t-chart[data-ready]", timeout=120_000)
        print(f"open until map and lines are drawn: {time.perf_counter() - begin:.2f} s")
        for what, change in (
            ("one rank (cube inflated)", "{third: 1}"),
            ("ranks x steps", "{map: 'rs', third: 'max'}"),
            ("layers x ranks", "{map: 'tr'}"),
            ("distance of each rank from the others", "{third: 'distance'}"),
            ("layers x steps", "{map: 'ts', third: 'max'}"),
            ("tensors of a layer together", "{rows: 'layer'}"),
            ("tensors again", "{rows: 'tensor'}"),
            ("filter", "{filter: 'layers.1'}"),
            ("no filter", "{filter: ''}"),
            ("against the median", "{colour: 'median'}"),
        ):
            begin = time.perf_counter()
            tab.evaluate(_CHANGE, tab.evaluate(f"({change})"))
            print(f"{what}: {1000 * (time.perf_counter() - begin):.0f} ms")
        tab.evaluate("Trends.set({colour: 'auto'})")
        times = tab.evaluate(_CHOOSE)
        times.sort()
        print(f"choose another row: p50 {statistics.median(times):.0f} ms, p95 {times[int(len(times) * 0.95)]:.0f} ms")
        memory = tab.evaluate("performance.memory ? performance.memory.usedJSHeapSize : 0")
        print(f"JavaScript heap: {memory / 1e6:.0f} MB")
        started.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--size", type=float, default=48.0, help="MB of numbers, as msprobe trends has it")
    parser.add_argument("--out", type=Path, default=Path("trends.html"))
    parser.add_argument("--browser", default="")
    args = parser.parse_args()
    begin = time.process_time()
    trends = write_trends([MadeUp(args.targets, args.steps, args.ranks)], args.out, numbers=int(args.size * 250_000))
    plan = trends.plan
    print(f"{args.targets} targets x {args.steps} steps x {args.ranks} ranks = {plan.wanted:,} numbers, kept {plan.numbers:,}")
    print(f"columns {len(plan.fine)}, per rank {len(plan.coarse)}, groups of ranks {len(plan.ranks)}")
    seconds, peak = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"made in {seconds:.0f} CPU seconds, peak {peak:.0f} MiB, file {args.out.stat().st_size / 1e6:.1f} MB")
    if args.browser:
        in_browser(args.out, args.browser)


if __name__ == "__main__":
    main()
