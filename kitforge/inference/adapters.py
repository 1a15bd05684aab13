"""LoRA adapters beside a base model, by name: each text of a batch has one or none.

The compiled step of a decoder adds their updates itself. Elsewhere a copy of the network over the same weights does so,
by two small products for each adapter of the batch, on its rows alone.
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor, nn

from kitforge.core.kernels.fused_decode_step.reference import Update
from kitforge.core.kernels.linear.reference import LinearKernel
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.lora import row_norms
from kitforge.core.nn.quantized import shared_copy
from kitforge.foundation.errors import ConfigError, ModelError, nearest

# By names of linear layers: down [rank, in], up [out, rank] times the scale, and of DoRA the magnitude [out].
Factors = Mapping[str, tuple[Tensor, ...]]


class Adapters:
    """The adapters of `network`, which may be quantized. `linear` multiplies with their factors, kept in `dtype`."""

    def __init__(
        self, network: nn.Module, adapters: Mapping[str, Factors], linear: LinearKernel, dtype: torch.dtype
    ) -> None:
        self.names = list(adapters)
        # Of the weights: one that is trained on has other keys and values under the same name.
        self.digests = [_digest(each) for each in adapters.values()]
        self._network = shared_copy(network).eval() if adapters else network
        self._rows: dict[int, Tensor] = {}  # of the batch, by the numbers of adapters
        self._magnitudes: list[tuple[Linear, Update, Tensor]] = []  # of DoRA
        self._layers = {path: each for path, each in self._network.named_modules() if isinstance(each, Linear)}
        if adapters and any("forward" in each.__dict__ for each in self._layers.values()):
            expected = "a base model without an adapter of its own, on one rank"
            raise ModelError(
                "the network takes no adapters by name", got="adapted or sharded layers", expected=expected
            )
        self.updates = [
            {path: self._update(name, path, factors, dtype) for path, factors in own.items()}
            for name, own in adapters.items()
        ]
        self.refresh()
        for path in {path for own in self.updates for path in own}:
            updates = {number: own[path] for number, own in enumerate(self.updates) if path in own}
            _add_updates(self._layers[path], updates, self._rows, linear)

    def number(self, name: str | None) -> int:
        """The number of an adapter; -1 for the base model. Raises ConfigError for an unknown one."""
        if name is None:
            return -1
        if name not in self.names:
            fix = nearest(name, self.names) if self.names else "open the model with serve.adapters={NAME: FOLDER}"
            raise ConfigError(f"there is no adapter {name!r}", fix=fix)
        return self.names.index(name)

    def network(self, numbers: Tensor) -> nn.Module:
        """The network for one row of tokens that have the adapters of these numbers [tokens]."""
        self._rows.clear()
        self._rows.update((each, (numbers == each).nonzero()[:, 0]) for each in set(numbers.tolist()) - {-1})
        return self._network

    @torch.no_grad()
    def refresh(self) -> None:
        """The base weights have changed, and with them the norms that DoRA divides by."""
        for layer, update, magnitude in self._magnitudes:
            weight = layer.dense_weight().float() + update.up.float() @ update.down.float()
            assert update.rescaling is not None
            update.rescaling.copy_(magnitude / row_norms(weight))

    def _update(self, name: str, path: str, factors: tuple[Tensor, ...], dtype: torch.dtype) -> Update:
        down, up, *magnitude = factors
        found, layer = (len(up), down.shape[1]), self._layers.get(path)
        if layer is None or found != layer.shape:
            expected = "linear layers" if layer is None else f"a matrix of {list(layer.shape)}"
            problem = f"the adapter {name!r} does not fit the model"
            raise ModelError(problem, got=f"{path} {list(found)}", expected=expected)
        device = layer.weight.device
        rescaling = torch.empty(len(up), device=device) if magnitude else None
        update = Update(down.to(device, dtype).contiguous(), up.to(device, dtype).contiguous(), rescaling)
        self._magnitudes += [(layer, update, each.to(device).float()) for each in magnitude]
        return update


def _add_updates(
    layer: Linear, updates: Mapping[int, Update], rows: Mapping[int, Tensor], linear: LinearKernel
) -> None:
    compute = layer.forward

    def forward(input: Tensor) -> Tensor:
        output = compute(input)
        for number in rows.keys() & updates.keys():
            own, update = rows[number], updates[number]
            added = linear(linear(input[:, own], update.down), update.up)
            output[:, own] = update.added(output[:, own], added.to(output.dtype), layer.bias)
        return output

    layer.__dict__["forward"] = forward


def _digest(factors: Factors) -> bytes:
    digest = blake2b(digest_size=16)
    for path, tensors in sorted(factors.items()):
        digest.update(f"{path} {[list(each.shape) for each in tensors]}".encode())
        for each in tensors:
            digest.update(each.float().contiguous().cpu().numpy().tobytes())
    return digest.digest()
