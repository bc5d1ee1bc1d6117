"""What is known of the NVIDIA chips that kernels are built for: limits that a launch must keep, rates that a bound is computed from.

Limits: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory, registers, threads); PTX ISA, "Tensor Memory" (512 columns of 128
lanes of 32 bits). Rates are the vendor's at boost clock, without sparsity (data sheets print twice the tensor-core figures where they say
"with sparsity"): upper bounds, never measurements. A benchmark measures its own ceilings.

* sm90: H200 data sheet, SXM: 4.8 TB/s, BF16 1,979 and FP8 3,958 TFLOP/s with sparsity, FP32 67. H100 SXM: the same with 3.35 TB/s.
* sm100: HGX B200 data sheet, for one GPU: FP4 9, FP8 4.5, BF16 2.25 PFLOP/s dense, FP32 80 TFLOP/s, up to 8 TB/s (boards list 7.7).
* sm103: HGX B300 data sheet, for one GPU: FP4 13.5 (108 for eight), FP8 4.5, BF16 2.25 PFLOP/s dense, FP32 75 TFLOP/s, 8 TB/s.

Processors are those that shipped B200 and B300 report (148); the full dies have 160 (vendor's blog "Inside NVIDIA Blackwell Ultra").
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
    f32_flops: float
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

    def operations(self, kind: str) -> float:
        """Operations a second of the unit that does this kind in our kernels: products of FP8 with FP4 run at the FP8 rate, and without
        block-scaled products those of FP8 are BF16 ones; whole numbers take the FP32 lanes, one operation each."""
        scaled = self.fp8_flops if self.scaled_products else self.bf16_flops
        rates = {"bf16": self.bf16_flops, "fp8": scaled, "fp4": scaled, "f32": self.f32_flops, "integer": self.f32_flops / 2}
        return rates[kind]


SM90 = Chip("sm90", 90, 132, 228 * KIBIBYTE, 227 * KIBIBYTE, 0, 4.8e12, 989.5e12, 1979e12, 0.0, 67e12, False)
SM100 = Chip("sm100", 100, 148, 228 * KIBIBYTE, 227 * KIBIBYTE, 256 * KIBIBYTE, 8.0e12, 2250e12, 4500e12, 9000e12, 80e12, True)
SM103 = Chip("sm103", 103, 148, 228 * KIBIBYTE, 227 * KIBIBYTE, 256 * KIBIBYTE, 8.0e12, 2250e12, 4500e12, 13500e12, 75e12, True)
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
