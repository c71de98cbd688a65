"""Benchmarks: contenders are checked equal, then timed in turns, and kept as JSON. The command is ``fastmod bench``.

The cases themselves are in the files ``bench/test_<op>.py`` of a checkout.
"""
