"""What the heads of a trained model say to each other: its mixing matrices, as arrays and a picture."""

from pathlib import Path

import jax
import numpy as np

from jax_extractor.errors import InputError, UsageError
from jax_extractor.shapes import PyTree


def mixing_matrices(params: PyTree) -> dict[str, np.ndarray]:
    """Every P_l (Hk, H) and P_w (H, Hv) of a model by its path, for example core/layers_0/….

    Those of scanned layers, which are stacked, come out one by one, with the layer's number behind
    the path.
    """
    found: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith(("pre_mixing", "post_mixing")):
            continue
        matrix = np.asarray(leaf)
        if matrix.ndim == 2:
            found[name] = matrix
        else:
            found |= {f"{name}[{layer}]": part for layer, part in enumerate(matrix)}
    return found


def check_picture(path: Path) -> None:
    """Raises UsageError or InputError unless a picture can lie there: .png or .svg, in a folder."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"picture {path} is neither .png nor .svg: name a file that ends so")
    if path.is_dir():
        raise InputError(f"picture {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise InputError(
            f"picture {path} lies in no folder: make {path.parent}, or name a folder that exists"
        )


def plot_mixings(params: PyTree, path: Path) -> dict[str, np.ndarray]:
    """Draws `mixing_matrices` as one picture, red for positive and blue for negative, and returns them.

    Raises:
        UsageError: a file that is neither .png nor .svg.
        InputError: the model has no mixings, matplotlib is missing, or the file cannot be written.
    """
    check_picture(path)
    matrices = mixing_matrices(params)
    if not matrices:
        raise InputError(
            "the model has no head mixings: train one with --model.mixer talking_heads"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("a picture needs matplotlib: pip install jax_extractor[plots]") from error
    columns = min(len(matrices), 4)
    rows = -(-len(matrices) // columns)
    figure = Figure(figsize=(3 * columns, 3.2 * rows), layout="constrained")
    limit = max(float(np.abs(matrix).max()) for matrix in matrices.values())
    axes = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axis in axes[len(matrices) :]:
        axis.set_axis_off()
    for axis, (name, matrix) in zip(axes, matrices.items(), strict=False):
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(name.removeprefix("core/").replace("/mixer", ""), fontsize=8)
        axis.set_xlabel("to head", fontsize=7)
        axis.set_ylabel("from head", fontsize=7)
    figure.colorbar(image, ax=axes.tolist(), shrink=0.8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot draw {path} ({error}): name a file that can be written"
        ) from error
    return matrices
