"""What the benchmarks share: timing, tables and result files, machine facts, models and workloads, peers."""
