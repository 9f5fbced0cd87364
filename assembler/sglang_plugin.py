"""The plug-in for sglang (entry-point group `sglang.srt.plugins`), and the only file that imports it.

    DRAFTGATHER_SGLANG=off | shadow | on       off by default: nothing is imported, nothing is hooked

sglang calls `load` in each of its processes. The hooks are AROUND hooks with a pass-through mode, as sglang's
registry cannot take a hook back. They run only where sglang calls the hooked functions: on a decode node.
What they do is in `dropin`; what differs between versions of sglang is found here, by signatures and
fields and not by version numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any, ClassVar

import torch

from draftgather.builder import REQUEST_ROWS, as_metadata, request_rows
from draftgather.dropin import DropIn, DropInOptions, Engine, Mode
from draftgather.dropin_mailbox import describe_size
from draftgather.errors import AlgorithmError
from draftgather.fields import Field
from draftgather.machine import as_device

logger = logging.getLogger("draftgather.sglang")

_BUILDER = "sglang.srt.speculative.eagle_disaggregation:build_eagle_disagg_draft_input"
_GATE = "sglang.srt.disaggregation.utils:_apply_metadata_gate"
# With the mailbox only.
_COMMIT = "sglang.srt.disaggregation.decode:DecodeTransferQueue._commit_transfer_to_req"
_READ = "sglang.srt.disaggregation.utils:MetadataBuffers.get_buf"

# The call shapes of the two, by their parameters.
_BUILDER_SHAPES = (
    ("batch", "server_args", "last_tokens_tensor", "future_map"),  # 0.5.13 to 0.5.17
    ("batch", "last_tokens_tensor", "future_map"),  # 0.5.18 to 0.5.23
)
_GATE_SHAPES = (
    ("polls", "decode_reqs", "metadata_buffers", "server_args"),  # 0.5.13 to 0.5.19
    ("polls", "decode_reqs", "metadata_buffers"),  # 0.5.20 to 0.5.23
)
_COMMIT_SHAPES = (("self", "decode_req"),)
_READ_SHAPES = (("self", "idx"),)
# The fields of EagleDraftInput from 0.5.13 to 0.5.23. One more may be one that a builder must fill.
_KNOWN_FIELDS = {
    *("topk_p", "topk_index", "draft_probs", "hidden_states", "dsa_topk_indices", "bonus_tokens"),
    *("kv_indptr", "kv_indices", "window_kv_indptr", "window_kv_indices", "capture_hidden_mode"),
    *("num_tokens_per_req", "num_tokens_for_logprob_per_req", "num_correct_drafts", "num_accept_tokens"),
    *("future_indices", "future_dsa_topk_indices_available", "cuda_graph_compatible"),
}

_drop_in: DropIn | None = None


def load() -> None:
    """The entry point. Loading again is a no-op; on an sglang that it does not know, one line and no hook."""
    global _drop_in
    if _drop_in is not None:
        return
    try:
        options = DropInOptions.from_environment(os.environ)
    except ValueError as error:
        logger.error("draftgather stays off: %s", error)
        return
    if options.mode is Mode.OFF:
        return
    try:
        engine, hooks = _detect()
        if options.mailbox_slots:
            hooks |= _arrival_hooks()
    except UnknownSglang as error:
        logger.warning("draftgather stays off: sglang %s is not one that it knows: %s", _version(), error)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _drop_in = DropIn(options, engine)
    for target, hook in hooks.items():
        HookRegistry.register(target.replace(":", "."), hook, HookType.AROUND)
    _verify_when_applied(HookRegistry, hooks)


def drop_in() -> DropIn | None:
    """The drop-in of this process, where one is in place: `.mode`, `.stats`."""
    return _drop_in


def set_mode(mode: Mode | str) -> None:
    """Change the mode at run time, in this process. Without hooks in place it raises RuntimeError."""
    if _drop_in is None:
        raise RuntimeError("draftgather is not in place in this process: start it with DRAFTGATHER_SGLANG=shadow or on")
    _drop_in.mode = Mode(mode)


class UnknownSglang(Exception):
    """This sglang lacks something that the drop-in needs, or has something that it does not know."""


def describe_installed() -> str:
    """One line for `draftgather doctor`: which sglang there is, and whether the drop-in knows it."""
    version = _version()
    if version == "not installed":
        return "sglang is not installed here"
    try:
        _detect()
    except UnknownSglang as error:
        return f"sglang {version}: not one that the drop-in knows ({error}); it would stay off"
    except Exception as error:
        return f"sglang {version}: cannot be imported here ({type(error).__name__}: {error})"
    known = f"sglang {version}: known; DRAFTGATHER_SGLANG={os.environ.get('DRAFTGATHER_SGLANG', 'off')}"
    try:
        options = DropInOptions.from_environment(os.environ)
    except ValueError as error:
        return f"{known}\n{error}: it would stay off"
    if not options.mailbox_slots:
        return known
    return f"{known}\na mailbox for arriving rows: {describe_size(options.mailbox_slots)}, for example"


# -- what this sglang is


def _version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "not installed"


def _detect() -> tuple[Engine, dict[str, Callable[..., Any]]]:
    """What the drop-in depends on, and the two hooks for it. Raises UnknownSglang."""
    builders = _find("sglang.srt.speculative.eagle_disaggregation")
    overlap = _find("sglang.srt.managers.overlap_utils")
    draft_input = _find("sglang.srt.speculative.eagle_info:EagleDraftInput")
    last = _find("sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode").LAST
    future_map_class = overlap.FutureMap
    names = {field.name for field in dataclasses.fields(draft_input)}
    if names - _KNOWN_FIELDS:
        raise UnknownSglang(f"EagleDraftInput has the fields {sorted(names - _KNOWN_FIELDS)}")
    payload = getattr(overlap, "RelayPayload", None)
    needs_seed = getattr(builders, "_requires_dsa_seed_for_cuda_graph", None)
    stock_relay = (future_map_class, future_map_class.publish, future_map_class.stash)

    def make_draft_input(
        topk_p: torch.Tensor, topk_index: torch.Tensor, hidden_states: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> Any:
        return draft_input(
            topk_p=topk_p,
            topk_index=topk_index,
            hidden_states=hidden_states,
            bonus_tokens=bonus_tokens,
            capture_hidden_mode=last,
        )

    def needs_seeds(batch: Any, settings: Any) -> bool:
        if needs_seed is None or settings.speculative_eagle_topk != 1:
            return False
        return bool(needs_seed(batch.model_config.hf_config, settings.speculative_eagle_topk))

    engine = Engine(
        version=_version(),
        make_draft_input=make_draft_input,
        make_payload=payload.from_draft_input if payload is not None else lambda draft_input: draft_input,
        has_seeds="dsa_topk_indices" in names,
        needs_seeds=needs_seeds,
        relays_hidden_states=_find("sglang.srt.speculative.spec_utils:spec_need_hidden_states"),
        has_stock_relay=lambda future_map: (
            (type(future_map), type(future_map).publish, type(future_map).stash) == stock_relay
        ),
    )
    return engine, {_BUILDER: _builder_hook(_find(_BUILDER)), _GATE: _gate_hook(_find(_GATE))}


def _find(name: str) -> Any:
    try:
        # With a colon the module is imported as it stands, and says itself why it cannot be.
        return pkgutil.resolve_name(name if ":" in name else f"{name}:")
    except (ImportError, AttributeError) as error:
        # A missing module of sglang's is another sglang; another package's is a broken installation.
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("sglang"):
            raise
        raise UnknownSglang(f"{name} is not there ({error})") from error


def _shape_of(function: Any, known: tuple[tuple[str, ...], ...], name: str) -> tuple[str, ...]:
    shape = tuple(inspect.signature(function).parameters)
    if shape not in known:
        raise UnknownSglang(f"{name.partition(':')[2]} takes ({', '.join(shape)})")
    return shape


def _builder_hook(stock_builder: Any) -> Callable[..., Any]:
    """The AROUND hook for the builder, of the installed call shape: positional and by keyword."""
    if _shape_of(stock_builder, _BUILDER_SHAPES, _BUILDER) == _BUILDER_SHAPES[0]:

        def hook(original: Any, batch: Any, server_args: Any, last_tokens_tensor: Any, future_map: Any) -> Any:
            assert _drop_in is not None
            return _drop_in.build(
                lambda relay: original(batch, server_args, last_tokens_tensor, relay),
                batch,
                server_args,
                last_tokens_tensor,
                future_map,
            )

        return hook
    get_spec = _find("sglang.srt.runtime_context:get_spec")

    def hook_without_settings(original: Any, batch: Any, last_tokens_tensor: Any, future_map: Any) -> Any:
        assert _drop_in is not None
        return _drop_in.build(
            lambda relay: original(batch, last_tokens_tensor, relay), batch, get_spec(), last_tokens_tensor, future_map
        )

    return hook_without_settings


def _gate_hook(stock_gate: Any) -> Callable[..., Any]:
    """The AROUND hook for the gate through which a request passes once its metadata has arrived."""
    is_fake_transfer = _find("sglang.srt.disaggregation.utils:_is_fake_transfer")
    from_string = _find("sglang.srt.speculative.spec_info:SpeculativeAlgorithm").from_string
    if _shape_of(stock_gate, _GATE_SHAPES, _GATE) == _GATE_SHAPES[0]:

        def hook(original: Any, polls: Any, decode_reqs: Any, metadata_buffers: Any, server_args: Any) -> None:
            original(polls, decode_reqs, metadata_buffers, server_args)
            if from_string(server_args.speculative_algorithm).is_eagle():
                _check_arrivals(polls, decode_reqs, metadata_buffers, fake_by_args(server_args))

        takes_args = len(inspect.signature(is_fake_transfer).parameters) == 2

        def fake_by_args(server_args: Any) -> Callable[[Any], bool]:
            return (lambda req: is_fake_transfer(req, server_args)) if takes_args else is_fake_transfer

        return hook
    get_spec = _find("sglang.srt.runtime_context:get_spec")

    def hook_without_settings(original: Any, polls: Any, decode_reqs: Any, metadata_buffers: Any) -> None:
        original(polls, decode_reqs, metadata_buffers)
        if from_string(get_spec().speculative_algorithm).is_eagle():
            _check_arrivals(polls, decode_reqs, metadata_buffers, is_fake_transfer)

    return hook_without_settings


def _check_arrivals(polls: Any, decode_reqs: Any, metadata_buffers: Any, is_fake: Callable[[Any], bool]) -> None:
    assert _drop_in is not None
    _drop_in.check_arrivals(polls, decode_reqs, metadata_buffers, is_fake)


def _arrival_hooks() -> dict[str, Callable[..., Any]]:
    """The AROUND hooks for the commit of a finished transfer, and for the reading of its metadata in there."""
    _shape_of(_find(_COMMIT), _COMMIT_SHAPES, _COMMIT)
    _shape_of(_find(_READ), _READ_SHAPES, _READ)

    def commit(original: Any, queue: Any, decode_req: Any) -> Any:
        if not queue.spec_algorithm.is_eagle():
            return original(queue, decode_req)
        assert _drop_in is not None
        return _drop_in.commit(lambda: original(queue, decode_req), decode_req.req)

    def read(original: Any, buffers: Any, idx: int) -> Any:
        assert _drop_in is not None
        return _drop_in.read_metadata(lambda of: original(of, idx), buffers, idx)

    return {_COMMIT: commit, _READ: read}


# -- algorithms of your own


def missing_methods(algorithm_class: type[Any]) -> list[str]:
    """The public methods of the installed sglang's SpeculativeAlgorithm members that `algorithm_class` lacks.

    The scheduler calls them on a plug-in's algorithm as on its own, without asking which of the two it has.
    """
    members = vars(_find("sglang.srt.speculative.spec_info:SpeculativeAlgorithm"))
    methods = (name for name, member in members.items() if inspect.isfunction(member) and not name.startswith("_"))
    return sorted(name for name in methods if not callable(getattr(algorithm_class, name, None)))


def __getattr__(name: str) -> Any:
    # Made at the first use: its base is sglang's.
    if name == "CustomSpecAlgo":
        return _custom_spec_algo()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=1)
def _custom_spec_algo() -> type[Any]:
    engine, _ = _detect()
    future_map_class = _find("sglang.srt.managers.overlap_utils:FutureMap")
    takes_settings = "server_args" in _shape_of(_find(_BUILDER), _BUILDER_SHAPES, _BUILDER)
    get_spec = None if takes_settings else _find("sglang.srt.runtime_context:get_spec")

    class CustomSpecAlgo(_find("sglang.srt.speculative.spec_registry:CustomSpecAlgo")):  # type: ignore[misc]
        """Base of an algorithm of your own whose draft rows are handed over from a field list.

            class MyAlgo(CustomSpecAlgo):
                def draft_fields(self, batch, settings):
                    return draftgather.eagle_fields(settings.speculative_eagle_topk, 4096)

            SpeculativeAlgorithm.register("MY_ALGO", supports_overlap=True, spec_class=MyAlgo)(make_worker)

        row_attributes: the attribute of a request that holds a field's row, a field name each.
        """

        row_attributes: ClassVar[dict[str, str]] = dict(REQUEST_ROWS)

        def draft_fields(self, batch: Any, settings: Any) -> Sequence[Field]:
            """The fields of this batch's rows. settings: sglang's speculative settings, as they are now."""
            raise AlgorithmError(f"{type(self).__name__} does not override draft_fields")

        def make_draft_input(self, tensors: dict[str, torch.Tensor], bonus_tokens: torch.Tensor) -> Any:
            """What the worker takes. Override it for another class than sglang's EagleDraftInput."""
            names = ("topk_p", "topk_index", "hidden_states")
            return engine.make_draft_input(*[tensors.get(name) for name in names], bonus_tokens)

        def build_disagg_draft_input(self, batch: Any, *arguments: Any, **by_name: Any) -> Any:
            """Gather, and under overlap publish and stash through sglang's own FutureMap."""
            names = ("server_args", "last_tokens_tensor", "future_map")[0 if takes_settings else 1 :]
            given = {**dict(zip(names, arguments, strict=False)), **by_name}
            settings = given["server_args"] if get_spec is None else get_spec()
            fields = as_metadata(self.draft_fields(batch, settings))
            attributes = tuple((f.name, self.row_attributes.get(f.name, f.name)) for f in fields)
            tensors = dict(request_rows(fields, attributes, as_device(batch.device)).assemble(batch.reqs, None))
            draft_input = self.make_draft_input(tensors, given["last_tokens_tensor"])
            if batch.enable_overlap:
                draft_input.future_indices = batch.req_pool_indices
                given["future_map"].publish(draft_input.future_indices, batch.seq_lens)
                given["future_map"].stash(draft_input.future_indices, engine.make_payload(draft_input))
            return draft_input

        # Called by the scheduler, and missing in sglang's own base (0.5.23).

        def create_future_map(self, device: Any, req_to_token_pool: Any, *options: Any, **named: Any) -> Any:
            return future_map_class(device, self, req_to_token_pool, *options, **named)

        def need_topk(self) -> bool:
            return "topk_p" in self.row_attributes

        def carries_draft_hidden_states(self) -> bool:
            return "hidden_states" in self.row_attributes

        def get_platform_worker_cls(self) -> None:
            return None

    return CustomSpecAlgo


