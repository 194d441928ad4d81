"""The worker: it claims jobs, keeps its lease, runs handlers and commands, and stops them when told.

What its modules are for, each where it matters most:

- start: `main`, `options`, `fitness`, `predecessor`, `host_record`
- incarnation: `registration`, `incarnation`, `session`, `control`, `repeating`, `maintenance`
- what it stores, asks and serves beside jobs: `schedules`, `limits`, `metrics`
- claiming: `loops`, `claims`, `listener`, `jobs`, `dispatch`; of gangs and services: `gangs`, `replicas`
- running inline: `runner_inline`, `context_impl`, `handler_info`, `output`, `watching`
- running in a child process: `runner_command`, `environment`, `child`, `launch`, `forkserver`, `socket_server`; in
  it: `child_main`, `child_context`
- async jobs that share a process: `shared`, `shared_orders`; in it: `async_main`
- reporting: `reporter`, `endings`, `results`; by the supervisor: `death_main`
- lease and drain: `lease`, `liveness`, `signals`, `drain`, `shutdown`
"""
