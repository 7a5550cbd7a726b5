"""sgl_kvtier: a KV-cache tier for SGLang that keeps pages on SSD and brings them back in time."""

__version__ = "0.1.0"
