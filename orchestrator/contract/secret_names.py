"""Detects environment variables whose names say that their value is secret."""

import re

_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET)$|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def is_plain_secret(name: str, value: object) -> bool:
    """Whether a variable holds a secret as plain text. The path of a file is not a secret."""
    return isinstance(value, str) and bool(value) and value[0] != "/" and bool(_NAME.search(name))
