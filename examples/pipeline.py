"""GANGQ_DSN=embedded python pipeline.py

Every night at three: prepare the data, work on four shards of it, then report. Now: one night at once.
The schedule goes on, wherever a worker runs, until: gangq schedule rm nightly
"""

import gangq

app = gangq.App()


@app.task
def prepare(ctx, rows):
    return list(range(rows))


@app.task
def shard(ctx, n, of):
    (rows,) = ctx.inputs.values()  # what the job returned that this one waited for
    return sum(rows[n::of])


@app.task
def report(ctx):
    return {"shards": len(ctx.inputs), "sum": sum(ctx.inputs.values())}


@app.schedule("0 3 * * *", tz="Europe/Oslo", skip_if_running=True, payload={"rows": 1000})
@app.task(wait_for_hardware=True)  # its worker starts after run_now
def nightly(ctx, rows):
    """A job that submits the others, each to start when what it needs is done."""
    prepared = prepare.submit(rows=rows)
    shards = shard.options(after=[prepared]).submit_many([{"n": n, "of": 4} for n in range(4)])
    return report.options(after=shards).submit().id


if __name__ == "__main__":
    app.store_schedules("pipeline.py:app")  # a worker whose login may submit does this when it starts
    night = app.schedules["nightly"]
    started = night.run_now()
    app.run_worker(once=True)
    reported = app.job(app.job(started.id).result(timeout="1m"))
    print("report:", reported.result(timeout="1m"))
    print("the next night is:", night.row().next_due)
