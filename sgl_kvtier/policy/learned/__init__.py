"""Measured values: the cost of prefill and the bandwidth of links."""
