"""Where each page is, who will use it, and which page to evict."""
