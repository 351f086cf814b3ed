"""What a reader could do at best: the same objects by bare GETs, decoded or not."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import google_crc32c
import numpy as np
import obstore
from numcodecs import Blosc
from obstore.store import from_url
from torch.utils.data import IterableDataset

from command_line import make_location
from data import Data
from location import client_options
from options import Options
from sampling import epoch_order

THREADS = 24  # as many as the block loader's: each reader of whole maps has so many


class Objects(IterableDataset):
    """The objects of an epoch's maps. An item, their bytes, stands for a batch.

    Each worker reads all of them, and is one more client of the server.
    """

    def __init__(self, options: Options, data: Data, decoded: bool):
        self.location = make_location(options)
        self.decoded = decoded
        self.seed = options.seed
        self.variables = options.variables
        self.positions = data.training.positions
        self.map_shape = data.climatology.valid.shape
        objects = len(options.variables) * options.batch_size
        self.per_batch = max(1, objects // options.patches_per_block)

    def __iter__(self) -> Iterator[int]:
        client = from_url(self.location.url, **client_options(self.location))
        mine = threading.local()

        def make_room() -> None:  # once a thread: new memory takes as long as decoding
            mine.values = np.empty(self.map_shape, "float32")

        def read(key: str) -> int:
            content = obstore.get(client, key).bytes()
            if self.decoded:
                decode_chunk(content, mine.values)
            return len(content)

        with ThreadPoolExecutor(THREADS, initializer=make_room) as threads:
            sizes = read_ahead(threads, read, self.keys())
            while True:
                yield sum(islice(sizes, self.per_batch))

    def keys(self) -> Iterator[str]:
        """The objects in the order of the maps, epoch after epoch."""
        for epoch in count():
            for time in epoch_order(self.seed, epoch, len(self.positions)):
                for name in self.variables:
                    yield f"{name}/c/{self.positions[time]}/0/0"


def read_ahead(
    threads: ThreadPoolExecutor, read: Callable[[str], int], keys: Iterator[str]
) -> Iterator[int]:
    """What `read` returns for each key. Two reads for each thread are under way."""
    started = deque(threads.submit(read, key) for key in islice(keys, 2 * THREADS))
    for key in keys:
        started.append(threads.submit(read, key))
        yield started.popleft().result()


def decode_chunk(chunk: bytes, values: np.ndarray) -> None:
    """Decode a chunk of make_store.py's: Blosc, and behind it a checksum of 4 bytes.

    OSError if the checksum is wrong.
    """
    content = memoryview(chunk)[:-4]
    checksum = int.from_bytes(chunk[-4:], "little")
    if google_crc32c.value(bytes(content)) != checksum:
        raise OSError("a chunk's checksum is wrong")
    Blosc().decode(content, values)
