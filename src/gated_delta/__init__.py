"""Gated delta rules as one operator: see `gated_delta`."""

from ._backend import AbstractBackend as AbstractBackend
from ._backend import Problem as Problem
from ._chunked import Chunked as Chunked
from ._dispatch import Explanation as Explanation
from ._gates import Gates as Gates
from ._op import explain as explain
from ._op import gated_delta as gated_delta
from ._op import gated_delta_step as gated_delta_step
from ._recurrent import Recurrent as Recurrent
