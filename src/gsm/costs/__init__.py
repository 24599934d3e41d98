"""The cost of a model in closed form: FLOPs, bytes and parameters, from the costs that each part declares."""
