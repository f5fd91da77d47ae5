"""The sentences of checks and causes, by the ids of their facts. They are changed in this folder."""
