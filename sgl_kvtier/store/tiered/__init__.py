"""A store of two tiers: the local disk, and a remote store that servers share."""
