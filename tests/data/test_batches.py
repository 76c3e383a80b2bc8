import gc
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.data import (
    Dataset,
    evaluation_batch_count,
    evaluation_batches,
    prefetch,
    train_batch,
)
from jax_extractor.data.tokenizers import BytesTokenizer
from jax_extractor.errors import InputError, UsageError


def make_dataset(train: int, validation: int = 50) -> Dataset:
    """Tokens 0, 1, 2, …, so that a token tells its place."""
    return Dataset(
        tokens=np.arange(train + validation, dtype=np.uint16),
        train_tokens=train,
        train_bytes=train,
        validation_bytes=validation,
        tokenizer=BytesTokenizer(),
        fingerprint="",
    )


def test_training_batches_are_windows_and_the_tokens_that_follow():
    batch = train_batch(make_dataset(1000), seed=3, step=7, batch_size=6, length=16)
    for array, dtype in zip(batch, (np.int32, np.int32, np.float32), strict=True):
        assert array.shape == (6, 16)
        assert array.dtype == dtype
    np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
    np.testing.assert_array_equal(batch.inputs, batch.inputs[:, :1] + np.arange(16))
    np.testing.assert_array_equal(batch.weights, 1)


def test_training_batches_are_a_pure_function_of_seed_and_step():
    dataset = make_dataset(60_000)
    places = {}
    for seed in range(3):
        for step in range(3):
            a, b = (
                train_batch(dataset, seed=seed, step=step, batch_size=4, length=8) for _ in "ab"
            )
            for left, right in zip(a, b, strict=True):
                np.testing.assert_array_equal(left, right)
            places[seed, step] = tuple(a.inputs[:, 0])
    assert len(set(places.values())) == 9
    # Fixed for ever: a resumed run must meet the same text under any later numpy.
    assert places[1, 2] == GOLDEN_PLACES
    words = np.random.Philox(key=[1, 2]).random_raw(4)
    assert places[1, 2] == tuple(int(word) % (60_000 - 8) for word in words)


GOLDEN_PLACES = (27553, 52418, 48435, 15866)


def test_every_window_of_the_train_split_is_drawn_and_no_other():
    dataset = make_dataset(30)
    starts = [
        train_batch(dataset, seed=0, step=step, batch_size=50, length=20).inputs[:, 0]
        for step in range(20)
    ]
    values, counts = np.unique(starts, return_counts=True)
    np.testing.assert_array_equal(values, np.arange(10))  # 9 + 20 = 29 is the last train token
    assert counts.min() > 60  # 100 expected, standard deviation 9.5


def test_a_split_of_one_window_is_enough_and_of_less_is_not():
    batch = train_batch(make_dataset(9), seed=0, step=0, batch_size=2, length=8)
    np.testing.assert_array_equal(batch.targets, [np.arange(1, 9)] * 2)
    with pytest.raises(InputError, match="8 train tokens, but max_length=8 needs at least 9"):
        train_batch(make_dataset(8), seed=0, step=0, batch_size=2, length=8)


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 6), slice(5, 6), slice(None)])
def test_row_slices_equal_the_rows_of_the_whole_batch(rows, stdlib_bytes):
    sizes = {"batch_size": 6, "length": 32}
    whole = train_batch(stdlib_bytes, seed=1, step=2, **sizes)
    part = train_batch(stdlib_bytes, seed=1, step=2, **sizes, rows=rows)
    pairs = list(zip(whole, part, strict=True))
    for whole_batch, part_batch in zip(
        evaluation_batches(stdlib_bytes, **sizes, limit=4),
        evaluation_batches(stdlib_bytes, **sizes, limit=4, rows=rows),
        strict=True,
    ):
        pairs += zip(whole_batch, part_batch, strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a[rows], b)


@settings(deadline=None)
@given(tokens=st.integers(2, 200), batch_size=st.integers(1, 5), length=st.integers(1, 20))
def test_evaluation_predicts_every_token_once(tokens, batch_size, length):
    dataset = make_dataset(300, tokens)
    batches = list(evaluation_batches(dataset, batch_size=batch_size, length=length))
    inputs, targets, weights = (np.stack(parts) for parts in zip(*batches, strict=True))
    assert len(batches) == math.ceil((tokens - 1) / (batch_size * length))
    assert len(batches) == evaluation_batch_count(dataset, batch_size=batch_size, length=length)
    for array, dtype in ((inputs, np.int32), (targets, np.int32), (weights, np.float32)):
        assert array.shape == (len(batches), batch_size, length)
        assert array.dtype == dtype
    real = weights == 1
    assert ((weights == 0) | real).all()
    np.testing.assert_array_equal(targets[real], dataset.validation[1:])
    np.testing.assert_array_equal(inputs[real], dataset.validation[:-1])
    assert (np.diff(weights, axis=-1) <= 0).all()  # real tokens first: padding is on the right
    assert inputs[~real].sum() == targets[~real].sum() == 0


