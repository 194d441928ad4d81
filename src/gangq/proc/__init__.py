"""Processes: what the kernel says of them, how their trees are ended, and the proof that they are dead.

Standard library only. The supervisor and the guardian are programs of their own, run without gangq on their path:
there this package is called ``proc``. So nothing here imports anything of gangq outside this package, its modules
import each other relatively, and those that these programs load import little.
"""
