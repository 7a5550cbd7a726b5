"""Pages that many servers share, in a distributed engine. See README.md."""
