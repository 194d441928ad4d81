"""GANGQ_DSN=embedded python batch_inference.py

A worker loads a model once and then paints one prompt after another. Each denoising step beats, so a hang is
noticed, progress shows in `gangq top`, and a job that is told to stop leaves at its next step.
"""

import functools
import time

import gangq

app = gangq.App()


class Pipeline:
    """Stands for diffusers.DiffusionPipeline: it is called in the same way, and calls back in the same way."""

    def __call__(self, prompt, num_inference_steps, callback_on_step_end):
        kwargs = {}
        for step in range(num_inference_steps):
            time.sleep(0.02)
            kwargs = callback_on_step_end(self, step, 1000 - step, kwargs)
        return f"a picture of {prompt}"


@functools.cache  # one for each process: the jobs after the first find it warm
def load(model):
    print(f"loading {model}")
    time.sleep(1)
    return Pipeline()


def beating(ctx, steps):
    """What diffusers calls after each step."""

    def on_step_end(pipeline, step, timestep, kwargs):
        ctx.raise_if_stopping()
        ctx.beat(step=step + 1, total=steps)
        return kwargs

    return on_step_end


# Placed on a worker that has the model loaded, if one has room. Here the worker starts after the submit.
@app.task(model="painter", wait_for_hardware=True)
def paint(ctx, prompt, steps=5):
    pipeline = load("painter")
    ctx.set_model("painter")
    return pipeline(prompt, num_inference_steps=steps, callback_on_step_end=beating(ctx, steps))


if __name__ == "__main__":
    pictures = paint.submit_many([{"prompt": prompt} for prompt in ("a fjord", "a fox", "a boat")])
    app.run_worker(once=True, slots=1, light=0)  # one slot: all jobs run in this process
    for picture in pictures:
        print(picture.result(timeout="1m"))
