"""Tokens to batches: random windows to learn from, every token once to evaluate on."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jax_extractor.data.dataset import Dataset
from jax_extractor.errors import UsageError

Item = TypeVar("Item")
ALL_ROWS = slice(None)


class Batch(NamedTuple):
    """Windows of a token stream: `targets[b, t]` is the token that follows `inputs[b, t]`."""

    inputs: np.ndarray  # (B, T) int32
    targets: np.ndarray  # (B, T) int32
    weights: np.ndarray  # (B, T) float32: 1 where the target counts, 0 on padding


def train_batch(
    dataset: Dataset,
    *,
    seed: int,
    step: int,
    batch_size: int,
    length: int,
    rows: slice = ALL_ROWS,
) -> Batch:
    """Windows from uniformly random places of the train split: a pure function of (seed, step).

    `rows` selects the rows of the batch that this process needs; they equal the same rows of the
    whole batch. Raises InputError for a split shorter than length+1, UsageError for bad sizes.
    """
    _check_positive(batch_size=batch_size, length=length)
    if not (0 <= seed < 1 << 64 and 0 <= step < 1 << 64):
        raise UsageError(f"seed={seed}, step={step}: choose integers from 0 to 2**64-1")
    dataset.check_length(length)
    tokens = dataset.train
    # Raw Philox words: numpy promises their stream for ever, but not that of Generator.integers.
    # Their remainder prefers no window by more than len(tokens) / 2**64.
    random = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(batch_size)
    starts = (random % np.uint64(len(tokens) - length)).astype(np.int64)[rows]
    windows = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return Batch(windows[:, :-1], windows[:, 1:], np.ones((len(starts), length), np.float32))


def evaluation_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    length: int,
    split: str = "validation",
    limit: int | None = None,
    rows: slice = ALL_ROWS,
) -> Iterator[Batch]:
    """Batches in which every token of `split` is a target once, but the first, which follows none.

    Window n predicts tokens n·length+1 … (n+1)·length. The last window and the last batch are
    filled up with weight 0 on the right and below, so that all shapes are (batch_size, length).
    `limit` takes that many batches, evenly spaced; `rows` as in `train_batch`.
    """
    _check_positive(batch_size=batch_size, length=length)
    if limit is not None:
        _check_positive(limit=limit)
    tokens = dataset.split(split)
    count = evaluation_batch_count(dataset, batch_size=batch_size, length=length, split=split)
    if limit is None or limit >= count:
        chosen: Iterable[int] = range(count)
    else:
        chosen = ((2 * n + 1) * count // (2 * limit) for n in range(limit))
    return (_evaluation_batch(tokens, n, batch_size, length, rows) for n in chosen)


def evaluation_batch_count(
    dataset: Dataset, *, batch_size: int, length: int, split: str = "validation"
) -> int:
    """How many batches `evaluation_batches` gives without a limit."""
    windows = -(-(len(dataset.split(split)) - 1) // length)
    return -(-windows // batch_size)


def _evaluation_batch(
    tokens: np.ndarray, number: int, batch_size: int, length: int, rows: slice
) -> Batch:
    size = batch_size * length
    begin = number * size
    span = np.asarray(tokens[begin : begin + size + 1], np.int32)
    real = len(span) - 1
    inputs, targets = np.zeros((2, size), np.int32)
    inputs[:real], targets[:real] = span[:-1], span[1:]
    weights = (np.arange(size) < real).astype(np.float32)
    parts = (part.reshape(batch_size, length)[rows] for part in (inputs, targets, weights))
    return Batch(*parts)


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name}={value} is not positive: choose 1 or more")


class Prefetcher(Generic[Item]):
    """An iterator whose items are made ahead by a thread; a context manager that stops it."""

    def __init__(self, iterator: Iterable[Item], size: int):
        self._items: queue.Queue = queue.Queue(size)
        self._stop = threading.Event()
        _check_positive(size=size)
        self._thread = threading.Thread(
            # The thread must not hold `self`, or a forgotten prefetcher would live for ever.
            target=_produce,
            args=(iterator, self._items, self._stop),
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._stop.is_set():
            raise StopIteration
        item, error = self._items.get()
        if error is not None:
            self.close()
            raise error
        return item

    def close(self) -> None:
        """Stop the thread and close the iterator; at once, unless an item is just being made."""
        self._stop.set()
        while self._thread.is_alive():
            while not self._items.empty():  # wake a thread that waits for room
                self._items.get_nowait()
            self._thread.join(0.02)

    def __enter__(self) -> "Prefetcher[Item]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()
        while not self._items.empty():
            self._items.get_nowait()


def prefetch(iterator: Iterable[Item], size: int = 2) -> Prefetcher[Item]:
    """Iterate over `iterator`, `size` items ahead, in a background thread.

    An exception inside the iterator is raised where its item would have come.
    """
    return Prefetcher(iterator, size)


def _produce(iterator: Iterable, items: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in iterator:
            items.put((item, None))
            if stop.is_set():
                break
        else:
            items.put((None, StopIteration()))
    except BaseException as error:  # whatever it is, it belongs to the consumer
        items.put((None, error))
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
