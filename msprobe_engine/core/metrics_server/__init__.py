"""Metrics over HTTP for Prometheus, bounded in connections, time and size."""
