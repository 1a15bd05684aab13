"""The compiled CPU engine: numba and its loops, vectors and micro-kernels in LLVM IR, a barrier of spinning threads."""
