"""`hold` checks a law; `Violated` says that a law was broken."""


class Violated(AssertionError):
    """A law was broken."""


def hold(fine: bool, law: str) -> None:
    """`law`: the message of `Violated`, which says what happened instead."""
    if not fine:
        raise Violated(law)
