"""gangq demo

The demo's tasks: a data-parallel training for a gang, and small solo jobs that run beside it. The demo starts workers
for them: gangq worker digits_app:app --queue demo
"""

from __future__ import annotations

import math
from typing import Any

import train

import gangq

app = gangq.App()


@app.task(name="train_digits", queue="demo", gpus=1, vram_mb=8_000)
def train_digits(ctx: gangq.Context, steps: int, step_delay_s: float = 0.02) -> dict[str, Any]:
    """One rank of the training (`train.train`); needs a gang."""
    try:
        return train.train(ctx, steps=steps, step_delay_s=step_delay_s)
    except train.PeerLost:
        # A rank that loses a peer is a victim, not the culprit: wait until the gang is told to stop on behalf of
        # the one that died, and take the blame only if nobody else is found to bear it. A rank that is frozen is
        # found after 30 s.
        if ctx.wait_stopping(40):
            ctx.raise_if_stopping()
        raise


@app.task(name="render_tile", queue="demo", gpus=1)
def render_tile(ctx: gangq.Context, tile: int, size: int = 96) -> dict[str, Any]:
    """One tile of a fractal: how many of its points never escape."""
    inside = 0
    for row in range(size):
        ctx.beat(step=row, total=size, phase="run")
        for column in range(size):
            point = complex(
                -2.2 + 3 * (column / size + tile % 4) / 4, -1.5 + 3 * (row / size + tile // 4) / 4
            )
            z = 0j
            for _ in range(40):
                z = z * z + point
                if math.hypot(z.real, z.imag) > 2:
                    break
            else:
                inside += 1
    return {"tile": tile, "inside": inside, "of": size * size}
