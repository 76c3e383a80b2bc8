"""Checkpoints: what is restored equals what was saved, and what cannot be restored says so."""

import resource
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_extractor.errors import InputError
from jax_extractor.training import arrays
from jax_extractor.training.checkpoints import Checkpoints


def make_mesh(data, model):
    devices = jax.devices()[: data * model]
    return jax.make_mesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def make_state(seed=0, width=16):
    """A state with what training has: nested parameters, optax's named tuples, a key, integers."""
    kernel_key, key = jax.random.split(jax.random.key(seed))
    params = {
        "layers": [{"kernel": jax.random.normal(kernel_key, (8, width)), "bias": jnp.ones(width)}],
        "half": jnp.linspace(0, 1, 5).astype(jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.int32(7),
        "key": key,
        "wide_key": jax.random.key(seed, impl="rbg"),
    }


def structure(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, a in arrays.by_path(got).items():
        b = arrays.by_path(expected)[path]
        assert a.dtype == b.dtype, path
        assert np.array_equal(arrays.to_stored(a), arrays.to_stored(b)), path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def saved(folder):
    """A run with the steps 10 and 20."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(10, make_state(1), {"position": 10})
        checkpoints.save(20, make_state(2), {"position": 20})
    return folder


@pytest.fixture
def small_files():
    """Lets no file grow beyond 20 000 bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_round_trip(saved):
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.latest() == 20
        for step, seed in ((None, 2), (10, 1), (20, 2)):
            assert_same(checkpoints.restore(step, structure(make_state())), make_state(seed))
        assert checkpoints.metadata() == {"position": 20}
        assert checkpoints.metadata(10) == {"position": 10}


def test_keys_go_on_as_they_would_have(saved):
    with Checkpoints(saved) as checkpoints:
        state = checkpoints.restore(None, structure(make_state()))
    expected = make_state(2)
    for name in ("key", "wide_key"):
        draws = jax.random.uniform(state[name], (4,)), jax.random.uniform(expected[name], (4,))
        assert np.array_equal(*draws)


def test_metadata_is_what_json_says(folder):
    metadata = {"config": {"rate": 1e-3, "names": ["a", "ü"], "none": None}, "big": 2**60}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)}, metadata)
        assert checkpoints.metadata(1) == metadata


def test_only_the_latest_are_kept(folder):
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"x": jnp.full(3, step)}, {})
        checkpoints.save(4, {"x": jnp.zeros(3)}, {})  # saved already: left as it is
        assert checkpoints.latest() == 4
        like = {"x": jax.ShapeDtypeStruct((3,), jnp.int32)}
        assert np.array_equal(checkpoints.restore(4, like)["x"], [4, 4, 4])
    assert sorted(p.name for p in folder.iterdir()) == ["3", "4"]


@pytest.mark.parametrize("before, after", [((4, 2), (2, 4)), ((1, 8), (8, 1)), ((4, 2), (1, 1))])
def test_another_mesh(folder, before, after):
    spec = {"kernel": P("data", "model"), "bias": P("model"), "key": P()}

    def place(tree, mesh):
        return {n: jax.device_put(x, NamedSharding(mesh, spec[n])) for n, x in tree.items()}

    state = {
        "kernel": jnp.arange(64.0).reshape(8, 8),
        "bias": jnp.arange(8.0),
        "key": jax.random.key(3),
    }
    shardings = {n: NamedSharding(make_mesh(*after), s) for n, s in spec.items()}
    like = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in state.items()
    }
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, place(state, make_mesh(*before)), {})
        restored = checkpoints.restore(1, like)
    assert_same(restored, state)
    for name in ("kernel", "bias"):
        assert restored[name].sharding == shardings[name]
    assert restored["key"].sharding.is_equivalent_to(shardings["key"], 0)


def test_parameters_alone(saved):
    like = structure(make_state()["params"])
    with Checkpoints(saved) as checkpoints:
        assert_same(checkpoints.restore_subtree(None, like), make_state(2)["params"])
        key = checkpoints.restore_subtree(10, structure(make_state()["key"]), key="key")
        assert_same(key, make_state(1)["key"])


