"""Types that several parts of a spec share."""

from typing import Annotated, Literal

from orchestrator.contract.limits import Above, AtLeast

Auto = Literal["auto"]
Count = Annotated[int, AtLeast(1)]
Seconds = Annotated[float, Above(0)]
Dtype = Literal["float32", "bfloat16"]
