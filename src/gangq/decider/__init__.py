"""The decider: it reads the board, decides with :mod:`gangq.placement`, and has the database carry that out.

Everything here is a generator of steps (:data:`gangq.client.verb.Steps`): a client, the control loop of a worker or a
test runs it. The client imports this room only when `tick`, `plan`, `explain_now` or `replay` is called.
"""
