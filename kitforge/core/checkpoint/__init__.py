"""One checkpoint format for all kits: named tensors in safetensors files, plain state, and a manifest written last."""
