"""`kvtier bench store`: the store against fio and against HiCache's file backend, in turns on one
directory.
"""
