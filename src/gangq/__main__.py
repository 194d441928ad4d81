"""The command `gangq`, also as `python -m gangq`."""

import os

from gangq import private
from gangq.proc.liveness_memory import VARIABLE

# Before the imports that take time: until it is closed, other processes of this user can read its environment.
if VARIABLE in os.environ or any(map(private.is_secret, os.environ)):
    private.close()

from gangq.cli import main

if __name__ == "__main__":
    main()
