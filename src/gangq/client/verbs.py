r"""Every verb: the methods that `Client` and `AsyncClient` have.

Each is declared once, in one of four modules, named as the SQL function or view, with its arguments; what the
annotations mean is in `gangq.client.verb`. Called on `Verbs` itself, a verb builds its `Query` for `execute`. What
nobody calls from Python has no method: `call` calls it. A docstring here says what a verb is for and what it raises;
what each argument means and who may call it is said once, with the SQL function: `\df+ gangq.claim` in psql, or the
reference of SQL.
"""

from __future__ import annotations

import inspect

from gangq.client.operator_verbs import OperatorVerbs
from gangq.client.submitter_verbs import SubmitterVerbs
from gangq.client.verb import Verb
from gangq.client.views import Views
from gangq.client.worker_verbs import WorkerVerbs


class Verbs(SubmitterVerbs, WorkerVerbs, OperatorVerbs, Views):
    """The methods of both clients."""

    def __init_subclass__(cls) -> None:
        """Give a client its methods: real functions, so that help() and inspect know them."""
        super().__init_subclass__()
        execute = vars(cls).get("execute")
        if execute is None or not isinstance(cls.submit, Verb):
            return
        awaited = inspect.iscoroutinefunction(execute)
        for name in dir(Verbs):
            declared = getattr(Verbs, name)
            if isinstance(declared, Verb):
                setattr(cls, name, declared.method(awaited))
