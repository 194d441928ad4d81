"""The clock that deadlines are counted on: seconds since boot, those asleep included."""

from gangq.gpu.reading import boottime

__all__ = ["boottime"]
