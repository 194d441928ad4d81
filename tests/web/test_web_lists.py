"""The pages of what there is: services, batches, paused tasks, usage, trips, quarantines; of an empty fleet too."""

from __future__ import annotations

from browsing import HOSTILE, cells, fetch

from sql.drive import Q, gpus
from sql.services import put


def test_an_empty_installation_says_what_there_is_not(dsn: str) -> None:
    fleet, services, batches, usage = fetch(dsn, "/", "/services", "/batches", "/usage")
    assert "No worker has registered yet" in fleet.text
    assert "There is no GPU." in fleet.text
    assert fleet.text.count("<p>Nothing.</p>") == 2
    assert "<code>gangq service set</code>" in services.text
    assert "<code>gangq submit --name</code>" in batches.text
    assert usage.text.count("<p>None.</p>") == 3
    assert fetch(dsn, "/batches/7")[0].status_code == 404


def test_services_show_how_many_are_ready_and_their_gangs(dsn: str, q: Q) -> None:
    worker = q.worker(cpus=1)
    put(q, replicas=2)
    q.tick()
    first = worker.take()
    q.call("report_ready", job_id=first["job_id"], token=first["token"], port=8000)
    q.tick()
    (page,) = fetch(dsn, "/services")
    state = '<span class="state blue">starting</span>'
    assert f"<td>chat</td><td>serve</td><td>default</td><td>{state}</td><td>1 of 2</td><td>2</td>" in cells(
        page.text
    )
    assert (
        f'href="/gangs/{first["gang_id"]}">g{first["gang_id"]}</a></td><td>1</td><td><span class="state cyan">'
        in cells(page.text)
    )
    assert "waits to be placed" in page.text
    (page,) = fetch(dsn, f"/gangs/{first['gang_id']}")
    assert 'of service <a href="/services">chat</a>' in page.text


def test_a_batch_shows_its_counts_and_the_jobs_that_failed_first(dsn: str, q: Q) -> None:
    jobs = q.submit(count=4, name=HOSTILE, tags=["lr"], at_most=3, max_attempts=1)
    worker = q.worker(slots=4)
    q.tick()
    claims = {claim.job_id: claim for claim in worker.claim()}
    claims[jobs[0]].complete()
    claims[jobs[1]].fail()
    batches, batch, job = fetch(dsn, "/batches", f"/batches/{jobs[0]}", f"/jobs/{jobs[1]}")
    assert f'<a href="/batches/{jobs[0]}">b{jobs[0]}</a>' in batches.text
    assert "<small>lr</small>" in batches.text
    assert "UTC</td><td>1 waiting, 1 running, 1 done, 1 failed</td>" in cells(batches.text)
    assert "1 waiting, 1 running, 1 done, 1 failed, 0 cancelled" in batch.text
    assert "3 at once at most" in batch.text
    assert batch.text.index(f"/jobs/{jobs[1]}") < batch.text.index(f"/jobs/{jobs[0]}")
    assert f'number 1 of batch <a href="/batches/{jobs[0]}">b{jobs[0]}</a>' in job.text
    for page in (batches, batch):
        assert "<script>alert" not in page.text


def test_a_paused_task_is_on_the_fleet_page_with_who_and_why(dsn: str, q: Q) -> None:
    q.call("learn_gap", task="train", device_class="H100", longest_s=1, beats=1)
    q.call("learn_gap", task="train", device_class="H200", longest_s=1, beats=1)
    (before,) = fetch(dsn, "/")
    assert "Paused tasks" not in before.text
    q.call("pause_task", task="train", reason="new data")
    (page,) = fetch(dsn, "/")
    assert cells(page.text).count("<td>train</td><td>resumed</td><td>postgres</td><td>new data</td>") == 1


def test_usage_trips_and_quarantines_are_shown(dsn: str, q: Q) -> None:
    worker = q.worker(devices=gpus(80000, 80000))
    job = q.submit(gpus=1)
    q.tick()
    claim = worker.take()
    q.live_on(3600, worker)
    claim.trip()
    free = q.value("select uuid from gangq.devices where state = 'free' limit 1")
    q.call("quarantine", device_uuid=free, reason="xid 79")
    (page,) = fetch(dsn, "/usage")
    assert "<td>postgres</td><td>default</td><td>1</td><td>1.00</td><td>1.00</td>" in cells(page.text)
    assert f'<td><a href="/jobs/{job}">{job}</a></td><td>host-w1</td>' in cells(page.text)
    assert f"<td>host-w1</td><td>{free}</td>" in cells(page.text)
    assert "xid 79" in page.text


def test_a_planned_start_says_when_and_after_what(dsn: str, q: Q) -> None:
    worker = q.worker(devices=gpus(80000), lease_s=1e5)
    running, _ = q.running_gang(worker, gpus=1, budget_s=600)
    planned = q.submit_gang(1, "next", gpus=1, budget_s=60)
    q.tick()
    (row,) = q.sql("select starts_at at time zone 'UTC' as at, follows from gangq.planned")
    assert f"g{running.id}" in row["follows"]
    (page,) = fetch(dsn, "/")
    assert (
        f'<tr id="planned-g{planned.id}"><td><a href="/gangs/{planned.id}">g{planned.id}</a></td><td>default</td>'
        f"<td>next</td><td>{row['at']:%Y-%m-%d %H:%M:%S} UTC</td><td>{row['follows']}</td>"
    ) in cells(page.text)


def test_evidence_and_output_of_a_gang_are_shown_by_rank(dsn: str, q: Q) -> None:
    gang, claims = q.running_gang(*q.workers(2, lease_s=1e5))
    for claim in claims:
        text = "".join(f"rank {claim['rank']} line {n}\n" for n in range(900))
        q.call("append_log", job_ids=[claim.job_id], tokens=[claim.token], seqs=[0], chunks=[text])
    claims[1].trip(76, f"made no progress for 600 s {HOSTILE}", evidence={"why": "all ranks wait"})
    gang_page, job_page = fetch(dsn, f"/gangs/{gang.id}", f"/jobs/{claims[1].job_id}")
    link = f'<a href="/jobs/{claims[1].job_id}#evidence">{claims[1].job_id}</a>'
    row = f"<td>1</td><td>{link}</td><td>trip</td><td>76 stall</td><td>made no progress for 600 s"
    assert row in cells(gang_page.text)
    assert "<script>alert" not in gang_page.text
    for rank in (0, 1):
        assert f'aria-label="Output of rank {rank}"' in gang_page.text
        assert f"rank {rank} line 899" in gang_page.text
        assert f"rank {rank} line 0\n" not in gang_page.text
    assert '<section id="evidence"><h2>Evidence</h2>' in job_page.text
    assert "all ranks wait" in job_page.text


def test_a_moment_has_its_zone_whatever_that_of_the_database_is(dsn: str, q: Q) -> None:
    name = q.value("select current_database()")
    q.sql(f"alter database {name} set timezone to 'Asia/Tokyo'")
    job = q.submit()
    at = q.value("select submitted_at at time zone 'UTC' from gangq.jobs")
    (page,) = fetch(dsn, f"/jobs/{job}")
    assert f"at {at:%Y-%m-%d %H:%M:%S} UTC." in page.text


def test_numbers_are_marked_as_such_in_heading_and_cell(dsn: str, q: Q) -> None:
    (page,) = fetch(dsn, "/")
    assert '<th class="number">waiting jobs</th>' in page.text
    assert '<td class="number" data-label="waiting jobs">0</td>' in page.text
    assert '<td class="number" data-label="queue"' not in page.text
