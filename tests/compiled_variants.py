"""Run by test_codegen.py in a process of its own, without Triton's interpreter and without a GPU.

Prints one JSON object: what the compiler makes of every variant that serving uses, for one target. The variants are
those of real descriptors: what a batch would launch is what is compiled here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import draftgather as dg
from draftgather.completion import DONE
from draftgather.kernels.gather_rows import NUM_THREADS, _arguments, _gather_rows_kernel, _kinds_of, _Pointer
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.machine import Machine

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FIELD_LISTS = {
    "eagle": dg.eagle_fields(4, 7168),
    "top-k 1": dg.eagle_fields(1, 4096),
    "3 steps, seed": (*dg.eagle_fields(4, 7168, num_steps=3), dg.Field("seed", 2048, torch.int32, optional=True)),
}
TYPES = {
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
}  # fmt: skip


class CatchingMachine(Machine):
    """Keeps what it is given to launch."""

    caught: list[LaunchDescriptor]

    @classmethod
    def of(cls) -> CatchingMachine:
        machine = cls(torch.device("cpu"), has_kernel=True, pins=False, zero_copy=True)
        object.__setattr__(machine, "caught", [])
        return machine

    def can_read(self, tensor: torch.Tensor) -> bool:
        return True

    def plan(self, descriptor: LaunchDescriptor) -> None:
        return None

    def run(self, descriptor: LaunchDescriptor, plan: object = None) -> Any:
        self.caught.append(descriptor)
        return DONE


def descriptors(fields: tuple[dg.Field, ...]) -> Iterator[tuple[str, LaunchDescriptor]]:
    """One of every kind that serving launches, by name: way, alignment, what is written."""
    machine = CatchingMachine.of()
    mailbox = dg.DraftMailbox(fields, 16, pin_memory=False)
    blocks = {f.name: torch.zeros(f.width + 16, dtype=f.dtype) for f in fields}
    for slot in range(16):
        mailbox.put(slot, slot, **{f.name: blocks[f.name][: f.width] for f in fields})
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine)
    future_map = dg.FutureMap(fields, 17, machine=machine)
    indices = torch.arange(1, 17)

    def rows(start: int, count: int) -> dict[str, Any]:
        return {f.name: [blocks[f.name][start : start + f.width]] * count for f in fields}

    for written, has_relay, outputs in (("batch", False, True), ("both", True, True), ("relay", True, False)):
        calls = {
            "few slots": lambda relay, o: assembler.assemble_slots(range(3), relay=relay(3), batch_outputs=o),
            "slots": lambda relay, o: assembler.assemble_slots(range(16), relay=relay(16), batch_outputs=o),
            "rows": lambda relay, o: assembler.assemble_rows(relay=relay(3), batch_outputs=o, **rows(0, 3)),
            "odd rows": lambda relay, o: assembler.assemble_rows(relay=relay(3), batch_outputs=o, **rows(1, 3)),
        }
        for way, call in calls.items():
            del machine.caught[:]
            call(lambda n: dg.Relay(future_map, *[indices[:n]] * 3) if has_relay else None, outputs)  # noqa: B023
            (descriptor,) = machine.caught
            yield f"{way}, {written}", descriptor


def compile_for(descriptor: LaunchDescriptor, target: GPUTarget) -> dict[str, Any]:
    """The kernel for launches like this one."""
    kinds = _kinds_of(_arguments(descriptor))
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(kind: Any, path: tuple[int, ...]) -> Any:
        if isinstance(kind, _Pointer):
            if kind.is_aligned:
                attributes[path] = [["tt.divisibility", 16]]
            return "*" + TYPES[kind.dtype]
        if isinstance(kind, tuple):
            return tuple(type_of(item, (*path, i)) for i, item in enumerate(kind))
        if kind is None:
            constants[path] = None
            return "constexpr"
        return "i64" if kind > 1 << 31 else "i32"

    names = _gather_rows_kernel.arg_names
    for i, (name, kind) in enumerate(zip(names, kinds.flat(), strict=True)):
        if i >= len(names) - len(kinds.constants):
            signature[name], constants[(i,)] = "constexpr", kind
        else:
            signature[name] = type_of(kind, (i,))
    source = ASTSource(fn=_gather_rows_kernel, signature=signature, constexprs=constants, attrs=attributes)
    asm: dict[str, Any] = triton.compile(
        source, target=target, options={"num_warps": NUM_THREADS // target.warp_size}
    ).asm
    return asm


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack (where spills go), as the driver will find them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(re.search(rf"{key}:(\d+)", told.stdout)[1]) for name, key in NAMES.items()}  # type: ignore[index]


NAMES = {"registers": "REG", "stack": "STACK", "local": "LOCAL"}
WIDE_LOAD = {"cuda": r"ld\.global\S*\.v4\.b32", "hip": r"(?:global|buffer)_load_dwordx4"}
WIDE_STORE = {"cuda": r"st\.global\S*\.v4\.b32", "hip": r"(?:global|buffer)_store_dwordx4"}
NARROW_LOAD = {"cuda": r"ld\.global\S*\.b16", "hip": r"(?:global|buffer)_load_(?:ushort|short)"}


def told(asm: dict[str, Any], target: GPUTarget) -> dict[str, int]:
    text = asm["ptx" if target.backend == "cuda" else "amdgcn"]

    def count(pattern: dict[str, str]) -> int:
        return len(re.findall(pattern[target.backend], text))

    found = {"wide loads": count(WIDE_LOAD), "wide stores": count(WIDE_STORE), "narrow loads": count(NARROW_LOAD)}
    return found | (resources(asm["cubin"]) if target.backend == "cuda" else {})


def main(target: str, lists: list[str]) -> None:
    print(
        json.dumps(
            {
                f"{name}: {kind}": told(compile_for(descriptor, TARGETS[target]), TARGETS[target])
                for name in lists
                for kind, descriptor in descriptors(FIELD_LISTS[name])
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
