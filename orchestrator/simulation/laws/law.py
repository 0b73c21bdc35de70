"""`require` checks a law; it raises `LawViolated` if the law is broken."""


class LawViolated(AssertionError):
    """A law was broken."""


def require(condition: bool, violation: str) -> None:
    """`violation`: the message of `LawViolated`, which says what happened instead."""
    if not condition:
        raise LawViolated(violation)
