import json

import pytest

from jax_extractor.analysis.cost import Sizes, costs
from jax_extractor.cli import main
from jax_extractor.mixers import MIXERS

SIZES = ["--length", "16", "--features", "8", "--num-heads", "2", "--max-length", "12"]


def run(capsys, *arguments):
    return main(["cost", *arguments]), *capsys.readouterr()


def test_a_row_for_every_mixer(capsys):
    status, out, err = run(capsys, *SIZES, "--no-measure")
    assert (status, err) == (0, "")
    about, _, headings, *rows = out.splitlines()
    assert "16 positions of 8 features, 12 offsets, 2 heads" in about
    assert headings.split() == ["mixer", "parameters", "multiplications", "×", "mha", "method"]
    expected = costs(Sizes(length=16, features=8, num_heads=2, max_length=12), measure=False)
    for line, row in zip(rows, expected, strict=True):
        label = row.mixer if row.value_heads is None else f"{row.mixer}, h_v={row.value_heads}"
        assert line.startswith(label)
        figures = line.removeprefix(label).split()[:2]
        assert figures == [f"{row.parameters:,}", f"{row.multiplications:,}"]
    assert list(dict.fromkeys(row.mixer for row in expected)) == list(MIXERS)
    assert [row.value_heads for row in expected if row.mixer == "talking_heads"] == [2, 3, 1]


def test_measured_table_of_chosen_mixers(capsys):
    status, out, _ = run(
        capsys, *SIZES, "--mixers", "mha", "me", "--repeats", "1", "--batch-size", "1"
    )
    assert status == 0
    mha, me = (line.split() for line in out.splitlines()[-2:])
    assert (mha[0], me[0]) == ("mha", "me")
    assert mha[6] == "1.000" and len(mha) == len(me) == 9


def test_json_lines(capsys):
    status, out, _ = run(capsys, *SIZES, "--json", "--no-measure", "--mixers", "ishe")
    row = json.loads(out)
    assert (status, row["mixer"], row["parameters"]) == (0, "ishe", 13 * 64)
    assert row["forward_ms"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mixers", "nha"], "unknown mixer 'nha': choose one of"),
        (["--features", "0"], "features=0: choose at least 1"),
        (["--repeats", "0"], "repeats=0: choose at least 1"),
        (["--features", "9"], "features=9 is not divisible by num_heads=8: choose 8 or 16"),
    ],
)
def test_bad_usage_is_one_line(capsys, flags, message):
    status, out, err = run(capsys, "--no-measure", *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
