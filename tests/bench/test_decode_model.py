"""The whole models that `bench decode` times write the same text, and the row holds their ratio."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jax_extractor.bench.decode_model import ModelSizes, measure_model, prepare_model, write

SIZES = ModelSizes(length=16, batch=2, layers=2, features=8, ffn_features=12, vocabulary=11)


def test_all_ways_give_the_same_logits_past_the_window():
    first = jnp.asarray([3, 7], jnp.int32)
    ways = prepare_model(SIZES)
    logits = {name: write(way[0], 40, *way[1:], first) for name, way in ways.items()}
    assert logits["streaming"].shape == (40, 2, 11)
    assert np.std(logits["streaming"]) > 0.1
    for name in ("naive", "naive transposed"):
        np.testing.assert_allclose(logits[name], logits["streaming"], atol=2e-5, err_msg=name)


def test_the_row_tells_sizes_times_and_the_ratio():
    row = measure_model(replace(SIZES, layers=1), repeats=1, naive_seconds=0.001)
    assert (row.length, row.batch, row.layers) == (16, 2, 1)
    assert min(row.naive, row.naive_transposed, row.streaming) > 0
    assert row.speedup == min(row.naive, row.naive_transposed) / row.streaming
