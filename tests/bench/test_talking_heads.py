"""The talking-heads bench: its contestants compute the same, its files say what it measured."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.bench.talking_heads import Options, Row, compare, einsum_attention, run
from jax_extractor.errors import UsageError
from jax_extractor.ops import talking_heads_attention


def test_the_naive_contestant_computes_what_ours_does():
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 5, 4, 3)) for n in range(3))
    pre, post = (jax.random.normal(jax.random.key(n), (4, 4)) for n in (3, 4))
    naive = jax.jit(einsum_attention)(q, k, v, pre, post)
    ours = jax.jit(talking_heads_attention, static_argnames="causal")(
        q, k, v, pre, post, causal=True
    )
    np.testing.assert_allclose(naive, ours, rtol=1e-5, atol=1e-5)


def test_files_hold_every_contestant(tmp_path, capsys):
    options = Options(
        sizes=((1, 8, 8, 2),),
        repeats=1,
        block_size=4,
        longest_naive=4,
        json=tmp_path / "out" / "bench.json",
        plot=tmp_path / "bench.png",
    )
    run(options)
    content = json.loads(options.json.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert rows["talking heads, einsum"]["milliseconds"] is None  # 8 is longer than 4
    assert rows["talking heads, einsum"]["temporary_megabytes"] > 0
    assert rows["talking heads, ours"]["milliseconds"] > 0
    assert "talking heads, torch" not in rows
    assert options.plot.stat().st_size > 1000
    said = capsys.readouterr().out
    for name in rows:
        assert name in said
    for ratio in content["ratios"]:
        assert f"{ratio['value']:.2f}  {ratio['title']}" in said


def test_ratios_divide_the_rows_they_name():
    size = (1, 8, 8, 2)
    rows = [
        Row(size, "MHA, einsum", 10.0, 8.0, 1.0),
        Row(size, "MHA, ours", 4.0, 1.0, 1.0),
        Row(size, "talking heads, ours", 5.0, 2.0, 1.0),
        Row(size, "talking heads, einsum", None, 32.0, 1.0),
    ]
    values = {r.title: r.value for r in compare(rows)}
    assert values == {
        "our talking heads' time / plain MHA's": 0.5,
        "our talking heads' time / our MHA's": 1.25,
        "our MHA's time / plain MHA's": 0.4,
        "naive talking heads' memory / ours": 16.0,
    }


def test_a_size_that_heads_do_not_divide_is_refused():
    with pytest.raises(UsageError, match="features divisible by heads"):
        run(Options(sizes=((1, 8, 9, 2),)))


@pytest.mark.oracle
def test_the_torch_contestant_computes_what_ours_does():
    torch = pytest.importorskip("torch")
    attend = pytest.importorskip("x_transformers.attend")
    from jax_extractor.bench import talking_heads

    q, k, v = (jax.random.normal(jax.random.key(n), (2, 5, 4, 3)) for n in range(3))
    mixing = jnp.eye(4) + jax.random.normal(jax.random.key(3), (4, 4))
    outputs = []
    forward = attend.Attend.forward

    def keep(self, *args, **kwargs):
        outputs.append(forward(self, *args, **kwargs)[0])
        return outputs[-1], None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend.Attend, "forward", keep)
        talking_heads.torch_contestant(q, k, v, mixing).call()
    ours = jax.jit(talking_heads_attention, static_argnames="causal")(
        q, k, v, mixing, mixing, causal=True
    )
    theirs = torch.transpose(outputs[0], 1, 2).detach().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
