"""Run by test_compiled_kernel.py in a process of its own, without Triton's interpreter and without a GPU.

Prints one JSON object: what the compiler made of the kernel, and what reached the driver.
"""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

import draftgather as dg
from draftgather.kernels.gather_rows import _gather_rows_kernel
from draftgather.machine import Machine

HIDDEN = 7168
POINTERS = ("*i32", "*i64", "*i16")  # topk_p, topk_index, hidden_states: rows travel as integers
NOTHING = (None,) * 3


def compile_for(target: GPUTarget, in_slots: bool, has_relay: bool, is_aligned: bool = True) -> dict[str, str]:
    """The kernel of EAGLE's three fields as a GPU of that kind would get it."""
    relay = "*i64" if has_relay else None
    types = {
        "slots_ptr": "*i64" if in_slots else None,
        "source_ptrs": POINTERS if in_slots else ("*i64",) * 3,
        "present_ptrs": NOTHING,
        "output_ptrs": POINTERS,
        "relay_ptrs": POINTERS if has_relay else NOTHING,
        "valid_ptrs": NOTHING,
        "future_indices_ptr": relay,
        "seq_lens_ptr": relay,
        "bonus_tokens_ptr": relay,
        "seq_lens_buf_ptr": relay,
        "bonus_tokens_buf_ptr": relay,
        "num_rows": "i32",
        "num_relay_slots": "i32",
    }
    layout = dg.DraftMailbox(dg.eagle_fields(4, HIDDEN), 1, pin_memory=False).layout
    constants = {
        "SOURCE_DTYPES": (tl.int32, tl.int64, tl.int16),
        "SLOT_STRIDES": tuple(layout.record_bytes // size for size in (4, 8, 2)),
        "WIDTHS": (4, 4, HIDDEN),
        "BLOCKS": (4, 4, 1024),
        "ALIGNED": is_aligned,
    }
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(_gather_rows_kernel.arg_names):
        given = types.get(name)
        if given is None:
            signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
        elif isinstance(given, str):
            signature[name] = given
            if given.startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = tuple("constexpr" if item is None else item for item in given)
            for j, item in enumerate(given):
                if item is None:
                    constexprs[(i, j)] = None
                else:
                    attributes[(i, j)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=_gather_rows_kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=target).asm


def accesses(ptx: str) -> dict[str, int | bool]:
    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    return {
        "wide_loads": count(r"ld\.global\S*\.v4\.b32"),
        "narrow_loads": count(r"ld\.global\S*\.b16"),
        "wide_stores": count(r"st\.global\S*\.v4\.b32"),
        "uses_local_memory": ".local" in ptx,
    }


class DoNothingUtils:
    def load_binary(self, *arguments: object) -> tuple[int, ...]:
        return (1, 2, 24, 0, 1024)  # module, function, registers, spills, most threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


launches: list[tuple[int, ...]] = []


class DoNothingLauncher:
    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: int) -> None:
        launches.append(arguments[:3])


class DoNothingDriver:
    """Everything above the CUDA driver is Triton's own; nothing below it is there."""

    utils = DoNothingUtils()
    launcher_cls = DoNothingLauncher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def drive() -> dict[str, object]:
    """Warm up, then serve every kind of batch size; count launches and compiled variants."""
    driver.set_active(DoNothingDriver())
    machine = Machine(torch.device("cpu"), has_kernel=True, pins=False, zero_copy=True)
    fields = dg.eagle_fields(4, HIDDEN)
    mailbox = dg.DraftMailbox(fields, 512, pin_memory=False)
    row = {field.name: torch.zeros(field.width, dtype=field.dtype) for field in fields}
    for slot in range(512):
        mailbox.put(slot, slot, **row)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine)
    future_map = dg.FutureMap(fields, 513, machine=machine)
    assembler.warmup()

    def num_variants() -> int:
        return sum(len(caches[0]) for caches in _gather_rows_kernel.device_caches.values())

    warmed, before, calls = num_variants(), len(launches), 0
    for n in (1, 2, 3, 8, 15, 16, 17, 64, 255, 256, 512):
        indices = torch.arange(1, n + 1)
        relay = dg.Relay(future_map, indices, indices, indices)
        for given in (None, relay):
            assembler.assemble_slots(list(range(n)), relay=given)
            assembler.assemble_rows(relay=given, **{name: [value] * n for name, value in row.items()})
            calls += 2
        assembler.assemble_slots(list(range(n)), relay=relay, batch_outputs=False)
        running = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=indices), seq_lens=None)
        future_map.resolve(running)
        future_map.stash(indices, running.spec_info)
        calls += 3
    assembler.assemble_slots([])
    return {
        "calls": calls,
        "launches": len(launches) - before,
        "variants_after_warmup": warmed,
        "variants_at_the_end": num_variants(),
        "staging_buffers": assembler.num_staging_buffers,
    }


def main() -> None:
    cuda = {
        f"sm_{arch} {mode} {'relay' if has_relay else 'batch'}": accesses(
            compile_for(GPUTarget("cuda", arch, 32), mode == "slots", has_relay)["ptx"]
        )
        for arch in (80, 90)
        for mode in ("slots", "pointers")
        for has_relay in (False, True)
    }
    narrow = accesses(compile_for(GPUTarget("cuda", 90, 32), False, True, is_aligned=False)["ptx"])
    hip = sorted(compile_for(GPUTarget("hip", "gfx942", 64), True, True))
    print(json.dumps({"cuda": cuda, "odd addresses": narrow, "hip": hip, "driven": drive()}))


if __name__ == "__main__":
    main()
