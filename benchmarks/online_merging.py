"""What online merging costs: nanoseconds and bytes per parameter, against AdamW alone, in one process.

    python benchmarks/online_merging.py               # about a minute of one core
    python benchmarks/online_merging.py --megabytes 512 --rounds 21

Every round times one step of each optimizer, in a new order; medians and the median of the ratios within a round are
printed. With one thread on a processor that is processor time, else wall time. The tensors are those of a small
transformer, and every step has a new gradient. Memory is what an optimizer keeps between steps; during one, merging
copies 262,144 parameters or one tensor at a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.merging.online import OnlineMerging

BASELINE = "AdamW, foreach"
RULES: dict[str, dict[str, Any]] = {
    "linear": {"method": "linear", "keep": 1.0},
    "OnDARE": {"method": "dare", "keep": 0.5},
    "OnDARE, frozen": {"method": "dare", "keep": 0.5, "frozen": True},
    "top-k": {"method": "topk", "keep": 0.5},
    "OnTIES": {"method": "ties", "keep": 0.5},
    "OnTIES, raw": {"method": "ties", "keep": 0.5, "election": "raw"},
}


def parameters_of(megabytes: int, dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Matrices of 1024 columns and norms, so many that float32 copies fill `megabytes`; with gradients."""
    shapes: list[tuple[int, ...]] = []
    elements = 0
    while elements < megabytes << 18:
        for shape in ((1024, 1024), (256, 1024), (2816, 1024), (1024,), (1024,)):
            shapes.append(shape)
            elements += torch.Size(shape).numel()
    parameters = [nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return parameters


def contestants(megabytes: int, dtype: torch.dtype, device: str) -> dict[str, torch.optim.Optimizer]:
    """Each with parameters of its own."""

    def adamw(**settings: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters_of(megabytes, dtype, device), lr=1e-6, **settings)

    found: dict[str, torch.optim.Optimizer] = {BASELINE: adamw(foreach=True), "AdamW, fused": adamw(fused=True)}
    for inner in ("foreach", "fused"):
        for title, rule in RULES.items():
            base = adamw(**{inner: True})
            named = [(str(number), p) for number, p in enumerate(base.param_groups[0]["params"])]
            reference = {name: p.detach().float() - 0.01 * torch.randn(p.shape, device=device) for name, p in named}
            found[f"{title} ({inner})"] = OnlineMerging(base, named, reference=reference, alpha=1e-7, **rule)
    return found


def timed(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Seconds of one step with a new gradient: one that stays makes all of Adam's steps equally long."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.normal_(0, 1e-3)
    if device != "cpu":
        torch.cuda.synchronize()
    # One thread's processor time is what a step takes, whatever else runs on the machine.
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    optimizer.step()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def kept_bytes(optimizer: torch.optim.Optimizer, elements: int) -> float:
    """Bytes per parameter that an optimizer keeps between steps, the parameters and gradients not counted."""
    tensors: list[Tensor] = [t for values in optimizer.state.values() for t in values.values() if torch.is_tensor(t)]
    if isinstance(optimizer, OnlineMerging):
        tensors += optimizer.extra_tensors()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / elements


def main() -> None:
    """Time all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="size of the parameters in float32")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each optimizer")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    optimizers = contestants(options.megabytes, getattr(torch, options.dtype), options.device)
    elements = sum(p.numel() for p in optimizers[BASELINE].param_groups[0]["params"])
    seconds: dict[str, list[float]] = {title: [] for title in optimizers}
    order = list(optimizers)
    shuffle = random.Random(0).shuffle
    for number in range(options.rounds + 2):
        shuffle(order)
        for title in order:
            taken = timed(optimizers[title], options.device)
            # The first two steps allocate.
            if number > 1:
                seconds[title].append(taken)
    print(f"{elements / 1e6:.1f} M parameters, {options.dtype}, {options.threads} thread(s), {options.device}\n")
    print(f"| optimizer | ns per parameter | times {BASELINE} | bytes per parameter |\n| --- | --- | --- | --- |")
    for title, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, seconds[BASELINE], strict=True))
        nanoseconds = statistics.median(own) / elements * 1e9
        print(f"| {title} | {nanoseconds:.1f} | {ratio:.2f} | {kept_bytes(optimizers[title], elements):.1f} |")


if __name__ == "__main__":
    main()
