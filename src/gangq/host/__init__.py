"""The host's side: restarting the workers that are flagged dead, and the systemd units that gangq ships.

:class:`gangq.host.bouncer.Bouncer` is what ``gangq bounce`` runs; :mod:`gangq.host.backends` restarts one worker;
:mod:`gangq.host.deaths` proves and reports that one is dead; :mod:`gangq.host.units` puts the units in place.
"""
