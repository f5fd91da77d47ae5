"""Sentences of checks and causes, by the ids of their facts: the folder that a person opens to change them."""
