"""The command `gangq`, also as `python -m gangq`."""

import atexit
import gc
import io
import os
import sys

from gangq import private
from gangq.proc.liveness_memory import VARIABLE

# Before the imports that take time: until it is closed, other processes of this user can read its environment.
if VARIABLE in os.environ or any(map(private.is_secret, os.environ)):
    private.close()

from gangq.cli import main

# Names and output of others may hold letters that a terminal of another encoding than UTF-8 lacks.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
# The interpreter would look three times through all that was imported for garbage before it ends: 60 ms.
atexit.register(gc.freeze)

if __name__ == "__main__":
    main()
