"""The remote store: pages that many servers share, in a distributed engine. See README.md."""
