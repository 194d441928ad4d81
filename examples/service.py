"""GANGQ_DSN=embedded python service.py

Two replicas that gangq keeps up: each answers over HTTP, one is then scaled away, and the service is deleted.
"""

import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gangq

app = gangq.App()


@app.service(replicas=2, linger="200ms")
def greet(ctx):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"hello from job {ctx.job.id}".encode())

    server = ThreadingHTTPServer(("", ctx.service.port), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ctx.ready()  # from here on it is an endpoint
    while not ctx.wait_stopping("1s"):
        ctx.load(0.1)
    server.shutdown()


def endpoints(count):
    """Where a proxy would send requests, once there are so many: `gangq service endpoints greet`."""
    while len(found := app.client.endpoints(service="greet")) != count:
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    # A worker stores the service and runs its replicas. Yours run on the GPU machines.
    with subprocess.Popen(
        [sys.executable, "-m", "gangq", "worker", "service.py:app", "--slots=2", "--log-level=warning"]
    ) as worker:
        for one in endpoints(2):
            print(urllib.request.urlopen(f"http://{one.address}:{one.port}/").read().decode())
        app.services["greet"].scale(1)
        print("endpoints after scale(1):", len(endpoints(1)))
        app.client.delete_service(name="greet")
        while app.client.services(name="greet"):  # forgotten once its last gang has ended
            time.sleep(0.05)
        worker.terminate()
