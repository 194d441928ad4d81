"""GANGQ_DSN=embedded uvicorn api:web

A web service that submits jobs and awaits them. Try: curl -X POST localhost:8000/primes/5000
"""

import subprocess
import sys
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

import gangq

app = gangq.App()


@app.task(wait_for_hardware=True)  # the first request may come before the worker is there
def primes(ctx, below):
    """How many primes there are below a number."""
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, below))


@asynccontextmanager
async def lifespan(web):
    # For this example only: a worker beside the service. Yours run on the GPU machines, and outlive deployments.
    worker = subprocess.Popen([sys.executable, "-m", "gangq", "worker", "api:app", "--log-level=warning"])
    async with app.aio:
        yield
    worker.terminate()
    worker.wait()


web = FastAPI(lifespan=lifespan)


@web.post("/primes/{below}")
async def count(below: int, wait: float = 10):
    """The answer, or where to ask for it if it takes longer than `wait` seconds."""
    job = await primes.aio.submit(below=below)
    try:
        return {"job": job.id, "primes": await job.result(timeout=wait)}
    except gangq.WaitTimeout:
        return {"job": job.id, "ask": f"/jobs/{job.id}"}


@web.get("/jobs/{id}")
async def show(id: int):
    try:
        row = await app.aio.job(id).row()
    except gangq.NotFound:
        raise HTTPException(404, f"there is no job {id}") from None
    return {"job": id, "state": row.state, "result": row.result}
