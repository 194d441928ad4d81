"""Watchdogs: what ends a job that no longer gets anywhere, and says why."""
