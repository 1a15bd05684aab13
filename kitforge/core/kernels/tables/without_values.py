"""The loops over rows of embedding tables on rows without values: what they return, and nothing else."""

from typing import Any

from torch import Tensor

from kitforge.core.kernels.tables.bags import Bags


def _pooled(
    source: Tensor, slots: Tensor, dim: int, *, inverse: Tensor | None = None, bags: Bags | None = None
) -> Tensor:
    num_rows = bags.num_bags if bags is not None else len(slots if inverse is None else inverse)
    return source.new_empty(num_rows, dim)


def _row_gradients(
    gradients: Tensor, _inverse: Tensor, num_rows: int, *, bags: Bags | None = None, out: Tensor | None = None
) -> Tensor:
    del bags
    return gradients.new_empty(num_rows, gradients.shape[1]) if out is None else out


def _nothing(first: Any, second: Any, *_: Any, at: Any = None, to: Any = None) -> None:
    del first, second, at, to


class _NoUpdate:
    """Updates no row."""

    update = staticmethod(_nothing)

    @staticmethod
    def catch_up(*_: Any, eps: float, powers: Any) -> None:
        """Moves no row."""
        del eps, powers


WITHOUT_VALUES: dict[str, Any] = {
    "copy_rows": _nothing,
    "swap_rows": _nothing,
    "pread_rows": _nothing,
    "embedding_bag": _pooled,
    "embedding_bag_backward": _row_gradients,
    "sparse_update": _NoUpdate(),
}
