"""Benches: each prints one table and writes one JSON; none asserts an absolute time."""
