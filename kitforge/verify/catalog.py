"""The contracts of a configuration, in the order in which they are checked."""

from kitforge.verify import distribution, foreseen, kernels, learning, resuming, serving
from kitforge.verify.case import Case
from kitforge.verify.contract import Contract

CONTRACTS: tuple[Contract[Case], ...] = (
    *learning.CONTRACTS,
    *resuming.CONTRACTS,
    *distribution.CONTRACTS,
    *serving.CONTRACTS,
    *foreseen.CONTRACTS,
    *kernels.CONTRACTS,
)
