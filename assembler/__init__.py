"""Draft rows of PD-disaggregated speculative decoding: kept safely, gathered in one launch.

A row's path, one file a step: mailbox, check, locate, describe, launch, draft_batch,
draft_input; under overlap future_map.
"""

from draftgather.algorithms import CustomSpecAlgo, SpeculativeAlgorithm
from draftgather.builder import build_disagg_draft_input, build_eagle_disagg_draft_input, use_mailbox
from draftgather.completion import CompletionMarker
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch
from draftgather.draft_input import CaptureHiddenMode, EagleDraftInput
from draftgather.errors import (
    AlgorithmError,
    CapacityError,
    CaptureError,
    DraftRowError,
    LayoutError,
    MailboxFullError,
    MissingRowError,
    Problem,
    RelayError,
    RowDeviceError,
    RowDtypeError,
    RowShapeError,
    RowValueError,
    SlotError,
)
from draftgather.fields import Field, RecordLayout, eagle_fields
from draftgather.future_map import FutureMap, Relay
from draftgather.mailbox import BufferInfo, DraftMailbox
from draftgather.observe import Metrics, metrics
from draftgather.ranges import profile_ranges
from draftgather.records import MailboxAddress, RecordWriter
from draftgather.routes import Route, RouteRule
from draftgather.schedule_batch import ScheduleBatch

__version__ = "0.1.0"

__all__ = [
    "AlgorithmError",
    "BufferInfo",
    "CapacityError",
    "CaptureError",
    "CaptureHiddenMode",
    "CompletionMarker",
    "CustomSpecAlgo",
    "DraftAssembler",
    "DraftBatch",
    "DraftMailbox",
    "DraftRowError",
    "EagleDraftInput",
    "Field",
    "FutureMap",
    "LayoutError",
    "MailboxAddress",
    "MailboxFullError",
    "Metrics",
    "MissingRowError",
    "Problem",
    "RecordLayout",
    "RecordWriter",
    "Relay",
    "RelayError",
    "Route",
    "RouteRule",
    "RowDeviceError",
    "RowDtypeError",
    "RowShapeError",
    "RowValueError",
    "ScheduleBatch",
    "SlotError",
    "SpeculativeAlgorithm",
    "__version__",
    "build_disagg_draft_input",
    "build_eagle_disagg_draft_input",
    "eagle_fields",
    "metrics",
    "profile_ranges",
    "use_mailbox",
]
