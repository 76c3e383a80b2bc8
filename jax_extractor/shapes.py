"""The shape vocabulary of the package: one letter a dimension, one meaning a letter.

    B batch            T time (queries)      S source time (keys)
    D features in      E features out        L offsets (max_length)
    H softmax heads    Hk key heads          Hv value heads
    K head width       F frequencies         V vocabulary
    M layers           P prompt length

Signatures use these letters inside jaxtyping strings, such as `Float[Array, "*B T D"]`, where `*B`
stands for any number of leading axes. The test suite checks them at run time (jaxtyping's import
hook with beartype); a user's run pays nothing for them.
"""

from jax import Array
from jaxtyping import Bool, Float, Int, Key, PyTree

__all__ = ["Array", "Bool", "Float", "Int", "Key", "PyTree"]
