"""The error of a checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or cannot be loaded here: names the folder, what is wrong and what is legal."""

    def __init__(self, folder: object, what: str, legal: str) -> None:
        super().__init__(f"checkpoint {folder}: {what}; legal: {legal}")
