"""The training bench: it runs the step of `train`, and its rows say what they measured."""

import json

import pytest

from jax_extractor.bench.training import Options, run
from jax_extractor.errors import UsageError

SIZES = {
    "batch_size": 2,
    "length": 8,
    "features": 8,
    "layers": 1,
    "ffn_features": 8,
    "num_heads": 2,
}


def test_rows_hold_sizes_times_and_their_quotients(tmp_path, capsys):
    options = Options(**SIZES, vocabulary=5, mixers=("me", "mha"), repeats=1, json=tmp_path / "b")
    run(options)
    me, mha = json.loads(options.json.read_text())["rows"]
    assert (me["mixer"], mha["mixer"]) == ("me", "mha")
    # me: D² + L for its 4·D² and the learned positions L·D of attention
    assert mha["parameters"] - me["parameters"] == 3 * 64 + 8 * 8 - 8
    assert me["times_first"] == 1
    assert mha["times_first"] == pytest.approx(mha["milliseconds"] / me["milliseconds"])
    assert me["tokens_per_second"] == pytest.approx(2 * 8 / me["milliseconds"] * 1e3)
    assert f"{mha['times_first']:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixers": ("nha",)}, "unknown model.mixer 'nha'"),
        ({"mixers": ()}, "mixers is empty"),
        ({"batch_size": 0}, "batch_size=0: choose at least 1"),
        ({"accumulate": 3}, "batch_size=2 is not divisible by accumulate=3"),
        ({"layers": 0}, "layers=0: choose at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        run(Options(**(SIZES | options)))
