"""The error that the person at the keyboard can put right: one sentence with the field, its value and what would do."""


class ConfigError(ValueError):
    """The configuration is wrong; the message is one sentence for the person who wrote it."""
