"""Every GPU kernel compiled ahead of time, without a GPU: ``fastmod compile``.

Kept empty: ``targets`` is read by tools that have neither torch nor triton.
"""
