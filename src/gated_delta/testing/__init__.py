"""A toolkit for testing backends and variants: problems to draw, what they should give, and one tolerance."""

from ._compare import Results as Results
from ._compare import assert_close as assert_close
from ._compare import backends as backends
from ._compare import budget as budget
from ._compare import expected as expected
from ._compare import pullback as pullback
from ._compare import relative_error as relative_error
from ._compare import why_not as why_not
from ._random import RandomGates as RandomGates
from ._random import RandomKeys as RandomKeys
from ._random import RandomProblem as RandomProblem
