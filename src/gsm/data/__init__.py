"""Text for training and measuring: `module.TextData` is what a run uses; its parts also stand alone."""
