"""The host's side: restarting the workers that are flagged dead, and the systemd units that gangq ships.

:class:`gangq.host.bouncer.Bouncer` is what ``gangq bounce`` runs; :mod:`gangq.host.choice` says how a worker is
restarted and :mod:`gangq.host.backends` restarts it; :mod:`gangq.host.seen` finds its process on this host;
:mod:`gangq.host.deaths` proves and reports that one is dead; :mod:`gangq.host.units` puts the units in place;
:mod:`gangq.host.commands` runs a program of the host for a bounded time.

A new way to restart a worker is a ``Backend`` in ``backends``; in ``choice`` its name in ``KINDS``
and ``WorkerMap.parse``, a branch in ``WorkerMap.backend``, and a row in the table of ``choose``; the help of
``--map`` in :mod:`gangq.cli.bounce`; if workers register it, also ``_registered``.
"""
