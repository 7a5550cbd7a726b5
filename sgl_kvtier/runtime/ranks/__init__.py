"""Agreement between ranks and pipeline stages."""
