"""The small program around a worker: sees it freeze, ends what it leaves, and says how it died.

Run as ``python -I -S supervisor.py [--silence S] [--start S] [--json] -- <worker's command line>``; ``gangq
worker`` turns itself into it (exec, so it has the pid that a service manager knows) and runs as its child.

A Python thread cannot end a process whose interpreter is held by C code. SIGKILL from inside does nothing to PID 1 of
a container. A process cannot report its own death by the kernel's OOM killer. A parent can do all that, if no fault
of the worker can reach it: 12 MB, no libraries, no database.

* *Signs of life* are written into shared memory by every thread of the library that runs, once a second at least.
  Without one for the limit [30 s] the worker is looked at twice, a second apart: its stacks, which ``faulthandler``
  writes (a signal, no interpreter needed), and the processor time of its threads. If no thread moved, the whole
  tree gets SIGKILL, and the exit code is 80. Time in which this process itself did not run is not counted. Before
  the first sign another limit holds [600 s]: imports may take a minute and hold the GIL.
* *The tree*: this is a subreaper (or PID 1), so whatever the worker has started ends up as a child of it.
  When the kernel answers ``ECHILD``, the tree is dead. Guardians get the time they give to commands, unless
  the worker was frozen.
* *The report*, to the database, is made by a fresh process (:mod:`gangq.worker.death_main`): which job the worker was
  in and why it died, and that all of it is dead. The worker's own report and this one share 5 s, counted from the
  verdict. What cannot be told is kept in the worker's directory, for its next start, the bouncer or report-death.
* *A process that survives SIGKILL* (state D: a driver, a dead mount) is reported first, then the exit code is
  87: no second worker may start beside it. As PID 1 even this exit waits for that process: hence the order.
* *systemd*: READY=1 once the worker has registered, WATCHDOG=1 only when it gave a sign of life, never on its
  own account.

The exit code is the worker's own, 128 + n when signal n killed it, 86 when that was for want of memory. It
restarts nothing: that is for the service manager.

What it does is in :mod:`gangq.proc.supervision`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Its package is the folder that this file lies in, without gangq above it. Appended, so that nothing beside that
    # folder can ever stand in for a module of the standard library.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from proc.supervision import main  # type: ignore[import-not-found]

    sys.exit(main(sys.argv[1:]))
