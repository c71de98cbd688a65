"""Benchmarks: contenders in turns on one clock, checked equal first, kept as JSON. ``fastmod bench`` is the command.

The cases themselves are in the files ``bench/test_<op>.py`` of a checkout.
"""
