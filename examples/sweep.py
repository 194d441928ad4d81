"""GANGQ_DSN=embedded python sweep.py

Forty learning rates as one batch of jobs, and the best of them.
With GPUs: python sweep.py --gpus 1, and on each machine: gangq worker sweep.py:app
"""

import argparse

import gangq

app = gangq.App()
POINTS = [(x / 10, 3 * x / 10) for x in range(-10, 11)]


@app.task(wait_for_hardware=True)  # its worker starts after the submit
def evaluate(ctx, rate, steps=30):
    """The loss after so many steps of gradient descent with this rate."""
    weight = 0.0
    for step in range(steps):
        weight -= rate * sum(2 * x * (weight * x - y) for x, y in POINTS) / len(POINTS)
        ctx.beat(step=step + 1, total=steps)
    return {"rate": rate, "loss": sum((weight * x - y) ** 2 for x, y in POINTS)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=0, help="whole GPUs for each job")
    gpus = parser.parse_args().gpus

    grid = [{"rate": n / 20} for n in range(1, 41)]
    sweep = evaluate.options(gpus=gpus).submit_many(grid, name="sweep")
    app.run_worker(once=True)  # until nothing is left to do; without this line other workers do it
    results = sorted(sweep.results(timeout="1m"), key=lambda result: result["loss"])
    for result in results[:3]:
        print(f"rate {result['rate']:.2f}  loss {result['loss']:.2e}")
    print(f"{len(results)} rates tried; the best is {results[0]['rate']:.2f}")
