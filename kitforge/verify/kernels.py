"""The contract of kernels: on this device, at the level of the run, each is its reference."""

from kitforge.foundation import device as devices
from kitforge.verify.case import Case
from kitforge.verify.contract import Contract, Measured, furthest
from kitforge.verify.kernel_cases import TABLE_TOLERANCE, has_same_mask, kernel_errors, table_errors, tolerance


def check_kernels(case: Case) -> Measured:
    """Outputs and gradients of every kernel in every dtype; the figure is the largest share of its bound."""
    device = devices.pick(case.values["device"])
    shares = {
        f"{name} in {str(dtype).removeprefix('torch.')}": error / tolerance(name, dtype)
        for name, errors in kernel_errors(device, case.values["compile_level"])
        for dtype, error in errors.items()
    }
    shares |= {name: error / TABLE_TOLERANCE for name, error in table_errors(device)}
    shares["dropout mask"] = 0.0 if has_same_mask(device) else float("inf")
    figure = furthest(shares.values())
    worst = next(name for name, each in shares.items() if each is figure)
    unit = f"of the bound of its dtype, {worst}; {len(shares)} on {device}"
    return Measured(figure=figure, bound=1.0, unit=unit)


CONTRACTS = (Contract(name="kernels", promise="kernels = references", check=check_kernels, is_of_device=True),)
