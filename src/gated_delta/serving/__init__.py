"""Running layers and models for many requests: a pool of states, speculative windows, long prompts piece by piece.

`import gated_delta` does not import this.
"""

from ._pool import StatePool as StatePool
from ._prefill import Prefilled as Prefilled
from ._prefill import Snapshots as Snapshots
from ._prefill import prefill as prefill
from ._step import pooled_step as pooled_step
from ._window import ReplayState as ReplayState
from ._window import ReplayWindow as ReplayWindow
from ._window import StateWindow as StateWindow
from ._window import begin_replay as begin_replay
from ._window import commit as commit
from ._window import end_replay as end_replay
from ._window import window as window

__all__ = [
    "Prefilled",
    "ReplayState",
    "ReplayWindow",
    "Snapshots",
    "StatePool",
    "StateWindow",
    "begin_replay",
    "commit",
    "end_replay",
    "pooled_step",
    "prefill",
    "window",
]
