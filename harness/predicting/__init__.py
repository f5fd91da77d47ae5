"""What a case will come to on machines that are not here: dry runs, clusters, and the costs of calls and products."""
