"""Text for training and measuring: a run uses `module.TextData`; its parts also stand alone."""
