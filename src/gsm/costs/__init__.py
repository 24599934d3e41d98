"""The cost of a model in closed form: FLOPs, bytes and parameters, summed over the costs declared by its parts."""
