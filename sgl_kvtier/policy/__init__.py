"""The room that decides. Standard library only, one thread, no clock, no randomness, no I/O: the
same facts give the same plans.
"""
