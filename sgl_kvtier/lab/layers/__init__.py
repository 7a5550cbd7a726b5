"""CacheFlow's layer axis in a running server (section 3.1): lower layers are computed for all
tokens of a prefix, upper ones are loaded from the top down, and the suffix alone goes on where they
meet.
"""
