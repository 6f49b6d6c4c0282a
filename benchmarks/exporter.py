"""Load test of the Prometheus endpoint: how long a scrape takes, and what scraping does to the step time of a training.

    python benchmarks/exporter.py --series 10000

A host-bound GPT trains with a probe whose endpoint has that many series; a process of its own scrapes it once a second. Rounds with and
without a scraper alternate in one run; the ratio is of median step times, with its 10 % and 90 % quantiles.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt
from overhead import quantiles

from msprobe.pytorch import TorchProbe

SCRAPER = """
import sys, time, urllib.request
url, every = sys.argv[1], float(sys.argv[2])
print("ready", flush=True)
while True:
    begin = time.perf_counter()
    text = urllib.request.urlopen(url, timeout=10).read()
    print(time.perf_counter() - begin, text.count(b"\\n"), len(text), flush=True)
    time.sleep(every)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between scrapes (15 is usual)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    a = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    job = gpt.Job(gpt.HOST_BOUND)
    with tempfile.TemporaryDirectory() as out:
        sinks = {"csv": {"enabled": False}, "prometheus": {"enabled": True, "port": 0, "max_series": a.series}}
        probe = TorchProbe.from_config({"output_dir": out, "monitor": {"parameters": True, "optimizer_states": True}, "sinks": sinks})
        probe.attach(job.model, job.optimizer)
        sink = next(s for s in probe.session.writer.sinks if s.name == "prometheus")
        layers = sink._metrics._layer_values  # made up to the wanted number: real layers would need a model of that size
        number = iter(range(1_000_000_000))

        def steps(count: int) -> float:
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                probe.begin_step(next(number))
                loss = job.step()
                probe.end_step({"loss": loss})
                times.append(time.perf_counter() - begin)
            return statistics.median(times)

        steps(5)
        missing = a.series - sum(len(family.samples) for family in sink.families())
        for i in range(max(0, missing)):
            layers["layer_grad_norm", (("layer", f"made.up.{i}"), ("phase", "reduced"))] = i * 1.234567
        command = [sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{sink.port}/metrics", str(a.every)]
        ratios, answers = [], []
        for _ in range(a.rounds):
            quiet = steps(a.steps)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scraper:
                assert scraper.stdout is not None
                scraper.stdout.readline()
                ratios.append(steps(a.steps) / quiet)
                scraper.terminate()
                answers += [line.split() for line in scraper.stdout.read().splitlines() if line.count(" ") == 2]
        probe.close()
    seconds = [float(x[0]) for x in answers]
    print(f"{a.series} series, {int(answers[-1][2]) / 1e6:.2f} MB, {len(seconds)} scrapes: {quantiles([s * 1e3 for s in seconds])} ms each")
    print(f"step time with a scrape every {a.every:g} s over none: {quantiles(ratios)}")


if __name__ == "__main__":
    main()
