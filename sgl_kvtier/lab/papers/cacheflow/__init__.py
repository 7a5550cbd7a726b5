"""CacheFlow's tables and figures."""
