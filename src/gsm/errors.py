"""The errors for values that a person can correct: `key must be ..., got value`, and a remedy where one helps."""


class ConfigError(ValueError):
    """The configuration is wrong. The message is one sentence for its author."""


def within(low: float, high: float | None = None, **numbers: float | None) -> None:
    """Raise ConfigError for a number below `low` or above `high`; None is no number, and as `high` no limit."""
    for name, number in numbers.items():
        if number is None or low <= number and (high is None or number <= high):
            continue
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name} must be {limits}, got {number}")
