"""Rollouts: engine, weight pushes, worker process and the collector."""
