"""The claims: property-based suites, a pytest plugin, mutants, benchmarks."""
