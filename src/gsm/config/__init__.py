"""How yaml becomes objects: compose, check, build, load."""
