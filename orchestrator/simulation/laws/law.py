"""How a law is stated, and what it is to break one."""


class Violated(AssertionError):
    """A law was broken."""


def hold(fine: bool, law: str) -> None:
    if not fine:
        raise Violated(law)