@pytest.mark.parametrize("name", ["stdlib_bytes", "stdlib_bpe"])
def test_evaluation_of_a_real_text_counts_all_its_tokens_and_bytes(name, request):
    dataset = request.getfixturevalue(name)
    lengths = dataset.tokenizer.byte_lengths
    tokens = size = 0
    for batch in evaluation_batches(dataset, batch_size=16, length=256):
        tokens += batch.weights.sum()
        size += (lengths[batch.targets] * batch.weights).sum()
    assert tokens == len(dataset.validation) - 1
    assert size == dataset.validation_bytes - lengths[dataset.validation[0]]


def test_evaluation_of_the_train_split_covers_it():
    batches = list(evaluation_batches(make_dataset(100), batch_size=2, length=10, split="train"))
    targets = np.concatenate([batch.targets[batch.weights == 1] for batch in batches])
    np.testing.assert_array_equal(targets, np.arange(1, 100))


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [(1, [5]), (2, [2, 7]), (5, [1, 3, 5, 7, 9]), (10, range(10)), (99, range(10))],
)
def test_a_limit_takes_evenly_spaced_batches(limit, chosen):
    dataset = make_dataset(300, 100)
    every = list(evaluation_batches(dataset, batch_size=2, length=5))
    assert len(every) == 10
    some = list(evaluation_batches(dataset, batch_size=2, length=5, limit=limit))
    assert len(some) == len(chosen)
    for number, batch in zip(chosen, some, strict=True):
        for a, b in zip(every[number], batch, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is not positive"),
        ({"length": -1}, "length=-1 is not positive"),
        ({"limit": 0}, "limit=0 is not positive"),
        ({"split": "test"}, "unknown split 'test': choose one of train, validation"),
    ],
)
def test_sizes_that_do_not_fit_are_bad_usage_at_once(change, message):
    with pytest.raises(UsageError, match=message):
        evaluation_batches(make_dataset(100), **({"batch_size": 2, "length": 4} | change))


@pytest.mark.parametrize("change", [{"seed": -1}, {"step": -1}, {"seed": 1 << 64}, {"length": 0}])
def test_training_sizes_that_do_not_fit_are_bad_usage(change):
    fields = {"seed": 0, "step": 0, "batch_size": 2, "length": 4} | change
    (name,) = change
    with pytest.raises(UsageError, match=f"{name}={change[name]}"):
        train_batch(make_dataset(100), **fields)


def test_prefetch_keeps_the_order_and_ends():
    with prefetch(iter(range(100)), 3) as ahead:
        assert list(ahead) == list(range(100))
        assert list(ahead) == []


def test_prefetch_runs_ahead_by_its_size_and_no_further():
    made = []
    full = threading.Event()

    def numbers():
        for number in range(100):
            made.append(number)
            if number == 3:
                full.set()
            yield number

    with prefetch(numbers(), 3) as ahead:
        assert full.wait(10)  # without any item taken: three in the queue, one in the hand
        assert made == [0, 1, 2, 3]
        assert next(ahead) == 0
        assert len(made) <= 5


def test_prefetch_raises_where_the_item_would_have_come():
    def failing():
        yield 1
        raise InputError("the disk is gone")

    ahead = prefetch(failing())
    assert next(ahead) == 1
    with pytest.raises(InputError, match="the disk is gone"):
        next(ahead)
    assert list(ahead) == []
    assert not ahead._thread.is_alive()


def test_prefetch_closes_the_thread_and_the_iterator():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    with pytest.raises(KeyboardInterrupt), prefetch(endless(), 1) as ahead:
        next(ahead)
        raise KeyboardInterrupt
    assert closed.is_set()
    assert not ahead._thread.is_alive()
    ahead.close()  # again is fine
    assert list(ahead) == []


def test_a_forgotten_prefetcher_stops_its_thread():
    def endless():
        while True:
            yield 0

    ahead = prefetch(endless(), 1)
    thread = ahead._thread
    next(ahead)
    del ahead
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_prefetch_of_no_size_is_bad_usage():
    with pytest.raises(UsageError, match="size=0 is not positive"):
        prefetch(iter([]), 0)