def test_buffers_may_be_donated_and_changed_while_saving(folder):
    state = {f"x{i}": jnp.full((512, 512), i, jnp.float32) for i in range(8)}
    state["host"] = np.arange(100_000, dtype=np.float32)
    expected = jax.tree.map(np.array, state)
    step = jax.jit(lambda x: jax.tree.map(lambda a: a - 100.0, x), donate_argnums=0)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
        host = state.pop("host")
        host[:] = -1.0
        for _ in range(3):
            state = step(state)
        restored = checkpoints.restore(1, structure(expected))
    assert_same(restored, jax.tree.map(jnp.asarray, expected))


KILLED = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np, jax.numpy as jnp
    from jax_extractor.training.checkpoints import Checkpoints

    folder = Path(sys.argv[1])
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"x": jnp.ones(3)}, {}, wait=True)
    noise = np.random.default_rng(0).random((24, 1 << 18), np.float32)
    checkpoints.save(2, {str(i): jnp.asarray(x) for i, x in enumerate(noise)}, {})
    while not any((folder / "2").glob("state/*/d/*")):
        time.sleep(1e-4)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_while_saving(folder):
    script = textwrap.dedent(KILLED)
    child = subprocess.run([sys.executable, "-c", script, folder], capture_output=True)
    assert child.returncode == -9, child.stderr.decode()
    assert (folder / "2").is_dir()
    like = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() == 1
        assert np.array_equal(checkpoints.restore(None, like)["x"], np.ones(3))
        checkpoints.save(3, {"x": jnp.zeros(3)}, {})
    assert sorted(p.name for p in folder.iterdir()) == ["1", "3"]


def test_empty_and_uncommitted_folders_do_not_count(saved):
    (saved / "30").mkdir()
    (saved / "notes").mkdir()
    (saved / "20" / "commit_success.txt").unlink()
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.latest() == 10
        assert_same(checkpoints.restore(None, structure(make_state())), make_state(1))
        checkpoints.save(20, make_state(3), {})
        assert_same(checkpoints.restore(20, structure(make_state())), make_state(3))
    assert sorted(p.name for p in saved.iterdir()) == ["10", "20", "notes"]


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_flipped_bit_in_an_array(folder, array_files):
    noise = np.random.default_rng(0).random((200, 200), np.float32)  # nothing to compress
    state = {"params": {"kernel": jnp.asarray(noise)}, "step": jnp.int32(1)}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(10, state, {})
        checkpoints.save(20, state, {})
    largest = max(array_files(folder / "20"), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 2, bit=3)
    like = structure(state)
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(InputError) as error:
            checkpoints.restore(None, like)
        assert str(error.value) == (
            f"checkpoint {folder}/20 is damaged: params.kernel does not match its checksum; "
            "remove that folder to go on from step 10"
        )
        assert_same(checkpoints.restore(10, like), state)
    with Checkpoints(folder) as checkpoints, pytest.raises(InputError, match="from the start"):
        flip(next((folder / "10" / "metadata").glob("metadata")), 15)
        checkpoints.restore(10, like)


@pytest.mark.slow
def test_no_damage_goes_unnoticed(folder, capfd):
    """Any byte of any file may change: an error of ours, or the very state that was saved."""
    state = {"w": jax.random.normal(jax.random.key(0), (4, 5)), "step": jnp.int32(3)}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {"position": 123})
    files = [p for p in sorted((folder / "1").rglob("*")) if p.is_file()]
    caught = 0
    random = np.random.default_rng(0)
    for path in files:
        whole = path.read_bytes()
        for place in random.integers(0, len(whole), 2):
            flip(path, place, bit=int(random.integers(8)))
            with Checkpoints(folder) as checkpoints:
                try:
                    assert_same(checkpoints.restore(None, structure(state)), state)
                    assert checkpoints.metadata() == {"position": 123}
                except InputError as error:
                    assert "damaged" in str(error)
                    caught += 1
            path.write_bytes(whole)
    assert caught >= 3
    assert capfd.readouterr().err == ""


def test_missing_or_cut_files(saved, array_files):
    for data in array_files(saved / "20"):
        data.write_bytes(data.read_bytes()[:-50])
    (saved / "10" / "metadata" / "metadata").unlink()
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(
            InputError, match=r"20 is damaged: .*; remove that folder to go on from"
        ):
            checkpoints.restore(None, structure(make_state()))
        with pytest.raises(InputError, match="10 is damaged: its metadata cannot be read; remove"):
            checkpoints.metadata(10)


