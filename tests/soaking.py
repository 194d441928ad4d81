"""Whether this is `make soak`: random walks are drawn anew and go further, and what depends on time is repeated."""

from __future__ import annotations

import os

SOAK = os.environ.get("GANGQ_SOAK", "0") not in ("", "0")
