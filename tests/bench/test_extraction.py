"""The extraction bench: its peers compute the same sum, its files say what it measured."""

import json

import jax
import numpy as np
import pytest

from jax_extractor.bench.extraction import Options, Row, compare, compare_limit, run
from jax_extractor.bench.extraction_peers import JAX_PEERS, torch_peers
from jax_extractor.bench.peaks import Peaks
from jax_extractor.errors import UsageError
from jax_extractor.ops import causal_extract


def draw():
    rng = np.random.default_rng(0)
    return (
        jax.numpy.asarray(rng.standard_normal(shape), jax.numpy.float32)
        for shape in ((2, 6, 3), (6, 3, 3))
    )


@pytest.mark.parametrize("name", JAX_PEERS)
def test_jax_peers_compute_the_same_sum(name):
    x, w = draw()
    ours = causal_extract(x, w, method="scan")
    np.testing.assert_allclose(jax.jit(JAX_PEERS[name])(x, w), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["torch Conv1d", "torch FFT"])
def test_torch_peers_compute_the_same_sum(name):
    torch = pytest.importorskip("torch")
    x, w = draw()
    theirs = torch_peers()[name](*(torch.tensor(np.asarray(a)) for a in (x, w)))
    ours = causal_extract(x, w, method="scan")
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_files_hold_every_program(tmp_path, capsys, monkeypatch):
    peers = {"jnp.fft": JAX_PEERS["jnp.fft"]}
    monkeypatch.setattr("jax_extractor.bench.extraction.torch_peers", dict)
    monkeypatch.setattr("jax_extractor.bench.extraction.JAX_PEERS", peers)
    options = Options(
        sizes=((1, 8, 4),),
        growth=(1, 1024, 1),
        repeats=1,
        methods=("auto", "spectral"),
        json=tmp_path / "out" / "bench.json",
        plot=tmp_path / "bench.png",
    )
    monkeypatch.setattr("jax_extractor.bench.extraction.measure_peaks", lambda *_: Peaks(1e9, 1e9))
    run(options)
    content = json.loads(options.json.read_text())
    names = {row["name"] for row in content["rows"]}
    assert names == {"ours, auto", "ours, spectral", *peers}
    both = [(row["name"], row["backward"]) for row in content["rows"] if row["size"] == [1, 8, 4]]
    assert len(both) == len(set(both)) == 2 * len(names)
    swept = [(r["size"][1], r["name"]) for r in content["growth"] if r["backward"]]
    assert sorted(swept) == sorted((time, name) for time in (512, 1024) for name in names)
    assert all(row["milliseconds"] > 0 for row in content["rows"])
    assert options.plot.stat().st_size > 1000
    said = capsys.readouterr().out
    for ratio in content["ratios"]:
        assert f"{ratio['value']:.2f}  {ratio['title']}" in said


def test_ratios_are_against_the_fastest_peer():
    size = (1, 8, 4)
    rows = [
        Row(size, "ours, auto", True, 2.0, 1.0),
        Row(size, "ours, fft", True, 1.0, 1.0),
        Row(size, "jnp.fft", True, 3.0, 1.0),
        Row(size, "flax.linen.Conv", True, 12.0, 1.0),
    ]
    values = {ratio.title: ratio.value for ratio in compare(rows)}
    assert values == {
        "forward + backward: the fastest peer's (jnp.fft) time / ours": 1.5,
        "forward + backward: flax.linen.Conv time / ours": 6.0,
    }


def test_the_limit_is_that_of_the_scarcer_rate():
    """Short sequences are computed directly: B·L(L+1)/2·D² products, three times with gradients."""
    size = (1, 8, 4)
    rows = [Row(size, "ours, auto", backward, 2.0, 1.0) for backward in (False, True)]
    products, floats = 8 * 9 // 2 * 16, 2 * 8 * 4 + 8 * 16
    slow_products = compare_limit(rows, Peaks(1e3 * products, 1e12), np.float32)
    assert [ratio.value for ratio in slow_products] == pytest.approx([0.5, 1.5])
    slow_copies = compare_limit(rows, Peaks(1e12, 1e3 * 4 * floats), np.float32)
    assert slow_copies[0].value == pytest.approx(0.5)


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(sizes=((0, 8, 4),)), "give positive numbers"),
        (Options(methods=("magic",)), "unknown method 'magic'"),
        (Options(repeats=0), "repeats=0: choose at least 1"),
        (Options(dtype="int8"), "unknown dtype 'int8'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        run(options)
