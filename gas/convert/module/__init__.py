"""A module as its user has made it: its arguments, attributes and state, when it is run."""
