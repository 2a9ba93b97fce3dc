"""A toolkit for testing backends and variants: problems to draw, what they should give, and one tolerance."""

from ._capabilities import MEMBERS as MEMBERS
from ._capabilities import Capabilities as Capabilities
from ._compare import assert_close as assert_close
from ._compare import backends as backends
from ._compare import budget as budget
from ._compare import expected as expected
from ._compare import pullback as pullback
from ._compare import relative_error as relative_error
from ._compare import results as results
from ._compare import why_not as why_not
from ._conformance import ConformanceError as ConformanceError
from ._conformance import ask as ask
from ._conformance import check_backend as check_backend
from ._conformance import check_law as check_law
from ._conformance import check_variant as check_variant
from ._conformance import conformance_suite as conformance_suite
from ._implementations import Implementation as Implementation
from ._implementations import fla_style as fla_style
from ._implementations import implementation as implementation
from ._implementations import plain as plain
from ._implementations import tokamax_style as tokamax_style
from ._own_step import Departure as Departure
from ._own_step import FoundGates as FoundGates
from ._own_step import OwnStep as OwnStep
from ._own_step import Token as Token
from ._own_step import find_gates as find_gates
from ._program import Collective as Collective
from ._program import collectives as collectives
from ._program import equations as equations
from ._random import DECAY_FAMILIES as DECAY_FAMILIES
from ._random import KEY_FAMILIES as KEY_FAMILIES
from ._random import STRENGTH_FAMILIES as STRENGTH_FAMILIES
from ._random import RandomGates as RandomGates
from ._random import RandomKeys as RandomKeys
from ._random import RandomProblem as RandomProblem
from ._report import Outcome as Outcome
from ._report import Report as Report
from ._run import Results as Results
from ._run import quick_jit as quick_jit
from ._strategies import LAYOUTS as LAYOUTS
from ._strategies import PACKED_LAYOUTS as PACKED_LAYOUTS
from ._strategies import gates as gates
from ._strategies import keys as keys
from ._strategies import lengths as lengths
from ._strategies import problems as problems
from ._strategies import segment_ids as segment_ids
from ._strategies import variants as variants
from .laws import LAWS as LAWS
from .laws import LAYER_LAWS as LAYER_LAWS
from .laws import STEP_LAWS as STEP_LAWS
from .laws import Law as Law
from .laws import Layer as Layer

__all__ = [
    "DECAY_FAMILIES",
    "KEY_FAMILIES",
    "LAWS",
    "LAYER_LAWS",
    "LAYOUTS",
    "MEMBERS",
    "PACKED_LAYOUTS",
    "STEP_LAWS",
    "STRENGTH_FAMILIES",
    "Capabilities",
    "Collective",
    "ConformanceError",
    "Departure",
    "FoundGates",
    "Implementation",
    "Law",
    "Layer",
    "Outcome",
    "OwnStep",
    "RandomGates",
    "RandomKeys",
    "RandomProblem",
    "Report",
    "Results",
    "Token",
    "ask",
    "assert_close",
    "backends",
    "budget",
    "check_backend",
    "check_law",
    "check_variant",
    "collectives",
    "conformance_suite",
    "equations",
    "expected",
    "find_gates",
    "fla_style",
    "gates",
    "implementation",
    "keys",
    "lengths",
    "plain",
    "problems",
    "pullback",
    "quick_jit",
    "relative_error",
    "results",
    "segment_ids",
    "tokamax_style",
    "variants",
    "why_not",
]
