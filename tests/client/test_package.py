"""The package's own surface."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gangq
from gangq import errors, schema


def test_every_public_name_is_there_and_nothing_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, gangq; assert 'psycopg' not in sys.modules; "
        "assert all(getattr(gangq, name) is not None for name in gangq.__all__); "
        "assert set(gangq.__all__) == set(gangq._HOME) <= set(dir(gangq)); assert 'psycopg' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_type_checkers_know_every_public_name() -> None:
    # Of a name that is missing there they say nothing: the module's __getattr__ makes it Any.
    tree = ast.parse(Path(gangq.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    known = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert known == gangq._HOME


def test_the_client_leaves_the_decision_to_the_decider() -> None:
    script = (
        "import sys, pkgutil, importlib, gangq.client; "
        "parts = [part.name for part in pkgutil.iter_modules(gangq.client.__path__)]; "
        "[importlib.import_module('gangq.client.' + part) for part in parts]; "
        "print([name for name in sys.modules if name.startswith(('gangq.placement', 'gangq.decider'))])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(gangq, "Celery")


def test_a_checkout_that_was_never_installed_can_write_down_its_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    # Asked for once, it is kept: what is said here must not be.
    monkeypatch.setitem(vars(gangq), "__version__", "")
    monkeypatch.delitem(vars(gangq), "__version__")
    assert "0+checkout" in schema.dump_sql()[:200]


def test_every_error_is_in_one_place() -> None:
    for module in pkgutil.walk_packages(gangq.__path__, "gangq."):
        if module.name not in ("gangq.__main__", "gangq.proc.guardian"):
            importlib.import_module(module.name)
    found: list[type[errors.GangqError]] = [errors.GangqError]
    for kind in found:
        found += kind.__subclasses__()
    assert {
        f"{kind.__module__}.{kind.__name__}"
        for kind in found
        if kind.__module__.startswith("gangq.")
        and kind.__module__ != "gangq.errors"
        and kind.__name__[0] != "_"
    } == set()
    assert gangq.Unfit is errors.Unfit
