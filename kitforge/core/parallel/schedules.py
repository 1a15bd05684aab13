"""The orders of the passes of a pipeline: plain lists, which every rank computes alike and without communication."""

from typing import Literal, NamedTuple


class Pass(NamedTuple):
    """A forward (F) or backward (B) pass of a micro-batch through the stage of a rank."""

    kind: Literal["F", "B"]
    micro_batch: int


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Pass]:
    """The passes of a stage in the order 1F1B (Narayanan et al., 2019, "PipeDream"; 2021, with a flush at the end of a
    step). A stage has the activations of at most `num_stages - stage` micro-batches at a time, however many there are.
    With fewer micro-batches than stages, all forward passes come first."""
    ahead = min(num_stages - stage - 1, num_micro_batches)
    order = [Pass("F", each) for each in range(ahead)]
    for each in range(num_micro_batches):
        if ahead + each < num_micro_batches:
            order.append(Pass("F", ahead + each))
        order.append(Pass("B", each))
    return order
