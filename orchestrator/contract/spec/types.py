"""Types that several parts of a spec share."""

from typing import Annotated, Literal

from orchestrator.contract.spec.limits import Above, AtLeast, AtMost

Auto = Literal["auto"]
Count = Annotated[int, AtLeast(1)]
MOST_HOSTS = 1_000_000
"""More than any cluster has. Each host becomes an object: an endless number would never be read."""
Hosts = Annotated[int, AtLeast(1), AtMost(MOST_HOSTS)]
Devices = Annotated[int, AtLeast(1), AtMost(1_024)]
"""Of one host."""
Seconds = Annotated[float, Above(0)]
Dtype = Literal["float32", "bfloat16"]
