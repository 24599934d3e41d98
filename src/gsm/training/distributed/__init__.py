"""Several processes that train one model: how its weights are divided, saved in parts, and who is missing."""
