"""What was measured: the cost of prefill and the bandwidth of links."""
