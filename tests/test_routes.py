"""Which way rows come where there is a choice, and the reason that is given."""

from __future__ import annotations

import pytest
import torch

import draftgather as dg
from draftgather.bench.do_nothing import Counts
from draftgather.machine import Machine
from draftgather.routes import DEFAULT_RULES, staged_by_rule
from helpers import FIELD_LISTS, assert_batch, random_rows, written_mailbox

CPU = torch.device("cpu")
FIELDS = FIELD_LISTS["eagle"]
ROW_BYTES = sum(field.row_bytes for field in FIELDS)
RULE = dg.RouteRule("H200", min_rows=3, min_row_bytes=ROW_BYTES, measured="a test")


class CountingMachine(Machine):
    counts: Counts

    @classmethod
    def of(cls, name: str) -> CountingMachine:
        machine = cls(CPU, has_kernel=True, pins=False, zero_copy=True, name=name)
        object.__setattr__(machine, "counts", Counts())
        return machine

    def can_read(self, tensor: torch.Tensor) -> bool:
        return True

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counts.uploads += 1
        return tensor.clone()


def test_nothing_is_claimed_before_it_is_measured() -> None:
    assert DEFAULT_RULES == ()


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "name", "is_staged"),
    [
        (3, ROW_BYTES, "NVIDIA H200", True),
        (2, ROW_BYTES, "NVIDIA H200", False),
        (3, ROW_BYTES - 1, "NVIDIA H200", False),
        (3, ROW_BYTES, "NVIDIA A30", False),
    ],
)
def test_a_rule_applies_from_its_limits_on(num_rows: int, row_bytes: int, name: str, is_staged: bool) -> None:
    route = staged_by_rule([RULE], CountingMachine.of(name), num_rows, row_bytes)
    assert (route == "staged") == is_staged
    assert route is None or (route.is_uploaded and route.reason == "copies of 3 rows or more are quicker here (a test)")


def test_the_first_rule_that_applies_speaks() -> None:
    later = RULE._replace(device_class="", measured="another test")
    route = staged_by_rule([RULE, later], CountingMachine.of("NVIDIA A30"), 3, ROW_BYTES)
    assert route is not None
    assert "another test" in route.reason


@pytest.mark.parametrize("way", ["rows", "slots"])
@pytest.mark.parametrize("num_rows", [2, 3, 10])
def test_a_rule_of_the_callers_own(way: str, num_rows: int) -> None:
    """The batch is the same by either route; by the rule it takes one upload."""
    machine, rows = CountingMachine.of("NVIDIA H200"), random_rows(FIELDS, num_rows)
    mailbox = written_mailbox(FIELDS, rows, num_rows)
    assembler = dg.DraftAssembler(FIELDS, mailbox=mailbox, machine=machine, route_rules=[RULE])
    batch = assembler.assemble_rows(**rows) if way == "rows" else assembler.assemble_slots(range(num_rows))
    assert_batch(batch, FIELDS, rows)
    by_rule = num_rows >= RULE.min_rows
    assert batch.route == ("staged" if by_rule else {"rows": "pointers", "slots": "slots"}[way])
    assert ("a test" in batch.route.reason) == by_rule
    assert machine.counts.uploads == by_rule


@pytest.mark.parametrize(
    ("machine_options", "slots", "lists"),
    [
        ({"has_kernel": False}, "the CPU reads records where they are", "lists, or rows of several dtypes"),
        ({"has_kernel": True}, "no rule says that copies are quicker", "lists, or rows of several dtypes"),
    ],
)
def test_every_route_has_its_reason(machine_options: dict[str, bool], slots: str, lists: str) -> None:
    machine = Machine(CPU, pins=False, zero_copy=False, **machine_options)
    rows = random_rows(FIELDS, 1)
    assembler = dg.DraftAssembler(FIELDS, mailbox=written_mailbox(FIELDS, rows, 1), machine=machine)
    assert slots in assembler.assemble_slots([0]).route.reason
    as_lists = {name: [[0] * len(row) for row in given] for name, given in rows.items()}
    assert lists in assembler.assemble_rows(**as_lists).route.reason
    assert assembler.assemble_slots([]).route.reason == "no rows"
