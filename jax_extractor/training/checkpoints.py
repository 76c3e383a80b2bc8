"""Checkpoints of a training run: saved in the background, checked when read."""

import gc
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_extractor.errors import InputError
from jax_extractor.files import cannot_write, reason
from jax_extractor.shapes import PyTree
from jax_extractor.training import arrays
from jax_extractor.training.quiet import abandoned_coroutines, quieten_leftovers, quieten_orbax

# What Orbax was seen to raise when any one bit of a checkpoint's files is flipped.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
COMMIT_FILE = "commit_success.txt"  # the name that Orbax gives it


class Checkpoints:
    """The checkpoints of one run, `RUN/checkpoints/STEP/`; a context manager.

    A step counts once its commit file stands, so a process killed while saving leaves the step
    before as the latest. Orbax's array files carry no checksum; each array's CRC-32 is therefore
    kept in the step's metadata and compared when the array is restored (arrays that one process
    cannot see whole go unchecked). Nothing is created before the first `save`, and leaving the
    context waits for the last.

    Args:
        directory: the folder of the steps; its parent is the run that messages name.
        keep: how many of the latest steps stay on disk.
    """

    def __init__(self, directory: Path, keep: int = 3):
        self._directory = Path(directory).absolute()
        self._run = directory.parent
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._wrote = False
        quieten_orbax()
        quieten_leftovers()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.close()
        except InputError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what ended the block matters more

    def save(
        self, step: int, state: PyTree, metadata: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Copies the state to host memory and writes it in the background.

        When it returns, the state's buffers may be donated. A step that is saved already is left as
        it is. Typed PRNG keys are stored as their raw data.

        Args:
            step: the number of steps trained.
            state: any pytree of arrays.
            metadata: what JSON can say, for `metadata` to return.
            wait: return only when everything is on disk.

        Raises:
            InputError: the disk is full or cannot be written, now or for the save before this one.
        """
        self.wait()
        stored = jax.tree.map(arrays.to_stored, state)
        record = _sealed(json.loads(json.dumps(metadata)), arrays.records(state, stored))
        try:
            self._begin_writing()
            manager = self._open()
            if step not in manager.all_steps():
                args = ocp.args.Composite(
                    state=ocp.args.PyTreeSave(stored), metadata=ocp.args.JsonSave(record)
                )
                manager.save(step, args=args, force=True)
        except (OSError, ValueError) as error:
            raise self._failed_save(error) from error
        if wait:
            self.wait()

    def wait(self) -> None:
        """Blocks until the last save is on disk; raises InputError when it could not be written."""
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except (OSError, ValueError) as error:
                raise self._failed_save(error) from error

    def close(self) -> None:
        """Waits for the last save and frees the threads; raises what `wait` raises."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def latest(self) -> int | None:
        """The last step that is whole on disk, after waiting for a save in progress; or None.

        Raises:
            InputError: a file stands where the run or its folder of checkpoints should be.
        """
        self.wait()
        for path, shown in ((self._directory.parent, self._run), (self._directory, self._shown)):
            if path.exists() and not path.is_dir():
                raise InputError(f"{shown} is a file, not a folder: choose another --run-dir")
        if not self._directory.exists():
            return None
        return max(self._open().all_steps(), default=None)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside a step (None: the latest); raises as `restore` does."""
        return self._record(self._found(step))["metadata"]

    def restore(self, step: int | None, like: PyTree) -> PyTree:
        """The state of a step, placed as `like` says, whatever the mesh at saving was.

        Args:
            step: the step, or None for the latest.
            like: the state's tree of `jax.ShapeDtypeStruct`, each with the sharding it is to have.

        Raises:
            InputError: there is no such step; an array is missing, left over or of another shape or
                dtype; what is on disk is damaged.
        """
        step = self._found(step)
        return self._read(step, self._record(step)["arrays"], like)

    def restore_subtree(self, step: int | None, like: PyTree, key: str = "params") -> PyTree:
        """One entry of the state alone, such as the parameters without the optimizer's moments.

        Args:
            step: the step, or None for the latest.
            like: that entry's tree of `jax.ShapeDtypeStruct`, each with its sharding.
            key: the entry's name in the state.

        Raises:
            InputError: as `restore`.
        """
        step = self._found(step)
        records = self._record(step)["arrays"]
        below = {p: r for p, r in records.items() if p == key or p.startswith(f"{key}.")}
        return self._read(step, below, {key: like})[key]

    # Writing

    def _begin_writing(self) -> None:
        """Makes the folder and clears what killed processes left half-written in it."""
        if self._wrote:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            for path in self._directory.iterdir():
                if path.name.isdigit() and path.is_dir() and not (path / COMMIT_FILE).exists():
                    shutil.rmtree(path)
        self._wrote = True

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                create=False,
                preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
                atomicity_options=ocp.options.AtomicityOptions(
                    mode=ocp.options.AtomicityMode.COMMIT_FILE
                ),
            )
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        return self._manager

    def _failed_save(self, error: Exception) -> InputError:
        """The error to raise; the manager, which counts the failed step as saved, is given up."""
        self._manager = None
        self._wrote = False
        return cannot_write(self._shown, error)

    # Reading

    @property
    def _shown(self) -> Path:
        return self._run / self._directory.name

    def _found(self, step: int | None) -> int:
        latest = self.latest()
        if latest is None:
            what = "has no checkpoint" if self._run.is_dir() else "does not exist"
            raise InputError(
                f"{self._run} {what}: train it first with "
                f"`jax-extractor train EXPERIMENT --run-dir {self._run}`"
            )
        if step is None:
            return latest
        steps = sorted(self._open().all_steps())
        if step not in steps:
            raise InputError(
                f"{self._shown} has no checkpoint of step {step}: choose one of "
                f"{', '.join(map(str, steps))}"
            )
        return step

    def _record(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        try:
            record = self._open().restore(step, args=args)["metadata"]
            whole = record == _sealed(record["metadata"], record["arrays"])
        except UNREADABLE as error:
            raise self._damaged(step, "its metadata cannot be read") from error
        if not whole:
            raise self._damaged(step, "its metadata does not match its checksum")
        return record

    def _read(self, step: int, records: dict[str, Any], like: PyTree) -> PyTree:
        """The arrays of the records, which must be those that `like` asks for."""
        self._check_tree(step, records, arrays.by_path(like))
        stored = self._load(step, jax.tree.map(arrays.stored_like, like))
        leaves, tree = jax.tree.flatten(stored)
        try:
            sums = arrays.checksums(leaves)
        except TypeError as error:  # a dtype that no array of a state has
            raise self._damaged(step, str(error)) from error
        paths = list(arrays.by_path(like))
        ordered = [records[path] for path in paths]
        for path, record, found in zip(paths, ordered, sums, strict=True):
            if None not in (found, record["crc32"]) and found != record["crc32"]:
                raise self._damaged(step, f"{path} does not match its checksum")
        return jax.tree.unflatten(tree, map(arrays.from_stored, leaves, ordered))

    def _load(self, step: int, item: PyTree) -> PyTree:
        """What Orbax reads, unchecked."""
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with abandoned_coroutines():
            try:
                return self._open().restore(step, args=ocp.args.Composite(state=args))["state"]
            except Exception as error:  # for some damage Orbax raises nothing narrower
                # The text alone: the error holds on to the coroutines.
                cause = error.__cause__
                what = reason(cause if isinstance(cause, Exception) else error)
            gc.collect()
        raise self._damaged(step, f"it cannot be read ({what})")

    def _check_tree(self, step: int, records: dict[str, Any], wanted: dict[str, Any]) -> None:
        for path in dict.fromkeys([*wanted, *records]):
            has, wants = (arrays.show(leaves.get(path)) for leaves in (records, wanted))
            if has != wants:
                raise InputError(
                    f"{path} is {has} in {self._shown / str(step)} and {wants} in this "
                    "configuration: use the one it was trained with, or another --run-dir"
                )

    def _damaged(self, step: int, what: str) -> InputError:
        earlier = [s for s in self._open().all_steps() if s < step]
        then = f"to go on from step {max(earlier)}" if earlier else "to train from the start"
        return InputError(
            f"checkpoint {self._shown / str(step)} is damaged: {what}; remove that folder {then}"
        )


def _sealed(metadata: dict, arrays: dict) -> dict[str, Any]:
    text = json.dumps([metadata, arrays], sort_keys=True)
    return {"metadata": metadata, "arrays": arrays, "crc32": zlib.crc32(text.encode())}
