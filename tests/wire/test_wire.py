"""Rows over a real transfer engine, between two processes, on loopback."""

from __future__ import annotations

import pytest
from wire_nodes import NUM_SLOTS, Node, NodeError, OtherPrefillNode, PrefillNode

OWNERS = list(range(1000, 1128))


def slots_of(held: list[tuple[int, int]]) -> list[int]:
    return [slot for slot, _ in held]


def test_128_slots(decode: Node, prefill: Node) -> None:
    """Guards every byte of every row, and the records on both sides of those that were written."""
    held = decode.call("hold", 128)
    assert prefill.call("send", held, OWNERS) == 0
    decode.call("accept", slots_of(held), OWNERS)
    assert decode.call("wrong_rows", slots_of(held), OWNERS) == []
    assert decode.call("written") == list(range(1, NUM_SLOTS - 1))


def test_one_by_one_out_of_order(decode: Node, prefill: Node) -> None:
    """Guards slot arithmetic: any slot first, and a row that is not there is not accepted."""
    held = decode.call("hold", 4)
    for pair, owner in ((held[2], 7), (held[0], 0)):
        assert prefill.call("send", [pair], [owner]) == 0
        decode.call("accept", [pair[0]], [owner])
    with pytest.raises(NodeError, match="slot 2 is not written"):
        decode.call("accept", [held[1][0]], [8])
    assert decode.call("wrong_rows", [held[0][0], held[2][0]], [0, 7]) == []


@pytest.mark.parametrize("place", ["before", "after", "across the end"])
def test_out_of_range(decode: Node, prefill: Node, place: str) -> None:
    """Guards the memory beside the mailbox: the engine refuses at the receiver, and nothing is changed."""
    held = decode.call("hold", 1)
    assert prefill.call("send", held, [1]) == 0
    first, size = prefill.call("record", 0), prefill.call("record", 1) - prefill.call("record", 0)
    address = {
        "before": first - size,
        "after": first + NUM_SLOTS * size,
        "across the end": first + NUM_SLOTS * size - 128,
    }
    assert prefill.call("transfer", [(0, address[place])]) == -1
    assert decode.call("written") == slots_of(held)
    for slot in (-1, NUM_SLOTS):
        with pytest.raises(NodeError, match=f"SlotError: .*slot is {slot}, expected an integer from 0 to 129"):
            prefill.call("record", slot)
    decode.call("accept", slots_of(held), [1])
    assert decode.call("wrong_rows", slots_of(held), [1]) == []


def test_a_batch_with_one_bad_row_is_not_atomic(decode: Node, prefill: Node) -> None:
    """Guards against taking a failed batch for rows that are not there, or for rows that are: each is sent again."""
    held = decode.call("hold", 2)
    first, second = (prefill.call("record", slot) for slot, _ in held)
    beyond = prefill.call("record", 0) + NUM_SLOTS * (second - first)
    prefill.call("pack", held, [3, 4])
    assert prefill.call("transfer", [(0, first), (0, beyond), (1, second)]) == -1
    assert decode.call("written") != []  # of the good ones
    # No completion, so nothing is accepted; one by one each is told.
    assert [prefill.call("transfer", [pair]) for pair in ((0, first), (0, beyond), (1, second))] == [0, -1, 0]
    decode.call("accept", slots_of(held), [3, 4])
    assert decode.call("wrong_rows", slots_of(held), [3, 4]) == []
    assert decode.call("written") == slots_of(held)


def test_the_writer_dies_in_mid_batch(nodes: list[Node], decode: Node, prefill: Node) -> None:
    """Guards the rows without a completion message: they are not accepted, and their slots serve the next."""
    held, completed = decode.call("hold", 128), []
    for i in range(20):
        assert prefill.call("send", [held[i]], [OWNERS[i]]) == 0
        completed.append(i)
    prefill.start("send", held[20:], OWNERS[20:])
    prefill.kill()
    done = [held[i][0] for i in completed]
    decode.call("accept", done, OWNERS[:20])
    lost = slots_of(held[20:])
    decode.call("release", lost)
    nodes.append(Node(PrefillNode))
    nodes[-1].call("connect", decode.call("told"))
    again = [(slot, decode.call("hold_again", slot)) for slot in lost[:30]]
    owners = list(range(2000, 2030))
    # What landed of the dead writer's rows is of a former generation, or nothing is there.
    for slot, owner in zip(lost[:30], owners, strict=True):
        with pytest.raises(NodeError, match=r"is of generation 1, expected generation 2|is not written|is torn"):
            decode.call("accept", [slot], [owner])
    assert nodes[-1].call("send", again, owners) == 0
    decode.call("accept", slots_of(again), owners)
    assert decode.call("wrong_rows", done + slots_of(again), OWNERS[:20] + owners) == []


