"""Deliver notifications from a host of the operator's choice: `gangq notify run`."""

from __future__ import annotations

from gangq.notify.delivery import Deliver, Failed, Post, Program, signature
from gangq.notify.runner import Outcome, Runner

__all__ = ["Deliver", "Failed", "Outcome", "Post", "Program", "Runner", "signature"]
