"""gangq run --gang 4 -- python train.py

The digits training as a plain ``torch.distributed`` script: nothing in it knows of gangq.

It reads ``RANK WORLD_SIZE MASTER_ADDR MASTER_PORT``, the names torch expects and gangq sets for each member
of a gang, so the same file runs as a gang, under ``torchrun --nproc-per-node 4 train.py``, or as processes
started by hand. Beside it run workers with room for four: ``gangq worker --slots 4``.

Rank 0 prints the accuracy on the fifth of the data that nobody trained on, as one line of JSON.
"""

import argparse
import gzip
import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DATA = Path(__file__).resolve().parents[1] / "digits" / "digits.csv.gz"
SEED = 7
GLOBAL_BATCH = 128


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training pixels and labels, then held-out ones: the same split on every rank."""
    with gzip.open(DATA, "rt", encoding="ascii") as lines:
        rows = torch.tensor([[int(cell) for cell in line.split(",")] for line in lines])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]
    pixels, labels = rows[:, :64] / 16.0, rows[:, 64]
    held_out = len(rows) // 5
    return pixels[held_out:], labels[held_out:], pixels[:held_out], labels[:held_out]


def main() -> None:
    """Train as one rank."""
    parser = argparse.ArgumentParser(description="Train the digits classifier with DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the model is tiny: more threads a rank only fight over the cores
    torch.manual_seed(SEED)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    pixels, labels, held_out_pixels, held_out_labels = load_digits()
    pixels, labels = pixels[rank::world_size], labels[rank::world_size]
    batch = max(1, GLOBAL_BATCH // world_size)
    draw = torch.Generator().manual_seed(SEED + rank)

    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(args.steps):
        chosen = torch.randperm(len(labels), generator=draw)[:batch]
        loss = nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if rank == 0:
        with torch.no_grad():
            guessed = model.module(held_out_pixels).argmax(dim=1)
        accuracy = (guessed == held_out_labels).double().mean().item()
        print(json.dumps({"accuracy": round(accuracy, 4), "steps": args.steps, "world_size": world_size}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
