"""TierKV's tables and figures."""
