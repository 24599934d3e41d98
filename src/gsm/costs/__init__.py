"""What a model costs in closed form: FLOPs, bytes and parameters, from what each part says of itself."""
