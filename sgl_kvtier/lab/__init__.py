"""The laboratory: workloads, simulator, papers, experiments. The product never imports it."""
