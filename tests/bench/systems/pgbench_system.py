"""The floor without Python: the same SQL by pgbench, one client, prepared statements, on the floor's own tables."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from systems.base import Absent
from systems.floor import Floor

_TAKEN = """
with taken as (
  update floor_jobs set state = 'running', claimed_at = clock_timestamp(), attempts = attempts + 1
  where id = any (array(
    select id from floor_jobs where state = 'pending'
    order by priority desc, id limit {batch} for update skip locked))
  returning id, payload)
select array_agg(id) as ids, count(payload) as payloads from taken \\gset
update floor_jobs set state = 'done', finished_at = clock_timestamp() where id = any (:ids::bigint[]);
"""
_INSERT = "insert into floor_jobs (task, payload) values ('noop', '{}') returning id;\n"
_RATE = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)


class Pgbench(Floor):
    """Its measures are taken by the program itself, see `floors.py`."""

    name = "pgbench"
    measures = ()

    def prepare(self, bindir: Path) -> None:
        beside = bindir / "pgbench"
        found = str(beside) if beside.exists() else shutil.which("pgbench")
        if not found:
            raise Absent(f"there is no pgbench in {bindir} nor on PATH")
        self._program = found

    def version(self) -> str:
        return subprocess.run(
            [self._program, "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()

    def drain(self, dsn: str, script: Path, count: int, batch: int) -> float:
        """Jobs a second that are claimed and finished, ``batch`` at a time; ``count`` of them wait."""
        script.write_text(_TAKEN.format(batch=batch))
        return batch * self._run(dsn, script, count // batch)

    def insert(self, dsn: str, script: Path, count: int) -> float:
        """Jobs a second that are inserted one by one."""
        script.write_text(_INSERT)
        return self._run(dsn, script, count)

    def _run(self, dsn: str, script: Path, transactions: int) -> float:
        command = [self._program, "-n", "-M", "prepared", "-t", str(transactions), "-f", str(script), dsn]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        rate = _RATE.search(said.stdout)
        if said.returncode or not rate:
            raise RuntimeError(f"pgbench failed ({said.returncode}): {said.stderr[-1000:]}")
        return float(rate[1])
