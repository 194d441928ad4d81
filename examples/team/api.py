# uvicorn api:web
"""The team's web service: it submits an experiment in the transaction that stores it, and shows how far it is."""

from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI, HTTPException
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tasks import app, prepare, submit_experiment

# The database of the jobs: what is stored and what is submitted commit together.
engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(app.dsn))


class Base(DeclarativeBase):
    pass


class Experiment(Base):
    __tablename__ = "experiments"

    name: Mapped[str] = mapped_column(primary_key=True)
    sweep: Mapped[int]
    gang: Mapped[int]
    published: Mapped[int]


@asynccontextmanager
async def lifespan(web):
    Base.metadata.create_all(engine)
    yield
    engine.dispose()


web = FastAPI(lifespan=lifespan)


@web.post("/experiments", status_code=201)
def begin(name: str, dataset: str, epochs: int = 20):
    try:
        with Session(engine) as session, session.begin():
            once = prepare.options(unique=dataset, unique_for="1h", connection=session)
            prepared = once.submit(dataset=dataset)
            experiment = Experiment(name=name, **submit_experiment(name, prepared, epochs, session))
            session.add(experiment)
            session.flush()
            return {"prepared": prepared.id, "existed": prepared.existed}
    except IntegrityError:
        raise HTTPException(409, f"there is an experiment {name}") from None


@web.get("/experiments/{name}")
def show(name: str):
    experiment = find(name)
    sweep = app.batch(experiment.sweep).progress()
    published = app.job(experiment.published).row()
    return {
        "sweep": {"done": sweep.done, "running": sweep.running, "of": sweep.size},
        "training": str(app.gang(experiment.gang).status()),
        "state": published.state,
        "report": published.result,
    }


@web.delete("/experiments/{name}", status_code=204)
def cancel(name: str):
    experiment = find(name)
    for handle in (app.batch(experiment.sweep), app.gang(experiment.gang)):
        handle.cancel(f"experiment {name} was deleted")


def find(name):
    with Session(engine) as session:
        experiment = session.get(Experiment, name)
    if experiment is None:
        raise HTTPException(404, f"there is no experiment {name}")
    return experiment
