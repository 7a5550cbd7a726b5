"""`kvtier bench torture`: kills, failing calls, lost writes and damage, checked against an oracle
outside the store.
"""
