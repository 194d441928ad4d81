"""GANGQ_DSN=embedded python outbox.py

A row of your own and its job are committed together, or neither is. The job's effect and its end are, too.
No outbox table and no relay process: the queue is in the database of the rows.
A worker of its own: FILMS_DSN=$(gangq db dsn --embedded) gangq worker --embedded outbox.py:app
"""

import os

import psycopg

import gangq

app = gangq.App()


def films():
    """The database of the rows. No job gets GANGQ_DSN: what its handler uses has a variable of its own."""
    return psycopg.connect(os.environ["FILMS_DSN"])


@app.task(wait_for_hardware=True)  # its worker starts after the submit
def render(ctx, film):
    """Its effect commits with its end: what a lost attempt has written is rolled back."""
    with films() as connection:
        connection.execute("update example_films set frames = frames + 24 where id = %s", [film])
        ctx.complete(connection, "rendered")


def order(title, paid=True):
    with films() as connection:  # commits at its end, unless there is an error
        insert = "insert into example_films (title) values (%s) returning id"
        (film,) = connection.execute(insert, [title]).fetchone()
        job = render.options(connection=connection).submit(film=film)
        if not paid:
            raise ValueError(f"{title} is not paid for")
        return job


if __name__ == "__main__":
    os.environ.setdefault("FILMS_DSN", app.dsn)
    with films() as connection:
        columns = "id serial, title text, frames int default 0"
        connection.execute(f"create table if not exists example_films ({columns})")
    order("Heat")
    try:
        order("Alien", paid=False)
    except ValueError as error:
        print("rolled back:", error)
    app.run_worker(once=True)
    with films() as connection:
        for film in connection.execute("select id, title, frames from example_films order by id"):
            print("film:", film)
    jobs = app.client.jobs(task="render")
    print("jobs:", sorted((job.payload["film"], job.state) for job in jobs))
