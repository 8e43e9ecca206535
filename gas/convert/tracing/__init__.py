"""The trace of a module: its computation as a graph, in training and evaluation."""
