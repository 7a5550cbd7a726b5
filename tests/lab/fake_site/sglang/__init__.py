"""A stand-in for SGLang's package, so that whole comparisons can be run where it is not installed."""
