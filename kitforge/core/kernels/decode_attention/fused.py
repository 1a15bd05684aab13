"""`decode_attention` sequence by sequence through torch's own attention."""

import functools

from kitforge.core.kernels.attention.fused import attention
from kitforge.core.kernels.decode_attention import reference

decode_attention = functools.partial(reference.decode_attention, attention=attention)
