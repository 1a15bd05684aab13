"""Data parallelism (DDP): gradients are all-reduced in buckets during the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kitforge.core.parallel import collectives
from kitforge.foundation.errors import ModelError
from kitforge.foundation.host_values import host_list

# Bytes of a bucket: large enough for full bandwidth, small enough to start early.
BUCKET_BYTES = 25 * 2**20


class _Bucket:
    """Parameters whose gradients are reduced together, in one flat tensor."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.num_ready = 0
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


class GradientBuckets:
    """The gradients of a model that is replicated on every rank of the group."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        deliver: Callable[[nn.Parameter, Tensor], None] | None = None,
    ) -> None:
        """With `deliver`, gradients are not kept: those of each micro-batch are summed over the ranks, in at least
        fp32, and handed over as soon as they are."""
        self._group = group
        self._deliver = deliver
        self._is_last = True
        self._num_passes = 1
        self._is_open = False
        self._num_sent = 0
        self._num_delivered = 0
        self._hooks: list[Any] = []
        # The backward pass computes the last layers first.
        self.parameters = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        self._buckets = _make_buckets(self.parameters)
        for bucket in self._buckets:
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]
                for parameter in bucket.parameters
            ]

    def close(self) -> None:
        """Leave the gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def micro_batch(self, is_last: bool, num_passes: int = 1) -> None:
        """Announce the next backward pass, or so many that take turns, and whether it is the last of the step."""
        if self._deliver is not None and self._is_open:
            self.finish()
        self._is_last, self._is_open = is_last or self._deliver is not None, True
        self._num_passes = num_passes

    def finish(self) -> None:
        """Wait until every gradient is the sum over the replicas. A gradient missing on this rank counts as zero; one
        missing on all ranks stays None, so that optimizers skip its parameter, as in one process."""
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
        flags = [1.0] * len(sent) + [float(parameter.grad is not None) for parameter in parameters[len(sent) :]]
        used = torch.tensor(flags, device=parameters[0].device)
        agreement = collectives.start_all_reduce_(used, self._group)
        for bucket in self._buckets[self._num_sent :]:
            self._start_all_reduce(bucket)
        agreement.wait()
        answers = iter(host_list(used, flags))
        for number, bucket in enumerate(self._buckets):
            is_used = [bool(next(answers)) for _ in bucket.parameters]
            if number >= self._num_delivered:
                self._take(bucket, is_used)
        self._num_sent = self._num_delivered = 0
        self._is_open = False

    def _take(self, bucket: _Bucket, is_used: Sequence[bool]) -> None:
        """Wait for the sums of a bucket, and give them to their parameters, or deliver them."""
        assert bucket.work is not None and bucket.flat is not None
        bucket.work.wait()
        gradients = torch.split(bucket.flat, [parameter.numel() for parameter in bucket.parameters])
        for parameter, gradient, used in zip(bucket.parameters, gradients, is_used, strict=True):
            if self._deliver is None:
                parameter.grad = gradient.view_as(parameter) if used else None
            elif used:
                self._deliver(parameter, gradient.view_as(parameter))
        bucket.work = bucket.flat = None
        bucket.num_ready = 0

    def _hook(self, bucket: _Bucket) -> object:
        def arrived(_parameter: Tensor) -> None:
            if not self._is_last:
                return
            bucket.num_ready += 1
            # All ranks reduce buckets in one order, independent of the order in which they are filled.
            while self._num_sent < len(self._buckets) and self._is_ready(self._buckets[self._num_sent]):
                self._start_all_reduce(self._buckets[self._num_sent])
                self._num_sent += 1
            # One bucket is reduced while the one before it leaves; it was sent because all of it is used.
            while self._deliver is not None and self._num_delivered < self._num_sent - 1:
                bucket_before = self._buckets[self._num_delivered]
                self._take(bucket_before, [True] * len(bucket_before.parameters))
                self._num_delivered += 1

        return arrived

    def _is_ready(self, bucket: _Bucket) -> bool:
        return bucket.num_ready == self._num_passes * len(bucket.parameters)

    def _start_all_reduce(self, bucket: _Bucket) -> None:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket.parameters
        ]
        # The bucket alone holds the gradients from here on, so that they are in memory once.
        for parameter in bucket.parameters:
            parameter.grad = None
        flats = [gradient.reshape(-1) for gradient in gradients]
        if self._deliver is not None:
            flats = [flat.to(torch.promote_types(flat.dtype, torch.float32)) for flat in flats]
        # A large parameter has its own bucket and is reduced in place.
        bucket.flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        bucket.work = collectives.start_all_reduce_(bucket.flat, self._group)


def all_reduce_partial(parameters: Sequence[nn.Parameter], group: collectives.Group) -> None:
    """All-reduce small gradients in one message, which also says which ranks have them: a missing gradient counts as
    zero, one missing on all ranks stays None."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    flats = [gradient.reshape(-1) for gradient in gradients]
    used = flats[0].new_tensor([each.grad is not None for each in trained])
    flat = collectives.all_reduce_(torch.cat([*flats, used]), group)
    *sums, answers = torch.split(flat, [*(each.numel() for each in flats), len(trained)])
    is_used = host_list(answers, [True] * len(trained))
    for parameter, gradient, has_gradient in zip(trained, sums, is_used, strict=True):
        parameter.grad = gradient.view_as(parameter) if has_gradient else None


def _make_buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Buckets of one dtype and at most that many bytes; a larger parameter has its own bucket."""
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
