"""The error of an impossible case."""


class CaseError(ValueError):
    """An impossible case: names the key, the value, the rule and a legal value."""

    def __init__(self, key: str, value: object, rule: str, legal: str) -> None:
        super().__init__(f"{key}={value}: {rule}; legal: {legal}")
        self.key, self.value, self.rule, self.legal = key, value, rule, legal
