"""A server and a store in trouble, and what they must not do then: the release gates."""
