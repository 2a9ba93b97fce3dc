"""SLA-R1 to SLA-R8: `SystolicLinearAttention` by how many value heads share a key head, the state being of one size."""

import functools

from ._sla import SystolicLinearAttention

sla_r1 = functools.partial(SystolicLinearAttention, group=1)
"""`SystolicLinearAttention` with one value head per key head."""

sla_r2 = functools.partial(SystolicLinearAttention, group=2)
"""`SystolicLinearAttention` with two value heads per key head."""

sla_r4 = functools.partial(SystolicLinearAttention, group=4)
"""`SystolicLinearAttention` with four value heads per key head: the member that the paper's abstract names."""

sla_r8 = functools.partial(SystolicLinearAttention, group=8)
"""`SystolicLinearAttention` with eight value heads per key head."""
