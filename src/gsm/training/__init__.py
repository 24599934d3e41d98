"""The Lightning module, optimisers, callbacks, resume, and training on several ranks."""
