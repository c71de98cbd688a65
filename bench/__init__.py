"""Benchmarks: ``make bench`` for the table of ratios, pytest-benchmark for the groups."""
