"""The parallel tensor core: kernels, layers, optimizers, parallelism and checkpoints. It knows no domain."""
