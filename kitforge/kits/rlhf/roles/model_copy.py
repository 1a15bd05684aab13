"""Groups the weights of models for the optimizer, casts frozen ones, and fingerprints models."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.nn.linear import Linear
from kitforge.core.optim.groups import ParameterGroup, network_groups
from kitforge.core.parallel.fsdp import local_tensor
from kitforge.foundation.host_values import is_fake
from kitforge.kits.rlhf.config import CriticOptions
from kitforge.kits.rlhf.roles.value_head import critic_of

# Elements of a weight per chunk of its digest.
DIGEST_CHUNK = 2**16


def actor_critic_groups(model: nn.Module, weight_decay: float, options: CriticOptions) -> list[ParameterGroup]:
    """Parameter groups of policy and critic; the critic has its own learning rate and gradient clipping."""
    groups = network_groups(model, weight_decay)
    if critic_of(model) is None:
        return groups
    found = []
    for part, rate, norm in (("policy", None, None), ("critic", options.learning_rate, options.max_grad_norm)):
        for group in groups:
            members = [
                pair for pair in zip(group.names, group.parameters, strict=True) if pair[0].startswith(f"{part}.")
            ]
            if members:
                names, parameters = zip(*members, strict=True)
                own = replace(group, names=names, parameters=parameters, part=part)
                found.append(replace(own, learning_rate=rate, max_grad_norm=norm))
    return found


@torch.no_grad()
def to_half(networks: Iterable[nn.Module], keep: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast the matrices of linear layers to `dtype`, the autocast dtype, so that no output changes. Weights of `keep`
    and FSDP shards keep their dtype.

    A CPU without arithmetic in `dtype` multiplies in fp32; there a matrix that would lose precision keeps its dtype.
    """
    kept = {_memory_of(each) for network in keep for each in network.parameters()}
    # Models may share memory: all holders of a matrix get the same new one.
    holders: dict[tuple[int, int], list[nn.Parameter]] = {}
    for layer in (each for network in networks for each in network.modules() if isinstance(each, Linear)):
        weight = layer.weight
        if weight.dtype is torch.float32 and local_tensor(weight) is weight and _memory_of(weight) not in kept:
            holders.setdefault(_memory_of(weight), []).append(weight)
    for weights in holders.values():
        first = weights[0]
        rounded = first.to(dtype)
        is_exact = is_fake(first) or not first.is_cpu or NATIVE_DTYPES[dtype] or torch.equal(rounded.float(), first)
        if not is_exact:
            continue
        for each in weights:
            each.requires_grad_(False)
            each.data = rounded


def _memory_of(weight: Tensor) -> tuple[int, int]:
    local = local_tensor(weight)
    return local.untyped_storage()._cdata, int(local.storage_offset())


@torch.no_grad()
def fingerprint(network: nn.Module) -> str:
    """A hash of all weights, bit for bit."""
    return model_fingerprint({name: weight_digest(each) for name, each in network.named_parameters()})


def model_fingerprint(digests: Mapping[str, str]) -> str:
    """The fingerprint of a model from the digests of its weights by name."""
    found = hashlib.blake2b(digest_size=16)
    for name, digest in sorted(digests.items()):
        found.update(f"{name} {digest}\n".encode())
    return found.hexdigest()


def weight_digest(weight: Tensor, dtype: torch.dtype | None = None) -> str:
    """A hash of a weight in `dtype`, by default its own, independent of its memory layout."""
    found = hashlib.blake2b(digest_size=16)
    if is_fake(weight):
        return f"{list(weight.shape)}"
    for chunk in torch.split(weight.detach(), max(1, DIGEST_CHUNK * len(weight) // weight.numel())):
        found.update(chunk.to(dtype or weight.dtype).cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
