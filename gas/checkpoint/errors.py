"""What is raised when a checkpoint can't be used."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, unfinished, of something else, or of a newer version."""
