"""Rewrites of a traced graph, until its layers read histories."""
