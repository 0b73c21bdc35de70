"""Types that several parts of a spec share."""

from typing import Annotated, Literal

from orchestrator.contract.spec.limits import Above, AtLeast, AtMost

OVERLAY = "-f "
"""Begins an overlay, `-f FILE`, among the overrides of a spec. The others are `KEY=VALUE`."""
SET = "--set"
"""The option of an override `KEY=VALUE`. One of another option begins with that option and a space,
so that messages name what was typed: `--compare parallel.tp=2`."""
Auto = Literal["auto"]
Count = Annotated[int, AtLeast(1)]
MOST_HOSTS = 1_000_000
"""More than any cluster has. Each host becomes an object, so a huge number would exhaust memory."""
Hosts = Annotated[int, AtLeast(1), AtMost(MOST_HOSTS)]
Devices = Annotated[int, AtLeast(1), AtMost(1_024)]
"""Devices of one host."""
Step = Annotated[int, AtLeast(0), AtMost(1 << 53)]
"""Number of optimizer steps done. Every JSON reader represents integers up to 2**53 exactly."""
ProcessId = Annotated[int, AtLeast(1), AtMost((1 << 31) - 1)]
"""A negative process id would make `kill` send its signal to a process group."""
Seconds = Annotated[float, Above(0)]
Dtype = Literal["float32", "bfloat16"]
