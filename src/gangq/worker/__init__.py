"""The worker: it claims jobs, keeps its lease, runs handlers and commands, and stops them when told."""
