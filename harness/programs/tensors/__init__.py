"""The recorder of values (`record --values`): what every rank's tensors are in the first steps of a program."""
