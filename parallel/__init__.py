"""The implementation under test: one scheme, one file or room, one table; no instrumentation inside."""
