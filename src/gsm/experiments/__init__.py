"""Experiments: arms and seeds, their runs here or on a cluster, and tables of their numbers."""

# Keys that make several runs of one configuration. Each of the runs has null there.
SEVERAL = ("arms", "seeds", "tune")
