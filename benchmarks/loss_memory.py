"""The most memory that KL takes beyond its inputs, forward and backward, against full logits of student and teacher.

    python benchmarks/loss_memory.py --positions 2048

Hidden states are as wide as SmolLM2-135M's, and the vocabulary is LLaMA 3's. Each way runs in a fresh process.
"""

import argparse
import resource
import subprocess
import sys

import torch

from moh_llm.devices import choose_device
from moh_llm.training.losses import token_losses

VOCABULARY, HIDDEN_SIZE = 128_256, 576


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--probe", choices=["chunked", "full"], help=argparse.SUPPRESS)  # a fresh process
    args = parser.parse_args()
    if args.probe:
        print(probe(args.probe, args.positions))
        return 0
    found = {}
    for kind in ("chunked", "full"):
        command = [sys.executable, __file__, "--probe", kind, "--positions", str(args.positions)]
        found[kind] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"KL of {args.positions} positions over {VOCABULARY:,} words, forward and backward: {found['chunked']:.0f} MiB "
        f"in chunks, {found['full']:.0f} MiB with full logits, ratio {found['chunked'] / found['full']:.3f}"
    )
    return 0


def probe(kind: str, positions: int) -> float:
    """MiB that one loss and its gradient take at most."""
    device = choose_device()
    draw = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(positions, HIDDEN_SIZE, generator=draw).to(device) for _ in range(2))
    head = torch.randn(VOCABULARY, HIDDEN_SIZE, generator=draw).to(device)
    hidden.requires_grad_(), head.requires_grad_()
    targets = torch.zeros(positions, dtype=torch.long, device=device)
    # What has been touched for a little one is not counted.
    token_losses(hidden[:8], head, targets[:8], teacher[:8], head.detach())[0].backward()
    hidden.grad = head.grad = None
    before = peak_mib(device)
    if kind == "chunked":
        loss, _ = token_losses(hidden, head, targets, teacher, head.detach())
    else:
        own = (hidden @ head.T).log_softmax(-1)
        other = (teacher @ head.detach().T).log_softmax(-1)
        loss = torch.nn.functional.kl_div(own, other, log_target=True, reduction="sum")
    loss.backward()
    return peak_mib(device) - before


def peak_mib(device: torch.device) -> float:
    """The most memory so far: of the device, or of this process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    sys.exit(main())
