"""4. Data cache: what lies in a slow store is read once, then it comes from disk or memory.

Run it twice from the root of a checkout, after ``pip install '.[examples]'``: the second run finds
on the disk what the first one left there. ::

    python -m examples.4_data_cache /tmp/cache    # a directory on the local disk, which it makes
"""

import argparse
import time

import numpy as np

import jsparse
from examples.options import output_folder
from jsparse.bench.options import whole

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=output_folder, help="on the local disk")
parser.add_argument("--epochs", type=whole(1), default=3, help="default 3")
args = parser.parse_args()


class Store:
    """1,000 images in a store behind a network: a read takes 3 ms."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(3e-3)
        return np.random.default_rng(index).integers(0, 256, (96, 96, 3), np.uint8)


def prepare(image):
    """What is done once for each image. Augment after the cache."""
    return np.float32(image) / 255


cache = jsparse.data.DataCache(Store(), args.directory, key="96 x 96, float32", prepare=prepare, memory_bytes=2**30)
for epoch in range(args.epochs):
    before, begin = cache.stats, time.perf_counter()
    order = np.random.default_rng(epoch).permutation(len(cache))
    for i in range(0, len(cache), 50):
        batch = np.stack([cache[j] for j in order[i : i + 50]])  # The training step takes it.
    seconds = time.perf_counter() - begin
    tiers = ("source", "disk", "memory")
    read = {tier: getattr(cache.stats, tier).samples - getattr(before, tier).samples for tier in tiers}
    print(f"epoch {epoch + 1}: {seconds:.2f} s, images from {read}")
