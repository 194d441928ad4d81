# python notebook.py
"""A look at one experiment; Jupyter and editors run it cell by cell."""

# %%
from tasks import app, prepare, submit_experiment

prepared = prepare.options(unique="digits").submit(dataset="digits")
ids = submit_experiment("notebook", prepared)

# %%
sweep = app.batch(ids["sweep"])
for one in sorted(sweep.results(timeout="1m"), key=lambda one: one["loss"])[:3]:
    print(one)

# %%
print(app.gang(ids["gang"]).results(timeout="1m"))

# %%
print(app.job(ids["published"]).result(timeout="1m"))
