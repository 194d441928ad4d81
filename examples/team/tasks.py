# gangq worker tasks:app --devices 2x8GiB --slots 4
"""The tasks of a small team: prepare a data set, try 30 learning rates on it, train on two GPUs, report, publish."""

import random

import gangq

app = gangq.App()  # the database that GANGQ_DSN names


@app.task
def prepare(ctx, dataset):
    """The rows of a data set. Larger ones go to shared storage, and the result is where."""
    chance = random.Random(dataset)
    return [[x, 3 * x + chance.gauss(0, 0.1)] for x in (chance.uniform(-1, 1) for _ in range(60))]


@app.task
def evaluate(ctx, rate):
    """One point of the sweep."""
    (rows,) = ctx.inputs.values()  # what prepare returned
    weight = 0.0
    for _ in range(20):
        weight = improve(weight, rows, rate)
    return {"rate": rate, "loss": sum((weight * x - y) ** 2 for x, y in rows) / len(rows)}


@app.task(gpus=1, budget="10m")
def train(ctx, epochs):
    """One rank of a gang, on its share of the rows. It goes on where its last checkpoint was saved."""
    (rows,) = ctx.inputs.values()
    share = rows[ctx.gang.rank :: ctx.gang.world_size]
    start, weight = 0, 0.0
    if ctx.checkpoint:
        start, weight = ctx.checkpoint.step, float(ctx.checkpoint.data)
    for epoch in range(start, epochs):
        weight = improve(weight, share, rate=0.5)
        ctx.wait_stopping("50ms")  # stands for what a GPU would do
        ctx.save_checkpoint(epoch + 1, str(weight).encode())
        ctx.beat(step=epoch + 1, total=epochs, weight=weight)
        ctx.raise_if_stopping()
    return {"rank": ctx.gang.rank, "weight": weight, "resumed_from": start}


@app.task(limit_key="simulator", limit=2)
def simulate(ctx, case):
    """A tool with two licences: never more than two of these run, on all machines together."""
    ctx.wait_stopping("100ms")
    return {"case": case, "passed": True}


@app.task
def report(ctx):
    """What came of all that the job was told to wait for."""
    found = list(ctx.inputs.values())
    best = min((one for one in found if "rate" in one), key=lambda one: one["loss"])
    weights = [one["weight"] for one in found if "weight" in one]
    passed = sum(one["passed"] for one in found if "case" in one)
    return {"best_rate": best["rate"], "weight": round(sum(weights) / len(weights), 2), "passed": passed}


@app.task(retry=gangq.Retry(5, backoff="100ms..10s", on=(ConnectionError,)))
def publish(ctx):
    """A flaky service: it answers the third attempt."""
    if ctx.attempt < 3:
        raise ConnectionError("the registry is away")
    (reported,) = ctx.inputs.values()
    return reported


@app.schedule("0 3 * * *", tz="Europe/Oslo", skip_if_running=True, payload={"dataset": "nightly"})
@app.task
def retrain(ctx, dataset):
    """Every night: a job that submits the others."""
    return submit_experiment("nightly", prepare.submit(dataset=dataset))


def submit_experiment(name, prepared, epochs=20, connection=None):
    """Submit all that follows a prepared data set, in the transaction of `connection`; return the ids."""
    sweep = evaluate.options(after=[prepared], connection=connection).submit_many(
        [{"rate": n / 50} for n in range(1, 31)], name=name, at_most=3
    )
    gang = train.gang(2, after=[prepared], connection=connection).submit(epochs=epochs)
    cases = simulate.options(after=[gang], connection=connection).submit_many(
        [{"case": n} for n in range(6)], name=f"{name}-cases"
    )
    reported = report.options(after=[sweep, gang, cases], connection=connection).submit()
    published = publish.options(after=[reported], connection=connection).submit()
    return {"sweep": sweep.id, "gang": gang.id, "published": published.id}


def improve(weight, rows, rate):
    """One step of gradient descent."""
    return weight - rate * sum(2 * x * (weight * x - y) for x, y in rows) / len(rows)
