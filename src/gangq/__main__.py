"""The command `gangq`, also as `python -m gangq`."""

import atexit
import gc
import os

from gangq import private
from gangq.proc.liveness_memory import VARIABLE

# Before the imports that take time: until it is closed, other processes of this user can read its environment.
if VARIABLE in os.environ or any(map(private.is_secret, os.environ)):
    private.close()

from gangq.cli import main

# The interpreter would look three times through all that was imported for garbage before it ends: 60 ms.
atexit.register(gc.freeze)

if __name__ == "__main__":
    main()
