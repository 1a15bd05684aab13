"""What the Triton kernels of several operations share: launching, grids, rounding, and the kernels themselves."""
