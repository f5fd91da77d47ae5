"""A failing case made small, and written as a script that shows the failure without shardproof."""
