"""The data axis: copies of a model sum their gradients, in buckets, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kitforge.core.parallel import collectives
from kitforge.foundation.errors import ModelError

# Large enough for the link's full rate, small enough that the first is on its way early.
BUCKET_BYTES = 25 * 2**20


@final
class _Bucket:
    """Parameters whose gradients travel together, in one flat tensor."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.num_ready = 0
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


@final
class GradientBuckets:
    """The gradients of a model of which every rank of the group has a copy."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_last = True
        self._num_sent = 0
        # The backward pass finishes the last layers first.
        self._buckets = _make_buckets([parameter for parameter in reversed(parameters) if parameter.requires_grad])
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]

    def micro_batch(self, is_last: bool) -> None:
        """Whether the coming backward pass is the last of its step."""
        self._is_last = is_last

    def finish(self) -> None:
        """Wait until every gradient is the sum over the copies. One that is missing here counts as zero; one that no
        copy has is None on all of them, so that optimizers leave its parameter alone, as in one process."""
        if not self._buckets:
            return
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        sent = [parameter for bucket in self._buckets[: self._num_sent] for parameter in bucket.parameters]
        if any(parameter.grad is not None for parameter in sent):
            raise ModelError(
                "a gradient was added after it had been sent to the other ranks",
                expected="one backward pass for each micro-batch",
                fix="use_reentrant=False where torch.utils.checkpoint is called, one sum of all losses in `loss`",
            )
        # What was sent has no `.grad` any more; it was sent because all of it was there.
        is_used = [1.0] * len(sent) + [float(parameter.grad is not None) for parameter in parameters[len(sent) :]]
        used = torch.tensor(is_used, device=parameters[0].device)
        agreement = collectives.start_all_reduce_(used, self._group)
        for bucket in self._buckets[self._num_sent :]:
            self._start_all_reduce(bucket)
        agreement.wait()
        answers = iter(used.tolist())
        for bucket in self._buckets:
            assert bucket.work is not None and bucket.flat is not None
            bucket.work.wait()
            gradients = torch.split(bucket.flat, [parameter.numel() for parameter in bucket.parameters])
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter) if next(answers) else None
            bucket.work = bucket.flat = None
            bucket.num_ready = 0
        self._num_sent = 0

    def _hook(self, bucket: _Bucket) -> object:
        def arrived(_parameter: Tensor) -> None:
            if not self._is_last:
                return
            bucket.num_ready += 1
            # All ranks send in one order, whatever the order in which their buckets fill.
            while self._num_sent < len(self._buckets) and self._next_bucket.num_ready == len(
                self._next_bucket.parameters
            ):
                self._start_all_reduce(self._next_bucket)
                self._num_sent += 1

        return arrived

    @property
    def _next_bucket(self) -> _Bucket:
        return self._buckets[self._num_sent]

    def _start_all_reduce(self, bucket: _Bucket) -> None:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket.parameters
        ]
        # From here on the bucket alone holds the gradients, or all of them would be there twice.
        for parameter in bucket.parameters:
            parameter.grad = None
        flats = [gradient.reshape(-1) for gradient in gradients]
        # A large parameter has a bucket of its own, and sums where its gradient lies.
        bucket.flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        bucket.work = collectives.start_all_reduce_(bucket.flat, self._group)


def _make_buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Buckets of at most that many bytes, each of one dtype; a larger parameter has its own."""
    buckets: list[_Bucket] = []
    for parameter in parameters:
        last = buckets[-1] if buckets else None
        fits = (
            last is not None
            and last.parameters[0].dtype == parameter.dtype
            and last.num_bytes + parameter.nbytes <= BUCKET_BYTES
        )
        if not fits:
            buckets.append(_Bucket())
        buckets[-1].parameters.append(parameter)
    return buckets
