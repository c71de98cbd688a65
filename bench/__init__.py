"""The cases of the benchmarks: `fastmod bench` for the table, `python -m pytest bench` for pytest-benchmark groups."""