def test_another_state_is_refused_with_the_first_difference(saved):
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(InputError) as error:
            checkpoints.restore(None, structure(make_state(width=12)))
        assert "opt_state.1.0.mu.layers.0.bias is float32(16) in" in str(error.value)
        assert "/20 and float32(12) in this configuration" in str(error.value)

        like = structure(make_state())
        del like["step"]
        with pytest.raises(InputError, match=r"step is int32\(\) in .*/10 and absent in this"):
            checkpoints.restore(10, like)
        with pytest.raises(InputError, match=r"more is absent in .*/20 and float32\(2\) in this"):
            more = {"more": jax.ShapeDtypeStruct((2,), jnp.float32)}
            checkpoints.restore(None, structure(make_state()) | more)
        with pytest.raises(InputError, match=r"step is int32\(\) in .* and float32\(\) in this"):
            scalar = {"step": jax.ShapeDtypeStruct((), jnp.float32)}
            checkpoints.restore(None, structure(make_state()) | scalar)
        with pytest.raises(InputError, match=r"wide_key is key<rbg>\(\) in .* and key<fry>\(\)"):
            other = {"wide_key": structure(make_state()["key"])}
            checkpoints.restore(None, structure(make_state()) | other)
        with pytest.raises(InputError, match=r"params\.other is absent"):
            checkpoints.restore_subtree(None, {"other": like["params"]["half"]})


def test_full_disk_loses_nothing(saved, small_files, capfd):
    noise = jnp.asarray(np.random.default_rng(0).random(100_000, np.float32))
    big = {"x": noise}
    with Checkpoints(saved, keep=1) as checkpoints:
        checkpoints.save(30, big, {})
        with pytest.raises(InputError) as error:
            checkpoints.wait()
        assert str(error.value) == (
            f"cannot write {saved}: File too large; free some space and run the same command again"
        )
        with pytest.raises(InputError, match="File too large"):
            checkpoints.save(30, big, {}, wait=True)
        assert checkpoints.latest() == 20
        assert_same(checkpoints.restore(None, structure(make_state())), make_state(2))
        small_files()  # space again
        checkpoints.save(30, big, {})
        assert checkpoints.latest() == 30
    assert [p.name for p in saved.iterdir()] == ["30"]
    assert capfd.readouterr().err == ""


def test_the_error_in_the_block_matters_more_than_the_disk(folder, small_files):
    noise = jnp.asarray(np.random.default_rng(0).random(100_000, np.float32))
    with pytest.raises(KeyboardInterrupt) as stopped, Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"x": noise}, {})
        raise KeyboardInterrupt
    assert "File too large" in stopped.value.__notes__[0]
    with pytest.raises(InputError, match="File too large"), Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"x": noise}, {})


def test_files_in_the_way(tmp_path):
    state = {"x": jnp.ones(2)}
    (tmp_path / "file").write_text("")
    for folder, shown in (
        (tmp_path / "file" / "checkpoints", tmp_path / "file"),
        (tmp_path / "file", tmp_path / "file"),
    ):
        checkpoints = Checkpoints(folder)
        with pytest.raises(InputError, match=f"^{shown} is a file, not a folder: choose another"):
            checkpoints.restore(None, structure(state))
        with pytest.raises(InputError, match=f"^cannot write {folder}: .*choose another --run-dir"):
            checkpoints.save(1, state, {})


def test_no_checkpoint(tmp_path):
    run = tmp_path / "run"
    remedy = f"train it first with `jax-extractor train EXPERIMENT --run-dir {run}`"
    checkpoints = Checkpoints(run / "checkpoints")
    with pytest.raises(InputError, match=f"^{run} does not exist: {remedy}$"):
        checkpoints.metadata()
    assert checkpoints.latest() is None
    assert not run.exists()
    for folder in (run, run / "checkpoints"):
        folder.mkdir()
        with pytest.raises(InputError, match=f"^{run} has no checkpoint: {remedy}$"):
            checkpoints.restore(None, {})


def test_unknown_step_lists_the_known(saved):
    with Checkpoints(saved) as checkpoints, pytest.raises(InputError, match=r"one of 10, 20$"):
        checkpoints.metadata(15)
