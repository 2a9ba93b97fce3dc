"""A toolkit for testing backends and variants: problems to draw, what they should give, and one tolerance."""

from ._compare import Results as Results
from ._compare import assert_close as assert_close
from ._compare import backends as backends
from ._compare import budget as budget
from ._compare import expected as expected
from ._compare import pullback as pullback
from ._compare import quick_jit as quick_jit
from ._compare import relative_error as relative_error
from ._compare import results as results
from ._compare import why_not as why_not
from ._program import equations as equations
from ._random import DECAY_FAMILIES as DECAY_FAMILIES
from ._random import KEY_FAMILIES as KEY_FAMILIES
from ._random import STRENGTH_FAMILIES as STRENGTH_FAMILIES
from ._random import RandomGates as RandomGates
from ._random import RandomKeys as RandomKeys
from ._random import RandomProblem as RandomProblem
from ._strategies import LAYOUTS as LAYOUTS
from ._strategies import PACKED_LAYOUTS as PACKED_LAYOUTS
from ._strategies import gates as gates
from ._strategies import keys as keys
from ._strategies import lengths as lengths
from ._strategies import problems as problems
from ._strategies import segment_ids as segment_ids
