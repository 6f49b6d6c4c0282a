"""CPU seconds and memory of reading the metadata of a distributed checkpoint (``.metadata`` of DCP, torch_dist), by the number of shards.

    python benchmarks/checkpoint_metadata.py --shards 1024 2048 4096

Each of 64 tensors is cut into so many pieces, one in each file: 4,096 shards are 262,144 pieces and 37 MB. The file is written by torch and
read in a process of its own, whose start does not count; memory is its peak.
"""

from __future__ import annotations

import argparse
import math
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

TENSORS = 64
_READ = """
import resource, sys, time
from pathlib import Path
from msprobe_engine.formats.checkpoint.dcp.metadata import read_metadata
began = time.process_time()
found = read_metadata(Path(sys.argv[1]))
seconds = time.process_time() - began
assert not found.problems
assert all(chunk.item is not None for tensor in found.tensors.values() for chunk in tensor.chunks)
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, sum(len(tensor.chunks) for tensor in found.tensors.values()))
"""


def write(directory: Path, shards: int) -> int:
    """Bytes of the metadata of a checkpoint of so many files."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

    tensors, stored, paths = {}, {}, {}
    for number in range(TENSORS):
        key = f"model.layers.{number}.mlp.experts.linear_fc1.weight"
        chunks = [ChunkStorageMetadata(torch.Size([4 * shard, 0]), torch.Size([4, 4096])) for shard in range(shards)]
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4 * shards, 4096]), chunks)
        paths[key] = (key,)
        for shard in range(shards):
            place = _StorageInfo(f"__{shard}_0.distcp", number * 33000, 33000)
            stored[MetadataIndex(key, torch.Size([4 * shard, 0]))] = place
    file = directory / ".metadata"
    file.write_bytes(pickle.dumps(Metadata(state_dict_metadata=tensors, planner_data=paths, storage_data=stored)))
    return file.stat().st_size


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1024, 2048, 4096], help="ascending")
    parser.add_argument("--rounds", type=int, default=3, help="the least CPU time of so many readings counts")
    options = parser.parse_args()
    print(f"{'shards':>7}{'pieces':>9}{'MB':>8}{'CPU s':>8}{'MiB':>7}{'exponent':>10}")
    before: tuple[int, float] | None = None
    for shards in options.shards:
        with tempfile.TemporaryDirectory() as place:
            size = write(Path(place), shards)
            command = [sys.executable, "-c", _READ, place]
            readings = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(options.rounds)]
        seconds, memory, pieces = min((float(cpu), float(mib), int(count)) for cpu, mib, count in readings)
        power = f"{math.log(seconds / before[1]) / math.log(shards / before[0]):10.2f}" if before else ""
        print(f"{shards:7,}{pieces:9,}{size / 1e6:8.1f}{seconds:8.2f}{memory:7.0f}{power}", flush=True)
        before = shards, seconds


if __name__ == "__main__":
    main()