# -- that the hooks took effect


def _verify_when_applied(registry: Any, hooks: dict[str, Callable[..., Any]]) -> None:
    """Look at the targets right after sglang applies its hooks, which only logs a target that it cannot patch."""
    apply_hooks = registry.__dict__["apply_hooks"]

    def apply_and_verify(cls: Any) -> None:
        registry.apply_hooks = apply_hooks
        cls.apply_hooks()
        _verify(hooks)

    registry.apply_hooks = classmethod(apply_and_verify)


def _verify(hooks: dict[str, Callable[..., Any]]) -> None:
    assert _drop_in is not None
    missing = [target for target, hook in hooks.items() if not _is_hooked(target, hook)]
    if missing:
        _drop_in.mode = Mode.OFF
        logger.error(
            "draftgather stays off: on sglang %s its hooks on %s did not take effect", _drop_in.engine.version, missing
        )
        return
    options = _drop_in.options
    logger.info(
        "draftgather %s on sglang %s: %s%s%s, bad rows: %s",
        metadata.version("draftgather"),
        _drop_in.engine.version,
        options.mode.value,
        ", publish and stash fused" if options.fused else "",
        f", a mailbox of {options.mailbox_slots} slots" if options.mailbox_slots else "",
        options.bad_rows.value,
    )


def _is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether what stands at `target` calls `hook`: sglang's wrappers hold their hook in a closure."""
    function: Any = pkgutil.resolve_name(target)
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
