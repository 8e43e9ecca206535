"""Graph folders: a clustered graph on disk, in plain arrays that are mapped, and a description."""
