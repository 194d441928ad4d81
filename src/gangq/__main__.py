"""`python -m gangq` is the command `gangq`."""

from gangq.cli import main

main()
