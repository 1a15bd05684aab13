"""Names of floating-point formats and their torch dtypes."""

from typing import Literal

import torch

# "fp8": bf16, with the products of linear layers in FP8.
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
# Spelled as in `torch_dtype` of config.json.
WeightDtype = Literal["float32", "bfloat16", "float16"]
# q8_0: blocks of 32 in int8 with a scale, in GGUF files only.
ExportDtype = Literal["float32", "bfloat16", "float16", "q8_0"]
# "auto": as stored.
LoadDtype = Literal["auto", "fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
EXPORT_DTYPES: dict[WeightDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def export_dtype(name: ExportDtype) -> torch.dtype:
    """The dtype of weights before they are written in that format; quantized ones start from float32."""
    return torch.float32 if name == "q8_0" else EXPORT_DTYPES[name]
