"""Stores in front of a server's store: a slower device, an unreliable one."""