def test_the_receiver_dies_in_mid_batch(decode: Node, prefill: Node) -> None:
    """Guards the writer: it is told, goes on, and ends."""
    held = decode.call("hold", 128)
    assert prefill.call("send", held[:2], OWNERS[:2]) == 0
    prefill.start("send", held[2:], OWNERS[2:])
    decode.kill()
    assert prefill.answer() in (0, -1)  # all of it had landed, or not
    assert prefill.call("send", held[:2], OWNERS[:2]) == -1
    assert prefill.call("record", 0) > 0


def test_two_writers_of_one_slot(nodes: list[Node], decode: Node, prefill: Node) -> None:
    """Guards a slot whose number two requests were given: nobody gets the other one's row."""
    nodes.append(Node(PrefillNode))
    nodes[-1].call("connect", decode.call("told"))
    held = decode.call("hold", 1)
    assert prefill.call("send", held, [1]) == 0
    assert nodes[-1].call("send", held, [2]) == 0
    with pytest.raises(NodeError, match="is owned by 2, expected owner 1"):
        decode.call("accept", slots_of(held), [1])
    decode.call("accept", slots_of(held), [2])
    assert decode.call("wrong_rows", slots_of(held), [2]) == []


@pytest.mark.parametrize("shift", [128, -128])
def test_overlapping_records(decode: Node, prefill: Node, shift: int) -> None:
    """Guards against a writer that takes another address for record 0: the tags of what it damaged say so."""
    held = decode.call("hold", 3)
    assert prefill.call("send", held, [1, 2, 3]) == 0
    middle = held[1][0]
    assert prefill.call("transfer", [(1, prefill.call("record", middle) + shift)]) == 0
    # Its bytes end in this record's tag, or in the tag of the one before.
    damaged = held[1] if shift > 0 else held[0]
    owner = {held[0][0]: 1, held[1][0]: 2}[damaged[0]]
    with pytest.raises(
        NodeError, match=f"slot {damaged[0]} (has the foreign layout|is not written|is torn|is of|is owned)"
    ):
        decode.call("accept", [damaged[0]], [owner])


def test_another_field_list_is_refused_before_the_first_byte(nodes: list[Node], decode: Node) -> None:
    """Guards against a peer of another configuration: told at connection, with nothing written."""
    nodes.append(Node(OtherPrefillNode))
    with pytest.raises(NodeError, match="LayoutError: the peer's records have the layout"):
        nodes[-1].call("connect", decode.call("told"))
    # Nor does it know where to write.
    with pytest.raises(NodeError, match=r"AttributeError: .*address"):
        nodes[-1].call("record", 1)
    assert decode.call("written") == []


def test_a_late_write_after_abort(decode: Node, prefill: Node) -> None:
    """Guards the next tenant: a write for the aborted one, before or after its own row, is refused and not served."""
    [(slot, generation)] = decode.call("hold", 1)
    decode.call("release", [slot])  # aborted
    new = decode.call("hold_again", slot)
    assert (generation, new) == (1, 2)
    assert prefill.call("send", [(slot, generation)], [5]) == 0  # too late; of the same owner, too
    with pytest.raises(NodeError, match="is of generation 1, expected generation 2"):
        decode.call("accept", [slot], [5])
    assert prefill.call("send", [(slot, new)], [5]) == 0
    assert prefill.call("send", [(slot, generation)], [4]) == 0
    with pytest.raises(NodeError, match="is of generation 1, expected generation 2"):
        decode.call("accept", [slot], [5])
    assert prefill.call("send", [(slot, new)], [5]) == 0
    decode.call("accept", [slot], [5])
    assert decode.call("wrong_rows", [slot], [5]) == []


def test_sglangs_form_of_the_call(decode: Node, prefill: Node) -> None:
    """Guards sglang's send_aux: entries paired by position, another slot on each side, the record as the last entry."""
    held = decode.call("hold", 9)[-1]
    assert prefill.call("send_aux", 5, held[0], held, 77) == 0
    decode.call("accept", [held[0]], [77])
    assert decode.call("wrong_rows", [held[0]], [77]) == []
    assert decode.call("aux_rows", held[0]) == [list(range(16)), list(range(100, 108))]
    assert decode.call("aux_rows", held[0] - 1) == [[0] * 16, [0] * 8]
    assert decode.call("written") == [held[0]]
