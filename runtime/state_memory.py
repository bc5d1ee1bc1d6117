"""States of an artifact as bytes: what a slot's rings and a block's entries hold, read, written and copied where the device allows it.

A payload is the parts in the manifest's order, one after the other. It means something for the same artifact only; whoever stores it names it
after that (`prefix.CacheIdentity`). docs/runtime.md, 2.3.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.device import Readable
from tapeout.runtime.errors import OptionRefused

ENCODER_PROGRAMS = ("step", "encoder")


class Span(NamedTuple):
    """Memory of one part of a state: unit i (a slot's ring, a block's entries) lies at `address` + i x `size`."""

    address: int
    size: int


class StateMemory:
    """Rings by slot and entries by block. `device` is None where the host cannot reach states: then nothing here can be done."""

    def __init__(self, artifact: Artifact, addresses: Mapping[tuple[str, str], int], device: Readable | None) -> None:
        self._device = device
        first_half = _used(artifact)
        tokens = artifact.manifest.options.block_tokens
        self._rings: list[Span] = []
        self._encoder_rings: list[Span] = []
        self._blocks: list[Span] = []
        for state in artifact.manifest.states:
            for part in state.parts:
                address = addresses[state.name, part.part]
                if state.kind == "blocks":
                    self._blocks.append(Span(address, part.row_bytes * (tokens // (state.ratio or 1))))
                    continue
                span = Span(address, part.row_bytes * (state.length or 1))
                self._rings.append(span)
                if state.name in first_half:
                    self._encoder_rings.append(span)

    @property
    def is_readable(self) -> bool:
        return self._device is not None

    def window(self, slot: int, *, is_whole: bool) -> bytes:
        """What the rings of a slot hold."""
        return self._read(self._of_slot(is_whole), slot)

    def put_window(self, slot: int, payload: bytes, *, is_whole: bool) -> None:
        """Makes the rings of a slot what `window` gave."""
        self._write(self._of_slot(is_whole), slot, payload)

    def block(self, number: int) -> bytes:
        """The entries of a block."""
        return self._read(self._blocks, number)

    def put_block(self, number: int, payload: bytes) -> None:
        """Makes the entries of a block what `block` gave."""
        self._write(self._blocks, number, payload)

    def _of_slot(self, is_whole: bool) -> list[Span]:
        return self._rings if is_whole else self._encoder_rings

    def _read(self, spans: list[Span], unit: int) -> bytes:
        device = self._reached()
        return b"".join(device.read(span.address + unit * span.size, span.size) for span in spans)

    def _write(self, spans: list[Span], unit: int, payload: bytes) -> None:
        device, at = self._reached(), 0
        for span in spans:
            device.write(span.address + unit * span.size, payload[at : at + span.size])
            at += span.size

    def _reached(self) -> Readable:
        if self._device is None:
            raise OptionRefused("states of this device", "memory that the host cannot reach", "a device that can be read, such as a CPU or a GPU")
        return self._device


def _used(artifact: Artifact) -> set[str]:
    """States that the encoder half reads or writes."""
    programs = [program for name in ENCODER_PROGRAMS for program in artifact.programs.get(name, {}).values()]
    return {str(ref[1]) for program in programs for launch in program.launches for ref in launch.buffers if ref[0] == "state"}
