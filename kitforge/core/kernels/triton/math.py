"""Functions within Triton kernels: quotients and roots as a CPU rounds them.

Triton's compiler reads annotations too, so only those that it knows may stand here.
"""

import triton
import triton.language as tl


@triton.jit
def divide(number, divisor, EXACT: tl.constexpr):
    """The quotient rounded as IEEE 754 says; Triton's own operator is 2 ulp off in fp32."""
    if EXACT == tl.float32:  # noqa: SIM300
        return tl.div_rn(number, divisor)
    else:  # noqa: RET505
        return number / divisor


@triton.jit
def root(number, EXACT: tl.constexpr):
    """The square root rounded as IEEE 754 says."""
    if EXACT == tl.float32:  # noqa: SIM300
        return tl.sqrt_rn(number)
    else:  # noqa: RET505
        return tl.sqrt(number)
