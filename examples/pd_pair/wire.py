"""Between the nodes: the transfer engine, which moves bytes, and the messages of the pipe beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import draftgather as dg
from pd_pair.decoder import TOPK
from pd_pair.model import DTYPE, HIDDEN_SIZE

MAX_RUNNING = 16
FIELDS = dg.eagle_fields(TOPK, HIDDEN_SIZE, DTYPE)
# For any message. Whoever waits longer takes the other side for lost, and ends.
PATIENCE_SECONDS = 60.0


class Bootstrap(NamedTuple):
    """Decode to prefill, first of all: where to write."""

    session: str  # of the decode node's engine
    kv_address: int  # of line 0
    mailbox: str  # dg.MailboxAddress as JSON


class Reservation(NamedTuple):
    """Memory of the decode node that is held for one request; its number is the record's owner."""

    number: int
    line: int  # request pool index: key of the future map and line of the KV buffer; 0 is padding
    slot: int  # of the mailbox
    generation: int  # of the slot


class Wanted(NamedTuple):
    """Decode to prefill: requests to compute and to hand over."""

    run: int
    reservations: tuple[Reservation, ...]


class Completed(NamedTuple):
    """Prefill to decode: KV and draft rows of these requests are written."""

    first_tokens: dict[int, int]  # by request number


class Engine:
    """Mooncake's transfer engine over TCP. Its bytes go over loopback, though it listens on every interface."""

    def __init__(self) -> None:
        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the transfer engine did not start")
        self.session = f"127.0.0.1:{self._engine.get_rpc_port()}"

    def register(self, address: int, num_bytes: int) -> None:
        if self._engine.register_memory(address, num_bytes) != 0:
            raise RuntimeError(f"the transfer engine did not register {num_bytes} bytes at {address:#x}")

    def write(self, session: str, sources: Sequence[int], destinations: Sequence[int], sizes: Sequence[int]) -> None:
        """Write into the peer's registered memory, and return when it is there."""
        status = self._engine.batch_transfer_sync_write(session, list(sources), list(destinations), list(sizes))
        if status != 0:
            raise RuntimeError(
                f"the transfer engine gave {status} for a write of {len(sizes)} pieces to {session}, expected 0"
            )


def why_no_engine() -> str | None:
    """None where the transfer engine is installed and loads."""
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return (
            f"the transfer engine does not load ({error}): it is mooncake-transfer-engine-non-cuda==0.3.13.post1, "
            "and needs libibverbs.so.1 (Debian: libibverbs1), over TCP too"
        )
    return None


def receive(connection: Connection) -> Any:
    """The next message. EOFError: the other side has closed; TimeoutError: it says nothing."""
    if not connection.poll(PATIENCE_SECONDS):
        raise TimeoutError(f"no message within {PATIENCE_SECONDS} s")
    return connection.recv()


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
