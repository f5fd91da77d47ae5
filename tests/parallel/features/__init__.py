"""A feature in two files, and what every command makes of it."""
