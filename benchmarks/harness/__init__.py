"""What the benchmarks share: pairs of measurements, processes asked by lines, yards, checks of numbers, reports."""
