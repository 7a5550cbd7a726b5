"""Where each page is, which requests will use it, and which page to evict."""
