"""The run folder while a run is written, interrupted or killed."""
