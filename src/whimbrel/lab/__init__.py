"""Tests and measurements of the product: simulator, chaos, benchmarks. The product imports none of it."""
