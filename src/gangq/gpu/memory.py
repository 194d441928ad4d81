"""Memory of GPUs that have none of their own."""

from __future__ import annotations

import psutil


def unified_memory(model: str, uuid: str) -> tuple[int, str]:
    """Return what to register for a GPU that shares the system's memory: MiB and a warning."""
    vram_mb = int(psutil.virtual_memory().total) // 2**20
    return vram_mb, (
        f"{model} ({uuid}) reports no memory of its own, as parts that share the system's memory do: it is "
        f"registered with all {vram_mb} MiB of this host. Declare less with --devices if other work needs it."
    )
