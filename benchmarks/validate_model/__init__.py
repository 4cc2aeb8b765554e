"""The cost model beside published measurements: `python -m benchmarks.validate_model`."""
