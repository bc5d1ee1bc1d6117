"""What is known of the Ascend 950 family (architecture dav-c310): cores by chip name, memories and alignments of a core, rates with their sources.

Core counts, memory sizes and alignments are those that bishengir-compile-a5 1.2.0 attaches to a module for each `--target` name. Rates are as
quoted in operator repositories of CANN and in public announcements, none measured here; None where no source gives one.
"""

from dataclasses import dataclass
from difflib import get_close_matches

DEFAULT_CHIP = "Ascend950PR_9589"
SOURCES = {
    "cores and memories": "target facts of ascendnpu-ir 1.2.0 (bishengir-compile-a5 --target)",
    "rates": "CANN operator repositories ops-cv issue 997, ops-nn issue 6033, ops-transformer issue 5487, quoting the Ascend 950 white paper",
    "clock and bytes a cycle": "platform file Ascend950PR_957b (public excerpt)",
    "950DT": "Huawei Connect announcement, rounded",
}


class ChipError(ValueError):
    """A chip name that is not known; the text names the nearest."""


@dataclass(frozen=True)
class CoreFacts:
    """One cube core with two vector cores; bytes. The unified buffer is per vector core, without what the system keeps."""

    unified_bytes: int = 253_952
    l1_bytes: int = 524_288
    l0a_bytes: int = 65_536
    l0b_bytes: int = 65_536
    l0c_bytes: int = 262_144
    unified_alignment: int = 32
    l1_alignment: int = 32
    l0c_alignment: int = 512
    vector_register_bytes: int = 256
    vector_cores: int = 2
    cube_tile: int = 16
    clock_hz: float = 1.65e9
    memory_bytes_per_cycle: int = 27
    l2_bytes_per_cycle: int = 100
    l1_to_l0_bytes_per_cycle: int = 256
    l0c_to_unified_bytes_per_cycle: int = 128


CORE = CoreFacts()


@dataclass(frozen=True)
class Chip:
    """One `--target` name. Rates are operations a second (a multiply-add is two) and bytes a second."""

    name: str
    cube_cores: int
    memory_bytes_per_s: float | None
    bf16_per_s: float | None
    fp8_per_s: float | None
    fp4_per_s: float | None

    @property
    def vector_cores(self) -> int:
        return self.cube_cores * CORE.vector_cores


_BY_CORES: dict[int, tuple[str, ...]] = {
    4: ("Ascend950PR_950z", "Ascend910_950z"),
    8: ("Ascend950DT_950x", "Ascend950DT_950y"),
    28: ("Ascend950PR_9579", *(f"Ascend950PR_957{x}" for x in "abcd"), *(f"Ascend950DT_957{x}" for x in range(1, 9)),
         "Ascend910_9579", "Ascend910_957b", "Ascend910_957d"),
    32: ("Ascend950PR_9589", *(f"Ascend950PR_958{x}" for x in "abcd"), *(f"Ascend950DT_958{x}" for x in range(1, 9)),
         "Ascend910_9581", "Ascend910_9589", "Ascend910_958a", "Ascend910_958b"),
    36: ("Ascend950PR_9599", "Ascend950PR_959a", "Ascend950PR_959b", *(f"Ascend950DT_959{x}" for x in (1, 2, 5, 6)),
         "Ascend950DT_95A1", "Ascend950DT_95A2", "Ascend910_9599"),
}  # fmt: skip
_RATES = {("950PR", 32): (1.6e12, 432e12, 865e12, 1730e12), ("950PR", 28): (1.6e12, 378e12, 756e12, 1513e12)}
_ANNOUNCED = (4.0e12, None, 1000e12, 2000e12)  # 950DT: memory, FP8 and FP4 alone


def _chip(name: str, cores: int) -> Chip:
    series = name.removeprefix("Ascend").split("_")[0]
    rates = _ANNOUNCED if series == "950DT" and cores >= 32 else _RATES.get((series, cores), (None,) * 4)
    return Chip(name, cores, *rates)


CHIPS: dict[str, Chip] = {name: _chip(name, cores) for cores, names in _BY_CORES.items() for name in names}


TARGETS = {
    "ascend950": DEFAULT_CHIP,
    "ascend950-4": "Ascend950PR_950z",
    "ascend950-8": "Ascend950DT_950x",
    "ascend950-28": "Ascend950PR_9579",
    "ascend950-36": "Ascend950DT_9592",
}
"""One chip for each number of cube cores, by the name of our target; `ascend950` is the one of 32."""


def chip(name: str = DEFAULT_CHIP) -> Chip:
    """The chip of a `--target` name; raises `ChipError` with the nearest names."""
    if name not in CHIPS:
        near = get_close_matches(name, CHIPS, 3)
        raise ChipError(f"no Ascend 950 chip is called {name!r}; expected one of {len(CHIPS)} names, nearest: {', '.join(near or [DEFAULT_CHIP])}")
    return CHIPS[name]
