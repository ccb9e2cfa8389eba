"""The figures of the framework, each as a ratio to its baseline in the same run: ``python -m benchmarks``."""
