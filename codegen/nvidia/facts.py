"""What is known of the NVIDIA chips that kernels are built for: limits that a launch must keep, rates that a bound is computed from.

Limits: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory, registers, threads), PTX ISA, "Tensor Memory" (512 columns of 128
lanes of 32 bits). Rates are the vendor's dense figures at boost clock: H100/H200 data sheets (SXM), Blackwell architecture brief (HGX B200),
HGX B300 data sheet. They are upper bounds, never measurements: a benchmark measures its own ceilings.
"""

from dataclasses import dataclass

KIBIBYTE = 1024


class ChipError(ValueError):
    """A chip that kernels cannot be built for."""


@dataclass(frozen=True)
class Chip:
    """One target. Bytes and registers are of one multiprocessor unless the name says block or thread; rates are of the whole chip."""

    name: str
    capability: int
    processors: int
    shared_bytes: int
    shared_bytes_per_block: int
    tensor_memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    scaled_products: bool
    registers: int = 65536
    registers_per_thread: int = 255
    threads: int = 2048
    blocks: int = 32
    reserved_shared_bytes_per_block: int = 1 * KIBIBYTE
    tile_elements: int = 1 << 20
    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)

    @property
    def tensor_memory_columns(self) -> int:
        """Columns of 128 lanes of 32 bits."""
        return self.tensor_memory_bytes // (128 * 4)

    @property
    def architecture(self) -> str:
        """The assembler's name: kernels use instructions of this very architecture."""
        return f"sm_{self.capability}a"


SM90 = Chip("sm90", 90, 132, 228 * KIBIBYTE, 227 * KIBIBYTE, 0, 4.8e12, 989e12, 1979e12, 0.0, False)
SM100 = Chip("sm100", 100, 148, 228 * KIBIBYTE, 227 * KIBIBYTE, 256 * KIBIBYTE, 8.0e12, 2250e12, 4500e12, 9000e12, True)
SM103 = Chip("sm103", 103, 148, 228 * KIBIBYTE, 227 * KIBIBYTE, 256 * KIBIBYTE, 8.0e12, 2250e12, 4500e12, 13500e12, True)
CHIPS = {chip.name: chip for chip in (SM90, SM100, SM103)}


def chip(name: str) -> Chip:
    """The chip of a target's name; raises `ChipError` for another name."""
    if name not in CHIPS:
        raise ChipError(f"no NVIDIA target is called {name!r}; there are {', '.join(CHIPS)}")
    return CHIPS[name]


def resident_blocks(chip: Chip, threads: int, registers: int, shared: int, tensor_columns: int = 0) -> int:
    """Blocks that one multiprocessor holds at once: limited by threads, registers (given out by 256 to a warp), shared and tensor memory."""
    warps = -(-threads // 32)
    each = -(-registers * 32 // 256) * 256 * warps
    by_shared = chip.shared_bytes // (shared + chip.reserved_shared_bytes_per_block)
    by_columns = chip.tensor_memory_columns // tensor_columns if tensor_columns else chip.blocks
    return min(chip.blocks, chip.threads // threads, chip.registers // each if each else chip.blocks, by_shared, by_columns)


def occupancy(chip: Chip, threads: int, registers: int, shared: int, tensor_columns: int = 0) -> float:
    """Resident threads as a share of the most that fit, 0 to 1."""
    return resident_blocks(chip, threads, registers, shared, tensor_columns) * threads / chip.threads
