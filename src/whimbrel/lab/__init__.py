"""What proves and measures the product: simulator, chaos, benchmarks. Nothing in the product imports it."""
