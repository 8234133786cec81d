"""What the parts cost, measured against a floor: `python -m benchmarks [ONLY=prefix,prefix]`."""
