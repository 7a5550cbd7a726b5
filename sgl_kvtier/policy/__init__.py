"""The room that decides. Standard library only, one thread, no clock, no chance, no I/O: same facts
in, same plans out.
"""
