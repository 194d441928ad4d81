"""A durable job queue inside PostgreSQL for work that occupies GPUs."""
