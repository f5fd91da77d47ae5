"""Tests of what ranks send: pairs, collectives, layouts, batches."""
