"""The published members of the family: each a record, a constructor, its equation and where it comes from."""

from ._delta_net import DeltaNet as DeltaNet
from ._delta_net import delta_net as delta_net
from ._gdn import GDN as GDN
from ._gdn import gdn as gdn
from ._gdn2 import GDN2 as GDN2
from ._gdn2 import gdn2 as gdn2
from ._gla import GLA as GLA
from ._gla import gla as gla
from ._kda import KDA as KDA
from ._kda import kda as kda
from ._sla import SLA as SLA
from ._sla import SystolicLinearAttention as SystolicLinearAttention
from ._sla import sla as sla
from ._sla_presets import sla_r1 as sla_r1
from ._sla_presets import sla_r2 as sla_r2
from ._sla_presets import sla_r4 as sla_r4
from ._sla_presets import sla_r8 as sla_r8

__all__ = [
    "GDN",
    "GDN2",
    "GLA",
    "KDA",
    "SLA",
    "DeltaNet",
    "SystolicLinearAttention",
    "delta_net",
    "gdn",
    "gdn2",
    "gla",
    "kda",
    "sla",
    "sla_r1",
    "sla_r2",
    "sla_r4",
    "sla_r8",
]
