"""Three bilinear maps that are each other's derivatives, as JAX primitives.

A trilinear form <y(x, w), ybar> fixes three maps: y(x, w), xbar(ybar, w) and wbar(x, ybar). Each is
bilinear, and its transposes are the other two. Declared once so, all derivatives of all orders,
forward and reverse, use the three hand-written maps: `jax.custom_vjp` would lose forward mode, and
plain automatic differentiation of a chunked loop would keep or copy arrays of w's size.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_extractor.ops.extraction_methods import accumulation_dtype


def trilinear_family(name: str, output, input_cotangent, weight_cotangent, differentiated):
    """Returns f(x, w, plan) = output(x, w, plan), differentiable through the three maps.

    x, ybar and so on are (B, T, features), w is (L, D, E), `plan` is hashable and carries `length` and the
    `dtype` of x, w and their cotangents; y and ybar are of its accumulation dtype. Where f is
    differentiated in both, it and its derivatives are computed by differentiated(plan, x's shape, w's shape)
    instead.
    """
    y_of = bilinear_primitive(
        f"{name}_output",
        output,
        lambda x, w, plan: ((*x.shape[:2], w.shape[2]), accumulation_dtype(plan.dtype)),
    )
    xbar_of = bilinear_primitive(
        f"{name}_input_cotangent",
        input_cotangent,
        lambda y, w, plan: ((*y.shape[:2], w.shape[1]), plan.dtype),
    )
    wbar_of = bilinear_primitive(
        f"{name}_weight_cotangent",
        weight_cotangent,
        lambda x, y, plan: ((plan.length, x.shape[2], y.shape[2]), plan.dtype),
    )
    # In each rule, `ct` stands where the map's result stood in the trilinear form.
    ad.defbilinear(
        y_of,
        lambda ct, x, w, plan: xbar_of.bind(ct, w, plan=plan),
        lambda ct, x, w, plan: wbar_of.bind(x, ct, plan=plan),
    )
    ad.defbilinear(
        xbar_of,
        lambda ct, y, w, plan: y_of.bind(ct, w, plan=plan),
        lambda ct, y, w, plan: wbar_of.bind(ct, y, plan=plan),
    )
    ad.defbilinear(
        wbar_of,
        lambda ct, x, y, plan: xbar_of.bind(y, ct, plan=plan),
        lambda ct, x, y, plan: y_of.bind(x, ct, plan=plan),
    )
    jvp_of_y = ad.primitive_jvps[y_of]

    def jvp(primals, tangents, *, plan):
        x, w = primals
        if not any(isinstance(tangent, ad.Zero) for tangent in tangents):
            plan = differentiated(plan, x.shape, w.shape)
        return jvp_of_y(primals, tangents, plan=plan)

    ad.primitive_jvps[y_of] = jvp
    fold_batch(y_of)
    fold_batch(xbar_of)
    loop_over_batch(wbar_of)
    return lambda x, w, plan: y_of.bind(*same_varying_axes(x, w), plan=plan)


def bilinear_primitive(name: str, function, result) -> Primitive:
    """The primitive that computes function(a, b, plan).

    result(a, b, plan) is the shape and dtype of what it gives for those of a and b; `function` may
    give a wider dtype.
    """
    primitive = Primitive(name)

    def typed(a, b, plan):
        return function(a, b, plan).astype(result(a, b, plan)[1])

    primitive.def_impl(jax.jit(typed, static_argnames="plan"))

    def abstract(a, b, *, plan):
        shape, dtype = result(a, b, plan)
        return a.update(shape=shape, dtype=dtype)

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(typed, multiple_results=False))
    return primitive


def fold_batch(primitive: Primitive) -> None:
    """vmap over the first argument alone joins the batch; over the second it is a loop."""

    def rule(arguments, axes, *, plan):
        (a, b), (a_axis, b_axis) = arguments, axes
        if b_axis is not None:
            return loop(primitive, a, b, a_axis, b_axis, plan)
        a = jnp.moveaxis(a, a_axis, 0)
        result = primitive.bind(a.reshape(-1, *a.shape[2:]), b, plan=plan)
        return result.reshape(*a.shape[:2], *result.shape[1:]), 0

    batching.primitive_batchers[primitive] = rule


def loop_over_batch(primitive: Primitive) -> None:
    """vmap over either argument is a loop: a sum over the batch cannot join batches."""

    def rule(arguments, axes, *, plan):
        return loop(primitive, arguments[0], arguments[1], axes[0], axes[1], plan)

    batching.primitive_batchers[primitive] = rule


def loop(primitive: Primitive, a, b, a_axis, b_axis, plan):
    """One call an example."""
    if a_axis is None:
        b = jnp.moveaxis(b, b_axis, 0)
        return lax.map(lambda b: primitive.bind(a, b, plan=plan), b), 0
    a = jnp.moveaxis(a, a_axis, 0)
    if b_axis is None:
        return lax.map(lambda a: primitive.bind(a, b, plan=plan), a), 0
    b = jnp.moveaxis(b, b_axis, 0)
    return lax.map(lambda pair: primitive.bind(*pair, plan=plan), (a, b)), 0


def same_varying_axes(x, w):
    """Inside `jax.shard_map` both operands must vary over the same mesh axes."""
    axes = [varying_axes(a) for a in (x, w)]
    together = axes[0] | axes[1]
    return tuple(
        lax.pcast(a, tuple(together - own), to="varying") if together - own else a
        for a, own in zip((x, w), axes, strict=True)
    )


def varying_axes(a) -> frozenset:
    """The mesh axes of the enclosing `jax.shard_map` over which an array varies."""
    kind = jax.typeof(a)
    manual = getattr(kind, "mat", None)  # jax >= 0.10
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying
