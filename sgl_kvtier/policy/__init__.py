"""The planner: it makes every decision of restoration and lookahead. Standard library only, one
thread, no clock, no randomness, no I/O. The same facts give the same plans.
"""
