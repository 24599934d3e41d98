"""The errors for values that a person can correct: one sentence with the key, its value, the reason and the remedy."""


class ConfigError(ValueError):
    """The configuration is wrong. The message is one sentence for its author."""


def within(low: float, high: float | None = None, **numbers: float | None) -> None:
    """Raise ConfigError for a number below `low` or above `high`; None is no number, and as `high` no limit."""
    for name, number in numbers.items():
        if number is None or low <= number and (high is None or number <= high):
            continue
        reason = f"below {low:,}" if number < low else f"above {high:,}" if high is not None else "no number"
        remedy = f"{low:,} or more" if high is None else f"a number from {low:,} to {high:,}"
        raise ConfigError(f"{name}={number} is not allowed because it is {reason}. Use {remedy}.")
