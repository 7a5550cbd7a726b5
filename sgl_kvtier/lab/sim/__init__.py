"""An executor of plans in virtual time: the planner of `policy/` on simulated links, memories and a
batching server.
"""
