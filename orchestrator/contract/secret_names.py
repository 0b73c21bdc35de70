"""Variables whose names say that their values are secret."""

import re

_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET)$|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def is_plain_secret(name: str, value: object) -> bool:
    """Whether a variable has a secret as plain text. The path of a file that has it is none."""
    return isinstance(value, str) and bool(value) and value[0] != "/" and bool(_NAME.search(name))
